//! What a run is asked for and what it says.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use ptx::Space;

use crate::counters::Counters;
use crate::stopwatch::Stopwatch;
use crate::trace::CtaTrace;

/// In which order things happen that the machine may order as it likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Warps in order, each until it waits; asynchronous copies land when they are waited for, the last legal moment.
    #[default]
    Late,
    /// Warps permuted and switched at random; asynchronous copies land at once.
    Early,
    /// Warps permuted and switched at random; each asynchronous copy lands early or late by the toss of a coin.
    Random,
    /// The same, and some lag behind, going a few steps only when all the others wait: warp `seed / 2`, or of an odd seed the
    /// warpgroup of that number, counted around.
    Lagging,
}

/// Which findings are looked for. Addresses and barriers are always checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Races and asynchronous copies not waited for.
    pub races: bool,
    /// Reads of memory and registers that nothing was written to.
    pub uninitialised: bool,
    /// `Write` buffers that were not written completely.
    pub unwritten: bool,
}

impl Checks {
    /// Everything.
    pub const ALL: Checks = Checks { races: true, uninitialised: true, unwritten: true };
}

/// How true a run is to the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fidelity {
    /// Bit by bit.
    #[default]
    Exact,
    /// Only what a trace needs: products of matrices add nothing to their sums, and what a CTA adds to an integer in global
    /// memory is added for the CTAs that do not run, too, so that one that takes its work from a counter gets its share. Results
    /// mean nothing.
    Sketch,
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of the schedule.
    pub seed: u64,
    /// Order of what is not ordered.
    pub schedule: Schedule,
    /// What is looked for.
    pub checks: Checks,
    /// Whether results are wanted, or a trace alone.
    pub fidelity: Fidelity,
    /// Architecture whose tensor-core rules and limits hold, as in `sm_NN`; the module's target when `None`.
    pub sm: Option<u32>,
    /// Linear indices of the CTAs to record.
    pub traced_ctas: Vec<u64>,
    /// Linear indices of the CTAs to run, each once; all when `None`. With a subset of CTAs, unwritten outputs are not
    /// reported. Use such a run for tracing, not for a check.
    pub only: Option<Vec<u64>>,
    /// Warp instructions a CTA may issue.
    pub step_limit: u64,
    /// Warp instructions that all CTAs may issue together; the start of a CTA counts as some.
    pub grid_limit: u64,
    /// The time limit and the progress of the run, where the caller wants them.
    pub stopwatch: Option<Arc<Stopwatch>>,
    /// Byte ranges per buffer of the contract that must be written; `Write` buffers not named must be written whole.
    pub must_write: HashMap<usize, Vec<std::ops::Range<usize>>>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            seed: 0,
            schedule: Schedule::Late,
            checks: Checks::ALL,
            fidelity: Fidelity::Exact,
            sm: None,
            traced_ctas: Vec::new(),
            only: None,
            step_limit: 50_000_000,
            grid_limit: u64::MAX,
            stopwatch: None,
            must_write: HashMap::new(),
        }
    }
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "explained by each finding's message")]
pub enum HazardKind {
    Race,
    UninitialisedRead,
    OutOfBounds,
    Misaligned,
    BarrierDivergence,
    Deadlock,
    AsyncNotWaited,
    MissingProxyFence,
    TransactionMismatch,
    MissingWgmmaFence,
    UnwrittenOutput,
    BeforeGridWait,
    RegisterPool,
}

impl HazardKind {
    /// The name in filetests and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            HazardKind::Race => "race",
            HazardKind::UninitialisedRead => "uninitialised_read",
            HazardKind::OutOfBounds => "out_of_bounds",
            HazardKind::Misaligned => "misaligned",
            HazardKind::BarrierDivergence => "barrier_divergence",
            HazardKind::Deadlock => "deadlock",
            HazardKind::AsyncNotWaited => "async_not_waited",
            HazardKind::MissingProxyFence => "missing_proxy_fence",
            HazardKind::TransactionMismatch => "transaction_mismatch",
            HazardKind::MissingWgmmaFence => "missing_wgmma_fence",
            HazardKind::UnwrittenOutput => "unwritten_output",
            HazardKind::BeforeGridWait => "before_grid_wait",
            HazardKind::RegisterPool => "register_pool",
        }
    }
}

/// One thread of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ThreadId {
    /// Linear index of the CTA.
    pub cta: u64,
    /// Warp in the CTA.
    pub warp: u32,
    /// Lane in the warp.
    pub lane: u32,
}

impl fmt::Display for ThreadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CTA {} warp {} lane {}", self.cta, self.warp, self.lane)
    }
}

/// Where in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// State space.
    pub space: Space,
    /// The buffer or variable; empty when there is none.
    pub name: String,
    /// Bytes from its start; negative or beyond its end when out of bounds.
    pub offset: i64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}[{:#x}]",
            if self.name.is_empty() { self.space.suffix().trim_start_matches('.') } else { &self.name },
            self.offset
        )
    }
}

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// What is wrong.
    pub kind: HazardKind,
    /// Line of the PTX text where it was noticed; 0 when the module was built and never printed, or for the whole kernel.
    pub line: u32,
    /// Line of the other access, where there is one.
    pub other_line: Option<u32>,
    /// The thread that did it, and the other one where there is one.
    pub threads: Vec<ThreadId>,
    /// The address, where there is one.
    pub place: Option<Place>,
    /// What happened, in words.
    pub message: String,
    /// How often, over all threads.
    pub count: u64,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at line {}", self.kind.name(), self.line)?;
        if let Some(other) = self.other_line {
            write!(f, " (and line {other})")?;
        }
        write!(f, ": {}", self.message)?;
        if let Some(place) = &self.place {
            write!(f, ", {place}")?;
        }
        for (i, thread) in self.threads.iter().enumerate() {
            write!(f, "{}{thread}", if i == 0 { "; " } else { " and " })?;
        }
        if self.count > 1 {
            write!(f, "; {} times", self.count)?;
        }
        Ok(())
    }
}

/// Findings, one for each (kind, line, other line).
#[derive(Debug, Default)]
pub(crate) struct Findings {
    list: Vec<Hazard>,
    index: HashMap<(HazardKind, u32, Option<u32>), usize>,
}

impl Findings {
    /// Counts a finding; `describe` makes it when it is the first of its key.
    pub fn report(
        &mut self,
        kind: HazardKind,
        line: u32,
        other_line: Option<u32>,
        describe: impl FnOnce() -> (Vec<ThreadId>, Option<Place>, String),
    ) {
        if let Some(&at) = self.index.get(&(kind, line, other_line)) {
            self.list[at].count += 1;
            return;
        }
        let (threads, place, message) = describe();
        self.add(Hazard { kind, line, other_line, threads, place, message, count: 1 });
    }

    fn add(&mut self, hazard: Hazard) {
        let key = (hazard.kind, hazard.line, hazard.other_line);
        match self.index.get(&key) {
            Some(&at) => self.list[at].count += hazard.count,
            None => {
                self.index.insert(key, self.list.len());
                self.list.push(hazard);
            }
        }
    }

    pub fn merge(&mut self, other: Findings) {
        other.list.into_iter().for_each(|h| self.add(h));
    }

    /// By line, then kind.
    pub fn into_sorted(mut self) -> Vec<Hazard> {
        self.list.sort_by_key(|h| (h.line, h.kind, h.other_line));
        self.list
    }
}

/// What a run says.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Everything wrong, one for each (kind, line, other line), by line.
    pub hazards: Vec<Hazard>,
    /// What was counted.
    pub counters: Counters,
    /// The CTAs recorded, in the order of their indices.
    pub traces: Vec<CtaTrace>,
    /// Warp instructions issued.
    pub steps: u64,
    /// The module's `.global` variables that the launch left other than it found them: what a next launch would see.
    pub changed: Vec<String>,
}
