//! Helpers of the gate's tests.

pub mod programs;

use std::fmt::Debug;

use attend::{Sums, Tiles};
use filetest::is_due;
use flashcore_check::gate::torture::Torture;
use flashcore_check::gate::{CheckReport, Settings, Verdict, check_kernel};
use flashcore_check::launchfile::Bound;
use kernels::forward::mma::{Grid, MmaPlan, QueryHome};
use kernels::forward::wgmma::{Ends, Rescaling, WgmmaPlan};
use kernels::{Arch, Plan};
use problem::Problem;
use tile::{Handout, Turns};

/// A Hopper GPU with so few SMs that a CTA computes several tiles.
pub const SMALL: Arch = Arch { multiprocessors: 3, ..Arch::SM_90 };

/// The default plan on [`SMALL`], with two consumers, blocks of 64 keys, and the genes that tests vary at
/// their simplest values.
pub fn plain_wgmma(problem: &Problem) -> WgmmaPlan {
    WgmmaPlan {
        consumers: 2,
        block_n: 64,
        rescale: Rescaling::Beyond(8),
        turns: Turns::Free,
        tiles: Tiles::InTurn,
        sums: Sums::Lanes,
        ends: Ends::Own,
        handout: Handout::Static,
        ..WgmmaPlan::default_for(problem, &SMALL)
    }
}

/// The default plan on a GPU, with tiles of 32 rows that two warps divide, and the simplest values of genes
/// that divide the keys.
pub fn plain_mma(problem: &Problem, arch: &Arch) -> MmaPlan {
    let default = MmaPlan::default_for(problem, arch);
    MmaPlan { block_m: 32, warps: 2, kv_warps: 1, splits: 1, stages: 2, ..default }
}

/// Asserts that a check passed. `of` is named if it did not.
pub fn passes(check: &CheckReport, of: &dyn Debug) {
    let CheckReport { verdict, reasons, hazards, .. } = check;
    assert_eq!(*verdict, Verdict::Passed, "{of:?}\n{reasons:#?}\n{hazards:?}");
}

/// Asserts that the kernels of a torture set pass. `emit` returns `None` for problems that are not supported;
/// at least `least` must be. Each kernel has two of the four quick runs, which depend on the problem and the
/// half: the problems of a half have all runs between them, and in both halves together every problem has
/// every run. Tests that take the set with several plans, types or families give each half to some of them. A
/// share of the tests has one of a kernel's two runs.
pub fn half_of_torture_passes(
    problems: &[Torture],
    half: usize,
    least: usize,
    of: &dyn Debug,
    emit: impl Fn(&Problem) -> Option<Bound>,
) {
    let quick = Settings::quick();
    let count = quick.runs.len();
    let mut supported = 0;
    for (i, torture) in problems.iter().enumerate() {
        let Some(bound) = emit(&torture.problem) else { continue };
        supported += 1;
        let runs = (0..count / 2).filter(|run| is_due(i + run, 2));
        let runs = runs.map(|run| quick.runs[(i + half * count / 2 + run) % count]).collect();
        let settings = Settings { runs, ..quick.clone() };
        passes(&check_kernel(&bound, &settings).unwrap(), &(of, torture.name));
    }
    assert!(supported >= least, "{of:?}: {supported} of {}", problems.len());
}

/// The fused family with 64 rows and 64 keys. The plan is fixed, so that better defaults do not move fault
/// sites.
pub fn small_tiles(problem: &Problem, queries: QueryHome, stages: u32) -> Bound {
    let (problem, arch) = (&problem.clone().with_lse(true), Arch::SM_80);
    let genes = MmaPlan {
        block_m: 64,
        block_n: 64,
        warps: 4,
        kv_warps: 1,
        products: attend::Order::InTurn,
        stages,
        resident_ctas: None,
        queries,
        tile_order: Grid::RowsFirst,
        ..MmaPlan::default_for(problem, &arch)
    };
    Bound::of_program(kernels::emit(problem, &Plan::Mma(genes), &arch).unwrap(), problem)
}
