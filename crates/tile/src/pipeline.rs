//! Keys and values in a ring of `cp.async` stages, visited from the last block to the first: the masked blocks come
//! first, and only the first block visited can be ragged.

use ptx::{Builder, CmpOp, Global, Pointer, R32, Shared, Src};

use crate::{Bound, Coverage, KeyTile, MatrixReader, OpenTile, TileCopy, TileLayout};

/// One of the two tensors that stream by.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Its copy from global memory.
    pub copy: TileCopy,
    /// How it is read.
    pub reader: MatrixReader,
    /// How its odd chunk is read, if it has one and it matters.
    pub tail: Option<MatrixReader>,
    /// The thread's pointer into the next block to load; walks down.
    pub from: Global,
    /// Bytes from one block to the next.
    pub block_bytes: i64,
    /// The tile of stage 0.
    pub tile: Shared,
    /// Layout of a tile.
    pub layout: TileLayout,
}

/// A ring of stages, each a tile of keys and one of values.
///
/// With one stage, values are loaded while S is computed and the next keys while O is, with two barriers a block. With
/// more, all stages are requested at the start; from then on a block's keys and values are requested `stages − 1` blocks
/// before, with one barrier a block: it both makes the block visible and frees the stage that the next request fills.
#[derive(Clone, Debug)]
pub struct KvPipeline {
    stages: u32,
    stage_bytes: u32,
    block_n: u32,
    /// Keys in all, where the last block may be ragged.
    ragged: Option<R32>,
    bound: Bound,
    key: Stream,
    value: Stream,
    /// The block to visit now, and the offset of its stage.
    current: R32,
    stage: R32,
    /// The block to request next, where there are stages to request ahead into.
    next: R32,
}

/// A block of keys and values being visited.
#[derive(Debug)]
pub struct Block<'a> {
    /// Its first key.
    pub origin: R32,
    /// What its rows see of it.
    pub coverage: Coverage,
    pipeline: &'a KvPipeline,
}

impl KvPipeline {
    /// A ring over the blocks of `bound`. The streams point at block `bound.end − 1`; `ragged` is the number of keys,
    /// unless `block_n` divides it.
    pub fn new(
        k: &mut Builder,
        stages: u32,
        block_n: u32,
        bound: Bound,
        key: Stream,
        value: Stream,
        ragged: Option<R32>,
    ) -> KvPipeline {
        let current = k.sub(bound.end, 1);
        let stage = k.mov(0);
        let stage_bytes = key.layout.bytes() + value.layout.bytes();
        let next = if stages == 1 { current } else { k.sub(current, stages) };
        KvPipeline { stages, stage_bytes, block_n, ragged, bound, key, value, current, stage, next }
    }

    /// Requests the first blocks. What the CTA requested before belongs to the first group. The group of the last stage is
    /// closed by the first visit, as that of every later block by the visit that requests it.
    pub fn start(&self, k: &mut Builder) {
        for ahead in 0..self.stages {
            self.if_block(k, ahead, |k| {
                let limit = self.ragged.filter(|_| ahead == 0).map(|keys| {
                    let before = k.mul(self.current, self.block_n);
                    k.sub(keys, before)
                });
                let stage = i64::from(ahead * self.stage_bytes);
                self.request(k, &self.key, self.key.tile.at(stage), limit);
                if self.stages > 1 {
                    self.request(k, &self.value, self.value.tile.at(stage), limit);
                }
            });
            if ahead < self.ahead().max(1) {
                k.cp_async_commit();
            }
        }
    }

    /// Blocks by which requests are ahead of visits.
    fn ahead(&self) -> u32 {
        self.stages - 1
    }

    /// Groups of this thread that may be incomplete when those requested before [`KvPipeline::start`] are needed.
    pub fn groups_ahead(&self) -> u32 {
        self.ahead().max(1) - 1
    }

    /// Visits every block of the bound, partial ones first.
    pub fn for_each_block(&self, k: &mut Builder, mut visit: impl FnMut(&mut Builder, &Block)) {
        if let Some(full) = self.bound.full {
            self.visit_down_to(k, full.into(), Coverage::Partial, &mut visit);
        }
        self.visit_down_to(k, 0.into(), Coverage::Full, &mut visit);
    }

    fn visit_down_to(
        &self,
        k: &mut Builder,
        last: Src<R32>,
        coverage: Coverage,
        visit: &mut impl FnMut(&mut Builder, &Block),
    ) {
        let some = k.setp_s(CmpOp::Ge, self.current, last.clone());
        k.if_(some, |k| {
            k.do_while(|k| {
                let origin = k.mul(self.current, self.block_n);
                let block = Block { origin, coverage, pipeline: self };
                visit(k, &block);
                self.next_stage(k);
                k.sub_to(self.current, self.current, 1);
                k.setp_s(CmpOp::Ge, self.current, last)
            });
        });
    }

    /// Runs `request` if the block `ahead` of the current one exists.
    fn if_block(&self, k: &mut Builder, ahead: u32, request: impl FnOnce(&mut Builder)) {
        let some = k.setp_s(CmpOp::Ge, self.current, ahead);
        k.if_(some, request);
    }

    /// Requests the stream's next tile, and steps down.
    fn request(&self, k: &mut Builder, stream: &Stream, to: Shared, limit: Option<R32>) {
        stream.copy.load(k, to, stream.from, limit);
        k.advance_to(stream.from, stream.block_bytes.wrapping_neg());
    }

    /// Requests the block whose turn it is, as one group, into the stage that the last visit left; nothing at the first
    /// visit, before which every stage was requested.
    fn request_ahead(&self, k: &mut Builder) {
        let ahead = k.sub(self.current, self.next);
        let exists = k.setp_s(CmpOp::Ge, self.next, 0);
        let turn = k.setp_s_and(CmpOp::Lt, ahead, self.stages, exists);
        k.if_(turn, |k| {
            k.sub_to(self.next, self.next, 1);
            let last_stage = self.ahead() * self.stage_bytes;
            let free = if self.stages == 2 {
                k.xor(self.stage, self.stage_bytes)
            } else {
                let before = k.sub(self.stage, self.stage_bytes);
                let wraps = k.setp_u(CmpOp::Eq, self.stage, 0);
                k.selp(last_stage, before, wraps)
            };
            for stream in [&self.key, &self.value] {
                let to = k.shared_advance(stream.tile, free);
                self.request(k, stream, to, None);
            }
        });
        k.cp_async_commit();
    }

    /// The current stage of a tile.
    fn tile(&self, k: &mut Builder, stream: &Stream) -> Shared {
        if self.stages == 1 { stream.tile } else { k.shared_advance(stream.tile, self.stage) }
    }

    /// On to the next stage of the ring.
    fn next_stage(&self, k: &mut Builder) {
        match self.stages {
            1 => {}
            2 => k.xor_to(self.stage, self.stage, self.stage_bytes),
            _ => {
                let next = k.add(self.stage, self.stage_bytes);
                let wraps = k.setp_u(CmpOp::Eq, next, self.stages * self.stage_bytes);
                k.selp_to(self.stage, 0, next, wraps);
            }
        }
    }
}

impl Block<'_> {
    /// The block's keys, once they are complete and visible.
    pub fn key(&self, k: &mut Builder) -> KeyTile {
        let p = self.pipeline;
        k.cp_async_wait(p.groups_ahead());
        k.bar_sync();
        if p.stages == 1 {
            let limit = self.limit(k);
            p.request(k, &p.value, p.value.tile, limit);
            k.cp_async_commit();
        } else {
            p.request_ahead(k);
        }
        let tile = p.tile(k, &p.key);
        KeyTile { tile: p.key.reader.open(k, tile), tail: p.key.tail.map(|tail| tail.open(k, tile)) }
    }

    /// The block's values, once they are complete and visible.
    pub fn value(&self, k: &mut Builder) -> OpenTile {
        let p = self.pipeline;
        if p.stages == 1 {
            k.cp_async_wait(0);
            k.bar_sync();
            p.if_block(k, 1, |k| p.request(k, &p.key, p.key.tile, None));
            k.cp_async_commit();
        }
        let tile = p.tile(k, &p.value);
        p.value.reader.open(k, tile)
    }

    /// Keys from the block's first one on; `None` where the block is known to be whole.
    fn limit(&self, k: &mut Builder) -> Option<R32> {
        match self.coverage {
            Coverage::Full => None,
            Coverage::Partial => self.pipeline.ragged.map(|keys| k.sub(keys, self.origin)),
        }
    }
}
