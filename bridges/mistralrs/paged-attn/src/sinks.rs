//! Causal attention with sinks for prompts.

use candle::{DType, Result, Tensor, bail};
use flashcore::Band;
use flashcore::gpu::{LengthArray, Operand};
use flashcore::raw::CallOptions;

use crate::op::Attention;
use crate::side::{SideOperand, check_heads, lengths, view, with_dense_rows};

/// Causal attention with sinks. `window_size` is the number of keys that a query sees; 0 means all.
///
/// * `q`: `[batch, heads, rows, head_dim]`.
/// * `k`, `v`: `[batch, kv_heads, keys, head_dim]`. The last query is level with the last key.
/// * `sinks`: `[heads]`, a logit without a value, in any type of floats.
///
/// The result has the shape of `q`; rows of a head do not follow each other in memory.
///
/// # Errors
/// When tensors do not fit each other.
pub fn flash_attn_sinks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    softmax_scale: f32,
    window_size: usize,
) -> Result<Tensor> {
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        if tensor.rank() != 4 {
            bail!("flash_attn_sinks expects {name} of rank 4, got shape {:?}", tensor.shape())
        }
    }
    let keys = [k.transpose(1, 2)?, v.transpose(1, 2)?];
    attend("flash-attn-sinks", q, keys, sinks, softmax_scale, window_size, Vec::new())
}

/// As [`flash_attn_sinks`], for sequences of different lengths.
///
/// * `q`: `[batch, heads, rows of the longest, head_dim]`. Rows behind a length are 0 in the result.
/// * `k`, `v`: packed, `[keys, kv_heads, head_dim]`.
/// * `cu_seqlens_q`, `cu_seqlens_k`: `[batch + 1]`, u32 or i32.
///
/// # Errors
/// When tensors do not fit each other, and on the CPU when lengths do not fit.
#[allow(clippy::too_many_arguments, reason = "the signature of mistralrs-paged-attn")]
pub fn flash_attn_sinks_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    cu_seqlens_q: &Tensor,
    cu_seqlens_k: &Tensor,
    softmax_scale: f32,
    window_size: usize,
) -> Result<Tensor> {
    for (name, tensor, rank) in [("q", q, 4), ("k", k, 3), ("v", v, 3)] {
        if tensor.rank() != rank {
            bail!("flash_attn_sinks_varlen expects {name} of rank {rank}, got shape {:?}", tensor.shape())
        }
    }
    let sequences = q.dim(0)?;
    for (name, starts) in [("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)] {
        if starts.dims() != [sequences + 1] {
            bail!("shape mismatch {name} {:?}, expected {:?}", starts.shape(), [sequences + 1])
        }
    }
    let used = lengths("cu_seqlens_q", cu_seqlens_q)?;
    let side = vec![
        SideOperand::integers(Operand::Lengths(LengthArray::UsedQ), "cu_seqlens_q", &used)?,
        SideOperand::integers(Operand::Lengths(LengthArray::CumulativeKv), "cu_seqlens_k", cu_seqlens_k)?,
    ];
    let keys = [k.clone(), v.clone()];
    attend("flash-attn-sinks-varlen", q, keys, sinks, softmax_scale, window_size, side)
}

fn attend(
    name: &'static str,
    q: &Tensor,
    [k, v]: [Tensor; 2],
    sinks: Option<&Tensor>,
    softmax_scale: f32,
    window_size: usize,
    mut side: Vec<SideOperand>,
) -> Result<Tensor> {
    side.extend(sinks.map(|sinks| sink_operand(sinks, q.dims()[1])).transpose()?);
    let before = window_size.checked_sub(1).and_then(|before| u32::try_from(before).ok());
    let options = CallOptions {
        scale: Some(softmax_scale),
        band: Band { before, ..Band::CAUSAL },
        ..CallOptions::default()
    };
    let attention = Attention { name, options, side, lse: None };
    let q = q.transpose(1, 2)?;
    let [q, k, v] = [&q, &k, &v].map(with_dense_rows);
    q?.apply_op3_no_bwd(k?.as_ref(), v?.as_ref(), &attention)?.transpose(1, 2)
}

/// A logit without a value for each head.
pub(crate) fn sink_operand(sinks: &Tensor, heads: usize) -> Result<SideOperand> {
    let sinks = sinks.to_dtype(DType::F32)?.contiguous()?;
    check_heads("sinks", &sinks, heads)?;
    let view = view(flashcore::ElementType::F32, &sinks)?;
    Ok(SideOperand { operand: Operand::Sinks, name: "sinks", tensor: sinks, view })
}
