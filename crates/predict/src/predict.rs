//! Computes the time of a launch from the replay of one SM.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ptx::{Dim3, Launch, Module};
use thiserror::Error;

use super::cost::{Pipe, TICK};
use super::lower::{Action, Cached, LoweredModule};
use super::machine::Gpu;
use super::memory::{CacheState, Residency};
use super::plan::{Layouts, Planned};
use super::prediction::{Bottleneck, Cause, Prediction, Roofline, Utilisation};
use super::replay::{Outcome, replay};
use crate::resources::{Occupancy, OccupancyError, ResourceSource, Resources, occupancy};
use emu::trace::{CtaTrace, Detail};

/// Maximum number of replayed events. They take about half a second.
const BUDGET: u64 = 6_000_000;
/// Maximum number of CTAs that are assigned to SMs one by one.
const MOST_CTAS: u64 = 1 << 18;
/// Fraction of the time from which a busy unit counts as the bottleneck.
const SATURATED: f64 = 0.65;
/// Relative uncertainty in the best case. It covers the public latencies and the approximation of ptxas.
const BASE_UNCERTAINTY: f64 = 0.30;

/// The kernel and launch to predict.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The module from which the traces were recorded.
    pub module: &'a Module,
    /// The launch to predict.
    pub launch: &'a Launch,
    /// The grid from which the traces were recorded: the grid of the launch, or a smaller one that repeats
    /// along one extent (for example one head of many).
    pub traced: Dim3,
    /// Traces of some CTAs of that grid, in any order. A CTA without a trace is assumed to behave like the
    /// nearest traced one.
    pub traces: &'a [CtaTrace],
    /// The resources of a CTA.
    pub resources: &'a Resources,
    /// Bytes of global memory that the whole grid touches, each counted once.
    pub footprint: u64,
    /// State of L2 at the launch.
    pub cache: CacheState,
}

/// Why there is no prediction.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelError {
    /// The kernel does not fit the machine.
    #[error("{machine} cannot run the kernel: {reason}")]
    DoesNotFit {
        /// The machine's name.
        machine: &'static str,
        /// The resource that does not fit.
        reason: OccupancyError,
    },
    /// No CTA was recorded.
    #[error("no CTA of the grid ({grid} CTAs) was traced: expected at least one trace")]
    NoTrace {
        /// Number of CTAs of the grid.
        grid: u64,
    },
}

/// Predicts the time of one launch.
///
/// # Errors
/// The kernel does not fit the machine, or the grid has CTAs and none was traced.
pub fn predict(subject: &Subject, gpu: &Gpu) -> Result<Prediction, ModelError> {
    let Subject { launch, resources, traces, .. } = *subject;
    let grid = launch.grid.count();
    let shared = resources.shared.saturating_add(launch.dynamic_shared);
    let occupancy = occupancy(gpu, launch.block.count(), resources.registers, shared)
        .map_err(|reason| ModelError::DoesNotFit { machine: gpu.name, reason })?;
    if traces.is_empty() {
        return Err(ModelError::NoTrace { grid });
    }
    let program = LoweredModule::new(subject.module, gpu);
    let mut layouts = Layouts::new(&program, gpu);
    let planned: Vec<Planned> = traces.iter().map(|trace| Planned::new(trace, &mut layouts)).collect();
    let works: Vec<u64> = planned.iter().map(|p| p.issues).collect();
    let queue = busiest_sm(subject, gpu, &occupancy, &works);
    let residency = Residency {
        active_sms: grid.min(u64::from(gpu.sms)) as u32,
        ctas: u64::from(occupancy.ctas).min(queue.len() as u64) as u32,
        shared: u64::from(occupancy.ctas) * u64::from(occupancy.shared),
        cold: cold_share(subject, gpu, &program, grid),
    };
    let issues: u64 = queue.iter().map(|t| works[*t]).sum();
    let taken = affordable(&queue, &works, residency.ctas as usize);
    let registers = layouts.registers();
    let outcome = replay(gpu, &layouts.all, registers, &planned, taken, residency, BUDGET);
    let mean = works.iter().sum::<u64>() as f64 / works.len() as f64;
    Ok(Scene { subject, gpu, occupancy, queue: &queue, issues, mean, outcome }
        .prediction(grid, program.code.len()))
}

/// The CTAs of the SM that finishes last, as indices of traces, in the order in which they start. CTAs are
/// assigned to the SMs in turn, one each, until all SMs are full. From then on, the SM where a CTA ends
/// receives the next one. The time of a CTA is not known yet; it is assumed to be proportional to its number
/// of instructions.
fn busiest_sm(subject: &Subject, gpu: &Gpu, occupancy: &Occupancy, works: &[u64]) -> Vec<usize> {
    let (traces, grid) = (subject.traces, subject.launch.grid.count());
    let nearest = |cta: u64| {
        let like = counterpart(cta, subject.launch.grid, subject.traced);
        (0..traces.len()).min_by_key(|t| (traces[*t].cta.abs_diff(like), *t)).unwrap_or(0)
    };
    let sms = u64::from(gpu.sms).min(grid);
    let slots = grid.min(sms * u64::from(occupancy.ctas));
    let mut queues: Vec<Vec<usize>> = vec![Vec::new(); sms as usize];
    // The time at which each slot is free, earliest first. Ties go to the slot of the first SM.
    let mut free: BinaryHeap<Reverse<(u64, u64)>> = (0..slots).map(|slot| Reverse((0, slot))).collect();
    let mut done = vec![(0u64, 0u64); sms as usize];
    for cta in 0..grid.min(MOST_CTAS) {
        let Some(Reverse((at, slot))) = free.pop() else { break };
        let (sm, trace) = ((slot % sms) as usize, nearest(cta));
        let work = works[trace].max(1);
        queues[sm].push(trace);
        done[sm] = (done[sm].0.max(at + work), done[sm].1 + work);
        free.push(Reverse((at + work, slot)));
    }
    let last = (0..queues.len()).max_by_key(|sm| (done[*sm], Reverse(*sm))).unwrap_or(0);
    let mut queue = queues.swap_remove(last);
    // The CTAs beyond the limit are assumed to behave like those in the middle of the grid.
    let beyond = grid.saturating_sub(MOST_CTAS).div_ceil(sms) as usize;
    queue.resize(queue.len() + beyond, nearest(grid / 2));
    queue
}

/// The CTA of the recorded grid that corresponds to a CTA of the launch.
fn counterpart(cta: u64, grid: Dim3, traced: Dim3) -> u64 {
    let [x, y, z] = [(grid.0, traced.0), (grid.1, traced.1), (grid.2, traced.2)]
        .map(|(extent, of)| (u64::from(extent.max(1)), u64::from(of.max(1))));
    let place = [(cta % x.0) % x.1, (cta / x.0 % y.0) % y.1, (cta / (x.0 * y.0)) % z.1];
    place[0] + x.1 * (place[1] + y.1 * place[2])
}

/// The part of the queue that the budget allows, in whole waves, at least one wave.
fn affordable<'q>(queue: &'q [usize], works: &[u64], resident: usize) -> &'q [usize] {
    let mut events = 0;
    let within = |t: &&usize| {
        events += works[**t];
        events <= BUDGET
    };
    let count = queue.iter().take_while(within).count();
    if count == queue.len() {
        return queue;
    }
    let waves = (count / resident.max(1)).max(1);
    &queue[..(waves * resident).min(queue.len())]
}

/// The fraction of the sectors new to a CTA that come from DRAM.
fn cold_share(subject: &Subject, gpu: &Gpu, program: &LoweredModule, grid: u64) -> f64 {
    if subject.cache == CacheState::Warm && subject.footprint <= gpu.memory.l2_bytes {
        return 0.0;
    }
    let mut fresh = 0u64;
    for event in subject.traces.iter().flat_map(|t| t.warps.iter().flatten()) {
        let global = program.code.get(event.pc as usize).is_some_and(|i| match i.action {
            Action::Cached(_, how) => how != Cached::Local,
            _ => matches!(i.action, Action::Copy | Action::Bulk),
        });
        fresh += match event.detail {
            Detail::Bulk { bytes, .. } if global => u64::from(bytes.div_ceil(32)),
            Detail::Cached(f) | Detail::Copy { source: f, .. } if global => u64::from(f.fresh),
            _ => 0,
        };
    }
    let asked = 32.0 * fresh as f64 * grid as f64 / subject.traces.len() as f64;
    (subject.footprint as f64 / asked.max(1.0)).min(1.0)
}

/// The inputs of a prediction.
struct Scene<'a> {
    subject: &'a Subject<'a>,
    gpu: &'a Gpu,
    occupancy: Occupancy,
    queue: &'a [usize],
    /// Instructions of the busiest SM, and the mean of a CTA.
    issues: u64,
    mean: f64,
    outcome: Outcome,
}

impl Scene<'_> {
    fn prediction(self, grid: u64, code: usize) -> Prediction {
        let (gpu, outcome) = (self.gpu, &self.outcome);
        let scale = if outcome.events == 0 { 0.0 } else { self.issues as f64 / outcome.events as f64 };
        let cycles = outcome.end as f64 / TICK as f64 * scale * self.spill_factor(code);
        let utilisation = self.utilisation();
        let active_sms = (grid as f64 / f64::from(gpu.sms)).min(1.0);
        let clock_mhz = clock_mhz(gpu, self.tensor_load(&utilisation) * active_sms);
        let busy_us = cycles / clock_mhz;
        let overlap = gpu.units.filter(|_| self.subject.launch.overlapping).map_or(0.0, |u| u.overlap_us);
        let launch_us = gpu.launch_us - overlap;
        let us = busy_us + launch_us;
        let split = self.split(launch_us / us);
        let uncertainty = self.uncertainty(scale);
        let rounds = self.queue.len().max(1) as f64;
        let roofline = self.roofline(grid, us);
        let all_flops = roofline.flops.max(1.0);
        Prediction {
            machine: gpu.name,
            us,
            us_low: busy_us / (1.0 + uncertainty) + launch_us / 1.5,
            us_high: busy_us * (1.0 + uncertainty) + launch_us * 1.5,
            bound: bound(&utilisation, &split),
            split,
            stalls: self.stalls(),
            utilisation,
            occupancy: self.occupancy,
            ctas: grid,
            waves: rounds / f64::from(self.occupancy.ctas),
            tail: (1.0 - grid as f64 / (f64::from(gpu.sms).min(grid.max(1) as f64) * rounds)).max(0.0),
            active_sms,
            clock_mhz,
            cycles,
            tensor_share: roofline.tensor_flops / us * 1e-6 / self.tensor_tflops(),
            local_fraction: outcome.local_sectors as f64 / outcome.l2_sectors.max(1) as f64,
            tensor_fraction: roofline.tensor_flops / all_flops,
            roofline,
            replayed: if scale > 1.0 { 1.0 / scale } else { 1.0 },
        }
    }

    /// The work of the tensor cores, as a fraction of their peak in the same clocks.
    fn tensor_load(&self, utilisation: &Utilisation) -> f64 {
        match self.gpu.units.filter(|_| !self.outcome.dense) {
            Some(units) => {
                utilisation.tensor * f64::from(self.gpu.tensor.f16_f32) / f64::from(units.wgmma.f16_f32)
            }
            None => utilisation.tensor,
        }
    }

    /// Peak rate of the kind of products that the kernel uses, in TFLOP/s at the boost clock.
    fn tensor_tflops(&self) -> f64 {
        match self.gpu.units.filter(|_| self.outcome.dense) {
            Some(units) => {
                f64::from(units.wgmma.f16_f32) * f64::from(self.gpu.sms) * self.gpu.clock_mhz * 1e-6
            }
            None => self.gpu.tensor_tflops(),
        }
    }

    fn utilisation(&self) -> Utilisation {
        let o = &self.outcome;
        let end = o.end.max(1) as f64;
        let units = end * f64::from(self.gpu.schedulers);
        let pipe = |p: Pipe| (o.pipes[p as usize] as f64 / units).min(1.0);
        Utilisation {
            issue: ((o.slots * TICK) as f64 / units).min(1.0),
            fma: pipe(Pipe::Fma),
            alu: pipe(Pipe::Alu),
            half: pipe(Pipe::Half),
            double: pipe(Pipe::Double),
            mufu: pipe(Pipe::Mufu),
            tensor: pipe(Pipe::Tensor),
            shared: (o.unit[0] as f64 / end).min(1.0),
            l1: (o.unit[1] as f64 / end).min(1.0),
            l2: o.bandwidth.0.min(1.0),
            dram: o.bandwidth.1.min(1.0),
        }
    }

    /// The shares of the causes, including the time of an empty kernel.
    fn split(&self, launch: f64) -> Vec<(Cause, f64)> {
        let total = self.outcome.waits.iter().sum::<u64>() as f64;
        let launch = if total > 0.0 { launch } else { 1.0 };
        let waits = Cause::ALL.iter().zip(&self.outcome.waits).filter(|(_, ticks)| **ticks > 0);
        let mut split: Vec<(Cause, f64)> =
            waits.map(|(cause, ticks)| (*cause, *ticks as f64 / total * (1.0 - launch))).collect();
        split.push((Cause::Launch, launch));
        split.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        split
    }

    /// The share of each instruction in the time of the warps.
    fn stalls(&self) -> Vec<f64> {
        let total = self.outcome.stalls.iter().sum::<u64>().max(1) as f64;
        self.outcome.stalls.iter().map(|ticks| *ticks as f64 / total).collect()
    }

    /// Spills are inserted by the compiler and are not in the trace. Each spilled word adds an instruction to
    /// the code, and the code is assumed to run evenly.
    fn spill_factor(&self, code: usize) -> f64 {
        let words = f64::from((self.subject.resources.spill_loads + self.subject.resources.spill_stores) / 4);
        1.0 + words / code.max(1) as f64
    }

    fn uncertainty(&self, scale: f64) -> f64 {
        let resources = self.subject.resources;
        let estimated = if resources.source == ResourceSource::Estimate { 0.10 } else { 0.0 };
        let spills = if resources.spill_loads + resources.spill_stores > 0 { 0.20 } else { 0.0 };
        let extrapolated = if scale > 1.01 { 0.10 } else { 0.0 };
        BASE_UNCERTAINTY + estimated + spills + extrapolated
    }

    fn roofline(&self, grid: u64, us: f64) -> Roofline {
        let (o, gpu) = (&self.outcome, self.gpu);
        let whole = self.mean * grid as f64 / o.events.max(1) as f64;
        let tensor_flops = o.tensor_flops as f64 * whole;
        let flops = tensor_flops + o.flops as f64 * whole;
        let l2_bytes = 32.0 * o.l2_sectors as f64 * whole;
        let dram_bytes = 32.0 * o.dram_sectors as f64 * whole;
        let peak = if tensor_flops > 0.0 {
            self.tensor_tflops()
        } else {
            2.0 * f64::from(gpu.rates.fma * gpu.sms) * gpu.clock_mhz * 1e-6
        };
        let (bytes, gbps) = if dram_bytes > 0.0 {
            (dram_bytes, gpu.memory.dram_gbps)
        } else {
            (l2_bytes, f64::from(gpu.memory.l2_bandwidth) * gpu.clock_mhz * 1e-3)
        };
        let intensity = flops / bytes.max(1.0);
        let roof_tflops = peak.min(intensity * gbps * 1e-3);
        Roofline {
            flops,
            tensor_flops,
            l2_bytes,
            dram_bytes,
            intensity,
            tflops: flops / us * 1e-6,
            roof_tflops,
        }
    }
}

/// The clock that the power limit allows for this fraction of the tensor cores' peak. Power is proportional
/// to the work, the clock and the square of the voltage, and the voltage to the clock. Below the limit it is
/// the boost clock.
fn clock_mhz(gpu: &Gpu, load: f64) -> f64 {
    gpu.clock_mhz.min(gpu.loaded_clock_mhz / load.cbrt())
}

/// The unit that is busy nearly all the time, otherwise the main cause of waiting. If memory is busy but
/// warps wait longer for a pipe, the pipe is chosen.
fn bound(u: &Utilisation, split: &[(Cause, f64)]) -> Bottleneck {
    let share =
        |wanted: &[Cause]| split.iter().filter(|(c, _)| wanted.contains(c)).map(|(_, s)| s).sum::<f64>();
    if share(&[Cause::Launch]) > 0.5 {
        return Bottleneck::Launch;
    }
    let units = [
        (u.tensor, Bottleneck::Tensor),
        (u.dram, Bottleneck::Dram),
        (u.l2, Bottleneck::L2),
        (u.shared, Bottleneck::Shared),
        (u.l1, Bottleneck::L1),
        (u.mufu, Bottleneck::Mufu),
        (u.fma, Bottleneck::Fma),
        (u.alu, Bottleneck::Alu),
        (u.half, Bottleneck::Half),
        (u.double, Bottleneck::Double),
        (u.issue, Bottleneck::Issue),
    ];
    let busiest = units.into_iter().rev().max_by(|a, b| a.0.total_cmp(&b.0));
    use Cause as C;
    let pipes = [
        (share(&[C::SharedBandwidth]), Bottleneck::Shared),
        (share(&[C::TensorPipe]), Bottleneck::Tensor),
        (share(&[C::FmaPipe]), Bottleneck::Fma),
        (share(&[C::AluPipe]), Bottleneck::Alu),
        (share(&[C::HalfPipe]), Bottleneck::Half),
        (share(&[C::DoublePipe]), Bottleneck::Double),
    ];
    let longest = |waits: &[(f64, Bottleneck)]| waits.iter().copied().max_by(|a, b| a.0.total_cmp(&b.0));
    if let Some((_, bound)) = busiest.filter(|(busy, _)| *busy >= SATURATED) {
        // Waits for copies are waits for the memory that they read.
        let copies = [C::AsyncCopy, C::Mbarrier];
        let waits = match bound {
            Bottleneck::L1 => share(&[C::L1]),
            Bottleneck::L2 => share(&[C::L2, C::L2Bandwidth]) + share(&copies),
            Bottleneck::Dram => share(&[C::Dram, C::DramBandwidth]) + share(&copies),
            _ => return bound,
        };
        return longest(&pipes).filter(|(pipe, _)| *pipe > waits).map_or(bound, |(_, pipe)| pipe);
    }
    let others = [
        (share(&[C::Barrier]), Bottleneck::Serial),
        (share(&[C::NotSelected, C::Issue]), Bottleneck::Issue),
        (share(&[C::L2Bandwidth]), Bottleneck::L2),
        (share(&[C::DramBandwidth]), Bottleneck::Dram),
        (
            share(&[
                C::L1,
                C::L2,
                C::Dram,
                C::Arithmetic,
                C::Mufu,
                C::TensorLatency,
                C::SharedLatency,
                C::Exchange,
                C::AsyncCopy,
                C::Mbarrier,
                C::Cluster,
                C::Branch,
            ]),
            Bottleneck::Latency,
        ),
    ];
    longest(&[&others[..], &pipes].concat()).map_or(Bottleneck::Latency, |(_, bound)| bound)
}

#[cfg(test)]
mod bound_tests {
    use super::*;

    /// A warp-specialised product: its copies keep L2 busy, and its consumers wait for the tensor cores.
    #[test]
    fn the_bound_is_one_that_warps_wait_for() {
        let busy = Utilisation { l2: 0.70, tensor: 0.62, ..Utilisation::default() };
        let split = [(Cause::TensorPipe, 0.44), (Cause::Mbarrier, 0.28), (Cause::Issue, 0.1)];
        assert_eq!(bound(&busy, &split), Bottleneck::Tensor);
        let starved = [(Cause::Mbarrier, 0.60), (Cause::TensorPipe, 0.20)];
        assert_eq!(bound(&busy, &starved), Bottleneck::L2);
        let saturated = Utilisation { tensor: 0.9, ..busy };
        assert_eq!(bound(&saturated, &starved), Bottleneck::Tensor);
        assert_eq!(bound(&Utilisation::default(), &starved), Bottleneck::Latency);
    }
}
