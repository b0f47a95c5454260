//! The numbers of a check: draws the inputs of a problem, and judges outputs by the f64 oracle.
//!
//! - [`gradients`]: the errors of gradients, and the errors that are allowed.
//! - [`inputs`]: random inputs in several styles, most of which make faulty kernels fail.
//! - [`operands`]: the operands other than Q, K and V.
//! - [`outputs`]: the errors of an output, and the errors that are allowed.
//! - [`values`]: tensors in host memory.

mod figures;
pub mod gradients;
pub mod inputs;
mod normal;
pub mod operands;
pub mod outputs;
pub mod values;
