//! The genes of the `decode` family, for the tests.

use attend::Rescale;
use flashcore_kernels::forward::decode::DecodePlan;
use tile::CopyMode;

use super::{Line, capped, causal, full};

/// Each gene at its simplest value.
pub fn plain() -> DecodePlan {
    DecodePlan {
        products: flashcore_kernels::forward::decode::ProductUnit::Warp,
        warps: 2,
        dim_warps: 1,
        warp_keys: 16,
        stages: 3,
        resident_ctas: 1,
        least_blocks: 1,
        rescale: Rescale::Always,
        copy: CopyMode::Async16,
        tma: false,
        overlapping: false,
        tanh: attend::Tanh::Exp2,
        piece: None,
    }
}

fn alone(_: &mut DecodePlan) {}

pub const TABLE: &[Line<DecodePlan>] = &[
    (full, alone, |p| p.warps = 1),
    (causal, alone, |p| p.warps = 4),
    (full, alone, |p| p.dim_warps = 2),
    (causal, alone, |p| p.warp_keys = 32),
    (full, alone, |p| p.stages = 2),
    (causal, alone, |p| p.stages = 4),
    (full, alone, |p| p.resident_ctas = 2),
    (causal, alone, |p| p.least_blocks = 3),
    (full, alone, |p| p.rescale = Rescale::Beyond(8)),
    (causal, alone, |p| p.rescale = Rescale::Beyond(0)),
    (causal, alone, |p| p.copy = CopyMode::Async8),
    (full, alone, |p| p.copy = CopyMode::Async4),
    (causal, alone, |p| p.copy = CopyMode::Elements),
    (full, alone, |p| p.overlapping = true),
    (capped, alone, |p| p.tanh = attend::Tanh::Approx),
    (causal, alone, |p| p.piece = Some(64)),
];
