//! What to compute: the attention problem, with no idea of hardware, kernels or tensors in memory.
//!
//! A [`Problem`] names shapes, strides, dtype, mask and scale of one scaled-dot-product attention,
//! `O = softmax(scale · Q Kᵀ + mask) V`. It is the first stop of the road and the only thing that the oracle,
//! the CPU kernels, the GPU generators and the benchmarks all understand alike.

mod dtype;
mod error;
mod mask;
mod shape;

pub use dtype::DType;
pub use error::ProblemError;
pub use mask::{KeyRange, Mask};
pub use shape::{Layout, Problem, Strides, Tensor};
