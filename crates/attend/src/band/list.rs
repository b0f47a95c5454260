//! Lists of the KV blocks that the rows of a tile see, for masks that no band can express.
//!
//! A list is an array of 32-bit integers: the number of blocks, the number of full blocks, then the block
//! indices. The indices of full blocks are stored from the front in ascending order, those of partial blocks
//! from the end in descending order. A *position* counts the full blocks from 0 on, then the partial blocks
//! from the lowest on. The main loop goes down from the last position, so it visits partial blocks first,
//! beginning with the highest one, which is the only block that can be ragged.

use ptx::{Builder, CmpOp, Global, Guard, Pointer, Pred, R32, Shared};

use super::Bound;

/// Integers before the block indices.
const HEADER: u32 = 2;
/// Codes that classify a block while a list is written.
const PARTIAL: u32 = 1;
const FULL: u32 = 2;

/// Location of the lists of a problem: `[batch][head][tile]`.
#[derive(Clone, Copy, Debug)]
pub struct BlockLists {
    pub start: Global,
    /// The largest number of blocks of a list.
    pub capacity: R32,
    /// Number of lists from one batch entry to the next, and from one head to the next; 0 if they share
    /// lists.
    pub batch_step: R32,
    pub head_step: R32,
}

/// The list of a tile.
#[derive(Clone, Copy, Debug)]
pub struct BlockList {
    /// The first block index.
    blocks: Global,
    /// The last slot for a block index.
    last: R32,
    /// Number of full blocks.
    pub full: R32,
    /// Number of blocks.
    pub count: R32,
}

impl BlockLists {
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
        let mut count: R32 = k.ld(list);
        let mut full: R32 = k.ld(list.at(4));
        if let Some(exists) = exists {
            count = k.selp(count, 1, exists);
            full = k.min_u(full, count);
        }
        let last = k.sub(self.capacity, 1);
        BlockList { blocks: list.at(4 * i64::from(HEADER)), last, full, count }
    }

    /// Writes the list of a tile; run by all threads of a CTA of `warps` warps. `judge` classifies a block,
    /// in all lanes of a warp: whether any row sees any of the keys, and whether every row sees every key,
    /// each as 1 or 0. `bound` holds the blocks of the band. With `at_least_one`, a list without visible keys
    /// contains block 0 as a partial block. `codes` is shared memory for `warps` integers.
    pub fn write(
        &self,
        k: &mut Builder,
        at: [R32; 3],
        (bound, at_least_one): (&Bound, bool),
        (warp, lane, warps): (R32, R32, u32),
        codes: Shared,
        judge: impl FnOnce(&mut Builder, R32) -> [R32; 2],
    ) {
        let list = self.list(k, at);
        let blocks = list.at(4 * i64::from(HEADER));
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
            let code: R32 = k.mov(0);
            let exists = k.setp_s(CmpOp::Lt, block, bound.end);
            k.if_(exists, |k| {
                let [any, all] = judge(k, block);
                let mut is_full = k.setp_u(CmpOp::Ne, all, 0);
                if let Some(full) = bound.full {
                    is_full = k.setp_s_and(CmpOp::Lt, block, full, is_full);
                }
                if let Some(full_from) = bound.lower.and_then(|lower| lower.full_from) {
                    is_full = k.setp_s_and(CmpOp::Ge, block, full_from, is_full);
                }
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
                let to = k.index(blocks, place, 4);
                k.guarded(stores, |k| k.st(to, block));
                let more = k.popc(all);
                k.add_to(count, count, more);
            };
            append(k, FULL, full, false);
            append(k, PARTIAL, partial, true);
            k.bar_sync();
        });
        // One thread writes the two counts.
        let first_warp = k.setp_u(CmpOp::Eq, warp, 0);
        let writes = k.and_pred(first_warp, speaks);
        k.if_(writes, |k| {
            let mut count = k.add(full, partial);
            if at_least_one {
                let none = k.setp_u(CmpOp::Eq, count, 0);
                k.if_(none, |k| {
                    let to = k.index(blocks, last, 4);
                    let zero: R32 = k.mov(0);
                    k.st(to, zero);
                });
                count = k.max_u(count, 1);
            }
            k.st(list, count);
            k.st(list.at(4), full);
        });
    }
}

impl BlockList {
    /// The block at a position.
    pub fn block(&self, k: &mut Builder, position: R32) -> R32 {
        let of_partial = k.sub(position, self.full);
        let from_end = k.sub(self.last, of_partial);
        let is_partial = k.setp_s(CmpOp::Ge, of_partial, 0);
        let place = k.selp(from_end, position, is_partial);
        let at = k.index(self.blocks, place, 4);
        k.ld(at)
    }

    /// The positions to visit, in the form of a bound on blocks: positions from `full` on are partial.
    pub const fn bound(&self) -> Bound {
        Bound { lower: None, full: Some(self.full), end: self.count }
    }
}
