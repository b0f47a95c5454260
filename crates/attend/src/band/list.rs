//! Lists of the KV blocks that the rows of a tile see, for masks that no band can express.
//!
//! A list is an array of 32-bit integers: the number of blocks, the number of full blocks, the entry that is
//! visited first, an unused word, then an entry for each block: its index, and whether the band and the mask
//! program hide any of its keys from any row. The entries of full blocks are stored from the front in
//! ascending order, those of partial blocks from the end in descending order. A *position* counts the full
//! blocks from 0 on, then the partial blocks from the lowest on. The main loop goes down from the last
//! position, so it visits partial blocks first, beginning with the highest one, which is the only block that
//! can be ragged.

use ptx::{Builder, CmpOp, Global, Guard, Pointer, Pred, R32, Shared};

use super::Bound;

/// Integers before the entries, which one load reads. The number of entries is a multiple of it.
const HEADER: u32 = 4;
/// The bits of an entry that say what hides keys of the block. The other bits are the index.
const BY_BAND: u32 = 1 << 30;
const BY_PROGRAM: u32 = 1 << 31;
/// Codes that classify a block while a list is written.
const PARTIAL: u32 = 1;
const FULL: u32 = 2;

/// Location of the lists of a problem: `[batch][head][tile]`.
#[derive(Clone, Copy, Debug)]
pub struct BlockLists {
    pub start: Global,
    /// Room for the entries of a list, from [`BlockLists::capacity`].
    pub capacity: R32,
    /// Number of lists from one batch entry to the next, and from one head to the next; 0 if they share
    /// lists.
    pub batch_step: R32,
    pub head_step: R32,
}

/// The list of a tile.
#[derive(Clone, Copy, Debug)]
pub struct BlockList {
    /// The first entry.
    entries: Global,
    /// The last slot for an entry.
    last: R32,
    /// The entry that is visited first.
    first: R32,
    /// Number of full blocks.
    pub full: R32,
    /// Number of blocks.
    pub count: R32,
}

/// The slots of a list's entries.
#[derive(Clone, Copy)]
struct Slots {
    /// The first slot.
    entries: Global,
    /// The last slot.
    last: R32,
    /// Number of full blocks.
    full: R32,
}

/// The CTA that writes a list.
#[derive(Clone, Copy, Debug)]
pub struct ListWriter {
    /// The thread's warp in the CTA.
    pub warp: R32,
    /// The thread's lane.
    pub lane: R32,
    /// Warps of the CTA.
    pub warps: u32,
    /// Shared memory for `warps` integers.
    pub codes: Shared,
}

/// Which masks hide keys of a block, according to the block's entry in a list.
#[derive(Clone, Copy, Debug)]
pub struct Hides(R32);

impl BlockLists {
    /// Room for the entries of `blocks` blocks in a list.
    pub const fn capacity(blocks: u64) -> u64 {
        blocks.div_ceil(HEADER as u64).saturating_mul(HEADER as u64)
    }

    /// Bytes of `lists` lists.
    pub const fn bytes(lists: u64, capacity: u64) -> u64 {
        lists.saturating_mul(capacity.saturating_add(HEADER as u64)).saturating_mul(4)
    }

    /// Start of a tile's list.
    fn list(&self, k: &mut Builder, [batch, head, tile]: [R32; 3]) -> Global {
        let before = k.mad(batch, self.batch_step, tile);
        let list = k.mad(head, self.head_step, before);
        let elements = k.add(self.capacity, HEADER);
        let element = k.mul_wide_u(list, elements);
        let bytes = k.shl(element, 2);
        k.advance(self.start, bytes)
    }

    /// Reads the list of a tile. For a tile without rows, the list has one block, which the caller has to
    /// mask.
    pub fn read(&self, k: &mut Builder, at: [R32; 3], exists: Option<Pred>) -> BlockList {
        let list = self.list(k, at);
        let [mut count, mut full, first, _]: [R32; 4] = k.ld_vec(list);
        if let Some(exists) = exists {
            count = k.selp(count, 1, exists);
            full = k.min_u(full, count);
        }
        let last = k.sub(self.capacity, 1);
        BlockList { entries: list.at(4 * i64::from(HEADER)), last, first, full, count }
    }

    /// Writes the list of a tile; run by all threads of the CTA. `judge` classifies a block, in all lanes of
    /// a warp: whether any row sees any of the keys, and whether every row sees every key, each as 1 or 0, by
    /// the mask program. `bound` holds the blocks of the band. With `at_least_one`, a list without visible
    /// keys contains block 0 as a partial block.
    pub fn write(
        &self,
        k: &mut Builder,
        at: [R32; 3],
        bound: &Bound,
        at_least_one: bool,
        ListWriter { warp, lane, warps, codes }: ListWriter,
        judge: impl FnOnce(&mut Builder, R32) -> [R32; 2],
    ) {
        let list = self.list(k, at);
        let entries = list.at(4 * i64::from(HEADER));
        let last = k.sub(self.capacity, 1);
        let (full, partial): (R32, R32) = (k.mov(0), k.mov(0));
        let own_code = k.shared_index(codes, warp, 4);
        let lane_code = k.shared_index(codes, lane, 4);
        let speaks = k.setp_u(CmpOp::Eq, lane, 0);
        let one: R32 = k.mov(1);
        let bit = k.shl(one, warp);
        let before_own = k.sub(bit, 1);
        k.for_range(bound.from(), bound.end, warps, |k, first| {
            let block = k.add(first, warp);
            let (code, entry): (R32, R32) = (k.mov(0), k.mov(block));
            let exists = k.setp_s(CmpOp::Lt, block, bound.end);
            k.if_(exists, |k| {
                let [any, all] = judge(k, block);
                let marked = marked(k, block, bound, all);
                k.mov_to(entry, marked);
                let is_full = k.setp_u(CmpOp::Lt, entry, BY_BAND);
                let seen: R32 = k.selp(FULL, PARTIAL, is_full);
                let is_seen = k.setp_u(CmpOp::Ne, any, 0);
                k.selp_to(code, seen, 0, is_seen);
            });
            let leads: Guard = speaks.into();
            k.guarded(leads, |k| k.st(own_code, code));
            k.bar_sync();
            let of_lane: R32 = k.mov(0);
            let is_warp = k.setp_u(CmpOp::Lt, lane, warps);
            k.guarded(is_warp, |k| k.ld_to(of_lane, lane_code));
            let append = |k: &mut Builder, wanted: u32, count: R32, from_end: bool| {
                let matches = k.setp_u(CmpOp::Eq, of_lane, wanted);
                let all = k.ballot(matches);
                let before = k.and(all, before_own);
                let before = k.popc(before);
                let place = k.add(count, before);
                let place = if from_end { k.sub(last, place) } else { place };
                let own = k.setp_u(CmpOp::Eq, code, wanted);
                let stores = k.and_pred(own, speaks);
                let to = k.index(entries, place, 4);
                k.guarded(stores, |k| k.st(to, entry));
                let more = k.popc(all);
                k.add_to(count, count, more);
            };
            append(k, FULL, full, false);
            append(k, PARTIAL, partial, true);
            k.bar_sync();
        });
        // One thread writes the header.
        let first_warp = k.setp_u(CmpOp::Eq, warp, 0);
        let writes = k.and_pred(first_warp, speaks);
        k.if_(writes, |k| write_header(k, list, Slots { entries, last, full }, partial, at_least_one));
    }
}

/// The entry of a block: its index, and what hides keys of it. `all` says whether the mask program hides
/// none.
fn marked(k: &mut Builder, block: R32, bound: &Bound, all: R32) -> R32 {
    let by_program = k.setp_u(CmpOp::Eq, all, 0);
    let mut hides = vec![(by_program, BY_PROGRAM)];
    if let Some(full_to) = bound.full_to {
        hides.push((k.setp_s(CmpOp::Ge, block, full_to), BY_BAND));
    }
    if let Some(full_from) = bound.lower.and_then(|lower| lower.full_from) {
        hides.push((k.setp_s(CmpOp::Lt, block, full_from), BY_BAND));
    }
    hides.into_iter().fold(block, |marked, (hides, bit)| {
        let bit: R32 = k.selp(bit, 0, hides);
        k.or(marked, bit)
    })
}

/// Writes the header of a list with `partial` partial blocks; run by one thread after all entries are
/// written.
fn write_header(k: &mut Builder, list: Global, slots: Slots, partial: R32, at_least_one: bool) {
    let mut count = k.add(slots.full, partial);
    if at_least_one {
        let none = k.setp_u(CmpOp::Eq, count, 0);
        k.if_(none, |k| {
            let to = k.index(slots.entries, slots.last, 4);
            let hidden: R32 = k.mov(BY_BAND | BY_PROGRAM);
            k.st(to, hidden);
        });
        count = k.max_u(count, 1);
    }
    let position = k.sub(count, 1);
    let place = slots.at(k, position);
    let visited = k.setp_u(CmpOp::Ne, count, 0);
    let first: R32 = k.mov(0);
    k.guarded(visited, |k| k.ld_to(first, place));
    k.st_vec(list, [count, slots.full, first, first]);
}

impl BlockList {
    /// The block at a position.
    pub fn block(&self, k: &mut Builder, position: R32) -> R32 {
        self.entry(k, position).0
    }

    /// The block at a position, and which masks hide keys of it.
    pub fn entry(&self, k: &mut Builder, position: R32) -> (R32, Hides) {
        let slots = Slots { entries: self.entries, last: self.last, full: self.full };
        let place = slots.at(k, position);
        let entry = k.ld(place);
        hides_of(k, entry)
    }

    /// The block that is visited first, as [`BlockList::entry`].
    pub fn first(&self, k: &mut Builder) -> (R32, Hides) {
        hides_of(k, self.first)
    }

    /// The positions to visit, in the form of a bound on blocks: positions from `full` on are partial.
    pub const fn bound(&self) -> Bound {
        Bound { lower: None, full_to: Some(self.full), end: self.count }
    }
}

impl Slots {
    /// The address of the entry at a position.
    fn at(&self, k: &mut Builder, position: R32) -> Global {
        let of_partial = k.sub(position, self.full);
        let from_end = k.sub(self.last, of_partial);
        let is_partial = k.setp_s(CmpOp::Ge, of_partial, 0);
        let place = k.selp(from_end, position, is_partial);
        k.index(self.entries, place, 4)
    }
}

/// The block of an entry, and what hides keys of it.
fn hides_of(k: &mut Builder, entry: R32) -> (R32, Hides) {
    (k.and(entry, BY_BAND - 1), Hides(entry))
}

impl Hides {
    /// Emits code that runs if the band hides keys of the block from some rows; without an entry, always.
    pub fn by_band(entry: Option<Hides>, k: &mut Builder, hide: impl FnOnce(&mut Builder)) {
        Hides::by(entry, BY_BAND, k, hide);
    }

    /// Like [`Hides::by_band`], for the mask program.
    pub fn by_program(entry: Option<Hides>, k: &mut Builder, hide: impl FnOnce(&mut Builder)) {
        Hides::by(entry, BY_PROGRAM, k, hide);
    }

    fn by(entry: Option<Hides>, bit: u32, k: &mut Builder, hide: impl FnOnce(&mut Builder)) {
        let Some(Hides(entry)) = entry else { return hide(k) };
        let bit = k.and(entry, bit);
        let hides = k.setp_u(CmpOp::Ne, bit, 0);
        k.if_(hides, hide);
    }
}
