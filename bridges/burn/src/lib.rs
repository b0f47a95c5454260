//! Fused attention for [burn](https://docs.rs/burn) 0.22 on the CPU, with a backward pass: a backend
//! extension of `Flex`, and a node of `Autodiff` that keeps O and the LSE. burn's own attention keeps the
//! matrix of logits, `[rows, keys]` for each head, wherever a tensor has a gradient.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_flashcore::{AttentionModuleOptions, attention};
//!
//! // [batch, head, row, dim]; 2 query heads share a head of keys.
//! let device = &Device::flex().autodiff();
//! let draw = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, device).require_grad();
//! let (q, k, v) = (draw([1, 4, 5, 16]), draw([1, 2, 7, 16]), draw([1, 2, 7, 16]));
//! let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
//! let out = attention(q.clone(), k, v, options)?;
//! let gradients = out.sum().backward();
//! assert_eq!(q.grad(&gradients).unwrap().dims(), q.dims());
//! # Ok::<(), flashcore::AttentionError>(())
//! ```
#![forbid(unsafe_code)]

mod node;
mod rows;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Tensor};
use flashcore::{AttentionError, Band, Problem, Score};

pub use burn::backend::ops::AttentionModuleOptions;

/// A backend with fused attention.
#[backend_extension(Flex, Autodiff)]
pub trait FusedAttention: Backend {
    /// `softmax(scale · Q Kᵀ) V`, of `[batch, head, row, dim]`.
    ///
    /// # Panics
    /// As operations of burn do, when tensors do not fit each other. [`attention`] returns an error.
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self>;
}

/// Attention of `q` `[batch, heads, rows, dim]`, `k` `[batch, kv_heads, keys, dim]` and `v`
/// `[batch, kv_heads, keys, dim_v]` in f32, f16 or bf16, on devices of `Flex` with and without autodiff. The
/// options are those of burn's `attention`: a causal mask lets the last query see all keys. The number of
/// heads is a multiple of `kv_heads`. A row that sees no key is 0.
///
/// # Errors
/// When tensors do not fit each other or have another type, and when an option is not accepted.
pub fn attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>, AttentionError> {
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    check([q.dims(), k.dims(), v.dims()], dtypes, options)?;
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    Ok(Tensor::from_dispatch(<Dispatch as FusedAttention>::fused_attention(q, k, v, options)))
}

fn check(
    [q, k, v]: [[usize; 4]; 3],
    dtypes: [DType; 3],
    options: AttentionModuleOptions,
) -> Result<(), AttentionError> {
    for (argument, dtype) in ["q", "k", "v"].into_iter().zip(dtypes) {
        if dtype != dtypes[0] || rows::element(dtype).is_none() {
            let (what, value) = ("element type", format!("{dtype:?}"));
            let expected = "f32, f16 or bf16, one type for q, k and v".to_owned();
            return Err(AttentionError::Operand { argument, what, value, expected });
        }
    }
    for (tensor, what, value, other, expected) in [
        ("k", "batch", k[0], "q", q[0]),
        ("v", "batch", v[0], "k", k[0]),
        ("v", "heads", v[1], "k", k[1]),
        ("k", "head_dim", k[3], "q", q[3]),
        ("v", "sequence length", v[2], "k", k[2]),
    ] {
        if value != expected {
            return Err(AttentionError::Shape { tensor, what, value, other, expected });
        }
    }
    let dtype = rows::element(dtypes[0]).unwrap_or(flashcore::DType::F32);
    let band = if options.is_causal { Band::CAUSAL } else { Band::FULL };
    let [scale, softcap] = [options.scale, options.softcap].map(|number| number.map(|number| number as f32));
    let problem = Problem {
        heads_kv: k[1],
        seq_kv: k[2],
        head_dim_v: v[3],
        band,
        score: Score { scale, softcap, ..Score::default() },
        ..Problem::new(q[0].max(1), q[1], q[2].max(1), q[3], dtype)
    };
    Ok(problem.with_layout(flashcore::Layout::Bhsd).check()?)
}
