//! A warp's ring of shared memory for keys and values.

use ptx::{Builder, CmpOp, Pointer, R32, Shared};
use tile::{Mbarriers, PipelineState, Threads, TileCopy, TileLayout};

use super::DecodePlan;
use super::slices::Slice;
use crate::Baked;

/// The ring of stages of a warp, or of the warps of different rows that have the same columns. A stage has a
/// tile for each slice of the columns.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    first: Shared,
    stages: u32,
    /// Whether warps share the ring, so that barriers of the CTA order their reads and copies.
    shared: bool,
    pub stage_bytes: u32,
    /// Bytes from a stage to its second tile.
    second: u32,
    /// The mbarriers of the stages, and the stage to wait for, if TMA fills them.
    filled: Option<(Mbarriers, PipelineState)>,
    /// The copies of both slices, by which a warp loads its share of the keys.
    pub copies: [(Slice, TileCopy); 2],
    /// The page of the lane's row in the next block to request, and the row there. The entry of the page
    /// table arrives while the warp computes.
    pub next: [R32; 2],
}

impl Ring {
    /// The ring of the warp in the rings of all warps, which begin at `rings`.
    pub fn new(k: &mut Builder, plan: &DecodePlan, baked: &Baked, threads: &Threads, rings: Shared) -> Ring {
        let stage_bytes = plan.stage_bytes(baked);
        let index =
            if plan.tiles() == 1 { threads.warp } else { threads.part.expect("warps divide columns") };
        let start = k.shared_index(rings, index, plan.stages * stage_bytes);
        let slices = plan.slices(baked);
        let [first, second] = slices.map(|slice| plan.layout(slice));
        let mut copy = |layout: TileLayout| {
            let layout = TileLayout { rows: plan.copied_keys(), ..layout };
            TileCopy::by_warp(k, threads, layout, 0, plan.copy)
        };
        let of_first = copy(first);
        let of_second = if second == first { of_first.clone() } else { copy(second) };
        let with_rows =
            |slice: Slice, copy: TileCopy| (slice, copy.with_row_bytes(baked.row_bytes(slice.tensor)));
        let filled = plan.tma.then(|| {
            let first = k.shared_index(rings, index, plan.stages * Mbarriers::BYTES);
            let barriers = Mbarriers::new(first.at(plan.barriers_from(baked).into()));
            let elected = k.elect(u32::MAX);
            k.if_(elected, |k| {
                (0..plan.stages).for_each(|stage| k.mbarrier_init(barriers.at(stage), 1));
                k.fence_mbarrier_init();
            });
            k.warp_sync();
            (barriers, PipelineState::consumer(k, plan.stages))
        });
        Ring {
            first: start,
            filled,
            stages: plan.stages,
            shared: plan.tiles() > 1,
            stage_bytes,
            second: first.bytes(),
            copies: [with_rows(slices[0], of_first), with_rows(slices[1], of_second)],
            next: [k.mov(0), k.mov(0)],
        }
    }

    /// The tiles of both slices of the stage at an offset.
    pub fn tiles(&self, k: &mut Builder, stage: R32) -> [Shared; 2] {
        let first = k.shared_advance(self.first, stage);
        [first, first.at(self.second.into())]
    }

    /// Waits until the oldest requested stage is filled, and until all lanes have read the stage before it.
    pub fn wait(&self, k: &mut Builder) {
        match self.filled {
            None => k.cp_async_wait(self.stages - 2),
            Some((barriers, at)) => {
                let barrier = barriers.index(k, at.stage);
                k.mbarrier_wait_parity(barrier, at.parity);
            }
        }
        if self.shared { k.bar_sync() } else { k.warp_sync() }
    }

    /// The mbarrier of stage `stage` (before the first block is read), or of the stage before the one to wait
    /// for.
    pub fn barrier(&self, k: &mut Builder, stage: Option<u32>) -> Option<Shared> {
        let (barriers, at) = self.filled?;
        let Some(stage) = stage else {
            let before = at.previous(k);
            return Some(barriers.index(k, before.stage));
        };
        Some(barriers.at(stage))
    }

    /// Advances the offset of a stage to the next stage.
    pub fn advance(&self, k: &mut Builder, stage: R32) {
        let next = k.add(stage, self.stage_bytes);
        let wraps = k.setp_u(CmpOp::Eq, next, self.stages * self.stage_bytes);
        k.selp_to(stage, 0, next, wraps);
        if let Some((_, at)) = self.filled {
            at.advance(k);
        }
    }

    /// The offset of the stage before another one.
    pub fn before(&self, k: &mut Builder, stage: R32) -> R32 {
        let wraps = k.setp_u(CmpOp::Eq, stage, 0);
        let before = k.sub(stage, self.stage_bytes);
        k.selp((self.stages - 1) * self.stage_bytes, before, wraps)
    }
}
