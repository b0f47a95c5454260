//! Helpers of the gate's tests.

pub mod programs;

use flashcore_check::launchfile::Bound;
use kernels::forward::mma::{Grid, MmaPlan, QueryHome};
use kernels::{Arch, Plan};
use problem::Problem;

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
