//! Why the times of a contestant do not count.

use serde::Serialize;

/// Each message names what was found and the limit.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "fault", rename_all = "snake_case")]
pub enum Fault {
    /// The output was filled with NaN before the timed work and read right after its end.
    #[error(
        "{elements} of {of} output elements were not written when the timed work was over: work was left out, or goes on \
         where no event waits for it"
    )]
    Unwritten { elements: usize, of: usize },
    #[error("the output is wrong: {reasons}")]
    Wrong { reasons: String },
    #[error(
        "the output answers the inputs before these, which lay at the same addresses: it was kept, not computed"
    )]
    Stale,
    #[error(
        "{fresh_us:.2} µs a call on inputs not seen before and {seen_us:.2} µs on inputs seen: answers are kept"
    )]
    FasterOnSeenInputs { fresh_us: f64, seen_us: f64 },
    #[error(
        "{calls} calls in a row take {us:.2} µs each and one alone {single_us:.2} µs: they are not {calls} calls' work"
    )]
    Batched { calls: u32, us: f64, single_us: f64 },
    #[error(
        "the events say {us:.2} µs and the host's clock {host_us:.2} µs: one of them does not tell the time"
    )]
    TimerDisagrees { us: f64, host_us: f64 },
    #[error(
        "{us:.3} µs is under the floor of {floor_us:.3} µs (arithmetic {flops_us:.3} µs, traffic {bytes_us:.3} µs at the \
         data sheet's peaks): the work was not done"
    )]
    UnderFloor { us: f64, floor_us: f64, flops_us: f64, bytes_us: f64 },
}

impl Fault {
    /// The fault of an output with too few elements.
    pub(super) fn short(elements: usize) -> Fault {
        Fault::Wrong { reasons: format!("it has {elements} elements only") }
    }
}
