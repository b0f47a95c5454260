//! Divides a trace into runs that are scheduled as a whole.

use std::borrow::Cow;
use std::collections::HashMap;

use super::lower::LoweredModule;
use super::machine::Gpu;
use super::schedule::{ScheduledRun, layout, single};
use emu::trace::{CtaTrace, Detail, Event};

/// A run of events and its layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Index in [`Layouts::all`].
    pub layout: u32,
    /// First event.
    pub event: u32,
}

/// A trace divided into runs.
pub(super) struct Planned<'a> {
    /// The events of each warp.
    pub warps: Vec<Cow<'a, [Event]>>,
    /// Number of events, including those that were not kept.
    pub issues: u64,
    /// The runs of each warp.
    pub runs: Vec<Vec<Run>>,
    /// Threads of each warp: the lanes that ever participated.
    pub threads: Vec<u32>,
}

impl<'a> Planned<'a> {
    pub(super) fn new(trace: &'a CtaTrace, layouts: &mut Layouts) -> Planned<'a> {
        let lanes = |events: &Vec<Event>| events.iter().fold(0, |all, e| all | e.lanes).count_ones();
        let warps: Vec<Cow<[Event]>> = trace.warps.iter().map(|w| without_vain_waits(w)).collect();
        Planned {
            runs: layouts.cut(&warps),
            threads: trace.warps.iter().map(lanes).collect(),
            issues: warps.iter().map(|w| w.len() as u64).sum::<u64>() + trace.dropped,
            warps,
        }
    }
}

/// Removes the unsuccessful polls of an mbarrier. Their number depends on the emulator's schedule; in the
/// replay, the warp waits instead. The events from one unsuccessful poll up to the next poll are removed.
fn without_vain_waits(events: &[Event]) -> Cow<'_, [Event]> {
    let question = |e: &Event| match e.detail {
        Detail::Wait { at, parity, done } => Some((at, parity, done)),
        _ => None,
    };
    if !events.iter().any(|e| matches!(question(e), Some((_, _, false)))) {
        return Cow::Borrowed(events);
    }
    let (mut kept, mut at) = (Vec::with_capacity(events.len()), 0);
    while let Some(event) = events.get(at) {
        match question(event) {
            Some((place, parity, false)) => {
                let again = |e: &Event| question(e).is_some_and(|(p, q, _)| (p, q) == (place, parity));
                at = events[at + 1..].iter().position(again).map_or(events.len(), |next| at + 1 + next);
            }
            _ => {
                kept.push(*event);
                at += 1;
            }
        }
    }
    Cow::Owned(kept)
}

/// The layouts made so far, by block and number of iterations.
pub(super) struct Layouts<'a> {
    program: &'a LoweredModule,
    gpu: &'a Gpu,
    pub all: Vec<ScheduledRun>,
    known: HashMap<(u32, u32), u32>,
}

impl<'a> Layouts<'a> {
    pub(super) fn new(program: &'a LoweredModule, gpu: &'a Gpu) -> Layouts<'a> {
        Layouts { program, gpu, all: Vec::new(), known: HashMap::new() }
    }

    /// Number of registers that a warp needs: the registers of the program, plus the maximum that a layout
    /// adds.
    pub(super) fn registers(&self) -> usize {
        let most = self.all.iter().map(|l| l.temporaries).max().unwrap_or(0);
        (self.program.registers + most) as usize
    }

    /// Divides the events of each warp into runs. Events whose `pc` is not in the program are left out.
    pub(super) fn cut(&mut self, warps: &[Cow<[Event]>]) -> Vec<Vec<Run>> {
        warps.iter().map(|events| self.cut_warp(events)).collect()
    }

    fn cut_warp(&mut self, events: &[Event]) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut at = 0;
        while let Some(event) = events.get(at) {
            let Some(block) = self.program.block_of.get(event.pc as usize) else {
                at += 1;
                continue;
            };
            let copies = self.iterations(*block, &events[at..]);
            let layout = match copies {
                0 => self.layout((u32::MAX, event.pc), |s| single(s.program, event.pc)),
                _ => self.layout((*block, copies), |s| {
                    layout(s.program, &s.program.blocks[*block as usize], copies, s.gpu)
                }),
            };
            runs.push(Run { layout, event: at as u32 });
            at += self.all[layout as usize].events.max(1) as usize;
        }
        runs
    }

    /// The number of whole iterations of the block at the start of the events, at most its unroll factor.
    fn iterations(&self, block: u32, events: &[Event]) -> u32 {
        let block = &self.program.blocks[block as usize];
        let whole = |copy: u32| {
            let first = (copy * block.len) as usize;
            let (start, end) = (events.get(first), events.get(first + block.len as usize - 1));
            start.is_some_and(|e| e.pc == block.start)
                && end.is_some_and(|e| e.pc == block.start + block.len - 1)
        };
        (0..block.unroll.max(1)).take_while(|copy| whole(*copy)).count() as u32
    }

    fn layout(&mut self, key: (u32, u32), make: impl FnOnce(&Self) -> ScheduledRun) -> u32 {
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let made = make(self);
        self.all.push(made);
        let index = self.all.len() as u32 - 1;
        self.known.insert(key, index);
        index
    }
}
