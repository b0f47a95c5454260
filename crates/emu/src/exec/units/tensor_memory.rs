//! Tensor memory (PTX ISA, "Tensor Memory"): 128 lanes of 512 columns of 32 bits in each CTA, which a CTA
//! allocates by columns, and the instructions on it that are in flight.

use std::ops::Range;

use crate::order::{Actors, Clock, DenseShadow, Epoch, TensorPipe};

/// Lanes and columns of a CTA.
pub(crate) const LANES: usize = 128;
pub(crate) const COLUMNS: usize = 512;
/// Columns of the smallest allocation.
const UNIT: usize = 32;
/// Lanes of a cell. A cell is one column of these lanes; accesses are checked by cells.
pub(crate) const CELL_LANES: usize = 16;
const CELLS: usize = LANES / CELL_LANES * COLUMNS;
/// Bytes that a cell takes in the shadow, which has records of blocks of this size.
const SHADOW_BYTES: usize = 16;

/// The last access of a warp to a cell, by the emulator's time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Touched {
    pub warp: usize,
    /// 0 if no warp accessed the cell.
    pub time: u64,
    pub pc: u32,
}

/// The last write of a cell, the last read, and whether the cell has been written since its allocation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cell {
    pub write: Touched,
    pub read: Touched,
    pub written: bool,
}

/// The tensor memory of a CTA.
#[derive(Debug, Default)]
struct OfCta {
    words: Vec<u32>,
    cells: Vec<Cell>,
    /// The allocations: first column, columns, and the instruction.
    allocations: Vec<(usize, usize, u32)>,
    relinquished: bool,
    /// Columns of the last allocation.
    last: Option<usize>,
}

/// The instructions of tensor memory that a warp has issued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorQueue {
    epochs: [Epoch; 3],
    /// The times of the last fence, or commit, of each kind.
    pub before: u64,
    pub after: u64,
}

impl Default for TensorQueue {
    fn default() -> TensorQueue {
        TensorQueue { epochs: [1; 3], before: 0, after: 0 }
    }
}

impl TensorQueue {
    /// The epoch to which the next instruction of a pipe belongs.
    pub fn epoch(&self, pipe: TensorPipe) -> Epoch {
        self.epochs[pipe as usize]
    }

    /// Ends the epoch of a pipe and returns it.
    pub fn close(&mut self, pipe: TensorPipe) -> Epoch {
        self.epochs[pipe as usize] += 1;
        self.epochs[pipe as usize] - 1
    }
}

/// A commit whose instructions are not yet complete.
#[derive(Debug)]
pub(crate) struct PendingCommit {
    pub mbarrier: u64,
    pub clock: Clock,
    pub pc: u32,
    pub warp: usize,
    pub lane: usize,
}

/// Why a CTA may not allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Other allocations have the columns.
    Full,
    Relinquished,
    /// The last allocation was smaller.
    Grows(usize),
    NotAPowerOfTwo,
}

/// The tensor memory of a cluster.
#[derive(Debug)]
pub(crate) struct TensorMemory {
    ctas: Vec<OfCta>,
    pub shadow: DenseShadow,
    pub queues: Vec<TensorQueue>,
    commits: Vec<PendingCommit>,
    /// Counts accesses and fences.
    now: u64,
}

impl TensorMemory {
    pub fn new(actors: Actors) -> TensorMemory {
        let ctas = if actors.tensor { actors.ctas } else { 0 };
        TensorMemory {
            ctas: (0..ctas).map(|_| OfCta::default()).collect(),
            shadow: DenseShadow::new(ctas * CELLS * SHADOW_BYTES, SHADOW_BYTES as u32, actors),
            queues: vec![TensorQueue::default(); if actors.tensor { actors.threads() } else { 0 }],
            commits: Vec::new(),
            now: 0,
        }
    }

    /// The time of a new access or fence.
    pub fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Allocates columns, and returns the first.
    pub fn allocate(&mut self, rank: usize, columns: usize, pc: u32) -> Result<usize, Refused> {
        let cta = &mut self.ctas[rank];
        if !columns.is_power_of_two() || !(UNIT..=COLUMNS).contains(&columns) {
            return Err(Refused::NotAPowerOfTwo);
        }
        if cta.relinquished {
            return Err(Refused::Relinquished);
        }
        if let Some(last) = cta.last.filter(|last| columns > *last) {
            return Err(Refused::Grows(last));
        }
        let free = |first: &usize| {
            cta.allocations.iter().all(|(at, size, _)| first + columns <= *at || at + size <= *first)
        };
        let first = (0..COLUMNS).step_by(columns).find(free).ok_or(Refused::Full)?;
        if cta.words.is_empty() {
            cta.words = vec![!0; LANES * COLUMNS];
            cta.cells = vec![Cell::default(); CELLS];
        }
        for group in 0..LANES / CELL_LANES {
            for cell in &mut cta.cells[group * COLUMNS + first..][..columns] {
                cell.written = false;
            }
        }
        cta.allocations.push((first, columns, pc));
        cta.last = Some(columns);
        Ok(first)
    }

    /// Frees an allocation. Returns whether there is one of that size at the column.
    pub fn free(&mut self, rank: usize, first: usize, columns: usize) -> bool {
        let allocations = &mut self.ctas[rank].allocations;
        let found = allocations.iter().position(|(at, size, _)| (*at, *size) == (first, columns));
        found.is_some_and(|at| {
            allocations.remove(at);
            true
        })
    }

    pub fn relinquish(&mut self, rank: usize) {
        self.ctas[rank].relinquished = true;
    }

    /// The columns of an allocation that was not freed, and its instruction.
    pub fn leak(&mut self, rank: usize) -> Option<(usize, u32)> {
        self.ctas.get_mut(rank)?.allocations.pop().map(|(_, columns, pc)| (columns, pc))
    }

    /// Whether all these columns are allocated.
    pub fn has(&self, rank: usize, columns: &Range<usize>) -> bool {
        let covers = |column: usize| {
            self.ctas[rank].allocations.iter().any(|(at, size, _)| (*at..at + size).contains(&column))
        };
        columns.end <= COLUMNS && columns.clone().all(covers)
    }

    pub fn cell(&mut self, rank: usize, group: usize, column: usize) -> &mut Cell {
        &mut self.ctas[rank].cells[group * COLUMNS + column]
    }

    /// The offset of a cell in the shadow.
    pub fn shadow_offset(rank: usize, group: usize, column: usize) -> usize {
        (rank * CELLS + group * COLUMNS + column) * SHADOW_BYTES
    }

    /// Bytes of a cell in the shadow.
    pub const fn shadow_bytes() -> usize {
        SHADOW_BYTES
    }

    /// A word. The column must be allocated.
    pub fn word(&self, rank: usize, lane: usize, column: usize) -> u32 {
        self.ctas[rank].words[lane * COLUMNS + column]
    }

    pub fn set_word(&mut self, rank: usize, lane: usize, column: usize, value: u32) {
        self.ctas[rank].words[lane * COLUMNS + column] = value;
    }

    /// Notes a commit whose instructions complete later.
    pub fn commit(&mut self, commit: PendingCommit) {
        self.commits.push(commit);
    }

    /// Whether a commit to an mbarrier is pending: later ones then complete after it.
    pub fn has_commit(&self, mbarrier: u64) -> bool {
        self.commits.iter().any(|c| c.mbarrier == mbarrier)
    }

    /// Removes the pending commits to an mbarrier, or all.
    pub fn take_commits(&mut self, mbarrier: Option<u64>) -> Vec<PendingCommit> {
        if self.commits.is_empty() {
            return Vec::new();
        }
        let (taken, left) = std::mem::take(&mut self.commits)
            .into_iter()
            .partition(|c| mbarrier.is_none_or(|mbarrier| c.mbarrier == mbarrier));
        self.commits = left;
        taken
    }
}
