//! The fixed order in which CTAs add to the sums of dQ, so that dQ has equal bits in every run.
//!
//! The tiles of keys that see a tile of query rows add their parts of dQ one after the other, from the last
//! tile of keys to the first. A number in global memory says whose turn it is. The kernel before the main
//! kernel sets it to the last tile of keys that sees the rows. A CTA waits until the number is that of its
//! own tile of keys, adds, waits until the addition is complete, and stores the number of the tile before.
//! The tiles of keys that see a tile of query rows are neighbours, so each passes the turn on to the next.
//!
//! There is no deadlock. The CTAs of a head are launched from the last tile of keys to the first, and a GPU
//! starts CTAs in the order of their indices. A CTA therefore waits only for CTAs that run or have ended, and
//! the first of those that run waits for none.
//!
//! CTAs seldom wait, because all of them visit query rows in ascending order. Under a causal mask or a window
//! the tile of keys before another one begins earlier in the query rows, so that of two CTAs that start
//! together, the one with the later keys is ahead in each tile of query rows. Without a mask it is so because
//! it starts earlier: between two CTAs of a head, those of the same keys of other heads are launched
//! ([`section`]).

use attend::KeyBand;
use problem::Problem;
use ptx::{Access, Builder, CmpOp, Global, Pointer, R32};
use tile::{Consumer, PipelineState, Relay, divide};

use super::convert::PART_BYTES;
use super::emit::Main;
use super::params::{OwnTile, RowTiles};
use super::plan::{FusedPlan, TileSizes};
use crate::contract::Contract;
use crate::forward::mma::CtaOrder;
use crate::grid::{Axis, Extents, Grid};
use crate::{Arch, Baked};

/// Parts of a tile of query rows, each with an order of its own: those of the two consumer warpgroups.
const PARTS: u32 = 2;
/// Bytes of the sums of a warpgroup's part.
const WARPGROUP_PART_BYTES: u32 = 4 * PART_BYTES;
/// Bytes of the barriers of the parts in shared memory.
pub(super) const BARRIER_BYTES: u32 = PARTS * Relay::bytes(1);

/// The numbers that say whose turn it is, for each part of each tile of query rows.
#[derive(Clone, Copy)]
pub(super) struct AddOrder {
    numbers: Global,
}

impl AddOrder {
    /// Declares the numbers, if additions have an order.
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        access: Access,
    ) -> Option<AddOrder> {
        let tiles = TileSizes::new(problem).row_tiles(problem).into_iter().product::<u64>();
        let numbers = tiles as usize * problem.heads_q * (4 * PARTS) as usize;
        let ordered = problem.pass.deterministic();
        ordered.then(|| AddOrder { numbers: c.temporary(k, "dq_turns", numbers, access) })
    }

    /// The number of a part of a tile.
    fn number(&self, k: &mut Builder, tiles: &RowTiles, place: [R32; 3], part: R32) -> Global {
        let index = tiles.index(k, place);
        let of_tile = Global { base: k.mad(index, i64::from(4 * PARTS), self.numbers.base), ..self.numbers };
        k.index(of_tile, part, 4)
    }

    /// Gives the turn to the last tile of keys that sees a tile of query rows. The rows may end within the
    /// tile: a CTA visits a tile for the sake of any of its rows.
    pub fn begin(
        &self,
        k: &mut Builder,
        (baked, band): (&Baked, &KeyBand),
        (tiles, own, lengths): (&RowTiles, &OwnTile, [R32; 2]),
        thread: R32,
    ) {
        let sizes = TileSizes::new(baked);
        let [.., tile] = own.at;
        let next = k.add(tile, 1);
        let past = k.mul(next, sizes.rows);
        let [_, seq_kv] = lengths;
        let end = match band.end_before(k, past, lengths) {
            None => seq_kv,
            Some(end) => k.min_s(end, seq_kv),
        };
        let last = k.sub(end, 1);
        let last = divide(k, last, sizes.keys());
        let number = self.number(k, tiles, own.place, thread);
        let writes = k.setp_u(CmpOp::Lt, thread, PARTS);
        k.guarded(writes, |k| k.st(number, last));
    }
}

/// The number of heads, over all batch entries, whose CTAs alternate in the launch. A CTA then starts about
/// one visit after its predecessor in the order of additions if the heads are as many as CTAs run, for each
/// of its visits.
fn section(plan: &FusedPlan, problem: &Problem, [tiles, batch]: [u64; 2]) -> u64 {
    let heads = batch * problem.heads_kv as u64;
    let entries = if problem.lengths.q.packed.is_some() { problem.batch.max(1) as u64 } else { 1 };
    let group = (problem.heads_q / problem.heads_kv.max(1)) as u64;
    let visits = (tiles / entries * group).max(1);
    let wanted = u64::from(Arch::SM_90.multiprocessors).div_ceil(visits);
    match plan.tile_order {
        CtaOrder::HeadsFirst => heads,
        CtaOrder::RowsFirst => {
            (wanted..heads).find(|&section| heads.is_multiple_of(section)).unwrap_or(heads)
        }
    }
}

/// The extents of the main kernel's grid, for `tiles` tiles of keys of each of `batch` batch entries: the
/// heads of a section, tiles of keys, and sections.
pub(super) fn extents(
    plan: &FusedPlan,
    problem: &Problem,
    [tiles, batch]: [u64; 2],
    row_tiles: [u64; 2],
) -> Extents {
    let section = section(plan, problem, [row_tiles[0], batch]).max(1);
    Extents([section, tiles, batch * problem.heads_kv as u64 / section])
}

/// The CTA's batch entry, KV head and tile of keys in such a grid.
pub(super) fn tile_of_cta(k: &mut Builder, baked: &Baked, grid: Grid) -> [R32; 3] {
    let [in_section, before, section] = [Axis::X, Axis::Y, Axis::Z].map(|axis| grid.index(k, axis));
    let (heads, tiles) = (grid.extent(k, Axis::X), grid.extent(k, Axis::Y));
    let index = k.mad(section, heads, in_section);
    let heads = (baked.heads_q as u32) / baked.group_size();
    let batch = divide(k, index, heads);
    let others = k.mul(batch, heads);
    let last = k.sub(tiles, 1);
    [batch, k.sub(index, others), k.sub(last, before)]
}

/// The staging memory of a warpgroup's part of dQ, from which a thread adds.
pub(super) struct Outbox {
    pub relay: Relay,
    pub at: PipelineState,
}

impl Main<'_> {
    /// Where a warpgroup leaves its parts of dQ.
    pub fn outbox(&self, k: &mut Builder, consumer: &Consumer) -> Outbox {
        let relay = self.staged_part(k, consumer.group);
        Outbox { relay, at: relay.writer(k) }
    }

    /// The staging memory of a warpgroup's part of dQ.
    fn staged_part(&self, k: &mut Builder, group: R32) -> Relay {
        Relay::new(k.shared_index(self.add_barriers, group, Relay::bytes(1)), 1).to_thread()
    }

    /// Initialises the barriers of the parts. Run by one thread.
    pub fn prepare_order(&self, k: &mut Builder) {
        for part in 0..PARTS {
            let at = self.add_barriers.at((part * Relay::bytes(1)).into());
            Relay::new(at, 1).to_thread().init(k);
        }
    }

    /// The threads that add the parts of the warpgroups, one for each: the first lanes of the warps after
    /// that of the producer.
    pub fn add_in_order(&self, k: &mut Builder, order: AddOrder, (index, warp): (R32, R32)) {
        let lane = k.and(index, 31);
        let first = k.setp_u(CmpOp::Eq, lane, 0);
        let part = k.sub(warp, 1);
        let adds = k.setp_u_and(CmpOp::Lt, part, PARTS, first);
        k.if_(adds, |k| self.add_parts(k, order, part));
    }

    fn add_parts(&self, k: &mut Builder, order: AddOrder, part: R32) {
        let tiles = &self.params.row_tiles;
        let relay = self.staged_part(k, part);
        let at = relay.reader(k);
        let staged = k.shared_index(self.staging, part, WARPGROUP_PART_BYTES);
        let [.., own] = self.at;
        let next = k.sub(own, 1);
        let visit = self.first_visit(k);
        let more = |k: &mut Builder| self.is_visit(k, visit);
        if self.sizes.takes_turns() {
            // The first two parts belong to no visit: one is sent before and one after the first turn.
            let some = more(k);
            k.if_(some, |k| {
                for _ in 0..2 {
                    relay.wait(k, &at);
                    relay.release_by_thread(k, &at);
                }
            });
        }
        k.while_(more, |k| {
            let place = self.place(k, visit);
            let turn = order.number(k, tiles, place, part);
            let sums = tiles.sums(k, place);
            let to = k.index(sums, part, WARPGROUP_PART_BYTES);
            k.do_while(|k| {
                let number: R32 = k.ld_acquire(turn);
                k.setp_u(CmpOp::Ne, number, own)
            });
            relay.wait(k, &at);
            k.bulk_add(to, staged, WARPGROUP_PART_BYTES);
            k.bulk_commit();
            k.bulk_wait_read(0);
            relay.release_by_thread(k, &at);
            k.bulk_wait(0);
            k.st_release(turn, next);
            self.advance(k, visit);
        });
    }
}
