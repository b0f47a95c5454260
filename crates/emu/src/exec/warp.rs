//! A warp: 32 lanes that run together while they can. Lanes that part become splits of their own; they meet again where
//! their paths must join, but none waits there for ever: as on hardware with independent thread scheduling, a lane that
//! spins on what a waiting lane has yet to do lets it go ahead.

use std::sync::Arc;

use smallvec::SmallVec;

use super::bulk_store::BulkQueue;
use super::cluster::Attendance;
use super::copy::CopyQueue;
use super::registers::Registers;
use super::undefined::Undefined;
use super::wgmma::WgmmaQueue;
use crate::decode::{NOWHERE, Program};
use crate::memory::LocalMemory;
use crate::order::{Actors, Clock, Moment, Strength, WarpView};

/// Where a called function returns to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    pub return_pc: u32,
    pub call: u32,
    pub caller: u32,
    /// Registers of the callee as they were, where it was running already.
    pub saved: Option<Box<SavedRegisters>>,
}

/// Registers of a function that is entered again before it returned.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SavedRegisters {
    pub w32: Vec<[u32; 32]>,
    pub w64: Vec<[u64; 32]>,
    pub pred: Vec<u32>,
}

/// What a split is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Run,
    /// At the meeting point of its innermost group.
    Parked,
    /// Before a warp-wide instruction, for the other lanes of this mask that have not exited.
    Lanes(u32),
    /// At a CTA barrier, for other warps.
    Barrier(u8),
}

/// Lanes that run together.
#[derive(Clone, Debug)]
pub(crate) struct Split {
    pub mask: u32,
    pub pc: u32,
    /// Meeting point of the innermost group.
    pub meet: u32,
    pub state: State,
    pub frames: Vec<Frame>,
    pub groups: SmallVec<[u32; 4]>,
    /// Function that is running.
    pub function: u32,
    /// Reads in a row that found what the one before had found.
    pub polls: u32,
    /// What the last of them found.
    pub found: u64,
    /// Goes on with the lanes it has: the others were found not to come.
    pub forced: bool,
}

/// Lanes that parted and meet at `pc`, in a call of `depth` frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pc: u32,
    depth: u32,
    pending: u32,
}

/// What a fence of some lanes made releasable, by each of them.
#[derive(Clone, Debug)]
pub(crate) struct Fenced {
    pub lanes: u32,
    pub strength: Strength,
    /// Of a `fence.sc` of gpu scope: see [`Sequential`].
    pub sequential: bool,
    pub moment: Moment,
}

/// What relaxed reads of a lane saw and a fence will acquire; or of several lanes, where a barrier carried it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub lanes: u32,
    pub strength: Strength,
    /// Of a `fence.sc` of gpu scope: see [`Sequential`].
    pub sequential: bool,
    pub clock: Clock,
    /// The release that a relaxed read saw last: seen again, it tells nothing new.
    pub last: Option<Arc<Clock>>,
}

/// What sequentially consistent fences of gpu scope made visible, and what strong reads saw of that.
///
/// A `fence.sc` synchronises with every later one (PTX ISA, "Fence-SC"), and what a thread observed tells which was
/// later. So neither fence need stand in the thread that signals or observes, as fences of a release or acquire pattern
/// must: `write; membar.gl; bar.sync; one thread: atom` and `one thread: atom; bar.sync; membar.gl; read` order the writes
/// and reads of all threads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequential {
    released: Option<Clock>,
    seen: Option<Clock>,
}

impl Sequential {
    /// Adds what others carry to the same CTA.
    pub fn join(&mut self, home: u32, other: &Sequential) {
        for (mine, theirs) in [(&mut self.released, &other.released), (&mut self.seen, &other.seen)] {
            if let Some(clock) = theirs {
                join_option(mine, home, clock);
            }
        }
    }
}

fn join_option(known: &mut Option<Clock>, home: u32, clock: &Clock) {
    match known {
        Some(known) => known.join(home, clock),
        None => *known = Some(clock.clone()),
    }
}

/// A warp of a cluster.
#[derive(Debug)]
pub(crate) struct Warp {
    /// Index in the cluster: those of the first CTA come first.
    pub index: usize,
    /// Lanes that have not exited.
    pub live: u32,
    pub registers: Registers,
    pub carry: u32,
    pub splits: Vec<Split>,
    pub groups: Vec<Group>,
    pub view: WarpView,
    pub local: LocalMemory,
    pub copies: CopyQueue,
    pub bulk: BulkQueue,
    pub wgmma: WgmmaQueue,
    pub undefined: Undefined,
    pub released: Vec<Fenced>,
    pub seen: Vec<Seen>,
    pub attendance: Attendance,
    /// Instructions issued, and of these up to the last CTA barrier.
    pub steps: u64,
    pub steps_at_barrier: u64,
}

impl Warp {
    pub fn new(program: &Program, index: usize, actors: Actors, home: u32, present: u32) -> Warp {
        let entry = &program.functions[program.entry];
        let mut local = LocalMemory::default();
        local.grow(entry.frame as usize);
        Warp {
            index,
            live: present,
            registers: Registers::new(program),
            carry: 0,
            splits: vec![Split {
                mask: present,
                pc: entry.start,
                meet: NOWHERE,
                state: State::Run,
                frames: Vec::new(),
                groups: SmallVec::new(),
                function: program.entry as u32,
                polls: 0,
                found: 0,
                forced: false,
            }],
            groups: Vec::new(),
            view: WarpView::new(home, index, actors, present),
            local,
            copies: CopyQueue::default(),
            bulk: BulkQueue::default(),
            wgmma: WgmmaQueue::default(),
            undefined: Undefined::new(program),
            released: Vec::new(),
            seen: Vec::new(),
            attendance: Attendance::default(),
            steps: 0,
            steps_at_barrier: 0,
        }
    }

    /// Lanes of `split` will wait for each other at `pc`.
    pub fn push_group(&mut self, split: &mut Split, pc: u32) {
        if pc == NOWHERE {
            return;
        }
        let depth = split.frames.len() as u32;
        if let Some(&top) = split.groups.last() {
            let top = &self.groups[top as usize];
            // An iteration of a loop that lanes leave one by one: they meet where those before them do.
            if top.pc == pc && top.depth == depth {
                return;
            }
        }
        if self.splits.is_empty() {
            // No one else is left in the groups made since.
            self.groups.truncate(split.groups.last().map_or(0, |&g| g as usize + 1));
        }
        split.groups.push(self.groups.len() as u32);
        self.groups.push(Group { pc, depth, pending: split.mask });
        split.meet = pc;
    }

    /// Whether the split stands at the meeting point of its innermost group.
    pub fn at_meeting(&self, split: &Split) -> bool {
        split.groups.last().is_some_and(|&g| {
            let group = &self.groups[g as usize];
            group.pc == split.pc && group.depth == split.frames.len() as u32
        })
    }

    fn pop_group(&self, split: &mut Split) {
        split.groups.pop();
        split.meet = split.groups.last().map_or(NOWHERE, |&g| self.groups[g as usize].pc);
    }

    /// The split arrives at its meeting point: it goes on when all are there, else it is parked.
    /// `None` when it was parked.
    pub fn park(&mut self, mut split: Split) -> Option<Split> {
        loop {
            let Some(&group) = split.groups.last() else { return Some(split) };
            if !self.at_meeting(&split) {
                return Some(split);
            }
            let pending = self.groups[group as usize].pending;
            let mut here = split.mask;
            for other in &self.splits {
                if other.state == State::Parked && other.groups.last() == Some(&group) {
                    here |= other.mask;
                }
            }
            if here & pending != pending {
                split.state = State::Parked;
                self.splits.push(split);
                return None;
            }
            self.splits.retain(|s| !(s.state == State::Parked && s.groups.last() == Some(&group)));
            split.mask = here;
            split.state = State::Run;
            self.pop_group(&mut split);
        }
    }

    /// Lanes leave all groups of a split: they have exited.
    pub fn leave(&mut self, lanes: u32) {
        self.live &= !lanes;
        self.groups.iter_mut().for_each(|g| g.pending &= !lanes);
        self.wake_complete_groups();
    }

    /// Parked splits whose group has no one else to wait for go on.
    fn wake_complete_groups(&mut self) {
        loop {
            let complete = self.splits.iter().position(|s| {
                s.state == State::Parked && s.groups.last().is_some_and(|&g| self.all_parked(g))
            });
            let Some(at) = complete else { return };
            let split = self.splits.remove(at);
            if let Some(mut split) = self.park(split) {
                split.state = State::Run;
                self.splits.push(split);
            }
        }
    }

    fn all_parked(&self, group: u32) -> bool {
        let here = self
            .splits
            .iter()
            .filter(|s| s.state == State::Parked && s.groups.last() == Some(&group))
            .fold(0, |m, s| m | s.mask);
        self.groups[group as usize].pending & !here == 0
    }

    /// Lets every parked split go ahead without those it waits for. Whether there was one.
    pub fn release_parked(&mut self) -> bool {
        let mut released = false;
        let mut splits = std::mem::take(&mut self.splits);
        for split in splits.iter_mut().filter(|s| s.state == State::Parked) {
            if let Some(&group) = split.groups.last() {
                self.groups[group as usize].pending &= !split.mask;
            }
            self.pop_group(split);
            split.state = State::Run;
            released = true;
        }
        self.splits = splits;
        released
    }

    /// Joins splits that wait at one warp-wide instruction. Those that are complete may run.
    pub fn join_waiting(&mut self) {
        let mut i = 0;
        while i < self.splits.len() {
            let mut j = i + 1;
            while j < self.splits.len() {
                let (a, b) = (&self.splits[i], &self.splits[j]);
                let same = matches!(a.state, State::Lanes(_))
                    && a.state == b.state
                    && a.pc == b.pc
                    && a.frames == b.frames;
                if same {
                    let other = self.splits.remove(j);
                    self.join(i, other);
                } else {
                    j += 1;
                }
            }
            if let State::Lanes(need) = self.splits[i].state
                && need & self.live & !self.splits[i].mask == 0
            {
                self.splits[i].state = State::Run;
            }
            i += 1;
        }
    }

    /// Groups that one of the two has and the other has not have lost their purpose for these lanes.
    fn join(&mut self, at: usize, other: Split) {
        let mine = self.splits[at].groups.clone();
        let common = mine.iter().zip(&other.groups).take_while(|(a, b)| a == b).count();
        for &group in &mine[common..] {
            self.groups[group as usize].pending &= !self.splits[at].mask;
        }
        for &group in &other.groups[common..] {
            self.groups[group as usize].pending &= !other.mask;
        }
        let split = &mut self.splits[at];
        split.mask |= other.mask;
        split.groups.truncate(common);
        split.meet = split.groups.last().map_or(NOWHERE, |&g| self.groups[g as usize].pc);
        self.wake_complete_groups();
    }

    /// What a barrier carries from these lanes to those that leave it.
    pub fn sequential(&self, lanes: u32) -> Sequential {
        let (home, mut carried) = (self.view.home(), Sequential::default());
        for fence in self.released.iter().filter(|f| f.sequential && f.lanes & lanes != 0) {
            join_option(&mut carried.released, home, &fence.moment.of(fence.lanes & lanes));
        }
        for seen in self.seen.iter().filter(|s| s.sequential && s.lanes & lanes != 0) {
            join_option(&mut carried.seen, home, &seen.clock);
        }
        carried
    }

    /// The lanes have left a barrier that carried this.
    pub fn inherit(&mut self, lanes: u32, carried: &Sequential) {
        let (strength, sequential) = (Strength::Gpu, true);
        if let Some(clock) = &carried.released {
            self.released.retain(|f| !(f.sequential && f.lanes & !lanes == 0));
            self.released.push(Fenced { lanes, strength, sequential, moment: self.view.carried(clock) });
        }
        if let Some(clock) = &carried.seen {
            self.seen.retain(|s| !(s.sequential && s.lanes & !lanes == 0));
            self.seen.push(Seen { lanes, strength, sequential, clock: clock.clone(), last: None });
        }
    }

    pub fn is_done(&self) -> bool {
        self.splits.is_empty()
    }

    pub fn can_run(&self) -> bool {
        self.splits.iter().any(|s| s.state == State::Run)
    }
}
