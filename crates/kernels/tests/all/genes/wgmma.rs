//! The genes of the `wgmma` family, for the tests.

use attend::{Order, OutputSums, Packing, Sums, Tiles};
use flashcore_kernels::forward::Visits;
use flashcore_kernels::forward::wgmma::{
    Diagonal, Ends, Probabilities, Rescaling, Share, Store, Tables, WgmmaPlan,
};
use problem::{DType, Layout, Problem};
use tile::{Handout, Tail, TileOrder, Turns};

use super::{Line, biased, capped, causal, full, masked};

/// A problem with groups of heads that can be packed.
fn grouped() -> Problem {
    Problem::new(1, 4, 50, 64, DType::Bf16).with_heads_kv(2, Layout::Bshd).with_lse(true)
}

fn without_lse() -> Problem {
    full().with_lse(false)
}

/// A problem with heads whose keys and values together exceed one MiB.
fn many_heads() -> Problem {
    Problem { seq_q: 8, ..Problem::new(1, 32, 256, 64, DType::Bf16) }.with_layout(Layout::Bshd).with_lse(true)
}

fn alone(_: &mut WgmmaPlan) {}

fn two(p: &mut WgmmaPlan) {
    p.consumers = 2;
}

fn ahead(p: &mut WgmmaPlan) {
    p.queries_ahead = 1;
}

fn own(p: &mut WgmmaPlan) {
    p.ends = Ends::Own;
}

fn longest_first(p: &mut WgmmaPlan) {
    p.tile_order = TileOrder::LongestFirst;
}

fn guessing(p: &mut WgmmaPlan) {
    p.rescale = speculative(0, 1);
}

const fn speculative(beyond: u8, limit: u8) -> Rescaling {
    Rescaling::Speculative { beyond, limit }
}

pub const TABLE: &[Line<WgmmaPlan>] = &[
    (causal, alone, |p| p.consumers = 2),
    (full, alone, |p| p.consumers = 3),
    (causal, two, |p| p.share = Share::HeadDim),
    (full, alone, |p| p.resident_ctas = 2),
    (causal, alone, |p| p.resident_ctas = 3),
    (full, alone, |p| p.resident_ctas = 4),
    (causal, alone, |p| p.cluster = 2),
    (grouped, alone, |p| p.packing = Packing::Packed),
    (causal, alone, |p| p.block_n = 16),
    (full, alone, |p| p.block_n = 48),
    (causal, alone, |p| p.block_n = 144),
    (full, alone, |p| p.block_n = 160),
    (full, alone, |p| p.stages = 1),
    (causal, alone, |p| p.stages = 3),
    (full, alone, |p| p.stages = 4),
    (full, alone, |p| p.stages = 8),
    (causal, alone, |p| p.tiles = Tiles::Overlapped),
    (causal, alone, |p| p.products = Order::InTurn),
    (full, alone, |p| p.producer_registers = Some(40)),
    (causal, alone, |p| p.queries_ahead = 1),
    (full, alone, |p| p.queries_ahead = 2),
    (causal, alone, |p| p.store = Store::Bulk),
    (causal, ahead, |p| p.store = Store::OverQueries),
    (causal, two, |p| p.turns = Turns::PingPong),
    (full, alone, |p| p.rescale = Rescaling::Always),
    (causal, alone, |p| p.rescale = Rescaling::Beyond(4)),
    (causal, alone, |p| p.rescale = speculative(8, 15)),
    (full, alone, |p| p.rescale = speculative(8, 40)),
    (full, alone, |p| p.rescale = speculative(0, 1)),
    (full, guessing, |p| p.exps_by_fma = 3),
    (causal, guessing, |p| p.exps_by_fma = 8),
    (causal, two, |p| p.probabilities = Probabilities::Shared),
    (biased, alone, |p| p.tables = Tables::Shared),
    (causal, alone, |p| p.chains.max = 1),
    (full, alone, |p| p.chains.max = 4),
    (full, alone, |p| p.chains.sum = 2),
    (without_lse, alone, |p| p.sums = Sums::Product),
    (causal, alone, |p| p.output_sums = OutputSums::ByBlock),
    (causal, two, |p| p.ends = Ends::Own),
    (causal, own, |p| p.diagonal = Diagonal::Halved),
    (causal, alone, |p| p.handout = Handout::Folded),
    (causal, alone, |p| p.handout = Handout::Dynamic),
    (causal, alone, |p| p.handout = Handout::Grid),
    (full, alone, |p| p.tail = Tail::Shared),
    (causal, alone, |p| p.tile_order = TileOrder::LongestFirst),
    (causal, alone, |p| p.tile_order = TileOrder::Level),
    (causal, alone, |p| p.tile_order = TileOrder::Strided),
    (many_heads, longest_first, |p| p.section_mib = 1),
    (capped, alone, |p| p.tanh = attend::Tanh::Approx),
    (masked, alone, |p| p.visits = Visits::Listed),
];
