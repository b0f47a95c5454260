//! Which rows a CTA and a warpgroup take of a tile, and which blocks of keys these see.

use ptx::{Builder, CmpOp, R32, Src};
use tile::{Blocks, Bound, Consumer, MaskRule, Masked, RowRange, Turn, Visits, WARPGROUP_ROWS, WorkTile};

use super::emit::Forward;
use super::plan::Ends;

impl Forward<'_> {
    /// The CTA's query rows of a tile.
    pub(super) fn rows(&self, k: &mut Builder, tile: &WorkTile) -> RowRange {
        let row_block = match self.schedule.peers {
            None => tile.row_block,
            Some(peers) => k.mad(tile.row_block, peers.ctas, peers.rank),
        };
        self.range(k, row_block, self.plan.block_m())
    }

    /// The range of that number, of ranges of `rows` query rows.
    pub(super) fn range(&self, k: &mut Builder, number: R32, rows: u32) -> RowRange {
        RowRange {
            first: k.mul(number, rows),
            rows,
            seq_q: self.params.seq_q,
            seq_kv: self.params.seq_kv,
            heads: self.plan.packed_heads(self.problem),
        }
    }

    /// Whether blocks end where the keys do.
    pub(super) fn divides(&self) -> bool {
        self.problem.seq_kv.is_multiple_of(self.plan.block_n as usize)
    }

    /// One past the last block of a tile, that of all CTAs of a cluster.
    pub(super) fn end(&self, k: &mut Builder, tile: &WorkTile) -> R32 {
        let rows = self.range(k, tile.row_block, self.plan.cluster * self.plan.block_m());
        self.end_of(k, &rows)
    }

    /// The first block of a tile that is to be visited, and one past the last.
    pub(super) fn span(&self, k: &mut Builder, tile: &WorkTile) -> (Src<R32>, R32) {
        match tile.part {
            None => (0.into(), self.end(k, tile)),
            Some(part) => (part.from.into(), part.end),
        }
    }

    /// One past the last block that rows see. They visit one at least, so that roles keep step: rows that see no key find it masked.
    pub(super) fn end_of(&self, k: &mut Builder, rows: &RowRange) -> R32 {
        let end = Bound::new(k, self.rule, rows, self.plan.block_n, self.divides()).end;
        match self.rule {
            MaskRule::All => end,
            MaskRule::Causal(_) => k.max_s(end, 1),
        }
    }

    /// A warpgroup's rows of a tile.
    pub(super) fn own_rows(&self, k: &mut Builder, tile: &RowRange, consumer: &Consumer) -> RowRange {
        let first = k.mad(consumer.group, WARPGROUP_ROWS, tile.first);
        RowRange { first, rows: WARPGROUP_ROWS, ..*tile }
    }

    /// The blocks that a warpgroup visits of a tile.
    pub(super) fn own_blocks(&self, k: &mut Builder, tile: &WorkTile, own: &RowRange) -> Blocks {
        let (from, end) = match tile.part {
            None => (0.into(), self.own_end(k, tile, own)),
            Some(_) => self.span(k, tile),
        };
        Blocks { from, end, masked: self.masked(k, own) }
    }

    /// One past the last block that a warpgroup visits of a tile: of rows beyond the last query, one.
    pub(super) fn own_end(&self, k: &mut Builder, tile: &WorkTile, own: &RowRange) -> R32 {
        if self.plan.ends == Ends::Common {
            return self.end(k, tile);
        }
        let end = self.end_of(k, own);
        let limit = k.mul(own.seq_q, own.heads);
        let exists = k.setp_u(CmpOp::Lt, own.first, limit);
        k.selp(end, 1, exists)
    }

    /// Lets the warpgroup skip the blocks of a tile from its own end on.
    pub(super) fn skip(&self, k: &mut Builder, visits: &Visits, tile: &WorkTile, own_end: R32) {
        let Some(skips) = &visits.skips else { return };
        let end = self.end(k, tile);
        let blocks = k.sub(end, own_end);
        skips.set(k, blocks);
    }

    /// Notes whether the warpgroup's last row sees no more than the first half of the block that it sees last.
    pub(super) fn halve(&self, k: &mut Builder, visits: &Visits, own: &RowRange) {
        let Some(halved) = visits.halved else { return };
        let halves = Bound::new(k, self.rule, own, self.plan.block_n / 2, false).end;
        let odd = k.and(halves, 1);
        k.mov_to(halved, odd);
    }

    /// Lets the warpgroup skip the blocks of the tile at which it stands now.
    pub(super) fn look_ahead(&self, k: &mut Builder, consumer: &Consumer, visits: &Visits, turn: &Turn) {
        if visits.skips.is_some() {
            let tile = turn.next(k);
            let rows = self.rows(k, &tile);
            let own = self.own_rows(k, &rows, consumer);
            let own_end = self.own_end(k, &tile, &own);
            self.skip(k, visits, &tile, own_end);
        }
    }

    /// Which blocks the rows of a warpgroup do not see completely.
    pub(super) fn masked(&self, k: &mut Builder, own: &RowRange) -> Masked {
        match self.rule {
            MaskRule::All if self.divides() => Masked::Never,
            MaskRule::All => Masked::First,
            MaskRule::Causal(_) => {
                let bound = Bound::new(k, self.rule, own, self.plan.block_n, false);
                bound.full.map_or(Masked::First, Masked::From)
            }
        }
    }
}
