//! Fused attention on the best device present.
//!
//! ```
//! use flashcore::{Layout, TensorView, attention};
//!
//! // Two heads, three queries, four keys, head dim 8: `[batch, head, sequence, dim]`.
//! let q = vec![0.1f32; 2 * 3 * 8];
//! let (k, v) = (vec![0.2f32; 2 * 4 * 8], vec![0.5f32; 2 * 4 * 8]);
//! let out = attention(
//!     TensorView::dense(&q, [1, 2, 3, 8], Layout::Bhsd)?,
//!     TensorView::dense(&k, [1, 2, 4, 8], Layout::Bhsd)?,
//!     TensorView::dense(&v, [1, 2, 4, 8], Layout::Bhsd)?,
//! )
//! .causal()
//! .run()?;
//! assert!(out.data.iter().all(|x| (x - 0.5).abs() < 1e-6));
//! # Ok::<(), flashcore::AttentionError>(())
//! ```
//!
//! Element types are `f32`, [`half::f16`] and [`half::bf16`], and [`E4m3`] and [`E5m2`] for inputs. Sums
//! are always f32. Memory grows linearly with the sequence length. Query heads may share K/V heads
//! (grouped-query attention). A causal mask is aligned to the bottom right, as in FlashAttention, or to the
//! top left, as in PyTorch.
//!
//! With an NVIDIA driver of CUDA 12.0 or later and a GPU of sm_80 or later (sm_89 for 8-bit inputs),
//! attention runs on the GPU. No CUDA toolkit is needed. For tensors that are already in device memory, use
//! [`gpu`]: it enqueues the kernel on a stream and returns.
//!
//! ```no_run
//! use flashcore::gpu::{Buffer, Gpu, Stream};
//! use flashcore::{DType, Problem};
//!
//! let gpu = Gpu::open(0)?;
//! let problem = Problem::new(1, 8, 512, 64, DType::F16);
//! let prepared = gpu.prepare(&problem, None)?; // compiles, once
//! let stream = Stream::new(gpu.context())?;
//! let tensor = || Buffer::new(gpu.context(), 8 * 512 * 64 * 2);
//! let (q, k, v, out) = (tensor()?, tensor()?, tensor()?, tensor()?);
//! prepared.enqueue(&stream, q.slice(), k.slice(), v.slice(), out.slice(), None)?; // launches
//! stream.synchronize()?;
//! # Ok::<(), flashcore::AttentionError>(())
//! ```
#![warn(missing_docs)]

mod attention;
mod backward;
mod bands;
pub mod cache;
mod dropout;
mod error;
mod features;
pub mod gpu;
mod invariant;
mod known;
mod merge;
pub mod parallel;
pub mod raw;
mod table;
mod tensor;

pub use attention::{Attention, Device, Output, attention};
pub use backward::Gradients;
pub use cpu::{Element, Quantization, Quantized, quantize, quantized_problem};
pub use error::AttentionError;
pub use features::{LengthValues, ScaleValues};
pub use kernels::Plan;
pub use merge::{PartialResult, merge_states};
pub use problem::program::{BinaryOp, Comparison, Input, UnaryOp, library};
pub use problem::{
    Band, Corner, DType, DTypes, E4m3, E5m2, ElementType, Elements, Expr, Invariant, Layout, OperandSpec,
    Pass, Problem, ProblemError, Program, ProgramError, ScaleLayout, Scales, Score, Strides, Table, Tensor,
};
/// The elements of a table.
pub type TableData<'a> = Elements<'a>;
/// The element type of a table.
pub type TableType = ElementType;

pub use table::TableView;
pub use tensor::{TensorView, TensorViewMut};

/// The example of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The program of the tutorial.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/tutorial/rust.md")]
struct Tutorial;

/// The examples of the book's guide.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/guide/rust.md")]
struct Guide;

/// The examples of the chapters on lengths, on programs and on 8-bit inputs.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/guide/fp8.md")]
#[doc = include_str!("../../../docs/src/guide/lengths.md")]
#[doc = include_str!("../../../docs/src/guide/scores-and-masks.md")]
struct Masks;
