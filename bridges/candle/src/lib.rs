//! Fused attention for [candle](https://docs.rs/candle-core): the functions of `candle-flash-attn`, and in
//! [`v3`] those of `candle-flash-attn-v3`, by name and signature, computed by FlashCore.
//!
//! - They run on the CPU, and with the feature `cuda` on NVIDIA GPUs, on candle's stream and in candle's
//!   memory.
//! - f32, f16 and bf16, any head dimension that FlashCore has, and tensors with any strides.
//! - They are differentiable in `q`, `k` and `v`, also with grouped heads, windows, softcap, ALiBi and packed
//!   sequences. Equal calls return equal gradients.
//! - This crate needs no CUDA toolkit. candle's own feature `cuda` does.
//!
//! ```
//! use candle::{Device, Tensor, Var};
//! use candle_flashcore::flash_attn;
//!
//! // [batch, row, head, dim]; 2 query heads share a head of keys.
//! let q = Var::randn(0f32, 1f32, (1, 5, 4, 16), &Device::Cpu)?;
//! let [k, v] = [0, 1].map(|_| Tensor::randn(0f32, 1f32, (1, 7, 2, 16), &Device::Cpu));
//! let out = flash_attn(&q, &k?, &v?, 0.25, true)?;
//! assert_eq!(out.dims(), q.dims());
//! let gradients = out.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
//! # Ok::<(), candle::Error>(())
//! ```
//!
//! A row that sees no key is 0. Tensors are `[batch, row, head, dim]`, packed ones `[row, head, dim]`.
//! `softmax_scale` is the factor on Q Kᵀ. A window of `left` and `right` lets a query see that many keys
//! before and after the key that is level with it, the last query being level with the last key; `None` is no
//! limit. Errors are those of candle. FlashCore's texts inside them name its own operands: `cu_seqlens_q` is
//! `seqlens_q`, and `page_table` is `block_table`.
#![deny(unsafe_code)]

mod call;
#[cfg(feature = "cuda")]
mod cuda;
mod memory;
mod op;
mod repeat;
mod side;
pub mod v3;

use call::{Arguments, Packed, PageArguments, window};
use candle::{Result, Tensor};

/// Attention, `softmax(softmax_scale · Q Kᵀ) V`; `causal` hides the keys after the level one.
///
/// # Errors
/// When tensors do not fit each other or have a type that FlashCore does not compute; so for all functions.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, window(causal))
}

/// [`flash_attn`] in a window.
///
/// # Errors
/// As [`flash_attn`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let window = [window_size_left, window_size_right];
    Arguments { window, ..Arguments::new([q, k, v], softmax_scale) }.attend()
}

/// [`flash_attn`] with ALiBi: `alibi_slopes` has an f32 factor on the distance for each query head.
///
/// # Errors
/// As [`flash_attn`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, window(causal))
}

/// [`flash_attn_windowed`] with ALiBi.
///
/// # Errors
/// As [`flash_attn`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let window = [window_size_left, window_size_right];
    let slopes = Some(alibi_slopes);
    Arguments { window, slopes, ..Arguments::new([q, k, v], softmax_scale) }.attend()
}

/// [`flash_attn_windowed`] with ALiBi and a softcap, `softcap · tanh(logit / softcap)`, which comes before
/// ALiBi. A softcap of 0 is none.
///
/// # Errors
/// As [`flash_attn`].
#[expect(clippy::too_many_arguments, reason = "the signature of candle-flash-attn")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let window = [window_size_left, window_size_right];
    let all = Arguments::new([q, k, v], softmax_scale);
    Arguments { window, slopes: alibi_slopes, softcap: Some(softcap), ..all }.attend()
}

/// Attention of packed sequences. `seqlens_q` and `seqlens_k`, u32 or i32, hold the first row of each
/// sequence and the end of the last; no sequence is longer than `max_seqlen_q` and `max_seqlen_k`. Rows of no
/// sequence are 0.
///
/// # Errors
/// As [`flash_attn`]; on the CPU also when lengths do not fit.
#[expect(clippy::too_many_arguments, reason = "the signature of candle-flash-attn")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let packed = Packed::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let window = [None, window(causal)];
    Arguments { window, packed, ..Arguments::new([q, k, v], softmax_scale) }.attend()
}

/// [`flash_attn_varlen`] in a window.
///
/// # Errors
/// As [`flash_attn_varlen`].
#[expect(clippy::too_many_arguments, reason = "the signature of candle-flash-attn")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let packed = Packed::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let window = [window_size_left, window_size_right];
    Arguments { window, packed, ..Arguments::new([q, k, v], softmax_scale) }.attend()
}

/// [`flash_attn_varlen_windowed`] on keys in pages: `k` and `v` are `[page, row, head, dim]` with
/// `page_block_size` rows, and `block_table`, u32 or i32 `[sequence, page]`, has the pages of each sequence.
/// The differences of `seqlens_k` are the numbers of keys. `mm_prefix_ranges`, i32 `[sequence, range, 2]`,
/// has ranges of positions whose queries see all keys of the range, whatever the window.
///
/// # Errors
/// As [`flash_attn_varlen`].
#[expect(clippy::too_many_arguments, reason = "the signature of candle-flash-attn")]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    let pages = PageArguments { table: block_table, rows: page_block_size, ranges: mm_prefix_ranges };
    let packed = Packed::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let packed = packed.map(|packed| Packed { pages: Some(pages), ..packed });
    let window = [window_size_left, window_size_right];
    Arguments { window, packed, softcap, ..Arguments::new([q, k, v], softmax_scale) }.attend()
}

/// [`flash_attn_varlen`] with ALiBi.
///
/// # Errors
/// As [`flash_attn_varlen`].
#[expect(clippy::too_many_arguments, reason = "the signature of candle-flash-attn")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let packed = Packed::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let (window, slopes) = ([None, window(causal)], Some(alibi_slopes));
    Arguments { window, packed, slopes, ..Arguments::new([q, k, v], softmax_scale) }.attend()
}

/// [`flash_attn_varlen_windowed`] with ALiBi.
///
/// # Errors
/// As [`flash_attn_varlen`].
#[expect(clippy::too_many_arguments, reason = "the signature of candle-flash-attn")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let packed = Packed::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let (window, slopes) = ([window_size_left, window_size_right], Some(alibi_slopes));
    Arguments { window, packed, slopes, ..Arguments::new([q, k, v], softmax_scale) }.attend()
}

/// [`flash_attn_varlen_windowed`] with ALiBi and a softcap, as [`flash_attn_alibi_windowed_softcap`].
///
/// # Errors
/// As [`flash_attn_varlen`].
#[expect(clippy::too_many_arguments, reason = "the signature of candle-flash-attn")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let packed = Packed::new([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let all = Arguments::new([q, k, v], softmax_scale);
    let window = [window_size_left, window_size_right];
    Arguments { window, packed, slopes: alibi_slopes, softcap: Some(softcap), ..all }.attend()
}

/// The program of the book's page on candle.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/guide/candle.md")]
struct Guide;
