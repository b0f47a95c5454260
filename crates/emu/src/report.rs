//! Options and report of a run, and the kinds of findings.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use ptx::Space;

use crate::counters::Counters;
use crate::earlier::EarlierUses;
use crate::stopwatch::Stopwatch;
use crate::trace::CtaTrace;

/// The order of events that the machine leaves open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Warps run in index order, each until it waits. Asynchronous copies complete when they are waited for,
    /// the latest time that PTX allows.
    #[default]
    Late,
    /// Warps are permuted and switched at random. Asynchronous copies complete at once.
    Early,
    /// Warps are permuted and switched at random. Each asynchronous copy completes early or late, chosen at
    /// random.
    Random,
    /// Like `Random`, but some warps lag: they advance a few steps only when all other warps wait. For an
    /// even seed, warp `seed / 2` lags. For an odd seed, the warpgroup `seed / 2` lags. The index wraps
    /// around.
    Lagging,
}

/// The kinds of findings to look for. Addresses and barriers are always checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Races, and asynchronous copies that are not waited for.
    pub races: bool,
    /// Reads of memory and registers that were never written.
    pub uninitialised: bool,
    /// `Write` buffers that were not written completely.
    pub unwritten: bool,
}

impl Checks {
    /// All checks.
    pub const ALL: Checks = Checks { races: true, uninitialised: true, unwritten: true };
}

/// How closely a run follows the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fidelity {
    /// Results are exact, bit for bit.
    #[default]
    Exact,
    /// Only the results that a trace needs. Matrix products add nothing to their accumulators. When a CTA
    /// adds to an integer in global memory, the emulator also adds the contributions of the CTAs that do not
    /// run, so that a CTA which takes its work from a counter gets its own share. Results have no meaning.
    Sketch,
}

/// Where the variables of shared memory are placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Where ptxas 13.0 places them: one after the other, each at its declared alignment, from a multiple of
    /// 1024 on. Dynamic shared memory is aligned to at least 16 bytes.
    #[default]
    Ptxas,
    /// At addresses that have the declared alignment but no larger one, so that an access that needs a larger
    /// one is misaligned.
    Declared,
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of the schedule.
    pub seed: u64,
    /// The order of events that the machine leaves open.
    pub schedule: Schedule,
    /// Which findings to look for.
    pub checks: Checks,
    /// Whether results are needed or only a trace.
    pub fidelity: Fidelity,
    /// Architecture `sm_NN` whose tensor-core rules and limits apply. `None` means the target of the module.
    pub sm: Option<u32>,
    /// Where the variables of shared memory lie.
    pub placement: Placement,
    /// Whether `shfl`, `vote`, `match`, `redux` and `elect` order the memory accesses of their lanes, as
    /// `bar.warp.sync` does. PTX does not say so, and races that depend on it are reported as
    /// [`HazardKind::WarpOrder`].
    pub collectives_order: bool,
    /// Maximum number of CTAs that are resident at the same time when CTAs communicate. `None` means as many
    /// as fit in the host's memory. A kernel that needs more deadlocks.
    pub resident: Option<u64>,
    /// The linear index of a CTA that starts before all others, if CTAs communicate: they start when the
    /// first one waits for them, has ended, or has issued about a million warp instructions. In other runs
    /// CTAs advance evenly, and few waits have to wait.
    pub first: Option<u64>,
    /// Whether the launch is cooperative: the kernel may then use a barrier of the whole grid.
    pub cooperative: bool,
    /// Whether relaxed and volatile reads of global memory may return older values, as far as PTX allows it.
    /// Each line that does so is reported as [`HazardKind::WeakOrder`]. Bit 1 of the seed decides whether
    /// each `fence.sc` stands in Fence-SC order where it ran, or as early as the accesses before it allow.
    pub weak: bool,
    /// Linear indices of the CTAs to record.
    pub traced_ctas: Vec<u64>,
    /// Linear indices of the CTAs to run, each once. `None` means all CTAs. With a subset, unwritten outputs
    /// are not reported.
    pub only: Option<Vec<u64>>,
    /// Whether the report has a [`Survey`]. With a survey, a run of some CTAs distinguishes the same kinds of
    /// races as a run of all CTAs. Without one, such a run is for tracing, not for a check.
    pub survey: bool,
    /// Warp instructions that one CTA may issue.
    pub step_limit: u64,
    /// Warp instructions that all CTAs together may issue, including a fixed cost for the start of each CTA.
    pub grid_limit: u64,
    /// The time limit and the progress of the run, if the caller wants them.
    pub stopwatch: Option<Arc<Stopwatch>>,
    /// Byte ranges, per index of a buffer in the contract, that the kernel must write. A `Write` buffer that
    /// is not listed must be written completely.
    pub must_write: HashMap<usize, Vec<std::ops::Range<usize>>>,
    /// The uses that earlier launches may still make of the buffers of a launch that overlaps with them.
    pub earlier: EarlierUses,
    /// Findings that fail no check, each with the reason.
    pub allowed: Allowed,
    /// Whether findings fail that only the PTX memory model forbids, and that no current GPU is known to
    /// show.
    pub by_the_letter: bool,
}

/// The findings that a caller allows: their kind, and a line of the PTX of one of their accesses.
pub type Allowed = Arc<HashMap<(HazardKind, u32), String>>;

impl Default for Options {
    fn default() -> Options {
        Options {
            seed: 0,
            schedule: Schedule::Late,
            checks: Checks::ALL,
            fidelity: Fidelity::Exact,
            sm: None,
            placement: Placement::Ptxas,
            collectives_order: false,
            resident: None,
            first: None,
            cooperative: false,
            weak: false,
            traced_ctas: Vec::new(),
            only: None,
            survey: false,
            step_limit: 50_000_000,
            grid_limit: u64::MAX,
            stopwatch: None,
            must_write: HashMap::new(),
            earlier: EarlierUses::default(),
            allowed: Allowed::default(),
            by_the_letter: true,
        }
    }
}

/// The kind of a finding.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
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
    /// An access to tensor memory after a synchronisation that has no `tcgen05.fence`.
    MissingTensorFence,
    /// A use of tensor memory that is not allocated or not the warp's, or an allocation that is not allowed.
    TensorMemory,
    /// A request to cancel a cluster after one that failed, or a use of a response that has no such meaning.
    LaunchControl,
    UnwrittenOutput,
    BeforeGridWait,
    RegisterPool,
    /// A shared access that needs more alignment than its variable declares.
    UnpromisedAlignment,
    /// A race of lanes of a warp that only a shuffle, a vote or another collective orders.
    WarpOrder,
    /// A race of the plain load that gives a loop around a compare-and-swap its first value.
    CasSeed,
    /// An access before `griddepcontrol.wait` to memory of which the uses by earlier launches are not known.
    EarlyAccess,
    /// A `.nc` load of memory that the launch also writes.
    NonCoherentRead,
    /// A `trap`.
    Trap,
    /// A failed `assert`.
    AssertionFailed,
    /// A relaxed or volatile read that returned an older value.
    WeakOrder,
    /// A read that races, but on whose value nothing depends.
    UnusedRead,
    /// Outputs that differ between two runs with equal inputs.
    Nondeterministic,
}

impl HazardKind {
    /// Whether the finding fails a check unless the caller says otherwise. The other kinds are notes: what
    /// works on current GPUs but relies on behaviour that PTX does not guarantee, what depends on launches
    /// that the check does not know, and outputs that depend on an order which the kernel may leave open on
    /// purpose.
    pub const fn fails(self) -> bool {
        use HazardKind::{EarlyAccess, Nondeterministic, UnpromisedAlignment, UnusedRead};
        !matches!(self, UnpromisedAlignment | UnusedRead | Nondeterministic | EarlyAccess)
    }

    /// Whether no current GPU is known to show the fault, which only the letter of the PTX ISA forbids.
    const fn is_of_the_letter(self) -> bool {
        use HazardKind::{CasSeed, MissingTensorFence, WarpOrder};
        matches!(self, WarpOrder | CasSeed | MissingTensorFence)
    }

    /// The name that filetests and JSON use.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// One thread of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ThreadId {
    /// Linear index of the CTA.
    pub cta: u64,
    /// Index of the warp in its CTA.
    pub warp: u32,
    /// Index of the lane in its warp.
    pub lane: u32,
}

impl fmt::Display for ThreadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CTA {} warp {} lane {}", self.cta, self.warp, self.lane)
    }
}

/// A memory location.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// State space.
    pub space: Space,
    /// The buffer or variable; empty if the address belongs to none.
    pub name: String,
    /// Byte offset from the start of the buffer or variable; negative or beyond the end when out of bounds.
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
    /// Line of the PTX text where the hazard was detected. 0 when the module was built and never printed, or
    /// when the hazard concerns the whole kernel.
    pub line: u32,
    /// Line of the other access, if there is one.
    pub other_line: Option<u32>,
    /// The thread of the access, and the thread of the other access if there is one.
    pub threads: Vec<ThreadId>,
    /// The memory location, if there is one.
    pub place: Option<Place>,
    /// A description of the hazard.
    pub message: String,
    /// Number of occurrences over all threads.
    pub count: u64,
    /// Whether [`Options::allowed`] has it, or the check is not [by the letter](Options::by_the_letter).
    pub allowed: bool,
}

impl Hazard {
    /// Whether the finding fails a check.
    pub fn fails(&self) -> bool {
        self.kind.fails() && !self.allowed
    }

    /// Notes that the finding is allowed, if it is.
    pub(crate) fn compare_with(&mut self, options: &Options) {
        if !options.by_the_letter && self.kind.is_of_the_letter() {
            self.allowed = true;
            return;
        }
        let lines = [Some(self.line), self.other_line].into_iter().flatten();
        let reason = lines.filter_map(|line| options.allowed.get(&(self.kind, line))).next();
        if let Some(reason) = reason.filter(|_| self.kind.fails()) {
            self.allowed = true;
            self.message += &format!("; {reason}");
        }
    }
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

/// The findings of a run, one for each (kind, line, other line).
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Whether a store to shared or to global memory was not carried out because its address is wrong. A
    /// later read of unwritten memory is then not reported as a finding.
    pub lost_shared: bool,
    pub lost_global: bool,
    list: Vec<Hazard>,
    index: HashMap<(HazardKind, u32, Option<u32>), usize>,
}

impl Findings {
    /// Counts a finding. `describe` is called only for the first finding with the same key.
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
        self.add(Hazard { kind, line, other_line, threads, place, message, count: 1, allowed: false });
    }

    /// Whether there is a finding of this kind.
    pub fn has(&self, kind: HazardKind) -> bool {
        self.list.iter().any(|hazard| hazard.kind == kind)
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
        self.lost_shared |= other.lost_shared;
        self.lost_global |= other.lost_global;
        other.list.into_iter().for_each(|h| self.add(h));
    }

    /// The findings, sorted by line, then by kind.
    pub fn into_sorted(mut self) -> Vec<Hazard> {
        self.list.sort_by_key(|h| (h.line, h.kind, h.other_line));
        self.list
    }
}

/// The text of a `printf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printed {
    /// The thread that printed it.
    pub thread: ThreadId,
    /// The text, of at most about a thousand bytes.
    pub text: String,
}

/// The instructions and accesses of each cluster, to choose clusters that stand for the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// One entry for each cluster that ran, in the order of their indices. Empty if CTAs communicate.
    pub footprints: Vec<Footprint>,
    /// Pairs of clusters, by the linear index of their first CTA, that wrote to a line of 128 bytes of global
    /// memory. At most [`Survey::PAIRS`].
    pub neighbours: Vec<(u64, u64)>,
}

impl Survey {
    /// The most pairs of neighbours.
    pub const PAIRS: usize = 1 << 16;
}

/// The instructions that a cluster executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Linear index of the cluster's first CTA.
    pub cta: u64,
    /// Bit `i % 64` of word `i / 64` is set if a lane executed instruction `i` of the module.
    pub executed: Vec<u64>,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// All findings, one for each (kind, line, other line), sorted by line.
    pub hazards: Vec<Hazard>,
    /// The counters of the run.
    pub counters: Counters,
    /// The traces of the recorded CTAs, in the order of their indices.
    pub traces: Vec<CtaTrace>,
    /// What `printf` printed, in the order of the CTAs; at most 1024 texts of a cluster.
    pub printed: Vec<Printed>,
    /// Whether CTAs may communicate: the kernel has atomics or strong accesses to global memory.
    pub communicates: bool,
    /// Warp instructions issued.
    pub steps: u64,
    /// Names of the module's `.global` variables that the launch changed. The next launch would see the
    /// changed values.
    pub changed: Vec<String>,
    /// For each buffer, whether the launch stored to it.
    pub stored: Vec<bool>,
    /// Whether the next launch may start before the launches before this one have ended: this launch overlaps
    /// with them, and no thread waits for their end, or one lets the next launch start before it waits.
    pub overtakes: bool,
    /// The record of each cluster, if [`Options::survey`] is set.
    pub survey: Survey,
}
