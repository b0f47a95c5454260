//! Attention of one new row per sequence on a cache in pages, and the append of rows to the cache.

use candle::{DType, Error, Result, Tensor, bail};
use flashcore::gpu::{LengthArray, Operand};
use flashcore::raw::{CallOptions, View};
use flashcore::{Band, ElementType, Tensor as TensorName, library};

use crate::cache::{RowWrite, standard};
use crate::op::Attention;
use crate::side::{SideOperand, program, stride, with_dense_rows};
use crate::sinks::sink_operand;

/// Attention of each sequence's last row on its keys in pages, `softmax(softmax_scale · Q Kᵀ) V`.
///
/// * `q`: `[sequences, heads, head_size]`.
/// * `k_scale`, `v_scale`: the factors of a cache in F8E4M3, one element each; not read for other caches.
/// * `key_cache`: `[blocks, kv_heads, head_size / x, page, x]`, with any `x`.
/// * `value_cache`: `[blocks, kv_heads, head_size, page]`.
/// * `block_tables`: `[sequences, blocks of the longest]`, u32 or i32; entries behind a length are not read.
/// * `context_lens`: `[sequences]`, u32 or i32. A sequence without keys gets zeros.
/// * `alibi_slopes`: `[heads]`, f32.
/// * `max_context_len`: the largest length, or more.
/// * `softcapping`: 1.0 means none.
/// * `sinks`: `[heads]`, a logit without a value.
///
/// The result is `[sequences, heads, head_size]`.
///
/// # Errors
/// When tensors do not fit each other, and on the CPU when a length or a table entry is outside of the cache.
/// On a GPU such keys are left out.
#[allow(clippy::too_many_arguments, reason = "the signature of mistralrs-paged-attn")]
pub fn paged_attention(
    q: &Tensor,
    k_scale: Option<&Tensor>,
    v_scale: Option<&Tensor>,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    alibi_slopes: Option<&Tensor>,
    max_context_len: usize,
    softmax_scale: f32,
    softcapping: f32,
    sinks: Option<&Tensor>,
) -> Result<Tensor> {
    if q.rank() != 3 {
        bail!("paged-attention expects q of rank 3, got shape {:?}", q.shape())
    }
    let (sequences, heads, _) = q.dims3()?;
    let [k, v] = standard(key_cache, value_cache)?;
    let (_, page, kv_heads, _) = k.dims4()?;
    let mut side = page_operands(sequences, block_tables, context_lens)?;
    let mut options = CallOptions {
        scale: Some(softmax_scale),
        softcap: Some(softcapping).filter(|&cap| cap != 1.0),
        band: Band::CAUSAL,
        longest: [None, Some(max_context_len.min(block_tables.dims()[1].saturating_mul(page)))],
        ..CallOptions::default()
    };
    if let Some(slopes) = alibi_slopes {
        side.push(SideOperand::slopes(slopes, sequences, heads)?);
        options.score = Some(program(&library::alibi(0))?);
    }
    if let Some(sinks) = sinks {
        side.push(sink_operand(sinks, heads)?);
    }
    let factors = factors(k_scale, v_scale, k.dtype())?;
    for ((name, tensor), factor) in [("k_scale", TensorName::K), ("v_scale", TensorName::V)]
        .into_iter()
        .zip(factors.into_iter().flatten())
    {
        // One factor for all sequences, and for all heads if there is one.
        let of_head = if factor.elem_count() == 1 { 0 } else { stride(factor.stride()[0])? };
        let view = View::new(ElementType::F32, &[sequences, kv_heads], &[0, of_head]).map_err(Error::wrap)?;
        side.push(SideOperand { operand: Operand::Descale(tensor), name, tensor: factor, view });
    }
    let q = with_dense_rows(q)?.unsqueeze(1)?;
    let attention = Attention { name: "paged-attention", options, side, lse: None };
    q.apply_op3_no_bwd(&k, &v, &attention)?.squeeze(1)
}

/// The lengths and the page table of the sequences.
pub(crate) fn page_operands(sequences: usize, table: &Tensor, lengths: &Tensor) -> Result<Vec<SideOperand>> {
    if table.rank() != 2 || table.dims()[0] != sequences {
        bail!("shape mismatch block_tables {:?}, expected ({sequences}, blocks)", table.shape())
    }
    if lengths.dims() != [sequences] {
        bail!("shape mismatch context_lens {:?}, expected {:?}", lengths.shape(), [sequences])
    }
    Ok(vec![
        SideOperand::integers(Operand::Lengths(LengthArray::UsedKv), "context_lens", lengths)?,
        SideOperand::integers(Operand::PageTable, "block_tables", table)?,
    ])
}

/// The factors of a cache in 8 bits; `None` for other caches.
fn factors(k_scale: Option<&Tensor>, v_scale: Option<&Tensor>, cache: DType) -> Result<Option<[Tensor; 2]>> {
    if cache != DType::F8E4M3 {
        return Ok(None);
    }
    let (Some(k_scale), Some(v_scale)) = (k_scale, v_scale) else {
        bail!("a cache in F8E4M3 needs k_scale and v_scale")
    };
    for (name, factor) in [("k_scale", k_scale), ("v_scale", v_scale)] {
        if factor.dtype() != DType::F32 {
            bail!("DType mismatch {name} {:?}, expected {:?}", factor.dtype(), DType::F32)
        }
    }
    Ok(Some([k_scale.flatten_all()?, v_scale.flatten_all()?]))
}

/// Writes rows to their slots of the cache. The slot of row `r` of block `b` is `b · page + r`; rows with a
/// negative slot are left out. Rows for a cache in F8E4M3 are divided by the factors and rounded.
///
/// * `key`, `value`: `[tokens, kv_heads, head_size]`.
/// * `slot_mapping`: `[tokens]`, i64, u32 or i32.
///
/// # Errors
/// When tensors do not fit each other, and on the CPU when a slot is outside of the cache; nothing is written
/// then. On a GPU such a row is left out.
pub fn reshape_and_cache(
    key: &Tensor,
    value: &Tensor,
    k_scale: Option<&Tensor>,
    v_scale: Option<&Tensor>,
    key_cache: &Tensor,
    value_cache: &Tensor,
    slot_mapping: &Tensor,
) -> Result<()> {
    let caches = standard(key_cache, value_cache)?;
    let factors = factors(k_scale, v_scale, caches[0].dtype())?;
    RowWrite { new: [key.clone(), value.clone()], caches, slots: slot_mapping.clone(), factors }.run()
}
