//! The base plan of the `wgmma` family for tests.

use attend::{Chains, Order, OutputSums, Packing, Sums, Tiles};
use flashcore_kernels::forward::Visits;
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Probabilities, Rescaling, Store, Tables, WgmmaPlan};
use tile::{Handout, Tail, TileOrder, Turns};

/// Small tiles, and each gene at its simplest value.
pub fn plain() -> WgmmaPlan {
    WgmmaPlan {
        share: flashcore_kernels::forward::wgmma::Share::Rows,
        consumers: 1,
        resident_ctas: 1,
        cluster: 1,
        packing: Packing::Apart,
        block_n: 32,
        stages: 2,
        tiles: Tiles::InTurn,
        products: Order::ScoresAhead,
        producer_registers: None,
        queries_ahead: 0,
        store: Store::Direct,
        turns: Turns::Free,
        rescale: Rescaling::Beyond(8),
        exps_by_fma: 0,
        probabilities: Probabilities::Registers,
        tables: Tables::Registers,
        chains: Chains { max: 2, sum: 1 },
        sums: Sums::Lanes,
        output_sums: OutputSums::Running,
        diagonal: Diagonal::Whole,
        ends: Ends::Common,
        handout: Handout::Static,
        tail: Tail::Whole,
        tile_order: TileOrder::InOrder,
        section_mib: 32,
        tanh: attend::Tanh::Exp2,
        visits: Visits::Band,
    }
}
