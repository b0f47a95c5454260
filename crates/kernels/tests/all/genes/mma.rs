//! The genes of the `mma` family, for the tests.

use attend::{Order, OutputSums, Rescale};
use flashcore_kernels::forward::Visits;
use flashcore_kernels::forward::mma::{CtaOrder, MmaPlan, QueryHome};
use tile::CopyMode;

use super::{Line, capped, causal, full, masked, small_types};

/// Each gene at its simplest value.
pub fn plain() -> MmaPlan {
    MmaPlan {
        block_m: 64,
        block_n: 64,
        warps: 4,
        kv_warps: 1,
        dim_warps: 1,
        splits: 1,
        stages: 2,
        products: Order::InTurn,
        resident_ctas: None,
        queries: QueryHome::Shared,
        rescale: Rescale::Always,
        output_sums: OutputSums::Running,
        copy: CopyMode::Async16,
        tile_order: CtaOrder::RowsFirst,
        tanh: attend::Tanh::Exp2,
        visits: Visits::Band,
    }
}

fn alone(_: &mut MmaPlan) {}

pub const TABLE: &[Line<MmaPlan>] = &[
    (full, alone, |p| p.block_m = 128),
    (causal, alone, |p| p.block_n = 48),
    (full, alone, |p| p.warps = 2),
    (causal, alone, |p| p.kv_warps = 2),
    (causal, alone, |p| p.dim_warps = 2),
    (causal, alone, |p| p.splits = 3),
    (full, alone, |p| p.stages = 1),
    (causal, alone, |p| p.stages = 3),
    (causal, alone, |p| p.products = Order::ScoresAhead),
    (full, alone, |p| p.resident_ctas = Some(2)),
    (causal, alone, |p| p.queries = QueryHome::Registers),
    (full, alone, |p| p.rescale = Rescale::Beyond(8)),
    (causal, alone, |p| p.rescale = Rescale::Beyond(0)),
    (small_types, alone, |p| p.output_sums = OutputSums::ByBlock),
    (causal, alone, |p| p.copy = CopyMode::Async8),
    (full, alone, |p| p.copy = CopyMode::Async4),
    (causal, alone, |p| p.copy = CopyMode::Elements),
    (causal, alone, |p| p.tile_order = CtaOrder::HeadsFirst),
    (capped, alone, |p| p.tanh = attend::Tanh::Approx),
    (masked, alone, |p| p.visits = Visits::Listed),
];
