//! Tests that every barrier, fence, arrival and wait of the persistent family is needed: if any one is
//! removed, the emulator rejects the kernel. Exceptions are listed here with their reasons.

use crate::common;
use attend::{Sums, Tiles};
use emu::{Emulator, Options, Schedule};
use filetest::is_due;
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Rescaling, Store, WgmmaPlan};
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, DType, Layout, Problem};
use ptx::{Item, Kernel, Op, Operand, Statement};
use tile::{Handout, Ones, Tail, Turns};

const DIM: u32 = 64;

fn plain() -> WgmmaPlan {
    WgmmaPlan { consumers: 2, block_n: 16, ..WgmmaPlan::PLAIN }
}

/// A speculative softmax that recomputes some blocks and keeps others.
const GUESSING: Rescaling = Rescaling::Speculative { beyond: 0, limit: 2 };

/// Problems whose kernels differ only in constants. They have one CTA or cluster, or two that share a tile at
/// the end, so that rings wrap: tiles of one block, of two, of three, of several, and a long tile with short
/// ones.
fn problems(plan: &WgmmaPlan, dim: u32) -> [Problem; 5] {
    let (block, rows) = (plan.block_n as usize, 64 * plan.consumers as usize);
    [
        (3, 70, 4 * block + 6),
        (4, 40, 10),
        (4, 70, block + 10),
        (4, 70, 2 * block + 10),
        (2, rows + 12, rows + 22),
    ]
    .map(|(heads, seq_q, seq_kv)| {
        let (heads, mask) = match plan.tail {
            Tail::Whole => (heads, Band::CAUSAL),
            Tail::Shared => (2 * heads + 1, Band::FULL),
        };
        let problem = Problem::new(1, heads, seq_q, dim as usize, DType::Bf16);
        problem.with_band(mask).with_seq_kv(seq_kv, Layout::Bshd)
    })
}

/// An instruction that orders memory accesses, products or warps, with a readable name: `wait full keys 2` is
/// the third wait (in statement order) for the full barriers of the key ring.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Site {
    name: String,
    /// Its index in the entry's statements, and the number of statements to remove: a wait is removed
    /// together with the branch back to it.
    at: usize,
    count: usize,
}

fn sites(plan: &WgmmaPlan, dim: u32, kernel: &Kernel) -> Vec<Site> {
    let mut seen = std::collections::HashMap::new();
    let found = statements(kernel).iter().enumerate().filter_map(|(at, statement)| {
        let Statement::Inst(inst) = statement else { return None };
        let (name, count) = match inst.op {
            Op::Mbarrier(mbarrier) => {
                let address = inst.operands.iter().find_map(|operand| match operand {
                    Operand::Address(address) => Some(address.offset as u32),
                    _ => None,
                });
                let place = mbarrier_name(plan, dim, address.expect("an mbarrier has an address"));
                let waits = mbarrier.op.waits();
                let verb =
                    if waits { "wait".to_owned() } else { format!("{:?}", mbarrier.op).to_lowercase() };
                (format!("{verb} {place}"), 1 + usize::from(waits))
            }
            Op::Bar { .. }
            | Op::BarWarpSync
            | Op::BarrierCluster(_)
            | Op::FenceProxy(_)
            | Op::Fence(..)
            | Op::Membar(_)
            | Op::CpAsyncBulkCommitGroup
            | Op::CpAsyncBulkWaitGroup { .. }
            | Op::WgmmaFence
            | Op::WgmmaCommitGroup
            | Op::WgmmaWaitGroup => (inst.op.to_string(), 1),
            _ => return None,
        };
        let nth = seen.entry(name.clone()).and_modify(|n| *n += 1).or_insert(0);
        Some(Site { name: format!("{name} {nth}"), at, count })
    });
    found.collect()
}

/// The mbarrier at an offset in shared memory: tiles come first, then each ring's full and empty barriers.
fn mbarrier_name(plan: &WgmmaPlan, dim: u32, offset: u32) -> String {
    let query_stages = plan.tiles.query_stages() + plan.queries_ahead;
    let rows_out = if plan.store == Store::Bulk { 64 * plan.consumers } else { 0 };
    let ones = if plan.sums == Sums::Product { Ones::BYTES / (2 * dim) } else { 0 };
    let rows = query_stages * 64 * plan.consumers + 2 * plan.stages * plan.block_n + rows_out + ones;
    let mut first = rows * 2 * dim;
    for (ring, stages) in
        [("queries", query_stages), ("keys", plan.stages), ("values", plan.stages), ("tiles", 2)]
    {
        for side in ["full", "free"] {
            let next = first + 8 * stages;
            if (first..next).contains(&offset) {
                return format!("{side} {ring}");
            }
            first = next;
        }
    }
    panic!("no barrier at {offset}")
}

fn statements(kernel: &Kernel) -> &[Statement] {
    &kernel.module.function(&kernel.entry).and_then(|f| f.body.as_ref()).expect("an entry").statements
}

fn without(kernel: &Kernel, site: &Site) -> Kernel {
    let mut module = kernel.module.clone().into_module();
    for item in &mut module.items {
        if let Item::Function(function) = item
            && *function.name == *kernel.entry
            && let Some(body) = &mut function.body
        {
            body.statements.drain(site.at..site.at + site.count);
        }
    }
    Kernel { module: module.assume_verified(), ..kernel.clone() }
}

/// Schedules and seeds for each problem. The lagging warps belong to the first, the second or the third
/// consumer.
const SCHEDULES: [(Schedule, u64); 8] = [
    (Schedule::Late, 0),
    (Schedule::Lagging, 3),
    (Schedule::Lagging, 5),
    (Schedule::Lagging, 7),
    (Schedule::Lagging, 11),
    (Schedule::Random, 1),
    (Schedule::Random, 2),
    (Schedule::Random, 3),
];

/// The sites out of those that `which` selects whose removal the emulator did not reject in any run.
fn survivors(plan: &WgmmaPlan, dim: u32, which: impl Fn(&Site) -> bool) -> Vec<String> {
    let takers = if plan.tail == Tail::Shared { 2 } else { 1 };
    let arch = Arch { multiprocessors: takers * plan.cluster, ..Arch::SM_90 };
    let problems = problems(plan, dim);
    let kernels = problems
        .each_ref()
        .map(|p| emit(p, &Plan::Wgmma(plan.clone()), &arch).expect("a good plan").kernel(0));
    let sites = kernels.each_ref().map(|kernel| sites(plan, dim, kernel));
    assert!(sites.iter().all(|of| *of == sites[0]), "problems whose kernels differ in more than constants");
    let runs =
        SCHEDULES.iter().flat_map(|schedule| problems.iter().zip(&kernels).map(move |of| (schedule, of)));
    let clean_runs = runs.clone().map(|(&schedule, (problem, kernel))| {
        steps(schedule, problem, kernel, u64::MAX).expect("the kernel itself is refused")
    });
    // A mutant that never ends is rejected too.
    let limit = 4 * clean_runs.max().expect("runs");
    let survives = |site: &&Site| {
        runs.clone().all(|(&schedule, (problem, kernel))| {
            steps(schedule, problem, &without(kernel, site), limit).is_some()
        })
    };
    let taken = sites[0].iter().filter(|site| which(site) && in_share(&site.name));
    taken.filter(survives).map(|site| site.name.clone()).collect()
}

/// Whether this share of the tests removes the site.
pub fn in_share(name: &str) -> bool {
    is_due(name.bytes().map(usize::from).sum(), 2)
}

/// The names of the sites that this share removes.
pub fn in_shares<'a>(names: &[&'a str]) -> Vec<&'a str> {
    names.iter().copied().filter(|name| in_share(name)).collect()
}

/// Number of steps of a run; `None` if the emulator rejects it.
fn steps(
    (schedule, seed): (Schedule, u64),
    problem: &Problem,
    kernel: &Kernel,
    step_limit: u64,
) -> Option<u64> {
    let mut machine = Emulator::new(Options { schedule, seed, step_limit, ..Options::default() });
    common::run_kernel(&mut machine, problem, kernel, 0).ok()?;
    machine.last_report().map(|report| report.steps)
}

/// Checks that all sites of a plan except `surviving` are needed. The exceptions are named with their
/// reasons; an exception that turns out to be needed is an error too.
fn assert_needed(plan: &WgmmaPlan, surviving: &[&str]) {
    assert_eq!(survivors(plan, DIM, |_| true), in_shares(surviving), "{plan:?}");
}

#[test]
fn tiles_in_turn() {
    assert_needed(&plain(), &[]);
}

#[test]
fn warpgroups_that_skip_blocks() {
    let plan = WgmmaPlan { ends: Ends::Own, ..plain() };
    assert_needed(&plan, &[]);
    assert_needed(&WgmmaPlan { turns: Turns::PingPong, ..plan }, &[]);
}

#[test]
fn tiles_in_turn_by_a_counter() {
    let plan = WgmmaPlan {
        ends: Ends::Own,
        handout: Handout::Dynamic,
        rescale: GUESSING,
        store: Store::Bulk,
        stages: 3,
        ..plain()
    };
    assert_needed(&plan, &[]);
}

#[test]
fn queries_ahead() {
    let plan = WgmmaPlan { queries_ahead: 1, tiles: Tiles::Overlapped, handout: Handout::Dynamic, ..plain() };
    assert_needed(&plan, &[]);
}

#[test]
fn output_over_queries() {
    let plan = WgmmaPlan {
        store: Store::OverQueries,
        queries_ahead: 1,
        ends: Ends::Own,
        handout: Handout::Dynamic,
        stages: 3,
        ..plain()
    };
    assert_needed(&plan, &[]);
    // With a head dim of 128, a warp writes its rows of O over rows of Q that other warps of the warpgroup
    // read. PTX counts groups of products by warpgroup, so a warp's wait covers them in the emulator. The
    // barrier also holds if the hardware waits only for the warp's own part of the products.
    let barriers = survivors(&plan, 128, |site| site.name.starts_with("bar.sync"));
    assert_eq!(barriers, in_shares(&["bar.sync 1"]));
}

/// The first of three warpgroups skips enough blocks for a ring to wrap.
#[test]
fn halved_diagonals() {
    let plan = WgmmaPlan {
        consumers: 3,
        block_n: 32,
        turns: Turns::PingPong,
        ends: Ends::Own,
        diagonal: Diagonal::Halved,
        ..plain()
    };
    assert_needed(&plan, &[]);
}

#[test]
fn overlapped_tiles() {
    let plan = WgmmaPlan {
        tiles: Tiles::Overlapped,
        handout: Handout::Dynamic,
        turns: Turns::PingPong,
        store: Store::Bulk,
        ..plain()
    };
    assert_needed(&plan, &[]);
}

#[test]
fn overlapped_tiles_of_warpgroups_that_skip_blocks() {
    let plan =
        WgmmaPlan { tiles: Tiles::Overlapped, ends: Ends::Own, rescale: GUESSING, stages: 3, ..plain() };
    // The third skipped value tile of the kernel's first tile is the last one. With three stages, no warp can
    // be a round ahead, so this wait is redundant here. It is needed for later tiles, and with two stages.
    assert_needed(&plan, &["wait full values 0"]);
}

#[test]
fn clusters() {
    // A warp in which only one lane has produced must reconverge before an `.aligned` barrier. The emulator
    // reconverges lanes where branches meet; the hardware need not.
    let plan = WgmmaPlan { cluster: 2, store: Store::Bulk, turns: Turns::PingPong, ..plain() };
    assert_needed(&plan, &["bar.warp.sync 2"]);
}

#[test]
fn clusters_by_a_counter() {
    let plan = WgmmaPlan {
        cluster: 2,
        tiles: Tiles::Overlapped,
        handout: Handout::Dynamic,
        rescale: GUESSING,
        stages: 3,
        ..plain()
    };
    // The `bar.warp.sync` at the end of every cluster kernel (see above).
    assert_needed(&plan, &["bar.warp.sync 0"]);
}

#[test]
fn sums_by_products() {
    let plan = WgmmaPlan { sums: Sums::Product, rescale: GUESSING, ..plain() };
    assert_needed(&plan, &[]);
    // The `bar.warp.sync` at the end of every cluster kernel (see above).
    assert_needed(&WgmmaPlan { cluster: 2, ..plan }, &["bar.warp.sync 0"]);
}

#[test]
fn tiles_that_are_shared() {
    let plan = WgmmaPlan { tail: Tail::Shared, ..plain() };
    assert_needed(&plan, &[]);
    // The `bar.warp.sync` at the end of every cluster kernel (see above).
    assert_needed(&WgmmaPlan { tiles: Tiles::Overlapped, cluster: 2, ..plan }, &["bar.warp.sync 2"]);
}
