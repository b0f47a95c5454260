//! CTA barriers (PTX ISA, "bar, barrier"). Each CTA has sixteen of them. Arrivals are counted in warps.

use std::rc::Rc;

use ptx::BarKind;

use super::fences::Sequential;
use crate::order::{Agent, Clock};

/// The counts of a reducing barrier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub count: u32,
    pub threads: u32,
}

/// The state of a barrier between two completions.
#[derive(Clone, Debug, Default)]
struct Barrier {
    /// Number of threads that the barrier waits for; `None` for all threads of the CTA.
    expected: Option<u32>,
    /// The reduction of the first arrival, if it has one.
    reduction: Option<BarKind>,
    /// The warps that arrived, once for each arrival.
    arrived: Vec<usize>,
    waiting: Vec<usize>,
    clock: Option<Clock>,
    carried: Sequential,
    tally: Tally,
    line: u32,
}

/// Lanes of a warp that arrive together by one instruction.
pub(crate) struct Joined {
    pub clock: Clock,
    pub carried: Sequential,
    pub kind: BarKind,
    /// The thread count of the instruction.
    pub count: Option<u32>,
    pub line: u32,
    /// The lanes whose predicate is true, and all lanes, of a reduction.
    pub votes: Option<(u32, u32)>,
}

/// What a warp receives when a barrier releases it.
#[derive(Clone, Debug)]
pub(crate) struct Wake {
    pub warp: usize,
    /// Index of the barrier in the cluster.
    pub barrier: u8,
    pub release: Rc<(Clock, Sequential)>,
    pub tally: Tally,
}

/// The barriers of a cluster: sixteen for each CTA, one CTA after the other.
#[derive(Debug)]
pub(crate) struct Barriers {
    all: Vec<Barrier>,
    /// Warps of a CTA.
    warps: usize,
    /// The warps that a barrier releases.
    wakes: Vec<Wake>,
}

impl Barriers {
    pub fn new(ctas: usize, warps: usize) -> Barriers {
        Barriers { all: vec![Barrier::default(); 16 * ctas], warps, wakes: Vec::new() }
    }

    /// The thread count, the reduction and the line of the first arrival of this phase.
    pub fn first_arrival(&self, at: usize) -> Option<(Option<u32>, Option<BarKind>, u32)> {
        let Barrier { expected, reduction, line, .. } = self.all[at];
        (!self.all[at].arrived.is_empty()).then_some((expected, reduction, line))
    }

    /// Adds lanes of an arriving warp.
    pub fn join(&mut self, at: usize, home: Agent, new: Joined) {
        let barrier = &mut self.all[at];
        match &mut barrier.clock {
            Some(known) => known.join(home, &new.clock),
            None => {
                barrier.clock = Some(new.clock);
                barrier.expected = new.count;
                barrier.reduction = reduction(new.kind);
                barrier.line = new.line;
            }
        }
        barrier.carried.join(home, &new.carried);
        if let Some((votes, lanes)) = new.votes {
            barrier.tally.count += votes.count_ones();
            barrier.tally.threads += lanes.count_ones();
        }
    }

    /// Counts the arrival of a warp, which then waits unless it only arrives. `live` are the lanes of all
    /// warps of the cluster that have not exited.
    pub fn arrive(&mut self, at: usize, warp: usize, kind: BarKind, live: &[u32]) {
        let barrier = &mut self.all[at];
        barrier.arrived.push(warp);
        if kind != BarKind::Arrive {
            barrier.waiting.push(warp);
        }
        self.complete(at, live);
    }

    /// Releases the waiting warps once all expected warps have arrived.
    fn complete(&mut self, at: usize, live: &[u32]) {
        let barrier = &self.all[at];
        let rank = at / 16;
        let full = match barrier.expected {
            Some(count) => 32 * barrier.arrived.len() as u32 >= count,
            None => (rank * self.warps..(rank + 1) * self.warps)
                .all(|w| live[w] == 0 || barrier.arrived.contains(&w)),
        };
        if barrier.arrived.is_empty() || !full {
            return;
        }
        let done = std::mem::take(&mut self.all[at]);
        let release = Rc::new((done.clock.unwrap_or_default(), done.carried));
        let wake = |warp| Wake { warp, barrier: at as u8, release: Rc::clone(&release), tally: done.tally };
        self.wakes.extend(done.waiting.into_iter().map(wake));
    }

    /// Completes the barriers that wait for all threads of a CTA: they do not wait for threads that have
    /// exited.
    pub fn complete_after_exit(&mut self, live: &[u32]) {
        for at in 0..self.all.len() {
            if self.all[at].expected.is_none() && !self.all[at].arrived.is_empty() {
                self.complete(at, live);
            }
        }
    }

    /// Whether barriers have released warps.
    pub fn has_wakes(&self) -> bool {
        !self.wakes.is_empty()
    }

    /// The warps that barriers have released since the last call.
    pub fn take_wakes(&mut self) -> Vec<Wake> {
        std::mem::take(&mut self.wakes)
    }

    /// The number of threads that have arrived at a barrier, and the number that it waits for.
    pub fn attendance(&self, at: u8) -> (usize, u32) {
        let barrier = &self.all[usize::from(at)];
        (32 * barrier.arrived.len(), barrier.expected.unwrap_or(32 * self.warps as u32))
    }

    /// Whether a warp has arrived at a barrier since the barrier last completed.
    pub fn has_arrived(&self, at: u8, warp: usize) -> bool {
        self.all[usize::from(at)].arrived.contains(&warp)
    }

    /// Whether a barrier waits for a given number of threads, rather than for all threads of the CTA.
    pub fn is_counted(&self, at: u8) -> bool {
        self.all[usize::from(at)].expected.is_some()
    }
}

/// The reduction of a barrier. Barriers without one may be mixed.
pub(crate) fn reduction(kind: BarKind) -> Option<BarKind> {
    (!matches!(kind, BarKind::Sync | BarKind::Arrive)).then_some(kind)
}
