//! Keys and values in a ring of `cp.async` stages, visited from the last block to the first: the masked
//! blocks come first, and only the first block visited can be ragged.
//!
//! A visit has three steps: the scores of a block, the references of the softmax that follow them, and what
//! the block's probabilities add to O. [`Order`] says how those of successive blocks interleave.

use ptx::{Builder, CmpOp, Global, Pointer, R32, Shared, Src};

use crate::{AccTile, Bound, Coverage, KeyTile, Lower, MatrixReader, OpenTile, TileCopy, TileLayout};

/// How the steps of successive blocks are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// One block after the other.
    InTurn,
    /// The next block's scores stand before this block's probabilities, which do not depend on them: the
    /// tensor cores have work while exponentials are taken, inside one warp (FlashAttention-3, Algorithm 2).
    /// Keys run a block ahead of values.
    ScoresAhead,
}

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
/// With one stage, values are loaded while S is computed and the next keys while O is, with two barriers a
/// block. With more, all stages are requested at the start; from then on a block's keys and values are
/// requested `stages − 1` blocks before, with one barrier a block: it both makes the block visible and frees
/// the stage that the next request fills.
#[derive(Clone, Debug)]
pub struct KvPipeline {
    order: Order,
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

/// The last block of each stretch of the way down, none before the first block to visit.
struct Limits {
    /// The last block that is partial for its last keys; `None` where none is.
    full_to: Option<R32>,
    /// The last full block; `None` where that is the last to visit.
    full_from: Option<Src<R32>>,
    /// The last block to visit.
    from: Src<R32>,
}

/// A block of keys and values being visited.
#[derive(Debug)]
pub struct Block<'a> {
    /// Its first key.
    pub origin: R32,
    /// What its rows see of it.
    pub coverage: Coverage,
    pipeline: &'a KvPipeline,
    /// The offset of the stage of its keys, which the round has waited for; `None` where [`Block::key`]
    /// waits.
    key_stage: Option<R32>,
}

/// The steps of a visit.
pub struct Steps<S, F, C> {
    /// The masked scores of a block.
    pub scores: S,
    /// Makes the softmax and O follow a block's scores.
    pub follow: F,
    /// Adds the block's probabilities times its values.
    pub accumulate: C,
}

impl KvPipeline {
    /// A ring over the blocks of `bound`. The streams point at block `bound.end − 1`; `ragged` is the number
    /// of keys, unless `block_n` divides it.
    #[allow(clippy::too_many_arguments, reason = "the ring's genes and its streams")]
    pub fn new(
        k: &mut Builder,
        order: Order,
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
        let next = match order {
            Order::InTurn if stages > 1 => k.sub(current, stages),
            _ => current,
        };
        KvPipeline { order, stages, stage_bytes, block_n, ragged, bound, key, value, current, stage, next }
    }

    /// Requests the first blocks. What the CTA requested before belongs to the first group. The group of the
    /// last stage is closed by the first visit, as that of every later block by the visit that requests it.
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

    /// Requests the stream's tile of the block `ahead` of the first, if there is one, into the stage of that
    /// number.
    fn request_first(&self, k: &mut Builder, stream: &Stream, ahead: u32) {
        self.if_block(k, ahead, |k| {
            let limit = self.ragged.filter(|_| ahead == 0).map(|keys| {
                let before = k.mul(self.current, self.block_n);
                k.sub(keys, before)
            });
            self.request(k, stream, stream.tile.at(i64::from(ahead * self.stage_bytes)), limit);
        });
    }

    /// Blocks by which requests are ahead of visits.
    fn ahead(&self) -> u32 {
        self.stages - 1
    }

    /// Waits until what was requested before [`KvPipeline::start`], and the first keys, are complete and
    /// visible.
    pub fn wait_for_first(&self, k: &mut Builder) {
        k.cp_async_wait(match self.order {
            Order::InTurn => self.groups_ahead(),
            Order::ScoresAhead => self.ahead(),
        });
        k.bar_sync();
    }

    /// Groups of this thread that may be incomplete when those of a visit are needed.
    fn groups_ahead(&self) -> u32 {
        self.ahead().max(1) - 1
    }

    /// Visits every block of the bound, partial ones first.
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
                    (steps.follow)(k, &s);
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

    /// Where the partial, full and again partial blocks end on the way down.
    fn limits(&self, k: &mut Builder) -> Limits {
        let from = self.bound.from();
        match self.bound.lower {
            None => Limits { full_to: self.bound.full, full_from: None, from },
            Some(Lower { from: first, full_from }) => Limits {
                full_to: self.bound.full.map(|full| k.max_s(full, first)),
                full_from: Some(k.max_s(full_from, first).into()),
                from,
            },
        }
    }

    /// All blocks, with the scores of the next before what the current one adds. The first keys are visible.
    fn visit_ahead<S, F, C>(&self, k: &mut Builder, steps: &Steps<S, F, C>)
    where
        S: Fn(&mut Builder, &Block) -> AccTile,
        F: Fn(&mut Builder, &AccTile),
        C: Fn(&mut Builder, &AccTile, &Block),
    {
        let masked = self.bound.full.is_some() || self.bound.lower.is_some();
        let cautious = if masked { Coverage::Partial } else { Coverage::Full };
        let some = k.setp_s(CmpOp::Ge, self.current, self.bound.from());
        k.if_(some, |k| {
            let first = self.block(k, 0, cautious, Some(self.stage));
            let s = (steps.scores)(k, &first);
            (steps.follow)(k, &s);
            let round = |k: &mut Builder, coverage: Coverage| {
                self.begin_round(k);
                let key_stage = self.stage_after(k);
                let next = self.block(k, 1, coverage, Some(key_stage));
                let current = self.block(k, 0, cautious, None);
                let ahead = (steps.scores)(k, &next);
                (steps.accumulate)(k, &s, &current);
                (steps.follow)(k, &ahead);
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

    /// `round` as long as there is a next block, not before block `last`.
    fn rounds(&self, k: &mut Builder, last: Src<R32>, round: impl FnOnce(&mut Builder)) {
        let some = k.setp_s(CmpOp::Gt, self.current, last.clone());
        k.if_(some, |k| {
            k.do_while(|k| {
                round(k);
                k.setp_s(CmpOp::Gt, self.current, last)
            });
        });
    }

    /// Waits for the current values and the next keys, and requests what takes the place of those before.
    fn begin_round(&self, k: &mut Builder) {
        k.cp_async_wait(self.groups_ahead());
        k.bar_sync();
        self.if_block(k, self.stages, |k| {
            let to = k.shared_advance(self.key.tile, self.stage);
            self.request(k, &self.key, to, None);
        });
        self.if_block(k, self.ahead(), |k| {
            let free = self.stage_before(k);
            let to = k.shared_advance(self.value.tile, free);
            self.request(k, &self.value, to, None);
        });
        k.cp_async_commit();
    }

    /// The block `ahead` of the current one.
    fn block(&self, k: &mut Builder, ahead: u32, coverage: Coverage, key_stage: Option<R32>) -> Block<'_> {
        let index = if ahead == 0 { self.current } else { k.sub(self.current, ahead) };
        Block { origin: k.mul(index, self.block_n), coverage, pipeline: self, key_stage }
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

    /// Runs `request` if the block `ahead` of the current one exists.
    fn if_block(&self, k: &mut Builder, ahead: u32, request: impl FnOnce(&mut Builder)) {
        let last: Src<R32> = match self.bound.lower {
            None => ahead.into(),
            Some(lower) => k.add(lower.from, ahead).into(),
        };
        let some = k.setp_s(CmpOp::Ge, self.current, last);
        k.if_(some, request);
    }

    /// Requests the stream's next tile, and steps down.
    fn request(&self, k: &mut Builder, stream: &Stream, to: Shared, limit: Option<R32>) {
        stream.copy.load(k, to, stream.from, limit);
        k.advance_to(stream.from, stream.block_bytes.wrapping_neg());
    }

    /// Requests the block whose turn it is, as one group, into the stage that the last visit left; nothing at
    /// the first visit, before which every stage was requested.
    fn request_ahead(&self, k: &mut Builder) {
        let ahead = k.sub(self.current, self.next);
        let exists = k.setp_s(CmpOp::Ge, self.next, self.bound.from());
        let turn = k.setp_s_and(CmpOp::Lt, ahead, self.stages, exists);
        k.if_(turn, |k| {
            k.sub_to(self.next, self.next, 1);
            let free = self.stage_before(k);
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

    fn open_keys(&self, k: &mut Builder, tile: Shared) -> KeyTile {
        KeyTile { tile: self.key.reader.open(k, tile), tail: self.key.tail.map(|tail| tail.open(k, tile)) }
    }

    /// The stage that the last visit left.
    fn stage_before(&self, k: &mut Builder) -> R32 {
        if self.stages == 2 {
            return k.xor(self.stage, self.stage_bytes);
        }
        let before = k.sub(self.stage, self.stage_bytes);
        let wraps = k.setp_u(CmpOp::Eq, self.stage, 0);
        k.selp(self.ahead() * self.stage_bytes, before, wraps)
    }

    /// The stage that the next visit takes.
    fn stage_after(&self, k: &mut Builder) -> R32 {
        if self.stages == 2 {
            return k.xor(self.stage, self.stage_bytes);
        }
        let next = k.add(self.stage, self.stage_bytes);
        let wraps = k.setp_u(CmpOp::Eq, next, self.stages * self.stage_bytes);
        k.selp(0, next, wraps)
    }

    /// On to the next stage of the ring.
    fn next_stage(&self, k: &mut Builder) {
        if self.stages > 1 {
            let next = self.stage_after(k);
            k.mov_to(self.stage, next);
        }
    }
}

impl Block<'_> {
    /// The block's keys, once they are complete and visible.
    pub fn key(&self, k: &mut Builder) -> KeyTile {
        let p = self.pipeline;
        if let Some(stage) = self.key_stage {
            let tile = k.shared_advance(p.key.tile, stage);
            return p.open_keys(k, tile);
        }
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
        p.open_keys(k, tile)
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
