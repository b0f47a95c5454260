//! Why the times of a contestant do not count.

use serde::Serialize;

/// Each message names what was found and the limit.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "fault", rename_all = "snake_case")]
pub enum TimingFault {
    /// The output was filled with NaN before the timed work and read right after its end.
    #[error(
        "{elements} of {of} output elements were not written when the timed work ended: the work is \
        incomplete, or part of it continues unseen by the timing events"
    )]
    Unwritten { elements: usize, of: usize },
    #[error("the output is wrong: {reasons}")]
    Wrong { reasons: String },
    #[error("the output belongs to the previous inputs at the same addresses: it was cached, not computed")]
    Stale,
    #[error(
        "{fresh_us:.2} µs per call on new inputs, but {seen_us:.2} µs on repeated inputs: results are cached"
    )]
    FasterOnSeenInputs { fresh_us: f64, seen_us: f64 },
    #[error(
        "{calls} calls in a row take {us:.2} µs each, but a single call takes {single_us:.2} µs: the \
        calls do not do their full work"
    )]
    Batched { calls: u32, us: f64, single_us: f64 },
    #[error(
        "the device's events measure {us:.2} µs, but the host's clock measures {host_us:.2} µs: one of \
        the two clocks is wrong"
    )]
    TimerDisagrees { us: f64, host_us: f64 },
    #[error(
        "{us:.3} µs is under the floor of {floor_us:.3} µs (arithmetic {flops_us:.3} µs, traffic \
        {bytes_us:.3} µs at the data sheet's peaks): the kernel cannot have done the work"
    )]
    UnderFloor { us: f64, floor_us: f64, flops_us: f64, bytes_us: f64 },
}

impl TimingFault {
    /// The fault of an output with too few elements.
    pub(super) fn short(elements: usize) -> TimingFault {
        TimingFault::Wrong { reasons: format!("it has {elements} elements only") }
    }
}
