//! Main loop over the KV blocks with a ring of `cp.async` stages, from the last block to the first. Partial
//! blocks at the upper end come first, and only the first block can be ragged.
//!
//! A visit has three steps: the scores of a block, the update of the softmax, and the product that
//! adds to O. [`Order`] says how the steps of successive blocks interleave.

use ptx::{Builder, CmpOp, Global, Pointer, R32, Shared, Src};
use tile::{AccTile, MatrixReader, OperandB, PagedRows, TileCopy, TileLayout};

use super::Order;
use crate::{BlockList, Bound, Coverage, Hides, Lower};

/// One of the two streamed tensors, K or V.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Its copy from global to shared memory.
    pub copy: TileCopy,
    /// Reads the tile as an operand.
    pub reader: MatrixReader,
    /// Reads the odd last chunk of keys, if there is one; for f32 values, reads the odd rows
    /// ([`OperandB::tail`]).
    pub tail: Option<MatrixReader>,
    /// The thread's pointer into the next block to load; moves down from block to block. With a list of
    /// blocks, the pointer into block 0. With pages, the start of the head.
    pub from: Global,
    /// The pages of the rows; `None` if rows have one distance from each other.
    pub pages: Option<PagedRows>,
    /// Bytes from one block to the next.
    pub block_bytes: i64,
    /// The tile of stage 0.
    pub tile: Shared,
    /// Layout of a tile.
    pub layout: TileLayout,
}

impl Stream {
    /// Reads the tile at `tile` as an operand.
    fn open(&self, k: &mut Builder, tile: Shared) -> OperandB {
        OperandB { tile: self.reader.open(k, tile), tail: self.tail.map(|tail| tail.open(k, tile)) }
    }
}

/// A ring of stages, each with a tile of keys and a tile of values.
///
/// With one stage, the values are loaded while S is computed, and the next keys while O is computed, with two
/// CTA barriers per block. With more stages, all stages are requested at the start. Later, each block is
/// requested `stages − 1` blocks before its visit, with one CTA barrier per block: that barrier makes the
/// block visible and also frees the stage that the next request fills.
#[derive(Clone, Debug)]
pub struct KvPipeline {
    order: Order,
    stages: u32,
    stage_bytes: u32,
    block_n: u32,
    /// Number of keys, if the last block may be ragged.
    ragged: Option<R32>,
    bound: Bound,
    /// The list of blocks, if `bound` counts positions in a list; `None` if it counts blocks.
    list: Option<BlockList>,
    key: Stream,
    value: Stream,
    /// The current block, and the byte offset of its stage.
    current: R32,
    stage: R32,
    /// The next block to request, if the ring has more than one stage.
    next: R32,
}

/// The last block of each of the three ranges. No limit lies before the first block to visit.
struct Limits {
    /// The last partial block at the upper end; `None` if there is no such range.
    full_to: Option<R32>,
    /// The last full block; `None` if that is also the last block to visit.
    full_from: Option<Src<R32>>,
    /// The last block to visit.
    from: Src<R32>,
}

/// A block of keys and values being visited.
#[derive(Debug)]
pub struct Block<'a> {
    /// First key of the block.
    pub origin: R32,
    pub coverage: Coverage,
    /// Which masks hide keys, if a list says so.
    pub hides: Option<Hides>,
    pipeline: &'a KvPipeline,
    /// Offset of the key stage that the round has already waited for; `None` if [`Block::key`] waits.
    key_stage: Option<R32>,
}

/// The steps of a visit.
pub struct Steps<S, F, C> {
    /// Computes the masked scores of a block.
    pub scores: S,
    /// Updates the softmax and rescales O for the scores of a block.
    pub update: F,
    /// Adds the block's probabilities times its values.
    pub accumulate: C,
}

impl KvPipeline {
    /// Creates a ring over the blocks of `bound`, or over the blocks of `list` at its positions. The streams
    /// point at block `bound.end − 1`, or at block 0 with a list. `ragged` is the number of keys, or `None`
    /// if `block_n` divides it.
    #[allow(clippy::too_many_arguments, reason = "the ring's genes and its streams")]
    pub fn new(
        k: &mut Builder,
        order: Order,
        stages: u32,
        block_n: u32,
        bound: Bound,
        list: Option<BlockList>,
        key: Stream,
        value: Stream,
        ragged: Option<R32>,
    ) -> KvPipeline {
        let current = k.sub(bound.end, 1);
        let stage = k.mov(0);
        let stage_bytes = key.layout.bytes() + value.layout.bytes();
        let next = match order {
            Order::InTurn if stages > 1 => k.sub(current, stages),
            _ => current,
        };
        KvPipeline {
            order,
            stages,
            stage_bytes,
            block_n,
            ragged,
            bound,
            list,
            key,
            value,
            current,
            stage,
            next,
        }
    }

    /// Requests the first blocks. Copies that the CTA requested earlier belong to the first `cp.async` group.
    /// The first visit commits the group of the last stage; the group of each later block is committed by the
    /// visit that requests it.
    pub fn start(&self, k: &mut Builder) {
        match self.order {
            Order::InTurn => {
                for ahead in 0..self.stages {
                    self.request_first(k, &self.key, ahead);
                    if self.stages > 1 {
                        self.request_first(k, &self.value, ahead);
                    }
                    if ahead < self.ahead().max(1) {
                        k.cp_async_commit();
                    }
                }
            }
            Order::ScoresAhead => {
                self.request_first(k, &self.key, 0);
                k.cp_async_commit();
                for ahead in 0..self.ahead() {
                    self.request_first(k, &self.key, ahead + 1);
                    self.request_first(k, &self.value, ahead);
                    k.cp_async_commit();
                }
            }
        }
    }

    /// Requests the block that is `ahead` blocks after the first one, if it exists, into the stage of that
    /// index.
    fn request_first(&self, k: &mut Builder, stream: &Stream, ahead: u32) {
        self.if_block(k, ahead, |k| {
            let limit = self.ragged.filter(|_| ahead == 0).map(|keys| {
                let before = self.block(k, 0, Coverage::Partial, None).origin;
                k.sub(keys, before)
            });
            let to = stream.tile.at(i64::from(ahead * self.stage_bytes));
            self.request(k, stream, to, limit, self.current, ahead);
        });
    }

    /// Number of blocks between a request and its visit.
    fn ahead(&self) -> u32 {
        self.stages - 1
    }

    /// Waits until the copies requested before [`KvPipeline::start`] and the first keys are complete and
    /// visible.
    pub fn wait_for_first(&self, k: &mut Builder) {
        k.cp_async_wait(match self.order {
            Order::InTurn => self.groups_ahead(),
            Order::ScoresAhead => self.ahead(),
        });
        k.bar_sync();
    }

    /// Number of this thread's `cp.async` groups that may still be in flight when a visit needs its own.
    fn groups_ahead(&self) -> u32 {
        self.ahead().max(1) - 1
    }

    /// Visits every block of the bound, the partial ones at the upper end first.
    pub fn for_each_block<S, F, C>(&self, k: &mut Builder, steps: Steps<S, F, C>)
    where
        S: Fn(&mut Builder, &Block) -> AccTile,
        F: Fn(&mut Builder, &AccTile),
        C: Fn(&mut Builder, &AccTile, &Block),
    {
        match self.order {
            Order::InTurn => {
                let visit = |k: &mut Builder, block: &Block| {
                    let s = (steps.scores)(k, block);
                    (steps.update)(k, &s);
                    (steps.accumulate)(k, &s, block);
                };
                let Limits { full_to, full_from, from } = self.limits(k);
                if let Some(full) = full_to {
                    self.visit_down_to(k, full.into(), Coverage::Partial, &visit);
                }
                self.visit_down_to(k, full_from.clone().unwrap_or(from.clone()), Coverage::Full, &visit);
                if full_from.is_some() {
                    self.visit_down_to(k, from, Coverage::Partial, &visit);
                }
            }
            Order::ScoresAhead => self.visit_ahead(k, &steps),
        }
    }

    /// The limits of the upper partial, full and lower partial ranges.
    fn limits(&self, k: &mut Builder) -> Limits {
        let from = self.bound.from();
        match self.bound.lower {
            None => Limits { full_to: self.bound.full_to, full_from: None, from },
            Some(Lower { from: first, full_from }) => Limits {
                full_to: self.bound.full_to.map(|full| k.max_s(full, first)),
                full_from: full_from.map(|full_from| k.max_s(full_from, first).into()),
                from,
            },
        }
    }

    /// Visits all blocks. The scores of the next block are issued before this block's P V. The first keys are
    /// already visible.
    fn visit_ahead<S, F, C>(&self, k: &mut Builder, steps: &Steps<S, F, C>)
    where
        S: Fn(&mut Builder, &Block) -> AccTile,
        F: Fn(&mut Builder, &AccTile),
        C: Fn(&mut Builder, &AccTile, &Block),
    {
        let masked = self.bound.full_to.is_some() || self.bound.lower.is_some_and(|l| l.full_from.is_some());
        let cautious = if masked { Coverage::Partial } else { Coverage::Full };
        let some = k.setp_s(CmpOp::Ge, self.current, self.bound.from());
        k.if_(some, |k| {
            let first = self.block(k, 0, cautious, Some(self.stage));
            let s = (steps.scores)(k, &first);
            (steps.update)(k, &s);
            let round = |k: &mut Builder, coverage: Coverage| {
                self.begin_round(k);
                let key_stage = self.stage_after(k);
                let next = self.block(k, 1, coverage, Some(key_stage));
                let current = self.block(k, 0, cautious, None);
                let ahead = (steps.scores)(k, &next);
                (steps.accumulate)(k, &s, &current);
                (steps.update)(k, &ahead);
                s.copy_from(k, &ahead);
                self.next_stage(k);
                k.sub_to(self.current, self.current, 1);
            };
            let Limits { full_to, full_from, from } = self.limits(k);
            if let Some(full) = full_to {
                let last = if self.bound.lower.is_none() { k.max_s(full, 0) } else { full };
                self.rounds(k, last.into(), |k| round(k, Coverage::Partial));
            }
            self.rounds(k, full_from.clone().unwrap_or(from.clone()), |k| round(k, Coverage::Full));
            if full_from.is_some() {
                self.rounds(k, from, |k| round(k, Coverage::Partial));
            }
            self.begin_round(k);
            let last = self.block(k, 0, cautious, None);
            (steps.accumulate)(k, &s, &last);
        });
    }

    /// Repeats `round` while there is a next block, down to block `last`.
    fn rounds(&self, k: &mut Builder, last: Src<R32>, round: impl FnOnce(&mut Builder)) {
        let some = k.setp_s(CmpOp::Gt, self.current, last.clone());
        k.if_(some, |k| {
            k.do_while(|k| {
                round(k);
                k.setp_s(CmpOp::Gt, self.current, last)
            });
        });
    }

    /// Waits for the current values and the next keys, then requests the tiles that replace the previous
    /// ones.
    fn begin_round(&self, k: &mut Builder) {
        k.cp_async_wait(self.groups_ahead());
        k.bar_sync();
        self.if_block(k, self.stages, |k| {
            let to = k.shared_advance(self.key.tile, self.stage);
            self.request(k, &self.key, to, None, self.current, self.stages);
        });
        self.if_block(k, self.ahead(), |k| {
            let free = self.stage_before(k);
            let to = k.shared_advance(self.value.tile, free);
            self.request(k, &self.value, to, None, self.current, self.ahead());
        });
        k.cp_async_commit();
    }

    /// The block that is `ahead` blocks after the current one.
    fn block(&self, k: &mut Builder, ahead: u32, coverage: Coverage, key_stage: Option<R32>) -> Block<'_> {
        let index = if ahead == 0 { self.current } else { k.sub(self.current, ahead) };
        let (block, hides) = match self.list.map(|list| list.entry(k, index)) {
            None => (index, None),
            Some((block, hides)) => (block, Some(hides)),
        };
        Block { origin: k.mul(block, self.block_n), coverage, hides, pipeline: self, key_stage }
    }

    fn visit_down_to(
        &self,
        k: &mut Builder,
        last: Src<R32>,
        coverage: Coverage,
        visit: &impl Fn(&mut Builder, &Block),
    ) {
        let some = k.setp_s(CmpOp::Ge, self.current, last.clone());
        k.if_(some, |k| {
            k.do_while(|k| {
                let block = self.block(k, 0, coverage, None);
                visit(k, &block);
                self.next_stage(k);
                k.sub_to(self.current, self.current, 1);
                k.setp_s(CmpOp::Ge, self.current, last)
            });
        });
    }

    /// Emits `request` under the condition that the block `ahead` of the current one exists.
    fn if_block(&self, k: &mut Builder, ahead: u32, request: impl FnOnce(&mut Builder)) {
        let last: Src<R32> = match self.bound.lower {
            None => ahead.into(),
            Some(lower) => k.add(lower.from, ahead).into(),
        };
        let some = k.setp_s(CmpOp::Ge, self.current, last);
        k.if_(some, request);
    }

    /// Requests the stream's next tile and moves the pointer down. With a list or pages, requests the tile at
    /// the position `ahead` of `position`.
    fn request(
        &self,
        k: &mut Builder,
        stream: &Stream,
        to: Shared,
        limit: Option<R32>,
        position: R32,
        ahead: u32,
    ) {
        if self.list.is_none() && stream.pages.is_none() {
            stream.copy.load(k, to, stream.from, limit);
            k.advance_to(stream.from, stream.block_bytes.wrapping_neg());
            return;
        }
        let position = if ahead == 0 { position } else { k.sub(position, ahead) };
        let block = self.list.map_or(position, |list| list.block(k, position));
        if let Some(pages) = stream.pages {
            let first = k.mul(block, self.block_n);
            return stream.copy.load_rows(k, to, limit, |k, row| {
                let row = k.add(first, row);
                pages.row(k, stream.from, row)
            });
        }
        let block = k.zext(block);
        let from = Global { base: k.mad(block, stream.block_bytes, stream.from.base), ..stream.from };
        stream.copy.load(k, to, from, limit);
    }

    /// Requests the next block as one `cp.async` group into the stage that the last visit released. The first
    /// visit requests nothing, because every stage was requested at the start.
    fn request_ahead(&self, k: &mut Builder) {
        let ahead = k.sub(self.current, self.next);
        let exists = k.setp_s(CmpOp::Ge, self.next, self.bound.from());
        let turn = k.setp_s_and(CmpOp::Lt, ahead, self.stages, exists);
        k.if_(turn, |k| {
            k.sub_to(self.next, self.next, 1);
            let follows = self.list.is_none() && self.key.pages.is_none();
            let position = if follows { self.next } else { k.add(self.next, 1) };
            let free = self.stage_before(k);
            for stream in [&self.key, &self.value] {
                let to = k.shared_advance(stream.tile, free);
                self.request(k, stream, to, None, position, 0);
            }
        });
        k.cp_async_commit();
    }

    /// The address of the stream's tile in the current stage.
    fn tile(&self, k: &mut Builder, stream: &Stream) -> Shared {
        if self.stages == 1 { stream.tile } else { k.shared_advance(stream.tile, self.stage) }
    }

    /// The offset of the stage that the last visit released.
    fn stage_before(&self, k: &mut Builder) -> R32 {
        if self.stages == 2 {
            return k.xor(self.stage, self.stage_bytes);
        }
        let before = k.sub(self.stage, self.stage_bytes);
        let wraps = k.setp_u(CmpOp::Eq, self.stage, 0);
        k.selp(self.ahead() * self.stage_bytes, before, wraps)
    }

    /// The offset of the stage of the next visit.
    fn stage_after(&self, k: &mut Builder) -> R32 {
        if self.stages == 2 {
            return k.xor(self.stage, self.stage_bytes);
        }
        let next = k.add(self.stage, self.stage_bytes);
        let wraps = k.setp_u(CmpOp::Eq, next, self.stages * self.stage_bytes);
        k.selp(0, next, wraps)
    }

    /// Advances to the next stage of the ring.
    fn next_stage(&self, k: &mut Builder) {
        if self.stages > 1 {
            let next = self.stage_after(k);
            k.mov_to(self.stage, next);
        }
    }
}

impl Block<'_> {
    /// The block's keys. Waits until they are complete and visible, unless the round has done so.
    pub fn key(&self, k: &mut Builder) -> OperandB {
        let p = self.pipeline;
        if let Some(stage) = self.key_stage {
            let tile = k.shared_advance(p.key.tile, stage);
            return p.key.open(k, tile);
        }
        k.cp_async_wait(p.groups_ahead());
        k.bar_sync();
        if p.stages == 1 {
            let limit = self.limit(k);
            p.request(k, &p.value, p.value.tile, limit, p.current, 0);
            k.cp_async_commit();
        } else {
            p.request_ahead(k);
        }
        let tile = p.tile(k, &p.key);
        p.key.open(k, tile)
    }

    /// The block's values. Waits until they are complete and visible, unless the round has done so.
    pub fn value(&self, k: &mut Builder) -> OperandB {
        let p = self.pipeline;
        if p.stages == 1 {
            k.cp_async_wait(0);
            k.bar_sync();
            p.if_block(k, 1, |k| p.request(k, &p.key, p.key.tile, None, p.current, 1));
            k.cp_async_commit();
        }
        let tile = p.tile(k, &p.value);
        p.value.open(k, tile)
    }

    /// Number of keys from the block's first key on; `None` where the block is known to be whole.
    fn limit(&self, k: &mut Builder) -> Option<R32> {
        match self.coverage {
            Coverage::Full => None,
            Coverage::Partial => self.pipeline.ragged.map(|keys| k.sub(keys, self.origin)),
        }
    }
}
