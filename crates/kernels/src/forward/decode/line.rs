//! The line of KV blocks of all tiles: its length, the CTA's piece of it, and the steps along it.

use attend::{Bound, KeyBand, Lengths, RowRange, Sequence, SequenceRows};
use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};
use tile::Pieces;

/// More rows than any sequence has packed.
const ALL_ROWS: u32 = 1 << 30;

/// The sequences whose tiles follow each other on the line: batch entries, in each its KV heads, in each the
/// tiles of packed rows, in each the blocks of keys that the sequence's rows see.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyLine {
    pub lengths: Option<Lengths>,
    /// Number of batch entries.
    pub batch: R32,
    pub heads_kv: R32,
    pub seq_q: R32,
    pub seq_kv: R32,
    pub band: KeyBand,
    /// Query heads of a KV head.
    pub group: u32,
    /// Rows of a tile, a power of two.
    pub rows: u32,
    /// Keys of a block.
    pub block_n: u32,
    /// Blocks of a piece, a power of two, if keys are cut at fixed pieces. The line then consists of pieces,
    /// and otherwise of blocks.
    pub piece: Option<u32>,
    pub lane: R32,
}

/// A batch entry on the line.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineEntry {
    pub q: SequenceRows,
    pub kv: SequenceRows,
    /// Tiles of a KV head.
    pub tiles: R32,
    /// The first block of each tile, and one past the last. A tile has at least one block.
    pub from: R32,
    pub end: R32,
}

/// A batch entry for each lane of a warp, and its place on the line.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneEntries {
    /// The batch entry of lane 0.
    base: R32,
    entry: LineEntry,
    /// Blocks (or pieces) of all KV heads of the lane's entry; 0 beyond the last entry.
    blocks: R32,
    /// Tiles of all KV heads of the lane's entry; 0 beyond the last entry.
    tiles: R32,
}

/// A block on the line. The registers change as the cursor advances.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineCursor {
    pub batch: R32,
    /// The KV head.
    pub head: R32,
    pub tile: R32,
    pub block: R32,
    pub entry: LineEntry,
}

impl KeyLine {
    /// A batch entry.
    fn entry(&self, k: &mut Builder, batch: R32) -> LineEntry {
        let Sequence { q, kv, .. } = match &self.lengths {
            Some(lengths) => lengths.sequence(k, batch),
            None => {
                let all = |len| SequenceRows { start: None, len };
                Sequence { batch, q: all(self.seq_q), kv: all(self.seq_kv) }
            }
        };
        let first = k.mov(0);
        let rows = RowRange { first, rows: ALL_ROWS, seq_q: q.len, seq_kv: kv.len, heads: self.group };
        let bound = Bound::new(k, &self.band, &rows, self.block_n, false);
        let from = bound.lower.map_or(first, |lower| lower.from);
        let least = k.add(from, 1);
        let end = k.max_s(bound.end, least);
        let packed = k.mul(q.len, self.group);
        let up = k.add(packed, self.rows - 1);
        LineEntry { q, kv, tiles: k.shr_u(up, self.rows.trailing_zeros()), from, end }
    }

    /// Blocks (or pieces) of a KV head of an entry, and of one of its tiles.
    fn blocks(&self, k: &mut Builder, entry: &LineEntry) -> [R32; 2] {
        let of_tile = match self.piece {
            None => k.sub(entry.end, entry.from),
            Some(_) => {
                let last = k.sub(entry.end, 1);
                let last = self.piece_of_tile(k, entry, last);
                k.add(last, 1)
            }
        };
        [k.mul(entry.tiles, of_tile), of_tile]
    }

    /// The number of a block's piece among the pieces of its tile.
    pub fn piece_of_tile(&self, k: &mut Builder, entry: &LineEntry, block: R32) -> R32 {
        let bits = self.piece.map_or(0, u32::trailing_zeros);
        let [first, own] = [entry.from, block].map(|block| k.shr_u(block, bits));
        k.sub(own, first)
    }

    /// Whether the block under the cursor is the last one of its piece in the tile.
    pub fn ends_piece(&self, k: &mut Builder, at: &LineCursor) -> Pred {
        let next = k.add(at.block, 1);
        let of_tile = k.setp_s(CmpOp::Ge, next, at.entry.end);
        let in_piece = k.and(next, self.piece.unwrap_or(1) - 1);
        let of_piece = k.setp_u(CmpOp::Eq, in_piece, 0);
        k.or_pred(of_tile, of_piece)
    }

    /// Loads the lane's entry, the lane's number after `base`. Returns the blocks of one of its tiles.
    fn load_lanes(&self, k: &mut Builder, lanes: &LaneEntries) -> R32 {
        let batch = k.add(lanes.base, self.lane);
        let exists = k.setp_u(CmpOp::Lt, batch, self.batch);
        let last = k.sub(self.batch, 1);
        let batch = k.min_u(batch, last);
        let entry = self.entry(k, batch);
        lanes.entry.copy_from(k, &entry);
        let [of_head, of_tile] = self.blocks(k, &entry);
        for (to, of_head) in [(lanes.blocks, of_head), (lanes.tiles, entry.tiles)] {
            let all = k.mul(of_head, self.heads_kv);
            k.selp_to(to, all, 0, exists);
        }
        of_tile
    }

    /// Cuts the line into pieces of at least `least` blocks for at most as many CTAs as the grid has. Returns
    /// the pieces, their number, and the first entries. Every warp adds up all sequences, the first ones
    /// last.
    pub fn cut(&self, k: &mut Builder, least: u32) -> (Pieces, R32, LaneEntries) {
        let [total, tiles, longest]: [R32; 3] = std::array::from_fn(|_| k.mov(0));
        let last = k.sub(self.batch, 1);
        let base = k.and(last, !31);
        let entry = self.no_entry(k);
        let lanes = LaneEntries { base, entry, blocks: k.mov(0), tiles: k.mov(0) };
        k.do_while(|k| {
            let of_tile = self.load_lanes(k, &lanes);
            k.add_to(total, total, lanes.blocks);
            k.add_to(tiles, tiles, lanes.tiles);
            k.max_u_to(longest, longest, of_tile);
            let more = k.setp_u(CmpOp::Ne, base, 0);
            k.guarded(more, |k| k.sub_to(base, base, 32));
            more
        });
        let [total, tiles] = [total, tiles].map(|n| k.redux_add(n));
        let longest = k.redux_max_u(longest);
        let grid = k.special(SpecialReg::NctaidX);
        let most = tile::divide(k, total, least);
        let takers = k.min_u(grid, most);
        let takers = k.max_u(takers, 1);
        let piece = k.div_u(total, takers);
        let before = k.mul(piece, takers);
        let longer = k.sub(total, before);
        let pieces = Pieces { piece, longer };
        let several = k.setp_u(CmpOp::Gt, total, takers);
        k.if_(several, |k| KeyLine::cut_evenly(k, [total, tiles, longest], &pieces, takers));
        (pieces, takers, lanes)
    }

    /// Lets pieces be whole tiles, or equal parts of a tile, if all tiles are equally long and pieces are
    /// then at most a sixteenth longer. Fewer tiles are divided, a CTA has parts of a single one, and the
    /// remaining CTAs fill the memory's bandwidth.
    fn cut_evenly(k: &mut Builder, [total, tiles, longest]: [R32; 3], pieces: &Pieces, takers: R32) {
        let even = k.mul(tiles, longest);
        let even = k.setp_u(CmpOp::Eq, even, total);
        let uneven = k.min_u(pieces.longer, 1);
        let most = k.add(pieces.piece, uneven);
        // Tiles of a piece, rounded up, or parts of a tile, rounded down.
        let divided = k.setp_u(CmpOp::Gt, longest, most);
        let up = k.add(most, longest);
        let up = k.sub(up, 1);
        let (long, short) = (k.selp(longest, up, divided), k.selp(most, longest, divided));
        let ratio = k.div_u(long, short);
        // Blocks of a part of a tile, or the number of pieces of whole tiles.
        let quotient = {
            let all = k.selp(longest, tiles, divided);
            k.div_u(all, ratio)
        };
        let exact = k.mul(quotient, ratio);
        let whole = k.mul(longest, ratio);
        let of_tiles = k.mul(tiles, ratio);
        let piece = k.selp(quotient, whole, divided);
        let count = k.selp(of_tiles, quotient, divided);
        let all = k.selp(longest, tiles, divided);
        let longer = k.sub(piece, most);
        let longer = k.shl(longer, 4);
        let near = k.setp_u_and(CmpOp::Le, longer, most, even);
        let cuts = k.setp_u_and(CmpOp::Eq, exact, all, near);
        k.selp_to(pieces.piece, piece, pieces.piece, cuts);
        k.selp_to(pieces.longer, 0, pieces.longer, cuts);
        k.selp_to(takers, count, takers, cuts);
    }

    /// The cursor at block `start` of the line, which exists. `lanes` has the first entries, and is used up.
    pub fn find(&self, k: &mut Builder, start: R32, lanes: &LaneEntries) -> LineCursor {
        let [carry, owner, before]: [R32; 3] = std::array::from_fn(|_| k.mov(0));
        k.do_while(|k| {
            let sum = k.mov(lanes.blocks);
            for distance in [1, 2, 4, 8, 16] {
                let lane = k.sub(self.lane, distance);
                let lane = k.and(lane, 31);
                let other = k.shfl_idx(sum, lane);
                let adds = k.setp_u(CmpOp::Ge, self.lane, distance);
                let other = k.selp(other, 0, adds);
                k.add_to(sum, sum, other);
            }
            let up_to = k.add(carry, sum);
            let reached = k.setp_u(CmpOp::Gt, up_to, start);
            let mask = k.ballot(reached);
            // The number of the lowest bit; without any, 32, and the values of the lane are not used.
            let below = k.sub(mask, 1);
            let not = k.not(mask);
            let below = k.and(below, not);
            let lane = k.popc(below);
            k.mov_to(owner, lane);
            let of_owner = k.sub(up_to, lanes.blocks);
            let lane = k.and(lane, 31);
            let of_owner = k.shfl_idx(of_owner, lane);
            k.mov_to(before, of_owner);
            let all = k.shfl_idx(sum, 31);
            k.add_to(carry, carry, all);
            let missing = k.setp_u(CmpOp::Eq, mask, 0);
            let next = k.add(lanes.base, 32);
            let more = k.setp_u_and(CmpOp::Lt, next, self.batch, missing);
            k.if_(more, |k| {
                k.mov_to(lanes.base, next);
                self.load_lanes(k, lanes);
            });
            more
        });
        let batch = k.add(lanes.base, owner);
        let found = lanes.entry.of_lane(k, owner);
        let [of_head, of_tile] = self.blocks(k, &found);
        let offset = k.sub(start, before);
        let [head, tiles_before] = [of_head, of_tile].map(|blocks| k.div_u(offset, blocks));
        let of_heads = k.mul(head, found.tiles);
        let tile = k.sub(tiles_before, of_heads);
        let before = k.mul(tiles_before, of_tile);
        let in_tile = k.sub(offset, before);
        let block = match self.piece {
            None => k.add(found.from, in_tile),
            Some(blocks) => {
                let piece = k.shr_u(found.from, blocks.trailing_zeros());
                let piece = k.add(piece, in_tile);
                let start = k.mul(piece, blocks);
                k.max_s(start, found.from)
            }
        };
        LineCursor { batch, head, tile, block, entry: found }
    }

    /// Registers for an entry.
    fn no_entry(&self, k: &mut Builder) -> LineEntry {
        let starts = self.lengths.map_or([false; 2], |lengths| lengths.have_starts());
        let [q, kv] = starts.map(|has| SequenceRows { start: has.then(|| k.mov(0)), len: k.mov(0) });
        LineEntry { q, kv, tiles: k.mov(0), from: k.mov(0), end: k.mov(0) }
    }

    /// Advances to the next block of the line. Beyond the last block, the cursor is at some block.
    pub fn advance(&self, k: &mut Builder, at: &LineCursor) {
        k.add_to(at.block, at.block, 1);
        let next_tile = k.setp_s(CmpOp::Ge, at.block, at.entry.end);
        k.if_(next_tile, |k| {
            k.add_to(at.tile, at.tile, 1);
            let next_head = k.setp_u(CmpOp::Ge, at.tile, at.entry.tiles);
            k.if_(next_head, |k| {
                k.mov_to(at.tile, 0);
                k.add_to(at.head, at.head, 1);
                let next_entry = k.setp_u(CmpOp::Ge, at.head, self.heads_kv);
                k.if_(next_entry, |k| {
                    k.mov_to(at.head, 0);
                    self.enter_next(k, at);
                });
            });
            k.mov_to(at.block, at.entry.from);
        });
    }

    /// Advances to the next entry with query rows, or to the last entry.
    fn enter_next(&self, k: &mut Builder, at: &LineCursor) {
        let last = k.sub(self.batch, 1);
        k.do_while(|k| {
            k.add_to(at.batch, at.batch, 1);
            k.min_u_to(at.batch, at.batch, last);
            let entry = self.entry(k, at.batch);
            at.entry.copy_from(k, &entry);
            let empty = k.setp_u(CmpOp::Eq, entry.tiles, 0);
            k.setp_u_and(CmpOp::Lt, at.batch, last, empty)
        });
    }
}

impl LineEntry {
    fn registers(&self) -> impl Iterator<Item = R32> {
        let starts = [self.q.start, self.kv.start].into_iter().flatten();
        starts.chain([self.q.len, self.kv.len, self.tiles, self.from, self.end])
    }

    /// The entry in registers of its own.
    fn owned(&self, k: &mut Builder) -> LineEntry {
        self.map(|register| k.mov(register))
    }

    /// The entry that lane `lane` has.
    fn of_lane(&self, k: &mut Builder, lane: R32) -> LineEntry {
        self.map(|register| k.shfl_idx(register, lane))
    }

    fn map(&self, mut copy: impl FnMut(R32) -> R32) -> LineEntry {
        let LineEntry { q, kv, tiles, from, end } = *self;
        let [q, kv] =
            [q, kv].map(|rows| SequenceRows { start: rows.start.map(&mut copy), len: copy(rows.len) });
        LineEntry { q, kv, tiles: copy(tiles), from: copy(from), end: copy(end) }
    }

    fn copy_from(&self, k: &mut Builder, other: &LineEntry) {
        for (to, from) in self.registers().zip(other.registers()) {
            k.mov_to(to, from);
        }
    }
}

impl LineCursor {
    /// The cursor in registers of its own.
    pub fn owned(&self, k: &mut Builder) -> LineCursor {
        let [batch, head, tile, block] = [self.batch, self.head, self.tile, self.block].map(|r| k.mov(r));
        LineCursor { batch, head, tile, block, entry: self.entry.owned(k) }
    }
}
