//! Tile scheduler: which CTA of a persistent kernel computes which tiles, and in which order.

use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};

use super::broadcast::IndexedTile;
use super::grid::remainder;
use crate::{Cluster, Consumer, Locate, PipelineState, StreamK, TileBroadcast, TileGrid, TilePart, WorkTile};

/// How tiles are assigned to CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handout {
    /// CTA `i` of `n` takes tiles `i`, `i + n`, `i + 2n`, …
    Static,
    /// CTA `i` of `n` takes tiles `i`, `2n − 1 − i`, `2n + i`, `4n − 1 − i`, …. If tiles are sorted from long
    /// to short, a CTA with a long tile gets a short one next, without an atomic counter.
    Folded,
    /// A CTA takes the next tile from an atomic counter when it has finished one.
    Dynamic,
    /// One CTA per tile, not persistent: the hardware starts CTAs as others exit.
    Grid,
}

/// The sequence of a CTA's tile indices, for a schedule that is known in advance.
#[derive(Clone, Copy, Debug)]
struct TileSequence {
    index: R32,
    /// The step from one index to the next.
    stride: Stride,
}

#[derive(Clone, Copy, Debug)]
enum Stride {
    /// The number of CTAs that take tiles.
    Even,
    /// Folded: the register holds the sum of this index and the next.
    Folded(R32),
    /// The number of CTAs that take tiles; after the whole tiles, the CTA's piece of the shared tiles. The
    /// registers are the first block of the tile and one past the last block.
    StreamK([R32; 2]),
}

/// The tile scheduler for the producer and the consumers. A launch has at most as many CTAs as tiles (or as
/// blocks, if the tiles of the last wave are shared), so every CTA has work at the start.
#[derive(Clone, Copy, Debug)]
pub struct TileScheduler<'a> {
    pub handout: Handout,
    pub grid: TileGrid,
    /// Finds the rows of a tile if batch entries have different rows. With dynamic scheduling, the producer
    /// calls it.
    pub locate: Option<&'a dyn Locate>,
    /// Present with dynamic scheduling.
    pub broadcast: Option<TileBroadcast>,
    /// Present if the CTAs of a cluster take a tile together.
    pub cluster: Option<Cluster>,
    /// How the tiles of the last wave are shared, if they are. Requires [`Handout::Static`].
    pub stream_k: Option<StreamK>,
}

impl TileScheduler<'_> {
    /// Runs `produce` for each tile of the CTA, in the producer thread. `produce` must call the closure that
    /// it is given exactly once, before its last request: the closure takes the next tile index from the
    /// counter. If the index were taken earlier, the CTA would hold a tile while other CTAs are already idle,
    /// which costs 5% for tiles of different lengths. The wait for the last request's stage hides the latency
    /// of the atomic; a producer whose requests are far ahead of the consumers may call it after the last
    /// one. If batch entries have different rows, the closure also searches for the rows of the next tile and
    /// sends the tile, because that search takes longer than the atomic.
    pub fn for_each_as_producer(
        &self,
        k: &mut Builder,
        produce: impl FnOnce(&mut Builder, &WorkTile, &mut dyn FnMut(&mut Builder)),
    ) {
        let (index, takers) = (self.first(k), self.takers(k));
        match (&self.broadcast, self.cluster) {
            (None, _) => {
                let sequence = self.sequence(k, index);
                k.do_while(|k| {
                    let tile = self.tile(k, &sequence);
                    produce(k, &tile, &mut |_| ());
                    self.step(k, &sequence, takers);
                    k.setp_u(CmpOp::Lt, sequence.index, self.grid.tiles)
                });
            }
            (Some(broadcast), None) => {
                let (sent, tile) = (broadcast.pipeline.producer_state(k), IndexedTile::new(k, self, index));
                let send_next = |k: &mut Builder, taken: R32| {
                    let index = k.add(taken, takers);
                    let next = IndexedTile::new(k, self, index);
                    self.pass_empty_tiles(k, broadcast, &next, takers);
                    broadcast.send(k, &sent, &next);
                    next
                };
                k.do_while(|k| {
                    let (mut taken, mut next) = (k.reg(), None);
                    produce(k, &tile.tile, &mut |k| {
                        taken = broadcast.take(k);
                        next = self.locate.map(|_| send_next(k, taken));
                    });
                    let next = next.unwrap_or_else(|| send_next(k, taken));
                    tile.copy_from(k, &next);
                    k.setp_u(CmpOp::Lt, tile.index, self.grid.tiles)
                });
                broadcast.reset(k, takers);
            }
            (Some(broadcast), Some(cluster)) => {
                let (sent, received) =
                    (broadcast.pipeline.producer_state(k), broadcast.pipeline.consumer_state(k));
                let sends = k.setp_u(CmpOp::Eq, cluster.rank, 0);
                let tile = IndexedTile::new(k, self, index);
                k.do_while(|k| {
                    let mut taken = k.reg();
                    produce(k, &tile.tile, &mut |k| taken = k.guarded(sends, |k| broadcast.take(k)));
                    k.if_(sends, |k| {
                        let next = k.add(taken, takers);
                        let next = IndexedTile::new(k, self, next);
                        broadcast.send(k, &sent, &next);
                    });
                    broadcast.receive_alone(k, &received, &tile);
                    k.setp_u(CmpOp::Lt, tile.index, self.grid.tiles)
                });
                k.if_(sends, |k| broadcast.reset(k, takers));
            }
        }
    }

    /// Takes further tiles from the counter while `next` has no rows.
    fn pass_empty_tiles(&self, k: &mut Builder, broadcast: &TileBroadcast, next: &IndexedTile, takers: R32) {
        let Some(spans) = next.tile.spans else { return };
        k.while_(
            |k| {
                let is_tile = k.setp_u(CmpOp::Lt, next.index, self.grid.tiles);
                k.setp_u_and(CmpOp::Eq, spans.rows[1], 0, is_tile)
            },
            |k| {
                let taken = broadcast.take(k);
                let index = k.add(taken, takers);
                let after = IndexedTile::new(k, self, index);
                next.copy_from(k, &after);
            },
        );
    }

    /// The work tile with this index.
    pub(crate) fn decode(&self, k: &mut Builder, index: R32) -> WorkTile {
        let tile = self.grid.tile(k, index);
        self.locate.map_or(tile, |locate| locate.locate(k, tile))
    }

    /// The first tile of the CTA or cluster; the only one with [`Handout::Grid`].
    pub fn first_tile(&self, k: &mut Builder) -> WorkTile {
        let first = self.first(k);
        self.decode(k, first)
    }

    /// The index of the first tile of a CTA or cluster: its own.
    fn first(&self, k: &mut Builder) -> R32 {
        k.special(if self.cluster.is_some() { SpecialReg::ClusteridX } else { SpecialReg::CtaidX })
    }

    /// Number of CTAs or clusters that take tiles.
    fn takers(&self, k: &mut Builder) -> R32 {
        k.special(if self.cluster.is_some() { SpecialReg::NclusteridX } else { SpecialReg::NctaidX })
    }

    /// The sequence from tile `first` on.
    fn sequence(&self, k: &mut Builder, first: R32) -> TileSequence {
        let stride = match (self.handout, &self.stream_k) {
            (Handout::Folded, _) => {
                let takers = self.takers(k);
                let round = k.mul(takers, 2);
                Stride::Folded(k.sub(round, 1))
            }
            (_, Some(stream_k)) => Stride::StreamK([k.mov(0), k.mov(stream_k.blocks)]),
            (_, None) => Stride::Even,
        };
        let sequence = TileSequence { index: k.mov(first), stride };
        if let (Stride::StreamK(span), Some(stream_k)) = (stride, &self.stream_k) {
            // If there are fewer tiles than CTAs, all tiles are shared.
            let beyond = k.setp_u(CmpOp::Ge, first, stream_k.whole);
            k.if_(beyond, |k| {
                let start = stream_k.pieces.start(k, first);
                self.go_to(k, stream_k, (sequence.index, span), start);
            });
        }
        sequence
    }

    /// The work tile at the sequence's position.
    fn tile(&self, k: &mut Builder, sequence: &TileSequence) -> WorkTile {
        let tile = self.decode(k, sequence.index);
        let part = match (sequence.stride, &self.stream_k) {
            (Stride::StreamK(span), Some(stream_k)) => Some(TilePart::new(k, stream_k, sequence.index, span)),
            _ => None,
        };
        WorkTile { part, ..tile }
    }

    /// Advances to the next index. Indices grow from round to round, so the first index beyond the last tile
    /// ends the sequence.
    fn step(&self, k: &mut Builder, sequence: &TileSequence, takers: R32) {
        match (sequence.stride, &self.stream_k) {
            (Stride::Folded(sum), _) => {
                let next = k.sub(sum, sequence.index);
                k.mov_to(sequence.index, next);
                let both = k.mad(takers, 2, sum);
                k.mov_to(sum, both);
            }
            (Stride::StreamK(span), Some(stream_k)) => {
                let next = k.add(sequence.index, takers);
                let whole = k.setp_u(CmpOp::Lt, next, stream_k.whole);
                k.if_else(
                    whole,
                    |k| k.mov_to(sequence.index, next),
                    |k| {
                        let first = self.first(k);
                        let start = stream_k.pieces.start(k, first);
                        let before = k.sub(sequence.index, stream_k.whole);
                        let done = k.mad(before, stream_k.blocks, span[1]);
                        let began = k.setp_u(CmpOp::Ge, sequence.index, stream_k.whole);
                        let at = k.selp(done, start, began);
                        self.go_to(k, stream_k, (sequence.index, span), at);
                    },
                );
            }
            _ => k.add_to(sequence.index, sequence.index, takers),
        }
    }

    /// Moves to the tile and the blocks at which the CTA's piece continues, from block `at` of the line of
    /// blocks on. Moves beyond the last tile if the piece has ended.
    fn go_to(&self, k: &mut Builder, stream_k: &StreamK, (index, [from, end]): (R32, [R32; 2]), at: R32) {
        let first = self.first(k);
        let next = k.add(first, 1);
        let stop = stream_k.pieces.start(k, next);
        let tile = k.div_u(at, stream_k.blocks);
        let block = remainder(k, at, tile, stream_k.blocks);
        let left = k.sub(stop, at);
        let past = k.add(block, left);
        let past = k.min_u(past, stream_k.blocks);
        k.mov_to(from, block);
        k.mov_to(end, past);
        let more = k.setp_u(CmpOp::Lt, at, stop);
        let tile = k.add(stream_k.whole, tile);
        k.selp_to(index, tile, self.grid.tiles, more);
    }

    /// A consumer's position, at the CTA's first tile.
    pub fn consumer<'a>(&'a self, k: &mut Builder, consumer: &Consumer) -> TileCursor<'a> {
        let index = self.first(k);
        TileCursor {
            scheduler: self,
            sequence: self.sequence(k, index),
            reader: self.broadcast.map(|broadcast| {
                let [now, next] = [(); 2].map(|()| IndexedTile::new(k, self, index));
                BroadcastReader { broadcast, received: broadcast.pipeline.consumer_state(k), now, next }
            }),
            elected: consumer.elected,
        }
    }
}

/// A consumer's state with dynamic scheduling: its ring position and the last received tile.
#[derive(Clone, Copy, Debug)]
struct BroadcastReader {
    broadcast: TileBroadcast,
    received: PipelineState,
    now: IndexedTile,
    next: IndexedTile,
}

/// A consumer's position in the sequence of the CTA's tiles.
#[derive(Clone, Copy, Debug)]
pub struct TileCursor<'a> {
    scheduler: &'a TileScheduler<'a>,
    /// The current tile, or the next one once it is known; unused with dynamic scheduling.
    sequence: TileSequence,
    reader: Option<BroadcastReader>,
    elected: Pred,
}

impl TileCursor<'_> {
    /// Runs `compute` for each tile of the CTA, in all threads of a consumer. `compute` must call
    /// [`TileCursor::advance`] exactly once and return its result.
    pub fn for_each(&self, k: &mut Builder, compute: impl FnOnce(&mut Builder, &WorkTile) -> Pred) {
        k.do_while(|k| {
            let tile = match &self.reader {
                None => self.scheduler.tile(k, &self.sequence),
                Some(reader) => reader.now.tile,
            };
            let more = compute(k, &tile);
            if let Some(reader) = &self.reader {
                reader.now.copy_from(k, &reader.next);
            }
            more
        });
    }

    /// Advances to the next tile. Returns whether there is one.
    pub fn advance(&self, k: &mut Builder) -> Pred {
        let index = match &self.reader {
            None => {
                let takers = self.scheduler.takers(k);
                self.scheduler.step(k, &self.sequence, takers);
                self.sequence.index
            }
            Some(reader) => {
                reader.broadcast.receive(k, &reader.received, self.elected, &reader.next);
                reader.next.index
            }
        };
        k.setp_u(CmpOp::Lt, index, self.scheduler.grid.tiles)
    }

    /// The tile that [`TileCursor::advance`] has moved to, if there is one; before the first call, the first
    /// tile.
    pub fn next(&self, k: &mut Builder) -> WorkTile {
        match &self.reader {
            None => self.scheduler.tile(k, &self.sequence),
            Some(reader) => reader.next.tile,
        }
    }
}
