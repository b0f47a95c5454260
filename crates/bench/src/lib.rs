//! Timing of kernels and libraries under one set of rules: one process, one operation and the same inputs for
//! all contestants. Peers are measured again in every run. Turns are interleaved and paired, an A/A control
//! runs in every race, and every sample is kept. Times that a contestant reports about itself do not count.
//!
//! [`race()`] implements the rules without knowing a device: it drives a [`Stage`], which is this machine's
//! CPU, a GPU or a simulated device of the tests. Results of the tests about the rules therefore hold for
//! races on a GPU.

mod answer;
mod cpu;
mod fault;
mod floor;
pub mod gpu;
mod load;
mod peaks;
pub mod provenance;
mod race;
mod random;
mod row;
pub mod schedule;
mod sensors;
mod stage;
mod statistics;
pub mod suites;
mod torch;

pub use self::race::{Measurement, Race, RaceError, RaceInputs, Rules, SUSTAINED_US, Sample, race};
pub use answer::{Answer, dense};
pub use cpu::{BenchError, CpuTimer, SLOW_BUILD, race as race_cpu, race_plans, suite as suite_cpu};
pub use fault::TimingFault;
pub use floor::{Floor, Peaks};
pub use load::{Load, LoadMeter, two_modes};
pub use peaks::{CpuPeaks, Products, Reads, products_rate, read_bandwidth};
pub use random::{RANDOM, random};
pub use row::{All, Identity, Row, problem_json};
pub use sensors::{Reading, Sensors, reasons};
pub use stage::{Entrant, Mode, NotOurs, OURS, Origin, Slot, Stage, Timing, Work};
pub use statistics::{
    Comparison, Interval, SpeedVerdict, compare, control, interval, judged, median, quantile, trimmed_mean,
};
pub use suites::Suite;
pub use torch::{Torch, TorchError};
