//! The genes of the families for small grids, for the tests.

use attend::{Packing, Rescale};
use flashcore_kernels::forward::small::{AtOncePlan, Merge, Requests, RowOrder, Scores, StreamedPlan};
use problem::{Band, DType, Layout, Problem};
use tile::{RowStore, Turns};

use super::{Line, capped, causal, full, rectangle};

/// A problem with as many keys as one block holds.
fn few_keys() -> Problem {
    full().with_seq_kv(120, Layout::Bhsd)
}

fn few_causal() -> Problem {
    rectangle(Band::CAUSAL).with_seq_kv(120, Layout::Bshd)
}

fn few_capped() -> Problem {
    few_causal().with_softcap(3.0)
}

/// A problem with groups of heads that can be packed.
fn grouped() -> Problem {
    let problem = Problem::new(1, 4, 50, 64, DType::Bf16).with_seq_kv(90, Layout::Bshd);
    problem.with_heads_kv(2, Layout::Bshd).with_lse(true)
}

fn grouped_causal() -> Problem {
    grouped().with_band(Band::CAUSAL)
}

fn at_once(_: &mut AtOncePlan) {}

fn pieces(p: &mut AtOncePlan) {
    (p.qk_pieces, p.pv_pieces) = (4, 4);
}

fn steps(p: &mut AtOncePlan) {
    (p.qk_pieces, p.softmax_steps, p.pv_pieces) = (4, 2, 2);
}

fn copies(p: &mut AtOncePlan) {
    pieces(p);
    (p.key_copies, p.requests) = (2, Requests::ValuesLate);
}

fn pair(p: &mut AtOncePlan) {
    p.cluster = 2;
}

pub const AT_ONCE: &[Line<AtOncePlan>] = &[
    (few_causal, at_once, |p| p.row_warpgroups = 2),
    (grouped, at_once, |p| p.packing = Packing::Packed),
    (grouped_causal, pieces, |p| p.packing = Packing::Packed),
    (few_keys, at_once, |p| p.cluster = 2),
    (few_causal, at_once, |p| p.cluster = 4),
    (few_causal, at_once, |p| p.kv_warpgroups = 2),
    (few_keys, at_once, |p| p.block_n = 160),
    (few_causal, at_once, |p| p.tile_order = RowOrder::LongestFirst),
    (few_causal, at_once, |p| p.tile_order = RowOrder::Folded),
    (few_keys, pieces, |p| p.key_copies = 2),
    (few_causal, pieces, |p| p.key_copies = 4),
    (few_causal, at_once, |p| p.qk_pieces = 2),
    (few_causal, pieces, |p| p.softmax_steps = 2),
    (few_keys, at_once, |p| p.pv_pieces = 2),
    (few_causal, pieces, |p| p.paths = 1),
    (few_causal, pieces, |p| p.paths = 2),
    (few_keys, at_once, |p| p.requests = Requests::ValuesLate),
    (few_causal, copies, |p| p.requests = Requests::FirstKeysOnly),
    (few_keys, steps, |p| p.scores = Scores::StepByStep),
    (few_keys, pair, |p| p.merge = Merge::PeerFirst),
    (few_keys, at_once, |p| p.store = RowStore::Chunks),
    (few_keys, at_once, |p| p.overlapping = true),
    (few_capped, at_once, |p| p.tanh = attend::Tanh::Approx),
];

fn streams(_: &mut StreamedPlan) {}

/// A block that needs about as many registers per thread as four resident CTAs allow, or slightly more.
fn crowded(p: &mut StreamedPlan) {
    p.block_n = 64;
}

fn two_rows(p: &mut StreamedPlan) {
    p.row_warpgroups = 2;
}

pub const STREAMED: &[Line<StreamedPlan>] = &[
    (full, streams, |p| p.row_warpgroups = 4),
    (grouped_causal, two_rows, |p| p.packing = Packing::Packed),
    (full, streams, |p| p.cluster = 2),
    (causal, streams, |p| p.cluster = 4),
    (causal, streams, |p| p.kv_warpgroups = 2),
    (full, streams, |p| p.kv_warpgroups = 4),
    (causal, streams, |p| p.block_n = 64),
    (few_causal, streams, |p| p.block_n = 128),
    (full, streams, |p| p.stages = 3),
    (causal, streams, |p| p.stages = 8),
    (full, streams, |p| p.rescale = Rescale::Beyond(8)),
    (causal, streams, |p| p.rescale = Rescale::Beyond(0)),
    (full, streams, |p| p.speculative = Some(12)),
    (causal, streams, |p| p.speculative = Some(1)),
    (causal, two_rows, |p| p.turns = Turns::PingPong),
    (causal, streams, |p| p.tile_order = RowOrder::LongestFirst),
    (causal, streams, |p| p.tile_order = RowOrder::Folded),
    (full, streams, |p| p.store = RowStore::Chunks),
    (full, streams, |p| p.overlapping = true),
    (causal, crowded, |p| p.resident_ctas = 4),
    (capped, streams, |p| p.tanh = attend::Tanh::Approx),
];
