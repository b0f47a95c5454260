//! The online softmax: the row max, the exponentials and the row sums.

mod exp2;
mod exponentials;
mod online;
mod reduce;
mod row_max;
mod speculative;
mod sums;

pub use online::{Finished, OnlineSoftmax, accepted_value_factor};
pub(crate) use online::{factor_if_seen, inverse, log_sum};
pub use reduce::{Chains, LaneMaxima};
pub(crate) use row_max::NO_MAX;
pub use row_max::{DeferredRescale, Rescale};
pub use speculative::SpeculativeMax;
pub use sums::Sums;
