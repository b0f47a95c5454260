//! Latent attention on `wgmma`, with the gene `products: warpgroup`: a tile of 64 query rows, blocks of 64
//! keys whose first columns are the values, and two consumer warpgroups.
//!
//! Each warpgroup holds half of the columns of O, 256. The warpgroups compute S and P of the blocks in turn
//! and pass P on through shared memory, with the row max and the factor by which it rescales what came
//! before, so that both have one running softmax (FlashMLA's "seesaw"). Neither computes a product twice, and
//! S of a block is computed while the other warpgroup is at the softmax of the block before it.
//!
//! Shared memory has Q and two stages of keys, 72 KB each. The warpgroup of a block, whose stage is its own,
//! writes P over the last 64 columns of the block: only S reads them. A stage is free when both warpgroups
//! have added its P V.
//!
//! A block of 64 keys and 64 rows in cycles of an SM of an H200, predicted:
//!
//! | | cycles |
//! |---|---|
//! | S: 36 `wgmma` of 64×64×16, 32 cycles each | 1152 |
//! | P V: 4 `wgmma` of 64×256×16 of each warpgroup, 128 cycles each | 1024 |
//! | operands from shared memory at 128 bytes a cycle: S 1152, P V 512 + 64, writes 640 | 2370 |
//! | 72 KB from L2, at 5.5 TB/s of all SMs (24 bytes a cycle) | 3070 |
//! | chain: P V of the block before, S, softmax, P to the other warpgroup | 1024 + 1152 + 850 |
//!
//! The chain and the bytes from L2 bound it alike: 8.9 MFLOP in 3070 cycles are 650 TFLOP/s at 1.7 GHz. With
//! 128 heads, two tiles read the same keys, so that the memory delivers half of the bytes. The keys of a
//! stage arrive some 3000 cycles after it is free, so a warpgroup releases the other's stage as soon as its P
//! V is complete, behind the first part of S. A third stage would let S of the next block fill the softmax's
//! time, but shared memory has no room for it.

mod blocks;
mod copy;
mod load;

use problem::{Problem, Tensor};
use ptx::{Builder, CmpOp, Pointer, R32, Shared};
use tile::{Consumer, Mbarriers, SwizzledTile, Threads};

use super::DecodePlan;
use super::boxes::{ATOM_ROWS, PageBoxes, check_repeats};
use super::form::{BARRIERS_FROM, BLOCK, DIMS, PART, PARTS, ROLES, STAGES, TILE_BYTES};
use super::line::LineCursor;
use super::params::DecodeParams;
use super::plan::NAME;
use super::tiles::LineTiles;
use crate::error::accept;
use crate::forward::contract::{check_tensor_map, is_half};
use crate::forward::lengths::check_ragged;
use crate::{Arch, Baked, PlanError};

impl DecodePlan {
    /// Whether warpgroups can multiply the tiles of the problem.
    pub(super) fn check_warpgroups(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let has_products = arch.has_warpgroup_products();
        accept("sm", arch.sm.into(), has_products, "90 with products of warpgroups")?;
        let refuse = |what: &str, value: String, accepted: &str| {
            let accepted = format!("{accepted} with products of warpgroups");
            Err(PlanError::unsupported(NAME, what, value, accepted))
        };
        let dims = [problem.head_dim, problem.head_dim_v];
        if !problem.v_in_k || dims != DIMS {
            return refuse("head dims", format!("{dims:?}"), "[576, 512] with values in keys");
        }
        if !is_half(problem) {
            return refuse("types", problem.dtypes.to_string(), "f16 or bf16 for all tensors");
        }
        let scale = problem.softmax_scale();
        if scale.is_nan() || scale <= 0.0 {
            return refuse("scale", scale.to_string(), "positive scales");
        }
        if !self.tma {
            return Ok(());
        }
        if let Some(pages) = problem.storage.pages()
            && !pages.rows.is_multiple_of(ATOM_ROWS)
        {
            return refuse("page_size", pages.rows.to_string(), "multiples of 8 with TMA and");
        }
        if problem.lengths.left_padded {
            return refuse("left padding", "present".to_owned(), "none with TMA and");
        }
        check_tensor_map(problem, Tensor::K, NAME)?;
        check_ragged(problem, Tensor::K, NAME)?;
        check_repeats(problem, Tensor::K)
    }

    /// The tile of a part of the columns of a block, in boxes of rows of one page.
    pub(super) fn part_of_block(page_rows: Option<u32>) -> SwizzledTile {
        let rows = page_rows.map_or(BLOCK, |rows| (1 << rows.trailing_zeros()).min(BLOCK));
        PART.in_boxes(BLOCK / rows).ragged(true)
    }
}

/// The kernel being emitted.
pub(super) struct Warpgroups<'a> {
    tiles: LineTiles<'a>,
    /// How TMA copies the keys, if it does.
    boxes: Option<PageBoxes>,
    shared: Shared,
    barriers: Mbarriers,
}

impl<'a> Warpgroups<'a> {
    pub(super) fn new(
        k: &mut Builder,
        plan: &'a DecodePlan,
        baked: &'a Baked,
        params: DecodeParams,
    ) -> Warpgroups<'a> {
        let threads = Threads::new(k, ROLES.threads(), 1);
        let boxes = params.boxes.map(|[boxes, _]| boxes);
        let tiles = LineTiles::new(k, (plan, baked), params, threads);
        let shared = k.dynamic_shared(SwizzledTile::ALIGNMENT);
        let barriers = Mbarriers::new(shared.at(BARRIERS_FROM.into()));
        Warpgroups { tiles, boxes, shared, barriers }
    }

    /// The kernel: the producer warp requests the blocks of the CTA's piece of the line, and the consumer
    /// warpgroups compute its tiles.
    pub(super) fn body(&self, k: &mut Builder) {
        let LineTiles { pieces, cta, line, threads, .. } = &self.tiles;
        let start = pieces.start(k, *cta);
        let next = k.add(*cta, 1);
        let end = pieces.start(k, next);
        let left = k.sub(end, start);
        let none = k.setp_u(CmpOp::Eq, left, 0);
        k.exit_if(none);
        let at = line.find(k, start, &self.tiles.lanes);
        let first = k.setp_u(CmpOp::Eq, threads.index, 0);
        k.if_(first, |k| {
            let arrivals = if self.boxes.is_some() { 1 } else { tile::WARPGROUP_THREADS / 32 };
            (0..STAGES * PARTS).for_each(|i| k.mbarrier_init(self.barriers.at(i), arrivals));
            let released = self.barriers.from(STAGES * PARTS);
            (0..STAGES).for_each(|stage| k.mbarrier_init(released.at(stage), ROLES.consumer_warps()));
            k.fence_mbarrier_init();
        });
        k.bar_sync();
        let produce = |k: &mut Builder, _: R32, warp: R32| match self.boxes {
            None => self.copy_blocks(k, &at, left),
            Some(boxes) => {
                let loads = k.setp_u(CmpOp::Eq, warp, 0);
                k.if_(loads, |k| self.produce(k, boxes, &at, left));
            }
        };
        let consume = |k: &mut Builder, consumer: &Consumer| self.consume(k, consumer, &at, (start, left));
        ROLES.divide(k, produce, consume);
    }

    /// Q if `number` is 0, else the stage of keys before `number`.
    fn tile_at(&self, k: &mut Builder, number: R32) -> Shared {
        k.shared_index(self.shared, number, TILE_BYTES)
    }

    /// The barriers of the parts of a stage.
    fn filled(&self, k: &mut Builder, stage: R32) -> Mbarriers {
        let first = k.mul(stage, PARTS);
        self.barriers.skip(k, first)
    }

    /// The barrier of a stage that warps release.
    fn released(&self, k: &mut Builder, stage: R32) -> Shared {
        self.barriers.from(STAGES * PARTS).index(k, stage)
    }

    /// The first key of the block under the cursor.
    fn origin(&self, k: &mut Builder, at: &LineCursor) -> R32 {
        k.mul(at.block, BLOCK)
    }
}
