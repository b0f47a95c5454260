//! The query rows of a CTA and of a warpgroup, and the KV blocks that these rows see.

use attend::{BlockList, Bound, KeyBand, MainLoop, Masked, RowRange, Tiles, Walk};
use ptx::{Builder, CmpOp, R32, Src};
use tile::{Consumer, Tail, TileCursor, WARPGROUP_ROWS, WorkTile};

use super::memory::Forward;
use super::plan::{Ends, WgmmaPlan};

impl WgmmaPlan {
    /// Whether a warpgroup skips the blocks below the lower bound of its own rows.
    pub(super) fn skips_last(&self, band: &KeyBand) -> bool {
        let whole_tiles = self.tiles == Tiles::InTurn && self.tail == Tail::Whole;
        band.before.is_some() && self.ends == Ends::Own && whole_tiles
    }
}

impl Forward<'_> {
    /// The CTA's query rows of a tile.
    pub(super) fn rows(&self, k: &mut Builder, tile: &WorkTile) -> RowRange {
        let row_block = match self.schedule.cluster {
            None => tile.row_block,
            Some(cluster) => k.mad(tile.row_block, cluster.ctas, cluster.rank),
        };
        self.range(k, tile, row_block, 1)
    }

    /// Range `number` of the query rows of a head, where each range covers `tiles` tiles. If packed heads do
    /// not fill a tile, the range includes rows of the next range.
    fn range(&self, k: &mut Builder, tile: &WorkTile, number: R32, tiles: u32) -> RowRange {
        let [seq_q, seq_kv] = self.lengths(tile);
        RowRange {
            first: k.mul(number, tiles * self.plan.tile_rows(self.baked)),
            rows: tiles * self.plan.block_m(),
            seq_q,
            seq_kv,
            heads: self.plan.packed_heads(self.baked),
        }
    }

    /// Whether the last KV block ends where the keys end.
    pub(super) const fn divides(&self) -> bool {
        self.baked.divides
    }

    /// One past the last KV block of a tile, over all CTAs of a cluster.
    pub(super) fn end(&self, k: &mut Builder, tile: &WorkTile) -> R32 {
        self.tile_bound(k, tile).end
    }

    /// The KV blocks of a tile, over all CTAs of a cluster.
    fn tile_bound(&self, k: &mut Builder, tile: &WorkTile) -> Bound {
        let rows = self.range(k, tile, tile.row_block, self.plan.cluster);
        self.bound_of(k, &rows)
    }

    /// The first KV block of a tile to visit, and one past the last.
    pub(super) fn span(&self, k: &mut Builder, tile: &WorkTile) -> (Src<R32>, R32) {
        match tile.part {
            None => {
                let bound = self.tile_bound(k, tile);
                (bound.from(), bound.end)
            }
            Some(part) => (part.from.into(), part.end),
        }
    }

    /// The KV blocks that the rows see. At least one block is visited, so that producer and consumers stay in
    /// step; for rows that see no key, that block is completely masked.
    fn bound_of(&self, k: &mut Builder, rows: &RowRange) -> Bound {
        let bound = Bound::new(k, &self.params.band, rows, self.plan.block_n, self.divides());
        let some = self.params.band.is_full() && self.params.lengths.is_none();
        if some { bound } else { bound.at_least_one(k) }
    }

    /// A warpgroup's rows of a tile.
    pub(super) fn own_rows(&self, k: &mut Builder, tile: &RowRange, consumer: &Consumer) -> RowRange {
        let first = k.mad(consumer.group, WARPGROUP_ROWS, tile.first);
        RowRange { first, rows: WARPGROUP_ROWS, ..*tile }
    }

    /// The list of a tile's blocks, if there are lists.
    pub(super) fn list(&self, k: &mut Builder, tile: &WorkTile) -> Option<BlockList> {
        let lists = self.params.lists?;
        let exists = tile.spans.map(|spans| k.setp_u(CmpOp::Ne, spans.rows[1], 0));
        Some(lists.read(k, [tile.batch, tile.head, tile.row_block], exists))
    }

    /// The KV blocks of a tile that a warpgroup visits, or their positions in the tile's list.
    pub(super) fn walk(
        &self,
        k: &mut Builder,
        tile: &WorkTile,
        own: &RowRange,
        list: Option<&BlockList>,
    ) -> Walk {
        if let Some(list) = list {
            let masked = Masked::From(list.full);
            return Walk { from: 0.into(), full_from: None, end: list.count, masked };
        }
        let (from, end) = match (tile.part, self.params.band.before) {
            (None, None) => (0.into(), self.own_end(k, tile, own)),
            (None, Some(_)) => {
                let end = self.own_end(k, tile, own);
                (self.own_from(k, tile, own, end), end)
            }
            (Some(_), _) => self.span(k, tile),
        };
        let (full_from, masked) = self.masked(k, own);
        Walk { from, full_from, end, masked }
    }

    /// The lowest KV block of a tile that a warpgroup visits.
    fn own_from(&self, k: &mut Builder, tile: &WorkTile, own: &RowRange, own_end: R32) -> Src<R32> {
        let lower = if self.plan.skips_last(&self.params.band) { self.bound_of(k, own).lower } else { None };
        let Some(lower) = lower else { return self.tile_bound(k, tile).from() };
        let last = k.sub(own_end, 1);
        k.min_s(lower.from, last).into()
    }

    /// One past the last KV block of a tile that a warpgroup visits. A warpgroup without queries visits one
    /// block.
    pub(super) fn own_end(&self, k: &mut Builder, tile: &WorkTile, own: &RowRange) -> R32 {
        if self.plan.ends == Ends::Common {
            return self.end(k, tile);
        }
        let end = self.bound_of(k, own).end;
        let limit = k.mul(own.seq_q, own.heads);
        let exists = k.setp_u(CmpOp::Lt, own.first, limit);
        let Some(lower) = self.params.band.before.and_then(|_| self.tile_bound(k, tile).lower) else {
            return k.selp(end, 1, exists);
        };
        let least = k.add(lower.from, 1);
        let end = k.max_s(end, least);
        k.selp(end, least, exists)
    }

    /// Sets the number of blocks of a tile to skip: the blocks from the warpgroup's own end on.
    pub(super) fn skip(&self, k: &mut Builder, main_loop: &MainLoop, tile: &WorkTile, own_end: R32) {
        let Some(skips) = &main_loop.schedule.skips else { return };
        let end = self.end(k, tile);
        let blocks = k.sub(end, own_end);
        skips.set(k, blocks);
    }

    /// Sets the number of blocks to skip at the end of a tile: the blocks below the warpgroup's own lower
    /// bound.
    pub(super) fn skip_last(&self, k: &mut Builder, main_loop: &MainLoop, tile: &WorkTile, walk: &Walk) {
        let Some(skips) =
            main_loop.schedule.skips.as_ref().filter(|_| self.plan.skips_last(&self.params.band))
        else {
            return;
        };
        let (own_from, from) = (k.mov(walk.from.clone()), self.tile_bound(k, tile).from());
        let blocks = k.sub(own_from, from);
        skips.set_last(k, blocks);
    }

    /// Records whether the warpgroup's last row sees at most the first half of the first visited block.
    pub(super) fn halve(&self, k: &mut Builder, main_loop: &MainLoop, own: &RowRange) {
        let Some(halved) = main_loop.schedule.halved else { return };
        let halves = Bound::new(k, &self.params.band, own, self.plan.block_n / 2, false).end;
        let odd = k.and(halves, 1);
        k.mov_to(halved, odd);
    }

    /// Sets the blocks to skip for the tile at the scheduler's current position.
    pub(super) fn look_ahead(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        main_loop: &MainLoop,
        tiles: &TileCursor,
    ) {
        if main_loop.schedule.skips.is_some() {
            let tile = tiles.next(k);
            let rows = self.rows(k, &tile);
            let own = self.own_rows(k, &rows, consumer);
            let own_end = self.own_end(k, &tile, &own);
            self.skip(k, main_loop, &tile, own_end);
        }
    }

    /// The blocks that need a mask for the rows of a warpgroup: the blocks below the first number (lower
    /// bound of the band), and those at the upper end.
    fn masked(&self, k: &mut Builder, own: &RowRange) -> (Option<R32>, Masked) {
        let band = &self.params.band;
        if band.is_full() {
            return (None, if self.divides() { Masked::Never } else { Masked::First });
        }
        let bound = Bound::new(k, band, own, self.plan.block_n, false);
        (bound.lower.and_then(|lower| lower.full_from), bound.full_to.map_or(Masked::First, Masked::From))
    }
}
