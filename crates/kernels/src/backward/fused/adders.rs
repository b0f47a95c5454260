//! The threads that see to the order of additions to dQ (`order.rs`): two of the producer warpgroup.

use ptx::{Builder, CmpOp, Global, Pointer, Pred, R32};
use tile::{Consumer, PipelineState, Relay};

use super::convert::PART_BYTES;
use super::emit::Main;
use super::order::AddOrder;
use super::plan::APART_SLOTS;
use super::tiles::KeyTile;

/// Polls of a CTA for its turns, some ten seconds: it would wait for ever for a CTA that never comes if the
/// ends of packed sequences do not ascend. Its results are wrong then, as without an order.
const MOST_POLLS: i32 = 1 << 24;
/// Bytes of the sums of a warpgroup's part.
const WARPGROUP_PART_BYTES: u32 = 4 * PART_BYTES;

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
        let of_additions = self.add_barriers.at(Relay::bytes(APART_SLOTS).into());
        [
            Relay::new(self.add_barriers, APART_SLOTS).from_thread(),
            Relay::new(of_additions, APART_SLOTS).to_thread(),
        ]
    }

    /// Initialises the barriers, if additions have an order. Run by one thread.
    pub fn prepare_order(&self, k: &mut Builder) {
        if self.params.order.is_none() {
            return;
        }
        if self.sizes.gradients_apart() {
            return self.turns_and_additions().iter().for_each(|relay| relay.init(k));
        }
        for part in 0..self.sizes.ordered_parts() {
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
        let (tiles, polls) = (&self.params.row_tiles, k.mov(MOST_POLLS));
        let keys = self.own_tile(k);
        if self.sizes.takes_turns() {
            // The first two parts belong to no visit: one is sent before and one after the first turn.
            keys.if_visited(k, |k, _| {
                for _ in 0..2 {
                    relay.wait(k, &at);
                    relay.release_by_thread(k, &at);
                }
            });
        }
        keys.each_turn(k, (order, part), |k, turn, place| {
            let sums = tiles.sums(k, place);
            let to = k.index(sums, part, WARPGROUP_PART_BYTES);
            keys.await_turn(k, turn, polls);
            relay.wait(k, &at);
            k.bulk_add(to, staged, WARPGROUP_PART_BYTES);
            k.bulk_commit();
            k.bulk_wait_read(0);
            relay.release_by_thread(k, &at);
            k.bulk_wait(0);
            keys.end_turn(k, turn);
        });
    }

    /// Tells the warpgroup of dQ when it may add.
    fn await_turns(&self, k: &mut Builder, order: AddOrder) {
        let [turns, _] = self.turns_and_additions();
        let at = turns.writer(k);
        let (part, polls) = (k.mov(0), k.mov(MOST_POLLS));
        let keys = self.own_tile(k);
        keys.each_turn(k, (order, part), |k, turn, _| {
            keys.await_turn(k, turn, polls);
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
        let keys = self.own_tile(k);
        keys.each_turn(k, (order, part), |k, turn, _| {
            additions.wait(k, &at);
            additions.release_by_thread(k, &at);
            keys.end_turn(k, turn);
        });
    }
}

impl KeyTile<'_> {
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
            let turn = order.number(k, &self.main.params.row_tiles, place, part);
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
