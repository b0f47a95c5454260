//! Running a CTA: its warps in turns, until all have exited or none can go on.

mod access;
mod alu;
mod atomic;
mod barrier;
mod collective;
mod control;
mod copy;
mod fence;
mod matrix;
mod mbarrier;
mod moves;
mod registers;
mod run;
mod scalar;
mod undefined;
mod warp;
mod wmma;

use std::collections::HashMap;
use std::sync::Arc;

use ptx::{Launch, Space, SpecialReg};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::counters::{Counter, Counters};
use crate::decode::{Inst, Program};
use crate::memory::{GlobalMemory, SHARED_BASE};
use crate::numerics::tensor::TensorRules;
use crate::order::{Clock, Conflict, DenseShadow, PagedShadow, Strength, Touch};
use crate::report::{Findings, HazardKind, Options, Place, Schedule, ThreadId};
use crate::trace::{CtaTrace, Recorder};
use crate::{EmuError, exec::warp::State};

use barrier::{Barrier, Wake};
use mbarrier::Mbarriers;
use warp::Warp;

pub(crate) use atomic::atomic_supported;
pub(crate) use matrix::mma_supported;
pub(crate) use scalar::evaluate;
pub(crate) use wmma::wmma_supported;

/// What is the same for all CTAs of a launch.
pub(crate) struct Context<'a> {
    pub program: &'a Program,
    pub launch: &'a Launch,
    pub global: &'a GlobalMemory<'a>,
    pub options: &'a Options,
    pub rules: TensorRules,
    /// CTAs run one by one and cannot see each other.
    pub apart: bool,
}

/// Order of accesses to global memory: one for each CTA when they run apart, else one for the grid.
#[derive(Debug, Default)]
pub(crate) struct GlobalOrder {
    pub shadow: PagedShadow,
    sync: HashMap<u64, SyncVariable>,
}

impl GlobalOrder {
    pub fn new(granule: u32, warps: usize) -> GlobalOrder {
        GlobalOrder { shadow: PagedShadow::new(granule, warps), sync: HashMap::new() }
    }

    /// Bytes that knowing who read what takes.
    pub fn bytes(&self) -> u64 {
        self.shadow.bytes()
    }
}

/// What an acquire that reads this place learns.
#[derive(Clone, Debug)]
struct SyncVariable {
    clock: Arc<Clock>,
    /// First agent of the CTA that the clock is of.
    home: u32,
    strength: Strength,
    sequential: bool,
}

/// What a CTA left behind.
pub(crate) struct Outcome {
    pub findings: Findings,
    pub counters: Counters,
    pub trace: Option<CtaTrace>,
    pub steps: u64,
    /// Steps, and what else took time.
    pub effort: u64,
}

/// Reads that find the same, after which nobody is expected to change it.
const SPINS: u32 = 10_000;
/// Instructions a warp of a recorded CTA issues before the next one's turn.
const RECORDED_TURN: u32 = 16;

/// How a CTA stands after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Running,
    Done,
}

/// Everything of a CTA but its warps.
pub(crate) struct Env<'a> {
    context: &'a Context<'a>,
    cta: u64,
    shared: Vec<u8>,
    shadow: DenseShadow,
    pub order: GlobalOrder,
    shared_sync: HashMap<u64, SyncVariable>,
    barriers: Vec<Barrier>,
    mbarriers: Mbarriers,
    counters: Counters,
    findings: Findings,
    recorder: Option<Recorder>,
    rng: SmallRng,
    /// Warps that a barrier lets go.
    wakes: Vec<Wake>,
    /// Lanes of each warp that have not exited.
    live: Vec<u32>,
    steps: u64,
    /// What knowledge of many lanes apart cost to copy and join, in warp instructions. It counts for budgets only.
    toll: u64,
}

/// A CTA being run.
pub(crate) struct Cta<'a> {
    pub env: Env<'a>,
    warps: Vec<Warp>,
    turn: Vec<usize>,
}

impl<'a> Cta<'a> {
    pub fn new(context: &'a Context<'a>, cta: u64, order: GlobalOrder) -> Cta<'a> {
        let program = context.program;
        let threads = context.launch.block.count() as usize;
        let warps = threads.div_ceil(32);
        let present: Vec<u32> = (0..warps).map(|w| u32::MAX >> (32 - (threads - 32 * w).min(32))).collect();
        let home = (cta as u32).wrapping_mul(warps as u32);
        let shared = program.layout.shared_extent as usize;
        let seed = context.options.seed ^ cta.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut env = Env {
            context,
            cta,
            shared: vec![0xff; shared],
            shadow: DenseShadow::new(shared, program.granules[0], warps),
            order,
            shared_sync: HashMap::new(),
            barriers: vec![Barrier::default(); 16],
            mbarriers: Mbarriers::default(),
            counters: Counters {
                instructions: vec![Counter::default(); program.code.len()],
                shared_bytes: program.layout.shared_bytes,
                warps: warps as u32,
                ..Counters::default()
            },
            findings: Findings::default(),
            recorder: context
                .options
                .traced_ctas
                .contains(&cta)
                .then(|| Recorder::new(cta, warps, Recorder::DEFAULT_LIMIT)),
            rng: SmallRng::seed_from_u64(seed),
            wakes: Vec::new(),
            live: present.clone(),
            steps: 0,
            toll: 0,
        };
        let warps: Vec<Warp> =
            (0..warps).map(|w| Warp::new(program, w, present.len(), home, present[w])).collect();
        let mut cta = Cta {
            turn: (0..warps.len()).collect(),
            warps,
            env: {
                env.counters.warps = present.len() as u32;
                env
            },
        };
        cta.set_specials();
        if context.options.schedule != Schedule::Late {
            cta.turn.shuffle(&mut cta.env.rng);
        }
        cta
    }

    fn set_specials(&mut self) {
        let env = &self.env;
        for warp in &mut self.warps {
            warp.registers.fill(env.context.program.frame_pointer, |_| crate::memory::LOCAL_BASE);
            for &(slot, special) in &env.context.program.specials {
                let index = warp.index;
                warp.registers.fill(slot, |lane| env.special(special, index, lane));
            }
        }
    }

    /// Runs the CTA to its end.
    pub fn run(mut self) -> Result<(Outcome, GlobalOrder), EmuError> {
        while self.turn()? == Progress::Running {
            if self.is_spinning() {
                self.report_deadlock();
                break;
            }
        }
        Ok(self.finish())
    }

    /// Whether all that can run only reads, again and again, what does not change.
    pub fn is_spinning(&self) -> bool {
        let mut running =
            self.warps.iter().flat_map(|w| &w.splits).filter(|s| s.state == State::Run).peekable();
        running.peek().is_some() && running.all(|s| s.polls > SPINS)
    }

    pub fn report_deadlock(&mut self) {
        self.env.report_deadlock(&self.warps);
    }

    /// Warp instructions issued so far, and what else took time, in their measure.
    pub fn effort(&self) -> u64 {
        self.env.steps + self.env.toll + self.env.order.shadow.toll()
    }

    /// Gives each warp that can run a turn.
    pub fn turn(&mut self) -> Result<Progress, EmuError> {
        let mut ran = false;
        for i in 0..self.turn.len() {
            let warp = &mut self.warps[self.turn[i]];
            if !warp.can_run() {
                continue;
            }
            ran = true;
            let quantum = match self.env.context.options.schedule {
                // Short turns, as on an SM: what one warp leaves in the caches until its next turn depends on the others.
                _ if self.env.recorder.is_some() => RECORDED_TURN,
                Schedule::Late => 4096,
                Schedule::Early | Schedule::Random => self.env.rng.random_range(1..400),
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

    /// Lets warps go on that a barrier released.
    fn wake(&mut self) {
        let waiting = self.warps.iter().filter(|w| !w.is_done()).count();
        if self.env.wakes.len() == waiting {
            self.end_interval();
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

    /// All warps have met: counts what the busiest of them issued while the others waited for it.
    fn end_interval(&mut self) {
        let (mut busiest, mut second) = (0, 0);
        for warp in &mut self.warps {
            let issued = warp.steps - std::mem::replace(&mut warp.steps_at_barrier, warp.steps);
            (busiest, second) = (busiest.max(issued), second.max(issued.min(busiest)));
        }
        self.env.counters.critical_issues += busiest;
        if self.warps.len() > 1 {
            self.env.counters.lone_warp_issues += busiest - second;
        }
    }

    /// When no warp can run: lanes that wait for others of their warp go on without them.
    fn unblock(&mut self) -> bool {
        for warp in &mut self.warps {
            warp.join_waiting();
            if warp.can_run() || warp.release_parked() {
                return true;
            }
        }
        self.warps.iter_mut().any(|warp| self.env.force(warp))
    }

    /// What the CTA found and counted.
    pub fn finish(mut self) -> (Outcome, GlobalOrder) {
        for warp in &mut self.warps {
            self.env.land_all(warp);
        }
        self.end_interval();
        let effort = self.effort();
        let Env { findings, counters, recorder, steps, order, .. } = self.env;
        (Outcome { findings, counters, trace: recorder.map(Recorder::finish), steps, effort }, order)
    }
}

impl Env<'_> {
    fn thread(&self, warp: usize, lane: usize) -> ThreadId {
        ThreadId { cta: self.cta, warp: warp as u32, lane: lane as u32 }
    }

    fn thread_of(&self, agent: u32, lane: u32) -> ThreadId {
        let warps = self.live.len() as u32;
        ThreadId { cta: u64::from(agent / warps), warp: agent % warps, lane }
    }

    fn line(&self, pc: u32) -> u32 {
        self.context.program.code[pc as usize].line
    }

    /// Where an address of a space is, in names.
    fn place(&self, space: Space, address: u64) -> Place {
        let (name, offset) = match space {
            Space::Shared => {
                self.context.program.layout.shared_place(address.wrapping_sub(SHARED_BASE) as i64)
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

    /// An access that an earlier one is not ordered with.
    fn report_conflict(
        &mut self,
        inst: &Inst,
        warp: usize,
        lane: usize,
        writes: bool,
        conflict: &Conflict,
        place: (Space, u64),
    ) {
        let copied = matches!(conflict.touch, Touch::Copy | Touch::CopyArrive);
        let kind = if copied && (conflict.in_flight || conflict.wrote && !writes) {
            HazardKind::AsyncNotWaited
        } else {
            HazardKind::Race
        };
        let threads = vec![self.thread(warp, lane), self.thread_of(conflict.agent, conflict.lane)];
        let other_line = Some(self.line(conflict.pc));
        let verb = if writes { "writes" } else { "reads" };
        let mut findings = std::mem::take(&mut self.findings);
        findings.report(kind, inst.line, other_line, || {
            let message = match (copied, conflict.in_flight, conflict.wrote) {
                (true, true, true) => {
                    format!("{verb} what an asynchronous copy is still writing: no wait_group covers it")
                }
                (true, true, false) => {
                    format!("{verb} what an asynchronous copy is still reading: no wait_group covers it")
                }
                (true, false, true) if !writes => {
                    "reads what another thread's asynchronous copy wrote: that thread waited for it, but no barrier stands between"
                        .into()
                }
                (true, false, false) => {
                    format!("{verb} what an asynchronous copy reads, and nothing orders the two")
                }
                (_, _, true) => format!("{verb} what another thread wrote, and nothing orders the two"),
                (_, _, false) => format!("{verb} what another thread reads, and nothing orders the two"),
            };
            (threads, Some(self.place(place.0, place.1)), message)
        });
        self.findings = findings;
    }

    fn special(&self, special: SpecialReg, warp: usize, lane: usize) -> u64 {
        use SpecialReg as S;
        let ptx::Dim3(bx, by, bz) = self.context.launch.block;
        let ptx::Dim3(gx, gy, gz) = self.context.launch.grid;
        let thread = (32 * warp + lane) as u32;
        let cta = self.cta;
        let below = (1u64 << lane) - 1;
        let value = match special {
            S::TidX => thread % bx,
            S::TidY => thread / bx % by,
            S::TidZ => thread / bx / by,
            S::NtidX => bx,
            S::NtidY => by,
            S::NtidZ => bz,
            S::CtaidX => (cta % u64::from(gx)) as u32,
            S::CtaidY => (cta / u64::from(gx) % u64::from(gy)) as u32,
            S::CtaidZ => (cta / u64::from(gx) / u64::from(gy)) as u32,
            S::NctaidX => gx,
            S::NctaidY => gy,
            S::NctaidZ => gz,
            S::LaneId => lane as u32,
            S::WarpId => warp as u32,
            S::NwarpId => self.live.len() as u32,
            S::LanemaskEq => 1 << lane,
            S::LanemaskLt => below as u32,
            S::LanemaskLe => (below << 1 | 1) as u32,
            S::LanemaskGt => !((below << 1 | 1) as u32),
            S::LanemaskGe => !(below as u32),
            S::DynamicSmemSize => self.context.launch.dynamic_shared,
            S::TotalSmemSize | S::AggrSmemSize => self.context.program.layout.shared_bytes,
            S::NsmId => 132,
            S::SmId => (cta % 132) as u32,
            _ => 0,
        };
        u64::from(value)
    }
}
