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
use ptx::{Access, Builder, CmpOp, Global, Pointer, Pred, R32};
use tile::{Consumer, PipelineState, Relay, divide};

use super::convert::PART_BYTES;
use super::emit::Main;
use super::params::{OwnTile, RowTiles};
use super::plan::{FusedPlan, TileSizes};
use crate::contract::Contract;
use crate::forward::mma::CtaOrder;
use crate::grid::{Axis, Extents, Grid};
use crate::{Arch, Baked};

/// Polls of a CTA for its turns, some ten seconds: it would wait for ever for a CTA that never comes if the
/// ends of packed sequences do not ascend. Its results are wrong then, as without an order.
const MOST_POLLS: i32 = 1 << 24;
/// Slots for the turns and the additions of the warpgroup of dQ, with gradients apart.
const SLOTS: u32 = 2;
/// Bytes of the sums of a warpgroup's part.
const WARPGROUP_PART_BYTES: u32 = 4 * PART_BYTES;

/// Parts of a tile of query rows, each with an order of its own: those of the warpgroups that add.
const fn parts(sizes: TileSizes) -> u32 {
    if sizes.gradients_apart() { 1 } else { 2 }
}

/// Bytes of the barriers in shared memory.
pub(super) const fn barrier_bytes(sizes: TileSizes) -> u32 {
    if sizes.gradients_apart() { 2 * Relay::bytes(SLOTS) } else { parts(sizes) * Relay::bytes(1) }
}

/// The numbers that say whose turn it is, for each part of each tile of query rows.
#[derive(Clone, Copy)]
pub(super) struct AddOrder {
    numbers: Global,
    parts: u32,
}

impl AddOrder {
    /// Declares the numbers, if additions have an order.
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        access: Access,
    ) -> Option<AddOrder> {
        let sizes = TileSizes::new(problem);
        let ([tiles, batch], parts) = (sizes.row_tiles(problem), parts(sizes));
        let bytes = (4 * tiles * batch) as usize * problem.heads_q * parts as usize;
        let ordered = problem.pass.deterministic();
        ordered.then(|| AddOrder { numbers: c.temporary(k, "dq_turns", bytes, access), parts })
    }

    /// The number of a part of a tile.
    fn number(&self, k: &mut Builder, tiles: &RowTiles, place: [R32; 3], part: R32) -> Global {
        let index = tiles.index(k, place);
        let bytes = i64::from(4 * self.parts);
        let of_tile = Global { base: k.mad(index, bytes, self.numbers.base), ..self.numbers };
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
        let writes = k.setp_u(CmpOp::Lt, thread, self.parts);
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

    /// With gradients apart: the turns of the warpgroup of dQ, and its additions.
    pub fn turns_and_additions(&self) -> [Relay; 2] {
        let of_additions = self.add_barriers.at(Relay::bytes(SLOTS).into());
        [Relay::new(self.add_barriers, SLOTS).from_thread(), Relay::new(of_additions, SLOTS).to_thread()]
    }

    /// Initialises the barriers, if additions have an order. Run by one thread.
    pub fn prepare_order(&self, k: &mut Builder) {
        if self.params.order.is_none() {
            return;
        }
        if self.sizes.gradients_apart() {
            return self.turns_and_additions().iter().for_each(|relay| relay.init(k));
        }
        for part in 0..parts(self.sizes) {
            let at = self.add_barriers.at((part * Relay::bytes(1)).into());
            Relay::new(at, 1).to_thread().init(k);
        }
    }

    /// The producer warpgroup: its `first` thread requests tiles. If additions have an order, the first lanes
    /// of two other warps see to it.
    pub fn produce_in_order(&self, k: &mut Builder, first: Pred, (index, warp): (R32, R32)) {
        let Some(order) = self.params.order else { return k.if_(first, |k| self.produce(k)) };
        k.if_else(
            first,
            |k| self.produce(k),
            |k| {
                let lane = k.and(index, 31);
                let first = k.setp_u(CmpOp::Eq, lane, 0);
                let helper = k.sub(warp, 1);
                let helps = k.setp_u_and(CmpOp::Lt, helper, 2, first);
                k.if_(helps, |k| {
                    if self.sizes.gradients_apart() {
                        let awaits = k.setp_u(CmpOp::Eq, helper, 0);
                        k.if_else(awaits, |k| self.await_turns(k, order), |k| self.end_turns(k, order));
                    } else {
                        self.add_parts(k, order, helper);
                    }
                });
            },
        );
    }

    /// Adds a warpgroup's parts of dQ from shared memory.
    fn add_parts(&self, k: &mut Builder, order: AddOrder, part: R32) {
        let relay = self.staged_part(k, part);
        let at = relay.reader(k);
        let staged = k.shared_index(self.staging, part, WARPGROUP_PART_BYTES);
        if self.sizes.takes_turns() {
            // The first two parts belong to no visit: one is sent before and one after the first turn.
            self.if_visited(k, |k, _| {
                for _ in 0..2 {
                    relay.wait(k, &at);
                    relay.release_by_thread(k, &at);
                }
            });
        }
        let (tiles, polls) = (&self.params.row_tiles, k.mov(MOST_POLLS));
        self.each_turn(k, (order, part), |k, turn, place| {
            let sums = tiles.sums(k, place);
            let to = k.index(sums, part, WARPGROUP_PART_BYTES);
            self.await_turn(k, turn, polls);
            relay.wait(k, &at);
            k.bulk_add(to, staged, WARPGROUP_PART_BYTES);
            k.bulk_commit();
            k.bulk_wait_read(0);
            relay.release_by_thread(k, &at);
            k.bulk_wait(0);
            self.end_turn(k, turn);
        });
    }

    /// Tells the warpgroup of dQ when it may add.
    fn await_turns(&self, k: &mut Builder, order: AddOrder) {
        let [turns, _] = self.turns_and_additions();
        let at = turns.writer(k);
        let (part, polls) = (k.mov(0), k.mov(MOST_POLLS));
        self.each_turn(k, (order, part), |k, turn, _| {
            self.await_turn(k, turn, polls);
            turns.acquire(k, &at);
            turns.publish_by_thread(k, &at);
        });
    }

    /// Ends each turn when the warpgroup of dQ has added. The release waits until the additions are complete,
    /// while the warpgroup goes on.
    fn end_turns(&self, k: &mut Builder, order: AddOrder) {
        let [_, additions] = self.turns_and_additions();
        let at = additions.reader(k);
        let part = k.mov(0);
        self.each_turn(k, (order, part), |k, turn, _| {
            additions.wait(k, &at);
            additions.release_by_thread(k, &at);
            self.end_turn(k, turn);
        });
    }

    /// Runs `body` for each visit, with the number that says whose turn it is and the visit's place.
    fn each_turn(
        &self,
        k: &mut Builder,
        (order, part): (AddOrder, R32),
        body: impl FnOnce(&mut Builder, Global, [R32; 3]),
    ) {
        let visit = self.first_visit(k);
        let more = |k: &mut Builder| self.is_visit(k, visit);
        k.while_(more, |k| {
            let place = self.place(k, visit);
            let turn = order.number(k, &self.params.row_tiles, place, part);
            body(k, turn, place);
            self.advance(k, visit);
        });
    }

    /// Waits for a turn, while polls are left.
    fn await_turn(&self, k: &mut Builder, turn: Global, polls: R32) {
        let [.., own] = self.at;
        k.do_while(|k| {
            let number: R32 = k.ld_acquire(turn);
            let waits = k.setp_u(CmpOp::Ne, number, own);
            k.guarded(waits, |k| k.sub_to(polls, polls, 1));
            k.setp_s_and(CmpOp::Gt, polls, 0, waits)
        });
    }

    fn end_turn(&self, k: &mut Builder, turn: Global) {
        let [.., own] = self.at;
        let next = k.sub(own, 1);
        k.st_release(turn, next);
    }
}
