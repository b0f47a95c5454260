//! `flashcore bench`: kernels under the law of time, on the CPU beside PyTorch's, or on a GPU.

mod cpu;
mod cuda;

use lab::bench::{Measurement, SpeedVerdict};

use crate::Status;
use crate::args::Bench;
use crate::device::Device;
use crate::error::CliError;

pub fn bench(args: &Bench) -> Result<Status, CliError> {
    if let Some(seconds) = args.seconds.filter(|s| !(*s > 0.0 && *s <= 3600.0)) {
        return Err(CliError::Argument {
            argument: "--seconds",
            value: seconds.to_string(),
            accepted: "more than 0, at most 3600".into(),
        });
    }
    match args.device.parse()? {
        Device::Cpu => cpu::bench(args),
        Device::Cuda(ordinal) => cuda::bench(args, ordinal),
        Device::Auto if driver::devices().is_ok_and(|found| !found.is_empty()) => cuda::bench(args, 0),
        Device::Auto => cpu::bench(args),
    }
}

/// The first contestant against this one, in a cell: ratio, interval and noise.
fn ratio(measurement: &Measurement) -> String {
    measurement.comparison.map_or("–".into(), |c| {
        format!("{:.3} [{:.3}, {:.3}] ±{:.3}", c.ratio, c.low, c.high, c.noise - 1.0)
    })
}

/// The verdict on the first contestant.
fn verdict(measurement: &Measurement) -> &'static str {
    measurement.comparison.map_or("–", |c| SpeedVerdict::name(c.verdict))
}
