//! The base plan of the `wgmma` family for tests, plans with random genes, and a check of a plan.

use super::draw::Draw;
use attend::{Chains, Order, OutputSums, Packing, Sums, Tanh, Tiles};
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::Visits;
use flashcore_kernels::forward::wgmma::{
    Diagonal, Ends, Probabilities, Rescaling, Share, Store, Tables, WgmmaPlan,
};
use flashcore_kernels::{Arch, Plan};
use problem::Problem;
use tile::{Handout, Tail, TileOrder, Turns};

/// A device with two SMs, so that a CTA computes several tiles.
pub const SMALL: Arch = Arch { multiprocessors: 2, ..Arch::SM_90 };

pub const SPECULATIVE: Rescaling = Rescaling::Speculative { beyond: 8, limit: 15 };

/// Number of plans with random genes.
const RANDOM_PLANS: usize = 40;

/// Checks a plan. The LSE is requested if lanes compute the sums, except for every fourth seed.
pub fn check(problem: &Problem, plan: WgmmaPlan, options: Options) {
    let seed = options.seed;
    let problem = &problem.clone().with_lse(plan.sums == Sums::Lanes && seed % 4 != 3);
    super::run(&mut Emulator::new(options), problem, &Plan::Wgmma(plan), &SMALL, seed).check();
}

/// Checks random combinations of genes, each on a problem that supports it: genes that are right alone must
/// be right together. `case` draws a problem, and may set genes of the drawn plan.
pub fn genes_get_along(case: impl Fn(&mut Draw, WgmmaPlan) -> (Problem, WgmmaPlan)) {
    let mut draw = Draw(0x9E37_79B9_7F4A_7C15);
    let mut passed = 0;
    while passed < RANDOM_PLANS {
        let plan = random(&mut draw);
        let (problem, plan) = case(&mut draw, plan);
        if Plan::Wgmma(plan.clone()).check(&problem, &SMALL).is_ok() {
            let schedule = draw.of(&[Schedule::Late, Schedule::Early, Schedule::Random]);
            check(&problem, plan, Options { seed: passed as u64, schedule, ..Options::default() });
            passed += 1;
        }
    }
}

/// The plan for the problem with this index of the torture set: tiles of several shapes.
pub fn varied(index: usize, plan: WgmmaPlan) -> WgmmaPlan {
    WgmmaPlan {
        consumers: [1, 2][index % 2],
        block_n: [32, 48, 64, 16][index % 4],
        tiles: [Tiles::InTurn, Tiles::Overlapped][index / 2 % 2],
        rescale: [SPECULATIVE, Rescaling::Beyond(8), Rescaling::Always][index % 3],
        cluster: [2, 1, 1][index % 3],
        ..plan
    }
}

/// A plan with random genes.
fn random(draw: &mut Draw) -> WgmmaPlan {
    WgmmaPlan {
        share: Share::Rows,
        consumers: draw.of(&[1, 2, 3]),
        resident_ctas: draw.of(&[1, 2]),
        cluster: draw.of(&[1, 2]),
        packing: draw.of(&[Packing::Apart, Packing::Packed]),
        block_n: draw.of(&[16, 32, 48, 64]),
        stages: draw.of(&[1, 2, 3]),
        tiles: draw.of(&[Tiles::InTurn, Tiles::Overlapped]),
        products: draw.of(&[Order::ScoresAhead, Order::InTurn]),
        producer_registers: draw.of(&[None, Some(24), Some(40)]),
        queries_ahead: draw.of(&[0, 1]),
        store: draw.of(&[Store::Direct, Store::Bulk, Store::OverQueries]),
        turns: draw.of(&[Turns::Free, Turns::PingPong]),
        rescale: draw.of(&[SPECULATIVE, Rescaling::Beyond(8), Rescaling::Always]),
        exps_by_fma: draw.of(&[0, 0, 3, 8]),
        probabilities: draw.of(&[Probabilities::Registers, Probabilities::Shared]),
        tables: Tables::Registers,
        chains: Chains { max: 2, sum: 1 },
        sums: draw.of(&[Sums::Lanes, Sums::Product]),
        output_sums: draw.of(&[OutputSums::Running, OutputSums::ByBlock]),
        diagonal: draw.of(&[Diagonal::Whole, Diagonal::Halved]),
        ends: draw.of(&[Ends::Common, Ends::Own]),
        handout: draw.of(&[Handout::Static, Handout::Dynamic, Handout::Folded, Handout::Grid]),
        tail: draw.of(&[Tail::Whole, Tail::Shared]),
        tile_order: draw.of(&[TileOrder::InOrder, TileOrder::LongestFirst, TileOrder::Strided]),
        section_mib: draw.of(&[1, 2]),
        tanh: Tanh::Exp2,
        visits: Visits::Band,
    }
}
