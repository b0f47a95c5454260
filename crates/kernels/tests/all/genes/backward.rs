//! The genes of the backward families, for the tests.

use attend::Order;
use flashcore_kernels::backward::fused::FusedPlan;
use flashcore_kernels::backward::split::SplitPlan;
use flashcore_kernels::forward::mma::{CtaOrder, QueryHome};
use problem::{Pass, Problem};
use tile::CopyMode;

use super::Line;

/// Each gene at its simplest value.
pub fn plain() -> SplitPlan {
    SplitPlan {
        dq_rows: 64,
        dq_keys: 32,
        dq_warps: 4,
        dq_stages: 2,
        dq_operands: QueryHome::Shared,
        dq_resident_ctas: None,
        dkv_keys: 64,
        dkv_rows: 32,
        dkv_warps: 4,
        dkv_dim_warps: 1,
        dkv_stages: 2,
        dkv_operands: QueryHome::Shared,
        dkv_resident_ctas: None,
        copy: CopyMode::Async16,
        tile_order: CtaOrder::RowsFirst,
        tanh: attend::Tanh::Exp2,
    }
}

fn full() -> Problem {
    super::full().with_pass(Pass::BACKWARD)
}

fn causal() -> Problem {
    super::causal().with_pass(Pass::DETERMINISTIC)
}

fn capped() -> Problem {
    super::capped().with_pass(Pass::BACKWARD)
}

fn alone<P>(_: &mut P) {}

pub const TABLE: &[Line<SplitPlan>] = &[
    (full, alone, |p| p.dq_rows = 128),
    (causal, alone, |p| p.dq_keys = 48),
    (full, alone, |p| p.dq_warps = 2),
    (causal, alone, |p| p.dq_stages = 3),
    (causal, alone, |p| p.dq_operands = QueryHome::Registers),
    (full, alone, |p| p.dq_resident_ctas = Some(3)),
    (full, |p| p.dkv_rows = 16, |p| p.dkv_keys = 128),
    (causal, alone, |p| p.dkv_rows = 48),
    (full, |p| p.dkv_rows = 16, |p| p.dkv_warps = 2),
    (causal, alone, |p| p.dkv_dim_warps = 2),
    (causal, alone, |p| p.dkv_stages = 3),
    (full, alone, |p| p.dkv_operands = QueryHome::Registers),
    (full, |p| p.dkv_rows = 16, |p| p.dkv_resident_ctas = Some(3)),
    (causal, alone, |p| p.copy = CopyMode::Async8),
    (full, alone, |p| p.copy = CopyMode::Async4),
    (causal, alone, |p| p.copy = CopyMode::Elements),
    (causal, alone, |p| p.tile_order = CtaOrder::HeadsFirst),
    (capped, alone, |p| p.tanh = attend::Tanh::Approx),
];

/// Each gene of `backward_fused` at its simplest value.
pub fn plain_fused() -> FusedPlan {
    FusedPlan {
        query_stages: 2,
        gradient_stages: 2,
        key_stages: 1,
        products: Order::InTurn,
        tile_order: CtaOrder::RowsFirst,
        row_parts: 1,
    }
}

fn atomic() -> Problem {
    super::causal().with_pass(Pass::BACKWARD)
}

pub const FUSED: &[Line<FusedPlan>] = &[
    (full, alone, |p| p.query_stages = 3),
    (atomic, alone, |p| p.gradient_stages = 3),
    (atomic, alone, |p| p.key_stages = 2),
    (atomic, alone, |p| p.products = Order::ScoresAhead),
    (full, alone, |p| p.tile_order = CtaOrder::HeadsFirst),
    (atomic, alone, |p| p.row_parts = 3),
];
