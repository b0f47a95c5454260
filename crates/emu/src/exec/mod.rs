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
mod doubt;
mod fence;
mod fence_order;
mod grid_wait;
mod matrix;
mod mbarrier;
mod moves;
mod register_pool;
mod registers;
mod run;
mod system;
mod tensor_map;
mod undefined;
mod wait_for;
mod warp;
mod weak;
mod wgmma;
mod wmma;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ptx::{Launch, Space, TensorMapSpec};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::counters::{Counter, Counters};
use crate::decode::{Inst, Program};
use crate::memory::{GlobalMemory, RANK_SHIFT, SHARED_BASE};
use crate::numerics::tensor::TensorRules;
use crate::order::{Actors, Agent, Clock, DenseShadow, PagedShadow, Strength};
use crate::report::{Findings, HazardKind, Options, Place, Printed, Schedule, ThreadId};
use crate::trace::{CtaTrace, Recorder};
use crate::{EmuError, exec::warp::State};

use barrier::{Barrier, Wake};
use bulk::Flight;
use cluster::{ClusterRendezvous, Visits};
use mbarrier::Mbarriers;
use register_pool::RegisterPool;
use warp::Warp;
use wgmma::OpenProducts;

pub(crate) use doubt::Doubts;
pub(crate) use register_pool::registers_at_entry;
pub(crate) use tensor_map::map_image;

/// The properties that all CTAs of a launch share.
pub(crate) struct Context<'a> {
    pub program: &'a Program,
    pub launch: &'a Launch,
    pub global: &'a GlobalMemory<'a>,
    pub options: &'a Options,
    pub follow: Follow<'a>,
    pub rules: TensorRules,
    /// Whether clusters run independently and do not communicate.
    pub apart: bool,
    pub actors: Actors,
    /// Registers per thread at the start, where known (see `registers_at_entry`).
    pub registers: Option<u32>,
    pub maps: &'a [TensorMapSpec],
    /// The number of clusters that each executed cluster stands for. It is more than 1 in a sketch that
    /// leaves some clusters out.
    pub stands_for: u64,
}

/// The values that a run follows in order to tell whether anything depends on them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Follow<'a> {
    Nothing,
    /// Collects the reads that race.
    Collect,
    /// Follows the values of these reads.
    Values(&'a Doubts),
    /// Follows undefined values through shared memory, instead of reporting their stores.
    Copies,
}

impl Follow<'_> {
    pub fn is_nothing(self) -> bool {
        matches!(self, Follow::Nothing)
    }

    /// Whether registers that a load writes may be undefined.
    pub fn follows_loads(self) -> bool {
        matches!(self, Follow::Values(_) | Follow::Copies)
    }
}

/// The order of accesses to global memory: one per cluster when clusters run independently, otherwise one per
/// grid.
#[derive(Debug, Default)]
pub(crate) struct GlobalOrder {
    pub shadow: PagedShadow,
    sync: HashMap<u64, SyncVariable>,
    weak: weak::WeakMemory,
}

impl GlobalOrder {
    pub fn new(granule: u32) -> GlobalOrder {
        GlobalOrder { shadow: PagedShadow::new(granule), ..GlobalOrder::default() }
    }

    /// Size in bytes of the records of reads.
    pub fn bytes(&self) -> u64 {
        self.shadow.bytes()
    }
}

/// The accesses that happened before an acquire that reads this location.
#[derive(Clone, Debug)]
struct SyncVariable {
    clock: Arc<Clock>,
    /// First agent of the cluster that the clock belongs to, and the agent that released it.
    home: Agent,
    agent: Agent,
    lane: usize,
    strength: Strength,
    /// Bytes of the element: accesses of other widths do not synchronise with it.
    width: u8,
    sequential: bool,
    /// The clock that the thread's last release at this location released, and its scope.
    own: Option<(Arc<Clock>, Strength)>,
}

/// The results of running a cluster.
pub(crate) struct Outcome {
    pub findings: Findings,
    pub counters: Counters,
    pub traces: Vec<CtaTrace>,
    pub printed: Vec<Printed>,
    pub doubts: Doubts,
    pub steps: u64,
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

/// The state of a cluster without its warps.
pub(crate) struct Env<'a> {
    context: &'a Context<'a>,
    /// Linear index of the cluster, and the linear indices of its CTAs by rank.
    cluster: u64,
    ctas: Vec<u64>,
    actors: Actors,
    /// Shared memory of the CTAs, one after the other, and the bytes of one CTA.
    shared: Vec<u8>,
    span: usize,
    shadow: DenseShadow,
    pub order: GlobalOrder,
    shared_sync: HashMap<u64, SyncVariable>,
    /// The barriers of all CTAs, sixteen for each CTA.
    barriers: Vec<Barrier>,
    rendezvous: ClusterRendezvous,
    visits: Visits,
    mbarriers: Mbarriers,
    /// Copies in flight to shared memory, in the order of their issue. For each mbarrier, the thread that
    /// issued its last copy.
    flights: Vec<Flight>,
    senders: HashMap<usize, (usize, usize)>,
    /// The number of wgmma groups that each warp has committed, and that each warpgroup has waited for.
    wgmma_committed: Vec<u32>,
    wgmma_waited: Vec<u32>,
    /// By warpgroup.
    wgmma_open: Vec<OpenProducts>,
    /// The registers that `setmaxnreg` moves.
    pool: RegisterPool,
    counters: Counters,
    findings: Findings,
    recorder: Option<Recorder>,
    rng: SmallRng,
    /// The text that the threads printed.
    printed: Vec<Printed>,
    /// The reads that race, if they are collected.
    collected: Option<Doubts>,
    /// The bytes of shared memory with undefined values, if these are followed.
    undefined_bytes: HashSet<u64>,
    /// The lanes whose present strong read returns an older value, if reads may do so.
    stale: u32,
    /// The error that stopped the run.
    stopped: Option<EmuError>,
    /// The warps that a barrier releases.
    wakes: Vec<Wake>,
    /// For each warp, the lanes that have not exited.
    live: Vec<u32>,
    steps: u64,
    /// Extra work in warp instructions: copying and joining clocks, and moving data. Only the instruction
    /// budget counts it.
    toll: u64,
}

/// A cluster being run.
pub(crate) struct Cluster<'a> {
    pub env: Env<'a>,
    warps: Vec<Warp>,
    turn: Vec<usize>,
}

impl<'a> Cluster<'a> {
    pub fn new(context: &'a Context<'a>, cluster: u64, order: GlobalOrder) -> Cluster<'a> {
        let (program, actors) = (context.program, context.actors);
        let threads = context.launch.block.count() as usize;
        let in_cta = |w: usize| u32::MAX >> (32 - (threads - 32 * w).min(32));
        let present: Vec<u32> = (0..actors.threads()).map(|w| in_cta(w % actors.warps)).collect();
        let home = (cluster as u32).wrapping_mul(actors.total() as u32);
        let span = (program.layout.shared_extent as usize).next_multiple_of(16);
        let ctas: Vec<u64> = (0..actors.ctas as u64).map(|rank| context.cta(cluster, rank)).collect();
        let traced = ctas.iter().any(|cta| context.options.traced_ctas.contains(cta));
        let env = Env {
            context,
            cluster,
            actors,
            shared: vec![0xff; span * actors.ctas],
            span,
            shadow: DenseShadow::new(span * actors.ctas, program.granules[0], actors),
            order,
            shared_sync: HashMap::new(),
            barriers: vec![Barrier::default(); 16 * actors.ctas],
            rendezvous: ClusterRendezvous::default(),
            visits: Visits::new(actors),
            mbarriers: Mbarriers::default(),
            flights: Vec::new(),
            senders: HashMap::new(),
            wgmma_committed: vec![0; actors.threads()],
            wgmma_waited: vec![0; actors.threads()],
            wgmma_open: vec![OpenProducts::default(); actors.threads()],
            pool: RegisterPool::new(actors, context.registers),
            counters: Counters {
                instructions: vec![Counter::default(); program.code.len()],
                shared_bytes: program.layout.shared_bytes,
                warps: actors.warps as u32,
                ..Counters::default()
            },
            findings: Findings::default(),
            recorder: traced.then(|| Recorder::of_cluster(&ctas, actors.warps, Recorder::DEFAULT_LIMIT)),
            ctas,
            rng: SmallRng::seed_from_u64(context.options.seed ^ cluster.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            printed: Vec::new(),
            collected: matches!(context.follow, Follow::Collect).then(Doubts::default),
            undefined_bytes: HashSet::new(),
            stale: 0,
            stopped: None,
            wakes: Vec::new(),
            live: present.clone(),
            steps: 0,
            toll: 0,
        };
        let warps: Vec<Warp> =
            (0..present.len()).map(|w| Warp::new(program, w, actors, home, present[w])).collect();
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
            warp.registers.fill(env.context.program.frame_pointer, |_| crate::memory::LOCAL_BASE);
            let window = (env.rank(warp) as u64) << RANK_SHIFT;
            for &(slot, address) in &env.context.program.shared_addresses {
                warp.registers.fill(slot, |_| window.wrapping_add(address));
            }
            for &(slot, special) in &env.context.program.specials {
                let index = warp.index;
                warp.registers.fill(slot, |lane| env.special(special, index, lane));
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
        self.env.steps + self.env.tolls() + self.env.order.shadow.toll()
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
            let quantum = match self.env.context.options.schedule {
                // Turns are short, as on an SM: the cache contents that a warp finds in its next turn depend
                // on the other warps.
                _ if self.env.recorder.is_some() => RECORDED_TURN,
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
        let Options { schedule, seed, .. } = &self.env.context.options;
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
        if let Some(first) = self.env.wakes.first() {
            let cta = self.warps_of(first.warp / self.env.actors.warps);
            let waiting = self.warps[cta.clone()].iter().filter(|w| !w.is_done()).count();
            if self.env.wakes.len() == waiting {
                self.end_interval(cta);
            }
        }
        while let Some(wake) = self.env.wakes.pop() {
            let warp = &mut self.warps[wake.warp];
            for at in 0..warp.splits.len() {
                if warp.splits[at].state == State::Barrier(wake.barrier) {
                    self.env.leave_barrier(warp, at, &wake);
                }
            }
        }
    }

    fn warps_of(&self, rank: usize) -> std::ops::Range<usize> {
        let warps = self.env.actors.warps;
        rank * warps..(rank + 1) * warps
    }

    /// Called when all warps of a CTA have met at a barrier. Counts the instructions for which the other
    /// warps waited for the busiest warp.
    fn end_interval(&mut self, cta: std::ops::Range<usize>) {
        let (mut busiest, mut second) = (0, 0);
        for warp in &mut self.warps[cta] {
            let issued = warp.steps - std::mem::replace(&mut warp.steps_at_barrier, warp.steps);
            (busiest, second) = (busiest.max(issued), second.max(issued.min(busiest)));
        }
        self.env.counters.critical_issues += busiest;
        if self.env.actors.warps > 1 {
            self.env.counters.lone_warp_issues += busiest - second;
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
        for rank in 0..self.env.ctas.len() {
            let cta = self.warps_of(rank);
            self.end_interval(cta);
        }
        let effort = self.effort();
        let Env { context, findings, counters, recorder, printed, collected, steps, order, .. } = self.env;
        let doubts = collected.unwrap_or_default();
        let mut traces = recorder.map(Recorder::finish_all).unwrap_or_default();
        traces.retain(|trace| context.options.traced_ctas.contains(&trace.cta));
        (Outcome { findings, counters, traces, printed, doubts, steps, effort }, order)
    }
}

impl Env<'_> {
    /// Work other than instructions, in warp instructions.
    fn tolls(&self) -> u64 {
        self.toll + self.shadow.toll()
    }

    fn thread(&self, warp: usize, lane: usize) -> ThreadId {
        let Actors { warps, .. } = self.actors;
        ThreadId { cta: self.ctas[warp / warps], warp: (warp % warps) as u32, lane: lane as u32 }
    }

    fn line(&self, pc: u32) -> u32 {
        self.context.program.code[pc as usize].line
    }

    /// The buffer or variable that an address belongs to, with the offset.
    fn place(&self, space: Space, address: u64) -> Place {
        let (name, offset) = match space {
            Space::Shared => {
                let inside = address & ((1 << RANK_SHIFT) - 1);
                self.context.program.layout.shared_place(inside as i64 - SHARED_BASE as i64)
            }
            Space::Global => match self.context.global.find(address) {
                Some((region, offset)) => (region.name.clone(), offset),
                None => (String::new(), address as i64),
            },
            _ => (String::new(), address as i64),
        };
        Place { space, name, offset }
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
        let thread = self.thread(warp, lane);
        let mut findings = std::mem::take(&mut self.findings);
        findings.report(kind, inst.line, None, || {
            (vec![thread], place.map(|(space, address)| self.place(space, address)), message())
        });
        self.findings = findings;
    }
}
