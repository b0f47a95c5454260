//! Microbenchmarks of the time model's constants: one kernel per constant, run on a machine and through the
//! model.
//!
//! Each kernel repeats an operation in a loop between two readings of the SM's clock. Four runs separate the
//! operation from its surroundings: loop bodies with U and 2U copies, each for two numbers of rounds. The
//! difference over the rounds removes the start and the end; the difference over the copies removes the loop.
//! The operation remains.

mod bench;
pub mod description;
mod list;
mod products;

use emu::{Buffer, EmuError, Options};
use predict::resources::estimate;
use predict::{CacheState, ModelError, Subject};
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch, Machine, Target, Verified, Violations};
use serde::Serialize;

pub use bench::Bench;
pub use list::all;

/// Rounds of the loop in the shorter and in the longer run.
const ROUNDS: [u32; 2] = [16, 48];
/// Launches of each kernel. The fastest counts.
const LAUNCHES: usize = 4;

/// Warps of a CTA that fills the pipes of an SM: four per sub-partition.
const MANY: u32 = 16;

/// The meaning of a probe's clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Time from one operation to the next dependent one, in one warp.
    Latency,
    /// SM time of one warp's operation, with many warps active.
    Rate,
    /// One round of a loop that is not unrolled.
    Loop,
}

/// A chain of pointers in the data buffer: entry `i` lies at `i · stride` and points to entry
/// `(i + step) mod entries`.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// Number of entries.
    pub entries: u32,
    /// Distance of neighbouring entries, bytes.
    pub stride: u32,
    /// Number of entries from one to the entry that it points to.
    pub step: u32,
}

/// A probe: one measured quantity.
pub struct Probe {
    pub name: String,
    pub kind: Kind,
    pub warps: u32,
    /// Whether one CTA runs on every SM instead of a single CTA.
    pub everywhere: bool,
    /// Copies of the operation in the shorter of the two timed loop bodies.
    pub units: u32,
    /// Pointers in the data buffer, written before each launch.
    pub chain: Option<Chain>,
    /// Size of the data buffer, bytes.
    pub data: usize,
    pub code: Box<dyn Fn(&mut Bench) + Sync>,
    /// The model's value, where the emulator cannot run the kernel.
    pub constant: Option<fn(&predict::Gpu) -> f64>,
}

/// A probe of one operation, whose other fields have their usual values.
fn probe(name: impl Into<String>, kind: Kind, code: impl Fn(&mut Bench) + Sync + 'static) -> Probe {
    Probe {
        name: name.into(),
        kind,
        warps: if kind == Kind::Rate { MANY } else { 1 },
        everywhere: false,
        units: 32,
        chain: None,
        data: 1 << 16,
        code: Box::new(code),
        constant: None,
    }
}

/// The result of a probe, in clocks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Clocks of one operation; for [`Kind::Loop`], of a round.
    pub clocks: f64,
    /// Clocks of a round beyond its operations.
    pub round: f64,
}

/// Why a probe has no figure.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError<E: std::error::Error> {
    #[error(transparent)]
    Machine(E),
    /// The model has no prediction.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The verifier rejects the probe's kernel, which is a fault of the probe.
    #[error("the probe's kernel breaks the rules of PTX: {0}")]
    Generator(#[from] Violations),
    /// The kernel has no entry for which resources can be estimated.
    #[error("the kernel of {0} has no body")]
    NoBody(String),
}

impl Probe {
    /// CTAs of the grid on a device of `sms` SMs.
    fn ctas(&self, sms: u32) -> u32 {
        if self.everywhere { sms } else { 1 }
    }

    /// The module with `units` copies in the loop body.
    ///
    /// # Errors
    /// When the verifier rejects it, which is a fault of the probe.
    pub fn module(&self, target: Target, units: u32) -> Result<Verified, Violations> {
        Bench::module(target, units, &self.code)
    }

    /// The launch of a module for a number of rounds.
    fn kernel(&self, module: Verified, rounds: u32, ctas: u32) -> Kernel {
        let out = 16 * (ctas * self.warps) as usize;
        let buffer = |name: &str, bytes, access| BufferSpec { name: name.to_owned(), bytes, access };
        Kernel {
            module,
            entry: bench::ENTRY.to_owned(),
            launch: Launch::new(Dim3(ctas, 1, 1), Dim3(32 * self.warps, 1, 1)),
            buffers: vec![
                buffer("data", self.data, Access::ReadWrite),
                buffer("clocks", out, Access::Write),
                buffer("kept", 4 * (32 * ctas * self.warps) as usize, Access::Write),
            ],
            tensor_maps: Vec::new(),
            args: vec![
                Arg::Buffer { index: 0, offset: 0 },
                Arg::Buffer { index: 1, offset: 0 },
                Arg::Buffer { index: 2, offset: 0 },
                Arg::U32(rounds),
                Arg::F32(1.0),
            ],
        }
    }

    /// Copies in the two loop bodies whose difference gives the operation.
    fn bodies(&self) -> [u32; 2] {
        if self.kind == Kind::Loop { [1, 1] } else { [self.units, 2 * self.units] }
    }

    /// The figure from four runs: `clocks[body][i]` of `rounds[i]` rounds.
    fn figure(&self, clocks: [[f64; 2]; 2], rounds: [u32; 2]) -> Figure {
        let rounds = f64::from(rounds[1] - rounds[0]);
        let [short, long] = clocks.map(|[few, many]| (many - few) / rounds);
        if self.kind == Kind::Loop {
            return Figure { clocks: short, round: 0.0 };
        }
        let units = f64::from(self.units);
        let unit = (long - short) / units;
        let warps = if self.kind == Kind::Rate { f64::from(self.warps) } else { 1.0 };
        Figure { clocks: unit / warps, round: short - unit * units }
    }

    /// Runs the probe on a machine of `sms` SMs.
    ///
    /// # Errors
    /// When the machine fails.
    pub fn measure<M: Machine>(
        &self,
        machine: &mut M,
        target: Target,
        sms: u32,
    ) -> Result<Figure, ProbeError<M::Error>> {
        let ctas = self.ctas(sms);
        let mut clocks = [[0.0; 2]; 2];
        let mut buffers = Vec::new();
        let any = self.kernel(self.module(target, 1)?, 1, ctas);
        for spec in &any.buffers {
            let mut buffer = machine.allocate(spec.bytes).map_err(ProbeError::Machine)?;
            if self.chain.is_none() {
                machine.upload(&mut buffer, &vec![0; spec.bytes]).map_err(ProbeError::Machine)?;
            }
            buffers.push(buffer);
        }
        let fill = self.chain.map(|chain| bench::fill(target, chain, self.data)).transpose()?;
        for (body, units) in self.bodies().into_iter().enumerate() {
            let module = self.module(target, units)?;
            for (i, rounds) in ROUNDS.into_iter().enumerate() {
                let kernel = self.kernel(module.clone(), rounds, ctas);
                let mut best = f64::INFINITY;
                for _ in 0..LAUNCHES {
                    if let Some(fill) = &fill {
                        machine.launch(fill, &mut [&mut buffers[0]]).map_err(ProbeError::Machine)?;
                    }
                    let mut handles: Vec<&mut M::Buffer> = buffers.iter_mut().collect();
                    machine.launch(&kernel, &mut handles).map_err(ProbeError::Machine)?;
                    let mut bytes = vec![0; kernel.buffers[1].bytes];
                    machine.download(&buffers[1], &mut bytes).map_err(ProbeError::Machine)?;
                    best = best.min(elapsed(&bytes, self.warps as usize));
                }
                clocks[body][i] = best;
            }
        }
        Ok(self.figure(clocks, ROUNDS))
    }

    /// The model's prediction for the same kernels, or the model's constant where the data is too large for
    /// the emulator.
    ///
    /// # Errors
    /// When the emulator or the model rejects the kernel.
    pub fn forecast(&self, gpu: &predict::Gpu, target: Target) -> Result<Figure, ProbeError<EmuError>> {
        self.forecast_from(gpu, target, ROUNDS)
    }

    /// [`Probe::forecast`] from these numbers of rounds.
    fn forecast_from(
        &self,
        gpu: &predict::Gpu,
        target: Target,
        rounds: [u32; 2],
    ) -> Result<Figure, ProbeError<EmuError>> {
        if let Some(constant) = self.constant {
            return Ok(Figure { clocks: constant(gpu), round: 0.0 });
        }
        let ctas = self.ctas(gpu.sms);
        let mut clocks = [[0.0; 2]; 2];
        for (body, units) in self.bodies().into_iter().enumerate() {
            let module = self.module(target, units)?;
            for (i, rounds) in rounds.into_iter().enumerate() {
                let kernel = self.kernel(module.clone(), rounds, ctas);
                clocks[body][i] = self.predicted(&kernel, gpu, target)?;
            }
        }
        Ok(self.figure(clocks, rounds))
    }

    /// Predicted clocks of one launch. A single CTA is run as a sample of all.
    fn predicted(
        &self,
        kernel: &Kernel,
        gpu: &predict::Gpu,
        target: Target,
    ) -> Result<f64, ProbeError<EmuError>> {
        let alone = Kernel { launch: Launch { grid: Dim3(1, 1, 1), ..kernel.launch }, ..kernel.clone() };
        let mut buffers: Vec<Buffer> =
            kernel.buffers.iter().map(|b| Buffer::from_bytes(&vec![0; b.bytes])).collect();
        if let Some(chain) = self.chain {
            let fill = bench::fill(target, chain, self.data)?;
            emu::run(&fill, &mut [&mut buffers[0]], &Options::default()).map_err(ProbeError::Machine)?;
        }
        let must_write = [(1, Vec::new()), (2, Vec::new())].into();
        let options = Options { traced_ctas: vec![0], must_write, ..Options::default() };
        let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
        let report = emu::run(&alone, &mut handles, &options).map_err(ProbeError::Machine)?;
        let resources =
            estimate(&kernel.module, &kernel.entry).ok_or_else(|| ProbeError::NoBody(self.name.clone()))?;
        let subject = Subject {
            module: &kernel.module,
            launch: &kernel.launch,
            traced: alone.launch.grid,
            traces: &report.traces,
            resources: &resources,
            footprint: self.data as u64,
            cache: CacheState::Warm,
        };
        Ok(predict::predict(&subject, gpu)?.cycles)
    }
}

/// Clocks from the first start to the last end in a CTA, as the median of all CTAs. Each warp wrote its two
/// readings.
fn elapsed(bytes: &[u8], warps: usize) -> f64 {
    let (words, _) = bytes.as_chunks::<8>();
    let words: Vec<u64> = words.iter().map(|w| u64::from_le_bytes(*w)).collect();
    let mut spans: Vec<u64> = words
        .chunks(2 * warps)
        .map(|cta| {
            let start = cta.iter().step_by(2).min().copied().unwrap_or(0);
            let end = cta.iter().skip(1).step_by(2).max().copied().unwrap_or(0);
            end.saturating_sub(start)
        })
        .collect();
    spans.sort_unstable();
    spans.get(spans.len() / 2).map_or(0.0, |span| *span as f64)
}

#[cfg(test)]
mod tests {
    use emu::Emulator;
    use predict::machine::H200;

    use super::*;

    /// Every probe runs in the emulator without a hazard, and the model has a figure for it. The figure is
    /// not the probe's, because the rounds are few.
    #[test]
    fn every_probe_runs_and_is_forecast() {
        const FEW: [u32; 2] = [3, 9];
        let mut names = std::collections::HashSet::new();
        for probe in all(Target::of_device(90)) {
            assert!(names.insert(probe.name.clone()), "{} twice", probe.name);
            let figure = probe.forecast_from(&H200, Target::of_device(90), FEW);
            let figure = figure.unwrap_or_else(|e| panic!("{}: {e}", probe.name));
            assert!(figure.clocks > 0.0 && figure.clocks.is_finite(), "{}: {figure:?}", probe.name);
        }
    }

    /// The emulator's clock counts instructions, so a chain with one instruction per unit gives one clock.
    #[test]
    fn the_difference_of_four_runs_is_the_unit() {
        let probe = all(Target::of_device(90)).into_iter().find(|p| p.name == "fma chain").unwrap();
        let figure = probe.measure(&mut Emulator::default(), Target::sm(90), 1).unwrap();
        assert_eq!(figure.clocks, 1.0);
        assert!((2.0..8.0).contains(&figure.round), "{figure:?}");
    }

    #[test]
    fn the_span_is_of_the_cta_in_the_middle() {
        let words: [u64; 12] = [10, 30, 12, 35, 5, 6, 5, 9, 0, 100, 50, 90];
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(elapsed(&bytes, 2), 25.0);
    }
}
