//! A warp: 32 lanes that run together if possible. Lanes that diverge form separate splits and reconverge
//! where their paths join. No lane waits there forever: as on hardware with independent thread scheduling,
//! when lanes spin on a value that a waiting lane has yet to write, the waiting lane continues.

use smallvec::SmallVec;

use super::registers::Registers;
use super::units::{
    Attendance, BulkQueue, CheckedWait, CopyQueue, Definedness, Fences, Undefined, WgmmaQueue,
};
use crate::decode::{NOWHERE, Program};
use crate::memory::LocalMemory;
use crate::order::{Actors, WarpView};

/// The return point of a called function.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    pub return_pc: u32,
    pub call: u32,
    pub caller: u32,
    /// Registers of the callee before the call, if the callee was already active (recursion).
    pub saved: Option<Box<SavedRegisters>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SavedRegisters {
    pub w32: Vec<[u32; 32]>,
    pub w64: Vec<[u64; 32]>,
    pub pred: Vec<u32>,
    /// The states of the function's suspects.
    pub undefined: Vec<Definedness>,
}

/// The state of a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Run,
    /// At the point of reconvergence of its innermost group.
    Parked,
    /// Before a warp-wide instruction, waiting for the other lanes of this mask that have not exited.
    Lanes(u32),
    /// At a CTA barrier, waiting for other warps.
    Barrier(u8),
}

/// Lanes that run together.
#[derive(Clone, Debug)]
pub(crate) struct Split {
    pub mask: u32,
    pub pc: u32,
    /// Point of reconvergence of the innermost group.
    pub meet: u32,
    pub state: State,
    pub frames: Vec<Frame>,
    pub groups: SmallVec<[u32; 4]>,
    /// Index of the running function.
    pub function: u32,
    /// Number of consecutive reads that returned the same value as the one before.
    pub polls: u32,
    /// The value of the last such read.
    pub found: u64,
    /// Set when a wait for other lanes cannot end: proceed with the lanes that arrived.
    pub forced: bool,
    /// The point of reconvergence that the lanes left without the other lanes of their group, because they
    /// would have waited forever; [`NOWHERE`] if they did not leave one.
    pub ran_on: u32,
}

/// Lanes that diverged and reconverge at `pc`, at a call depth of `depth` frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pc: u32,
    depth: u32,
    pending: u32,
}

/// A warp of a cluster.
#[derive(Debug)]
pub(crate) struct Warp {
    /// Index in the cluster, in the order of the CTAs.
    pub index: usize,
    /// Lanes that have not exited.
    pub live: u32,
    pub registers: Registers,
    pub splits: Vec<Split>,
    pub groups: Vec<Group>,
    pub view: WarpView,
    pub local: LocalMemory,
    pub copies: CopyQueue,
    pub bulk: BulkQueue,
    pub wgmma: WgmmaQueue,
    pub undefined: Undefined,
    pub fences: Fences,
    pub attendance: Attendance,
    /// The last wait on an mbarrier that all its lanes were allowed to use.
    pub waited: Option<CheckedWait>,
    /// Instructions issued, and the part of them up to the last CTA barrier.
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
                ran_on: NOWHERE,
            }],
            groups: Vec::new(),
            view: WarpView::new(home, index, actors, present),
            local,
            copies: CopyQueue::default(),
            bulk: BulkQueue::default(),
            wgmma: WgmmaQueue::default(),
            undefined: Undefined::new(program),
            fences: Fences::default(),
            attendance: Attendance::default(),
            waited: None,
            steps: 0,
            steps_at_barrier: 0,
        }
    }

    /// Makes the lanes of `split` wait for each other at `pc`.
    pub fn push_group(&mut self, split: &mut Split, pc: u32) {
        if pc == NOWHERE {
            return;
        }
        let depth = split.frames.len() as u32;
        if let Some(&top) = split.groups.last() {
            let top = &self.groups[top as usize];
            // In a loop that lanes leave one by one, all lanes reconverge at the same point.
            if top.pc == pc && top.depth == depth {
                return;
            }
        }
        if self.splits.is_empty() {
            // The groups created since then have no other lanes left.
            self.groups.truncate(split.groups.last().map_or(0, |&g| g as usize + 1));
        }
        split.groups.push(self.groups.len() as u32);
        self.groups.push(Group { pc, depth, pending: split.mask });
        split.meet = pc;
    }

    /// Whether the split is at the point of reconvergence of its innermost group.
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

    /// Handles a split at its point of reconvergence. Returns the split when all lanes of the group have
    /// arrived; otherwise parks it and returns `None`.
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

    /// Removes exited lanes from all groups.
    pub fn leave(&mut self, lanes: u32) {
        self.live &= !lanes;
        self.groups.iter_mut().for_each(|g| g.pending &= !lanes);
        self.wake_complete_groups();
    }

    /// Continues parked splits whose groups have no other lanes to wait for.
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

    /// Continues every parked split without the lanes that it waits for. `stuck` states that nothing else in
    /// the cluster can run. Returns whether any split was parked.
    pub fn release_parked(&mut self, stuck: bool) -> bool {
        let mut released = false;
        let mut splits = std::mem::take(&mut self.splits);
        for split in splits.iter_mut().filter(|s| s.state == State::Parked) {
            if let Some(&group) = split.groups.last() {
                self.groups[group as usize].pending &= !split.mask;
            }
            self.pop_group(split);
            split.state = State::Run;
            split.ran_on = if stuck { split.pc } else { split.ran_on };
            released = true;
        }
        self.splits = splits;
        released
    }

    /// Joins splits that wait at the same warp-wide instruction. A split with all its lanes may run.
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

    /// Joins another split into the split at `at`. Groups to which only one of the two splits belongs no
    /// longer apply.
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
        split.ran_on = NOWHERE;
        split.groups.truncate(common);
        split.meet = split.groups.last().map_or(NOWHERE, |&g| self.groups[g as usize].pc);
        self.wake_complete_groups();
    }

    pub fn is_done(&self) -> bool {
        self.splits.is_empty()
    }

    pub fn can_run(&self) -> bool {
        self.splits.iter().any(|s| s.state == State::Run)
    }
}
