//! The online softmax: the row max, the exponentials and the row sums.

mod deferred;
mod exp2;
mod online;
mod sums;

pub use deferred::{Chains, Due};
pub use online::{Finished, LaneMaxima, OnlineSoftmax, Rescale};
pub(crate) use online::{NO_REFERENCE, largest_sum};
pub use sums::Sums;
