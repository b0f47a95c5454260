//! Paged attention of [mistral.rs](https://docs.rs/mistralrs) 0.8.1, computed by FlashCore: the public
//! functions of its crate `mistralrs-paged-attn`, by name and signature, for `[patch]`.
//!
//! - They run on the CPU, and with the feature `cuda` on NVIDIA GPUs, on candle's stream and in candle's
//!   memory. This crate needs no nvcc.
//! - Any group of query heads, any head dim that FlashCore has, sinks, ALiBi and softcap together, and caches
//!   in F8E4M3 beside queries in 16 bits. A decode step reads its lengths and tables on the device: there is
//!   no plan on the host, and the arrays of FlashInfer's plan are not read.
//!
//! # The caches
//!
//! mistral.rs allocates them; this crate takes both of its layouts by shape. A block of the standard layout
//! (keys `[blocks, heads, dim / x, page, x]`, values `[blocks, heads, dim, page]`) holds the rows of one
//! page. mistral.rs itself never reads a block, so the order of the elements in it is this crate's: `[row,
//! head, dim]`, which the kernels read in place. The layout of latent attention (`[blocks, page, dim]` twice)
//! has that order anyway.
//!
//! ```
//! use candle::{DType, Device, Tensor};
//! use mistralrs_paged_attn::{paged_attention, reshape_and_cache};
//!
//! # let device = &Device::Cpu;
//! // 4 blocks with 2 heads, head dim 16 and pages of 8 rows; x is 16 bytes, 4 elements.
//! let keys = Tensor::zeros((4, 2, 16 / 4, 8, 4), DType::F32, device)?;
//! let values = Tensor::zeros((4, 2, 16, 8), DType::F32, device)?;
//! let [k, v] = [0, 1].map(|_| Tensor::randn(0f32, 1f32, (3, 2, 16), device));
//! let slots = Tensor::new(&[16i64, 17, 18], device)?; // block 2
//! reshape_and_cache(&k?, &v?, None, None, &keys, &values, &slots)?;
//!
//! let q = Tensor::randn(0f32, 1f32, (1, 6, 16), device)?;
//! let (table, lengths) = (Tensor::new(&[[2u32, 0]], device)?, Tensor::new(&[3u32], device)?);
//! let out = paged_attention(&q, None, None, &keys, &values, &table, &lengths, None, 3, 0.25, 1.0, None)?;
//! assert_eq!(out.dims(), [1, 6, 16]);
//! # Ok::<(), candle::Error>(())
//! ```
#![deny(unsafe_code)]

// candle 0.10 has other types than candle 0.11 of bridges/candle, so the sources are compiled again.
#[cfg(feature = "cuda")]
#[path = "../../../candle/src/cuda.rs"]
mod cuda;
#[path = "../../../candle/src/memory.rs"]
mod memory;
#[path = "../../../candle/src/op.rs"]
mod op;
#[path = "../../../candle/src/repeat.rs"]
mod repeat;
#[path = "../../../candle/src/side.rs"]
mod side;

mod blocks;
mod cache;
mod latent;
mod paged;
mod sinks;

pub use blocks::{copy_blocks, gather_kv_cache, kv_scale_update, swap_blocks};
pub use latent::{concat_and_cache_mla, context_attention_fwd_mla, flashinfer_mla_decode, gather_mla_cache};
pub use paged::{paged_attention, reshape_and_cache};
pub use sinks::{flash_attn_sinks, flash_attn_sinks_varlen};

/// Whether caches may be in F8E4M3.
pub const USE_FP8: bool = true;
