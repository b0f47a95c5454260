//! The attention problem, independent of hardware, kernels and tensors in memory.
//!
//! A [`Problem`] holds the shapes, strides, element types, band and score function of one scaled-dot-product
//! attention, `O = softmax(score(Q Kᵀ) + band) V`. The oracle, the CPU kernels, the GPU generators and the
//! benchmarks all take a [`Problem`].
#![warn(missing_docs)]

mod band;
mod dense;
mod dropout;
mod dtype;
mod element;
mod error;
mod fp8;
mod invariant;
mod lengths;
mod mean;
mod operand;
mod pass;
pub mod program;
mod quantization;
mod scales;
mod score;
mod shape;
mod storage;
mod tensor;

pub use band::{Band, Corner, KeyRange};
pub use dense::Shape;
pub use dropout::{Dropout, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL};
pub use dtype::{DType, DTypes};
pub use element::{Element, ElementType, Elements, ElementsMut};
pub use error::ProblemError;
pub use fp8::{E4m3, E5m2};
pub use invariant::{Invariant, UnknownInvariant};
pub use lengths::{Lengths, Sequence, SideLengths, Span};
pub use mean::Mean;
pub use operand::{LengthArray, Operand, OperandMap, OperandSpec, Operands};
pub use pass::{Gradients, Pass, PassKind};
pub use program::{Expr, Program, ProgramError, Programs, Table};
pub use quantization::{Quantization, Rotation};
pub use scales::{ScaleLayout, Scales, descale_name};
pub use score::Score;
pub use shape::Problem;
pub use storage::{KeyPlaces, Pages, Storage};
pub use tensor::{GradientStrides, Layout, Strides, Tensor};
