//! Times under one law: same process, same operation, same inputs for all; peers measured again in every run; turns
//! interleaved and paired, an A/A control beside, every sample kept; and nobody's word taken for anything.
//!
//! [`race()`] holds the law and knows no device: it drives a [`Stage`], of which this machine's CPU, a GPU and the made-up
//! devices of the tests are implementations. So what the tests show of the law holds for the races on a GPU.

mod answer;
mod cpu;
mod fault;
mod floor;
pub mod gpu;
mod peaks;
mod race;
mod row;
pub mod schedule;
mod sensors;
mod stage;
mod statistics;
pub mod suites;
mod torch;

pub use self::race::{Deck, Measurement, Race, RaceError, Rules, SUSTAINED_US, Sample, race};
pub use answer::{Answer, dense};
pub use cpu::{BenchError, CpuTimer, race as race_cpu, race_plans, suite as suite_cpu};
pub use fault::Fault;
pub use floor::{Floor, Peaks};
pub use peaks::{CpuPeaks, Products, Reads};
pub use row::{All, Identity, Row, problem_json};
pub use sensors::{Reading, Sensors, reasons};
pub use stage::{Entrant, Mode, NotOurs, OURS, Origin, Slot, Stage, Timing, Work};
pub(crate) use statistics::judged;
pub use statistics::{
    Comparison, Interval, SpeedVerdict, compare, control, interval, median, quantile, trimmed_mean,
};
pub use suites::Suite;
pub use torch::{Torch, TorchError, python};
