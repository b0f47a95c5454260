//! Genes of the `small` family.

use attend::{Packing, Rescale};
use flashcore_kernels::forward::small::{Merge, Requests, RowOrder, Scores, SmallPlan};
use problem::{Band, DType, Layout, Problem};
use tile::{RowStore, Turns};

use super::{Line, capped, causal, full, rectangle};

/// As many keys as one block holds.
fn few_keys() -> Problem {
    full().with_seq_kv(120, Layout::Bhsd)
}

fn few_causal() -> Problem {
    rectangle(Band::CAUSAL).with_seq_kv(120, Layout::Bshd)
}

/// Groups of heads that are packed.
fn grouped() -> Problem {
    let problem = Problem::new(1, 4, 50, 64, DType::Bf16).with_seq_kv(90, Layout::Bshd);
    problem.with_heads_kv(2, Layout::Bshd).with_lse(true)
}

fn grouped_causal() -> Problem {
    grouped().with_band(Band::CAUSAL)
}

fn alone(_: &mut SmallPlan) {}

fn streams(p: &mut SmallPlan) {
    (p.stages, p.block_n) = (2, 32);
}

/// A block for which a thread needs about the registers that four resident CTAs leave it, or a few more.
fn crowded(p: &mut SmallPlan) {
    (p.stages, p.block_n) = (2, 64);
}

fn two_rows(p: &mut SmallPlan) {
    streams(p);
    p.row_warpgroups = 2;
}

fn pieces(p: &mut SmallPlan) {
    (p.qk_pieces, p.pv_pieces) = (4, 4);
}

fn steps(p: &mut SmallPlan) {
    (p.qk_pieces, p.softmax_steps, p.pv_pieces) = (4, 2, 2);
}

fn copies(p: &mut SmallPlan) {
    pieces(p);
    (p.key_copies, p.requests) = (2, Requests::ValuesLate);
}

fn pair(p: &mut SmallPlan) {
    p.cluster = 2;
}

pub const TABLE: &[Line<SmallPlan>] = &[
    (few_causal, alone, |p| p.row_warpgroups = 2),
    (full, streams, |p| p.row_warpgroups = 4),
    (grouped, alone, |p| p.packing = Packing::Packed),
    (grouped_causal, pieces, |p| p.packing = Packing::Packed),
    (grouped_causal, two_rows, |p| p.packing = Packing::Packed),
    (full, streams, |p| p.cluster = 2),
    (causal, streams, |p| p.cluster = 4),
    (causal, streams, |p| p.kv_warpgroups = 2),
    (full, streams, |p| p.kv_warpgroups = 4),
    (few_keys, alone, |p| p.block_n = 160),
    (causal, streams, |p| p.block_n = 64),
    (few_causal, alone, |p| p.stages = 2),
    (full, streams, |p| p.stages = 3),
    (causal, streams, |p| p.stages = 8),
    (full, streams, |p| p.rescale = Rescale::Beyond(8)),
    (causal, streams, |p| p.rescale = Rescale::Beyond(0)),
    (full, streams, |p| p.speculative = Some(12)),
    (causal, streams, |p| p.speculative = Some(1)),
    (causal, two_rows, |p| p.turns = Turns::PingPong),
    (causal, streams, |p| p.tile_order = RowOrder::LongestFirst),
    (few_causal, alone, |p| p.tile_order = RowOrder::Folded),
    (few_keys, pieces, |p| p.key_copies = 2),
    (few_causal, pieces, |p| p.key_copies = 4),
    (few_causal, alone, |p| p.qk_pieces = 2),
    (few_causal, pieces, |p| p.softmax_steps = 2),
    (few_keys, alone, |p| p.pv_pieces = 2),
    (few_causal, pieces, |p| p.paths = 1),
    (few_causal, pieces, |p| p.paths = 2),
    (few_keys, alone, |p| p.requests = Requests::ValuesLate),
    (few_causal, copies, |p| p.requests = Requests::FirstKeysOnly),
    (few_keys, steps, |p| p.scores = Scores::StepByStep),
    (few_keys, pair, |p| p.merge = Merge::PeerFirst),
    (few_keys, alone, |p| p.store = RowStore::Chunks),
    (few_keys, alone, |p| p.overlapping = true),
    (causal, crowded, |p| p.resident_ctas = 4),
    (capped, streams, |p| p.tanh = attend::Tanh::Approx),
];
