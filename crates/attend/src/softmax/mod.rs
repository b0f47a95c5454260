//! The online softmax: the row max, the exponentials and the row sums.

mod deferred;
mod exp2;
mod online;
mod sums;

pub use deferred::{Chains, DeferredRescale};
pub use online::{Finished, LaneMaxima, OnlineSoftmax, Rescale};
pub(crate) use online::{NO_MAX, largest_sum};
pub use sums::Sums;
