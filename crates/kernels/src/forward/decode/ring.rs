//! A warp's ring of shared memory for keys and values.

use problem::Tensor;
use ptx::{Builder, CmpOp, Pointer, R32, Shared};
use tile::{Threads, TileCopy};

use super::DecodePlan;
use crate::Baked;

/// A warp's ring of stages. A stage has a tile of keys and a tile of values.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    first: Shared,
    stages: u32,
    pub stage_bytes: u32,
    pub copy: TileCopy,
    /// The page of the lane's row in the next block to request, and the row there. The entry of the page
    /// table arrives while the warp computes.
    pub next: [R32; 2],
}

impl Ring {
    /// The ring of the warp in the rings of all warps, which begin at `rings`.
    pub fn new(k: &mut Builder, plan: &DecodePlan, baked: &Baked, threads: &Threads, rings: Shared) -> Ring {
        let stage_bytes = plan.stage_bytes(baked);
        let row_bytes = baked.row_bytes(Tensor::K);
        Ring {
            first: k.shared_index(rings, threads.warp, plan.stages * stage_bytes),
            stages: plan.stages,
            stage_bytes,
            copy: TileCopy::by_warp(k, threads, plan.layout(baked), row_bytes, plan.copy),
            next: [k.mov(0), k.mov(0)],
        }
    }

    /// The tiles of keys and of values of the stage at an offset.
    pub fn tiles(&self, k: &mut Builder, stage: R32) -> [Shared; 2] {
        let keys = k.shared_advance(self.first, stage);
        [keys, keys.at(i64::from(self.stage_bytes / 2))]
    }

    /// Waits until the oldest requested stage is filled, and until all lanes have read the stage before it.
    pub fn wait(&self, k: &mut Builder) {
        k.cp_async_wait(self.stages - 2);
        k.warp_sync();
    }

    /// Advances the offset of a stage to the next stage.
    pub fn advance(&self, k: &mut Builder, stage: R32) {
        let next = k.add(stage, self.stage_bytes);
        let wraps = k.setp_u(CmpOp::Eq, next, self.stages * self.stage_bytes);
        k.selp_to(stage, 0, next, wraps);
    }

    /// The offset of the stage before another one.
    pub fn before(&self, k: &mut Builder, stage: R32) -> R32 {
        let wraps = k.setp_u(CmpOp::Eq, stage, 0);
        let before = k.sub(stage, self.stage_bytes);
        k.selp((self.stages - 1) * self.stage_bytes, before, wraps)
    }
}
