//! A trace cut into scheduled runs.

use std::borrow::Cow;
use std::collections::HashMap;

use super::lower::Program;
use super::machine::Gpu;
use super::schedule::{Layout, layout, single};
use crate::trace::Event;

/// A run of events and how it is laid out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Into [`Layouts::all`].
    pub layout: u32,
    /// First event.
    pub event: u32,
}

/// Layouts made so far, by block and number of iterations.
pub(super) struct Layouts<'a> {
    program: &'a Program,
    gpu: &'a Gpu,
    pub all: Vec<Layout>,
    known: HashMap<(u32, u32), u32>,
}

impl<'a> Layouts<'a> {
    pub(super) fn new(program: &'a Program, gpu: &'a Gpu) -> Layouts<'a> {
        Layouts { program, gpu, all: Vec::new(), known: HashMap::new() }
    }

    /// Registers that a warp needs: the program's and the most that a layout adds.
    pub(super) fn registers(&self) -> usize {
        let most = self.all.iter().map(|l| l.temporaries).max().unwrap_or(0);
        (self.program.registers + most) as usize
    }

    /// Cuts the events of each warp into runs. Events whose `pc` is not of the program are left out.
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

    /// How many whole iterations of the block the events begin with, up to its unrolling.
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

    fn layout(&mut self, key: (u32, u32), make: impl FnOnce(&Self) -> Layout) -> u32 {
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
