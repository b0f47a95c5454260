//! Kernels of every family with one inserted fault: each instruction that orders memory, copies or products
//! is removed once, and arithmetic is made wrong at some sites. The gate must reject all of them, each for a
//! fitting reason.
//!
//! The emulator finds the faults, on any machine. A fault can be harmless in one kernel, because another
//! instruction orders the same accesses. Kernels of a family with the same sites are therefore taken
//! together, and one of them must fail.

use attend::{Order, Packing, Sums, Tiles};
use emu::Schedule;
use judge::inputs::Style;
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::forward::small::{AtOncePlan, Merge, Requests, RowOrder, Scores, StreamedPlan};
use kernels::forward::wgmma::{Diagonal, Ends, Rescaling, WgmmaPlan};
use kernels::{Arch, Family, Plan};
use problem::{Band, DType, Layout, Problem};
use rayon::prelude::*;
use tile::{Handout, RowStore};

use super::plans::asking;
use super::{Check, Making, Settings};
use check::gate::mutate::{Fault, mutant, sites};
use check::gate::{self, Verdict, bind, check_kernel};
use check::launchfile::Bound;

/// Faults that remove ordering. Each of their sites must be needed.
fn order() -> impl Iterator<Item = Fault> {
    Fault::ALL.iter().copied().filter(|fault| fault.orders())
}

/// Faults that change the computation or its inputs.
const CONTENT: [Fault; 6] = [
    Fault::DropCopy,
    Fault::WrongSlot,
    Fault::SkipRescale,
    Fault::WrongScale,
    Fault::ComparisonOffByOne,
    Fault::SkipStore,
];

/// Number of sites of arithmetic faults that are tried, spread from the first to the last. Sites are many and
/// similar.
const CONTENT_PLACES: usize = 8;

/// Kernels with the same fault sites.
struct Suspect {
    name: &'static str,
    /// The kernels, or why a plan gives none.
    kernels: Result<Vec<Bound>, String>,
}

/// Names of the kernels of the family `small_streamed`.
const STREAM: &str = "small_streamed, one warpgroup";
const STREAM_TO_TWO: &str = "small_streamed, two warpgroups of rows";
/// Name of the kernels of the family `wgmma` without tile overlap.
const IN_TURN: &str = "wgmma, tiles in turn";

/// Why an ordering instruction is kept although its removal has no effect here: the product may follow the
/// branch of the requesting thread.
const FOR_PTXAS: &str =
    "ptxas serialises products that have no fence of their own behind a divergent branch (C7519)";

/// Sites whose removal has no visible effect in these launches, and why they are kept.
const UNSEEN: [(&str, Fault, usize, &str); 5] = [
    (STREAM, Fault::DropProductFence, 2, FOR_PTXAS),
    (STREAM, Fault::DropProductFence, 4, FOR_PTXAS),
    (STREAM_TO_TWO, Fault::DropProductFence, 2, FOR_PTXAS),
    (STREAM_TO_TWO, Fault::DropProductFence, 4, FOR_PTXAS),
    (
        IN_TURN,
        Fault::DropPhaseWait,
        5,
        "the queries' one stage holds the next tile back before its mailbox does",
    ),
];

/// Inserts every fault into kernels of every family of an architecture.
pub fn mutants(arch: &Arch, settings: &Settings, progress: &mut dyn FnMut(&Check)) -> Vec<Check> {
    if settings.mutants == 0 {
        return Vec::new();
    }
    let checks = suspects(arch, &settings.families).into_iter().map(|suspect| {
        let check = suspect.check(settings.mutants);
        progress(&check);
        check
    });
    checks.collect()
}

impl Suspect {
    /// Checks every `step`-th site of each fault.
    fn check(&self, step: usize) -> Check {
        let mut making = Making::new("mutants", self.name);
        let kernels = match &self.kernels {
            Ok(kernels) => kernels,
            Err(error) => {
                making.fail(error.clone());
                return making.done();
            }
        };
        let count = |fault| kernels.first().map_or(0, |right| sites_of(right, fault));
        let places = |fault, step| (0..count(fault)).step_by(step).map(move |site| (fault, site));
        let needed = |&(fault, site): &(Fault, usize)| {
            !UNSEEN.iter().any(|known| (known.0, known.1, known.2) == (self.name, fault, site))
        };
        for (_, fault, site, why) in UNSEEN.iter().filter(|known| known.0 == self.name) {
            making.check.notes.push(format!("{fault:?} {site} is not judged: {why}"));
        }
        let order: Vec<_> = order().flat_map(|fault| places(fault, step)).filter(needed).collect();
        making.check.cases += order.len() as u64;
        let unfit = |&(fault, site): &(Fault, usize)| match refusal(kernels, fault, site) {
            None => Some(format!("{fault:?} {site} passes")),
            Some(why) => (!fitting(fault).iter().any(|reason| why.contains(reason)))
                .then(|| format!("{fault:?} {site} is refused for another reason: {why}")),
        };
        let found: Vec<_> = order.par_iter().filter_map(unfit).collect();
        found.into_iter().for_each(|why| making.fail(why));
        for fault in CONTENT {
            let tried: Vec<_> = places(fault, (count(fault) / CONTENT_PLACES).max(1)).collect();
            making.check.cases += tried.len() as u64;
            // Some sites have no effect: before the first block there is nothing to rescale. They would need
            // all runs, so the quick runs of the other sites come first.
            let seen = stages().iter().any(|runs| {
                tried
                    .par_iter()
                    .any(|&(fault, site)| refusal_by(runs, &wrong(kernels, fault, site)).is_some())
            });
            if !seen && !tried.is_empty() {
                making.fail(format!("{fault:?} passes at all of {} places", tried.len()));
            }
        }
        making.done()
    }
}

/// The accepted beginnings of the gate's message for a fault in the ordering.
fn fitting(fault: Fault) -> &'static [&'static str] {
    match fault {
        Fault::DropProductFence => &["missing_wgmma_fence at"],
        // A product that is not waited for reads memory that is already being overwritten.
        Fault::DropProductGroup | Fault::DropProductWait => &["async_not_waited at", "race at"],
        Fault::DropFence => &["missing_proxy_fence at", "race at"],
        Fault::DropExpectation => &["transaction_mismatch at", "deadlock at"],
        Fault::DropArrival => &["deadlock at"],
        Fault::DropGridWait => &["before_grid_wait at"],
        Fault::DropClusterBarrier => &["barrier_divergence at", "race at", "deadlock at"],
        _ => &[
            "race at",
            "warp_order at",
            "async_not_waited at",
            "deadlock at",
            "missing_proxy_fence at",
            "uninitialised_read at",
        ],
    }
}

/// Number of sites of a fault in all kernels of a program.
fn sites_of(right: &Bound, fault: Fault) -> usize {
    right.steps().map(|kernel| sites(kernel, fault)).sum()
}

/// The program with the fault at this site, counted through its kernels in launch order.
fn mutated(right: &Bound, fault: Fault, mut site: usize) -> Option<Bound> {
    let mut changed = right.clone();
    for kernel in changed.steps_mut() {
        let count = sites(kernel, fault);
        if site < count {
            *kernel = mutant(kernel, fault, site)?;
            break;
        }
        site -= count;
    }
    Some(changed)
}

/// The kernels with the fault at this site.
fn wrong(kernels: &[Bound], fault: Fault, site: usize) -> Vec<Bound> {
    kernels.iter().filter_map(|right| mutated(right, fault, site)).collect()
}

/// The reason of the first program that the gate rejects; `None` when all pass.
fn refusal(kernels: &[Bound], fault: Fault, site: usize) -> Option<String> {
    let wrong = wrong(kernels, fault, site);
    stages().iter().find_map(|runs| refusal_by(runs, &wrong))
}

/// The reason of the first program that these runs of the gate reject.
fn refusal_by(runs: &gate::Settings, wrong: &[Bound]) -> Option<String> {
    wrong.iter().find_map(|wrong| match check_kernel(wrong, runs) {
        Ok(check) => (check.verdict == Verdict::Failed).then(|| check.reasons.join("; ")),
        Err(error) => Some(error.to_string()),
    })
}

/// The quick runs, in which most faults show, and then more schedules: a missing wait shows only if a warp
/// lags behind. The parity of a seed decides which side of a branch runs first.
fn stages() -> [gate::Settings; 2] {
    let random = (11..20).map(|seed| (Style::Normal, seed, Schedule::Random));
    let runs = std::iter::once((Style::Normal, 10, Schedule::Late)).chain(random).collect();
    let quick = gate::Settings::quick();
    [quick.clone(), gate::Settings { runs, traced_ctas: 0, ..quick }]
}

/// Kernels of the requested families that an architecture supports.
fn suspects(arch: &Arch, families: &[Family]) -> Vec<Suspect> {
    let hopper = arch.sm == Arch::SM_90.sm;
    let of = |family: &Family| match family {
        Family::Mma => vec![mma()],
        Family::SmallAtOnce if hopper => small_at_once(),
        Family::SmallStreamed if hopper => small_streamed(),
        Family::Wgmma if hopper => wgmma(),
        _ => Vec::new(),
    };
    families.iter().flat_map(of).collect()
}

fn suspect(name: &'static str, plans: &[Plan], problems: &[Problem], arch: &Arch) -> Suspect {
    let both = plans.iter().flat_map(|plan| problems.iter().map(move |problem| (plan, problem)));
    let kernels = both
        .map(|(plan, problem)| bind(plan, &asking(problem, plan), arch).map_err(|error| error.to_string()));
    Suspect { name, kernels: kernels.collect() }
}

fn rectangle(heads: usize, seq_q: usize, seq_kv: usize, mask: Band) -> Problem {
    Problem::new(1, heads, seq_q, 64, DType::Bf16).with_band(mask).with_seq_kv(seq_kv, Layout::Bshd)
}

fn mma() -> Suspect {
    let problems = [(146, 201), (192, 64)].map(|(rows, keys)| rectangle(1, rows, keys, Band::CAUSAL));
    let plan = MmaPlan {
        block_m: 64,
        block_n: 64,
        warps: 4,
        kv_warps: 1,
        products: Order::InTurn,
        stages: 2,
        resident_ctas: None,
        queries: QueryHome::Registers,
        ..MmaPlan::default_for(&problems[0], &Arch::SM_80)
    };
    suspect("mma", &[Plan::Mma(plan)], &problems, &Arch::SM_80)
}

/// Kernels of the family `wgmma`. One SM takes all tiles, one after the other.
fn wgmma() -> Vec<Suspect> {
    let arch = Arch { multiprocessors: 1, ..Arch::SM_90 };
    // A tile of one block, or of as many blocks as there are stages, waits at places where other tiles need
    // not wait.
    let short = [100, 60, 20].map(|keys| rectangle(4, 70, keys, Band::CAUSAL)).to_vec();
    // In a full tile, the first warpgroup skips more blocks than there are stages.
    let full = [&short[..], &[rectangle(2, 140, 150, Band::CAUSAL)]].concat();
    let guessing = Rescaling::Speculative { beyond: 0, limit: 1 };
    let plain = WgmmaPlan { consumers: 2, handout: Handout::Dynamic, ..WgmmaPlan::PLAIN };
    let overlapped = WgmmaPlan { tiles: Tiles::Overlapped, rescale: guessing, ..plain.clone() };
    let sums = WgmmaPlan { sums: Sums::Product, rescale: guessing, ..plain.clone() };
    let ahead = WgmmaPlan { queries_ahead: 1, ..plain.clone() };
    // Static, because a mailbox would be delayed by the single stage of queries.
    let handout = Handout::Static;
    let halved = WgmmaPlan { diagonal: Diagonal::Halved, ends: Ends::Own, handout, ..plain.clone() };
    // Stage counts that give a kernel the same barriers: counts above the number of query slots, or counts up
    // to it.
    let plans = [
        (IN_TURN, &[2, 3][..], plain, &short),
        ("wgmma, tiles overlapped", &[2, 1], overlapped, &short),
        ("wgmma, sums by products", &[2, 3], sums, &short),
        ("wgmma, queries ahead", &[2, 1], ahead, &short),
        ("wgmma, halved diagonals", &[1], halved, &full),
    ];
    let of = |(name, stages, plan, problems): (&'static str, &[u32], WgmmaPlan, &Vec<Problem>)| {
        let with = |&stages: &u32| Plan::Wgmma(WgmmaPlan { stages, ..plan.clone() });
        suspect(name, &stages.iter().map(with).collect::<Vec<_>>(), problems, &arch)
    };
    plans.into_iter().map(of).collect()
}

fn small_at_once() -> Vec<Suspect> {
    let plain = AtOncePlan {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 1,
        kv_warpgroups: 1,
        block_n: 64,
        tile_order: RowOrder::ByHead,
        key_copies: 2,
        qk_pieces: 2,
        softmax_steps: 2,
        pv_pieces: 2,
        paths: 4,
        requests: Requests::ValuesLate,
        scores: Scores::AllAtOnce,
        merge: Merge::Shares,
        store: RowStore::Chunks,
        overlapping: false,
        tanh: attend::Tanh::Exp2,
    };
    let two_ctas = AtOncePlan { cluster: 2, ..plain.clone() };
    let store = RowStore::Pairs;
    let scores = Scores::StepByStep;
    let plans = [
        ("small_at_once, one warpgroup", plain.clone()),
        // Overlaps with the previous grid.
        ("small_at_once, scores step by step", AtOncePlan { scores, overlapping: true, ..plain.clone() }),
        ("small_at_once, two warpgroups share rows", AtOncePlan { kv_warpgroups: 2, store, ..plain }),
        ("small_at_once, two CTAs, shares", AtOncePlan { store, ..two_ctas.clone() }),
        ("small_at_once, two CTAs, peer first", AtOncePlan { merge: Merge::PeerFirst, ..two_ctas }),
    ];
    let of = |(name, plan): (&'static str, AtOncePlan)| {
        let keys = plan.cluster_keys() as usize;
        // Rows for every path: the whole block is visible, all but the last keys, half of it, nothing.
        let shapes = [(65, keys), (104, keys), (200, keys - 5)];
        let problems = shapes.map(|(rows, keys)| rectangle(2, rows, keys, Band::CAUSAL));
        suspect(name, &[plan.into()], &problems, &Arch::SM_90)
    };
    plans.into_iter().map(of).collect()
}

fn small_streamed() -> Vec<Suspect> {
    let plain = StreamedPlan { block_n: 32, ..StreamedPlan::BASE };
    let plans = [
        (STREAM, plain.clone()),
        // Overlaps with the previous grid.
        (STREAM_TO_TWO, StreamedPlan { row_warpgroups: 2, overlapping: true, ..plain }),
    ];
    let of = |(name, plan): (&'static str, StreamedPlan)| {
        let keys = plan.cluster_keys() as usize;
        // Enough blocks to fill every stage repeatedly.
        let shapes = [(64, 8 * keys), (200, 8 * keys - 5)];
        let problems = shapes.map(|(rows, keys)| rectangle(2, rows, keys, Band::FULL));
        suspect(name, &[plan.into()], &problems, &Arch::SM_90)
    };
    plans.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernels' own tests remove every site of ordering; this test takes every fifth.
    const STEP: usize = 5;

    #[test]
    fn faults_are_refused_in_every_family() {
        let settings = Settings { mutants: STEP, ..Settings::quick() };
        let checks = mutants(&Arch::SM_90, &settings, &mut |_| ());
        let failed: Vec<_> = checks.iter().filter(|check| check.verdict != Verdict::Passed).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        assert!(checks.iter().all(|check| check.cases > 10), "{checks:?}");
    }

    /// Sites are compared by number, so every kernel must have the same sites.
    #[test]
    fn kernels_of_a_suspect_have_the_same_places() {
        for suspect in suspects(&Arch::SM_90, &Family::ALL) {
            let kernels = suspect.kernels.unwrap_or_else(|error| panic!("{}: {error}", suspect.name));
            let counts: Vec<_> = kernels
                .iter()
                .map(|right| order().map(|fault| sites_of(right, fault)).collect::<Vec<_>>())
                .collect();
            assert!(counts.windows(2).all(|pair| pair[0] == pair[1]), "{}: {counts:?}", suspect.name);
        }
    }
}
