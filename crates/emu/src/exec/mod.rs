//! Runs one cluster of CTAs, which usually has one CTA. Its warps run in turns until all have exited or none
//! can continue.

mod access;
mod alu;
mod atomic;
mod barrier;
mod bulk;
mod bulk_store;
mod cluster;
mod collective;
mod conflict;
mod control;
mod copy;
mod deadlock;
mod descriptor;
mod fence;
mod grid_wait;
mod launch_control;
mod map_change;
mod map_image;
mod matrix;
mod mbarrier;
mod moves;
mod registers;
mod run;
mod setmaxnreg;
mod system;
mod tensor_map;
mod tensor_memory;
mod undefined;
mod units;
mod wait_for;
mod warp;
mod wgmma;
mod wmma;

use std::collections::HashMap;

use ptx::Space;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::EmuError;
use crate::counters::Counters;
use crate::decode::Inst;
use crate::memory::RANK_SHIFT;
use crate::order::DenseShadow;
use crate::report::{Findings, HazardKind, Options, Printed, Schedule, ThreadId};
use crate::trace::{CtaTrace, Recorder};

use units::{
    Barriers, BulkFlights, Facts, Log, Mbarriers, MemoryOrder, Products, RegisterPool, Rendezvous,
    TensorMemory, UndefinedBytes, Visits,
};
use warp::{State, Warp};

pub(crate) use map_image::map_image;
pub(crate) use units::{Context, Doubts, Follow, GlobalOrder, Parameters, REGISTERS, registers_at_entry};

/// The results of running a cluster.
pub(crate) struct Outcome {
    pub findings: Findings,
    pub counters: Counters,
    pub traces: Vec<CtaTrace>,
    pub printed: Vec<Printed>,
    pub doubts: Doubts,
    pub steps: u64,
    /// Whether a thread let the next grid start before it waited for the previous one.
    pub overtaken: bool,
    /// Steps, plus other work measured in steps.
    pub effort: u64,
}

/// Number of equal reads in a row after which the emulator assumes that the value no longer changes.
const SPINS: u32 = 10_000;

/// Number of unsuccessful polls after which a warp counts as waiting for a lagging warp. It is also the
/// maximum number of steps of a lagging warp in a turn.
const LAG: u32 = 16;

/// Instructions that a warp of a recorded CTA issues in a turn.
const RECORDED_TURN: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Running,
    Done,
}

/// The shared memory of the CTAs of a cluster, one after the other, and the last accesses to it.
struct SharedMemory {
    bytes: Vec<u8>,
    shadow: DenseShadow,
}

/// A cluster without its warps: its units, each of which owns its state.
struct Env<'a> {
    facts: Facts<'a>,
    log: Log,
    rng: SmallRng,
    /// For each warp, the lanes that have not exited.
    live: Vec<u32>,
    shared: SharedMemory,
    order: MemoryOrder,
    /// The reads that race, if they are collected.
    collected: Option<Doubts>,
    undefined_bytes: UndefinedBytes,
    barriers: Barriers,
    rendezvous: Rendezvous,
    visits: Visits,
    mbarriers: Mbarriers,
    copies: BulkFlights,
    /// For each CTA, the line that found that a request to cancel a cluster failed.
    refusals: Vec<Option<u32>>,
    /// The tensor maps that threads have acquired: address, warp and lane, and the map as it was.
    acquired_maps: HashMap<(u64, usize, usize), [u8; map_image::BYTES]>,
    products: Products,
    tensors: TensorMemory,
    /// The registers that `setmaxnreg` moves.
    pool: RegisterPool,
}

/// A cluster being run.
pub(crate) struct Cluster<'a> {
    env: Env<'a>,
    warps: Vec<Warp>,
    turn: Vec<usize>,
}

impl<'a> Cluster<'a> {
    pub fn new(context: &'a Context<'a>, cluster: u64, order: GlobalOrder) -> Cluster<'a> {
        let (program, actors) = (context.program, context.actors);
        let threads = context.launch.block.count() as usize;
        let in_cta = |w: usize| u32::MAX >> (32 - (threads - 32 * w).min(32));
        let present: Vec<u32> = (0..actors.threads()).map(|w| in_cta(w % actors.warps)).collect();
        let facts = Facts::new(context, cluster);
        let bytes = facts.span * actors.ctas;
        let env = Env {
            log: Log::new(&facts),
            rng: SmallRng::seed_from_u64(context.options.seed ^ cluster.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            live: present.clone(),
            shared: SharedMemory {
                bytes: vec![0xff; bytes],
                shadow: DenseShadow::new(bytes, program.granules[0], actors),
            },
            order: MemoryOrder::new(order),
            collected: matches!(context.follow, Follow::Collect).then(Doubts::default),
            undefined_bytes: UndefinedBytes::default(),
            barriers: Barriers::new(actors.ctas, actors.warps),
            rendezvous: Rendezvous::default(),
            visits: Visits::new(actors),
            mbarriers: Mbarriers::default(),
            copies: BulkFlights::default(),
            refusals: vec![None; actors.ctas],
            acquired_maps: HashMap::new(),
            products: Products::new(actors),
            tensors: TensorMemory::new(actors),
            pool: RegisterPool::new(actors, context.registers),
            facts,
        };
        let warps: Vec<Warp> =
            (0..present.len()).map(|w| Warp::new(program, w, actors, env.facts.home(), present[w])).collect();
        let mut cluster = Cluster { turn: (0..warps.len()).collect(), warps, env };
        cluster.set_specials();
        if context.options.schedule != Schedule::Late {
            cluster.turn.shuffle(&mut cluster.env.rng);
        }
        cluster
    }

    fn set_specials(&mut self) {
        let env = &self.env;
        for warp in &mut self.warps {
            warp.registers.fill(env.facts.context.program.frame_pointer, |_| crate::memory::LOCAL_BASE);
            let window = (env.rank(warp) as u64) << RANK_SHIFT;
            for &(slot, address) in &env.facts.context.program.shared_addresses {
                warp.registers.fill(slot, |_| window.wrapping_add(address));
            }
            for &(slot, special) in &env.facts.context.program.specials {
                let index = warp.index;
                warp.registers.fill(slot, |lane| env.facts.special(special, index, lane));
            }
        }
    }

    /// Runs the cluster to its end.
    pub fn run(mut self) -> Result<(Outcome, GlobalOrder), EmuError> {
        while self.turn()? == Progress::Running {
            if self.is_spinning() {
                self.report_deadlock();
                break;
            }
        }
        Ok(self.finish())
    }

    /// Whether every warp that can run only repeats reads whose value does not change.
    pub fn is_spinning(&self) -> bool {
        self.has_polled(SPINS)
    }

    /// Whether the cluster seems to wait for another cluster.
    pub fn is_waiting(&self) -> bool {
        self.has_polled(LAG)
    }

    /// Whether every warp that can run has read the same value more than so many times in a row.
    fn has_polled(&self, polls: u32) -> bool {
        let mut running =
            self.warps.iter().flat_map(|w| &w.splits).filter(|s| s.state == State::Run).peekable();
        running.peek().is_some() && running.all(|s| s.polls > polls)
    }

    pub fn report_deadlock(&mut self) {
        self.env.report_deadlock(&self.warps);
    }

    /// Warp instructions issued so far, plus other work measured in warp instructions.
    pub fn effort(&self) -> u64 {
        self.env.log.steps + self.env.tolls() + self.env.order.grid.shadow.toll()
    }

    /// The order of accesses to global memory, which clusters that communicate pass on to each other.
    pub fn order(&mut self) -> &mut GlobalOrder {
        &mut self.env.order.grid
    }

    /// Gives a turn to each warp that can run.
    pub fn turn(&mut self) -> Result<Progress, EmuError> {
        let mut ran = false;
        for i in 0..self.turn.len() {
            if !self.warps[self.turn[i]].can_run() || self.lags(self.turn[i]) {
                continue;
            }
            let slow = self.is_slow(self.turn[i]);
            let warp = &mut self.warps[self.turn[i]];
            ran = true;
            let quantum = match self.env.facts.context.options.schedule {
                // Turns are short, as on an SM: the cache contents that a warp finds in its next turn depend
                // on the other warps.
                _ if self.env.log.recorder.is_some() => RECORDED_TURN,
                Schedule::Late => 4096,
                _ if slow => self.env.rng.random_range(1..LAG),
                Schedule::Early | Schedule::Random | Schedule::Lagging => self.env.rng.random_range(1..400),
            };
            self.env.run_warp(warp, quantum)?;
            self.wake();
        }
        if self.warps.iter().all(Warp::is_done) {
            return Ok(Progress::Done);
        }
        if ran || self.warps.iter().any(Warp::can_run) || self.unblock() {
            return Ok(Progress::Running);
        }
        self.report_deadlock();
        Ok(Progress::Done)
    }

    /// Whether a warp lags in this schedule.
    fn is_slow(&self, warp: usize) -> bool {
        let Options { schedule, seed, .. } = &self.env.facts.context.options;
        let together = if seed.is_multiple_of(2) { 1 } else { 4 };
        let groups = self.warps.len().div_ceil(together) as u64;
        *schedule == Schedule::Lagging && warp / together == (seed / 2 % groups) as usize
    }

    /// Whether a warp must wait because it lags and another warp makes progress.
    fn lags(&self, warp: usize) -> bool {
        let gets_on = |warp: &Warp| warp.splits.iter().any(|s| s.state == State::Run && s.polls < LAG);
        self.is_slow(warp)
            && self.warps.iter().enumerate().any(|(other, warp)| !self.is_slow(other) && gets_on(warp))
    }

    /// Continues the warps that a barrier released.
    fn wake(&mut self) {
        if !self.env.barriers.has_wakes() {
            return;
        }
        let wakes = self.env.barriers.take_wakes();
        let cta = self.env.facts.warps_of(self.env.facts.rank(wakes[0].warp));
        let waiting = self.warps[cta.clone()].iter().filter(|w| !w.is_done()).count();
        if wakes.len() == waiting {
            self.end_interval(cta);
        }
        for wake in wakes.iter().rev() {
            let warp = &mut self.warps[wake.warp];
            for at in 0..warp.splits.len() {
                if warp.splits[at].state == State::Barrier(wake.barrier) {
                    self.env.leave_barrier(warp, at, wake);
                }
            }
        }
    }

    /// Called when all warps of a CTA have met at a barrier. Counts the instructions for which the other
    /// warps waited for the busiest warp.
    fn end_interval(&mut self, cta: std::ops::Range<usize>) {
        let (mut busiest, mut second) = (0, 0);
        for warp in &mut self.warps[cta] {
            let issued = warp.steps - std::mem::replace(&mut warp.steps_at_barrier, warp.steps);
            (busiest, second) = (busiest.max(issued), second.max(issued.min(busiest)));
        }
        self.env.log.counters.critical_issues += busiest;
        if self.env.facts.actors.warps > 1 {
            self.env.log.counters.lone_warp_issues += busiest - second;
        }
    }

    /// Called when no warp can run: parked lanes continue, or lanes that wait for other lanes of their warp
    /// proceed without them.
    fn unblock(&mut self) -> bool {
        for warp in &mut self.warps {
            warp.join_waiting();
            if warp.can_run() || warp.release_parked(true) {
                return true;
            }
        }
        self.warps.iter_mut().any(|warp| self.env.force(warp))
    }

    /// Completes the operations in flight, makes the final checks and returns the results.
    pub fn finish(mut self) -> (Outcome, GlobalOrder) {
        for warp in &mut self.warps {
            self.env.land_all(warp);
        }
        self.env.land_flights();
        self.env.check_changes();
        for rank in 0..self.env.facts.actors.ctas {
            let cta = self.env.facts.warps_of(rank);
            self.end_interval(cta);
        }
        let effort = self.effort();
        let Env { facts, log, collected, order, .. } = self.env;
        let Log { findings, counters, recorder, printed, steps, overtaken, .. } = log;
        let doubts = collected.unwrap_or_default();
        let mut traces = recorder.map(Recorder::finish_all).unwrap_or_default();
        traces.retain(|trace| facts.context.options.traced_ctas.contains(&trace.cta));
        (Outcome { findings, counters, traces, printed, doubts, steps, overtaken, effort }, order.grid)
    }
}

impl Env<'_> {
    /// Work other than instructions, in warp instructions.
    fn tolls(&self) -> u64 {
        self.log.toll + self.shared.shadow.toll() + self.tensors.shadow.toll()
    }

    /// The rank of a warp's CTA.
    fn rank(&self, warp: &Warp) -> usize {
        self.facts.rank(warp.index)
    }

    fn thread(&self, warp: usize, lane: usize) -> ThreadId {
        self.facts.thread(warp, lane)
    }

    fn line(&self, pc: u32) -> u32 {
        self.facts.line(pc)
    }

    fn report(
        &mut self,
        kind: HazardKind,
        inst: &Inst,
        warp: usize,
        lane: usize,
        place: Option<(Space, u64)>,
        message: impl FnOnce() -> String,
    ) {
        self.log.report(&self.facts, kind, inst, (warp, lane), place, message);
    }
}
