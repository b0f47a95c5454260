//! The main kernel for head dims above 128: one consumer warpgroup for each gradient.
//!
//! dK and dV of 64 keys fill half of a thread's registers each, so they are in different warpgroups. The
//! warpgroup of dV computes S and P, and passes P on in f32. The warpgroup of dK computes dP and dS, and
//! passes dS on. The third warpgroup computes dQ = dS K in parts and adds them to the sums in global memory,
//! so that no product of the others waits for an addition. Each of the first two issues the product of its
//! next visit ahead of its gradient, whose operand has registers of its own.
//!
//! The additions bound the kernel: a visit adds 64 KB.

use attend::Masker;
use problem::Tensor;
use ptx::{Builder, CmpOp, Pointer, SpecialReg};
use tile::{
    AccTile, Accumulate, Consumer, OperandTile, Products, Relay, SharedMatrix, SwizzledTile, Threads,
    WARPGROUP_THREADS, WarpRows,
};

use super::convert::{PART_BYTES, PART_TILES, add_part, place_of_part};
use super::emit::Main;
use super::plan::{APART_SLOTS, WEIGHT_SLOTS};
use super::tiles::{KeyTile, Visit};
use crate::forward::contract::half;

/// Registers of a thread of each warpgroup: in sum those of four threads at the launch. Fewer for dQ, or
/// registers for two parts of it, serialise the products.
const PRODUCER_REGISTERS: u32 = 24;
const DV_REGISTERS: u32 = 208;
const DK_REGISTERS: u32 = 216;
const DQ_REGISTERS: u32 = 64;
/// Bytes of the sums of the warpgroup's part of dQ.
const WARPGROUP_PART_BYTES: u32 = 4 * PART_BYTES;

impl Main<'_> {
    /// The relays of P and of dS.
    fn relays(&self) -> [Relay; 2] {
        let of_ds = self.barriers.at(Relay::bytes(WEIGHT_SLOTS).into());
        [Relay::new(self.barriers, WEIGHT_SLOTS), Relay::new(of_ds, APART_SLOTS)]
    }

    /// Initialises the barriers and divides the warpgroups. Each consumer finds its tile: registers that live
    /// across `setmaxnreg` are spilled.
    pub(super) fn compute_apart(&self, k: &mut Builder) {
        let thread = k.special(SpecialReg::TidX);
        let first = k.setp_u(CmpOp::Eq, thread, 0);
        k.if_(first, |k| {
            for ring in &self.rings {
                ring.pipeline.init(k, 2 * WARPGROUP_THREADS / 32);
            }
            for relay in self.relays() {
                relay.init(k);
            }
            self.prepare_order(k);
            k.fence_mbarrier_init();
        });
        k.bar_sync();
        self.await_rows(k);
        let warp = k.warp_index_uniform();
        let group = k.shr_u(warp, 2);
        let [produces, of_dv, of_dq] = [0, 1, 3].map(|number| k.setp_u(CmpOp::Eq, group, number));
        k.if_else(
            produces,
            |k| {
                k.setmaxnreg_dec(PRODUCER_REGISTERS);
                self.produce_in_order(k, first, (thread, warp));
            },
            |k| {
                k.if_else(
                    of_dq,
                    |k| {
                        k.setmaxnreg_dec(DQ_REGISTERS);
                        self.compute_dq(k);
                    },
                    |k| {
                        k.if_else(
                            of_dv,
                            |k| {
                                k.setmaxnreg_inc(DV_REGISTERS);
                                self.compute_dv(k);
                            },
                            |k| {
                                k.setmaxnreg_inc(DK_REGISTERS);
                                self.compute_dk(k);
                            },
                        );
                    },
                );
            },
        );
    }

    /// The warpgroup of dV. The numbers in the margin are the lines of FlashAttention-2, Algorithm 2.
    fn compute_dv(&self, k: &mut Builder) {
        let consumer = &consumer(k);
        let keys_tile = &self.own_tile(k);
        let [queries, keys, _, gradients] = &self.rings;
        let own = SharedMatrix::over_columns(k, keys.tile, keys.first);
        let q = SharedMatrix::over_columns(k, queries.tile, queries.first);
        let d_out = SharedMatrix::over_rows(k, gradients.tile, gradients.first);
        let (s, p) = self.score_registers(k);
        let dv = AccTile::zero(k, 16, self.sizes.multiplied(self.baked, Tensor::V));
        let mask = Masker::new(k, &keys_tile.band, &consumer.threads, &keys_tile.keys, 16, self.sizes.rows);
        let mask = mask.of_probabilities();
        let gradient = self.score_gradient(&mask);
        let [weights, _] = self.relays();
        let slot = weights.writer(k);
        let place = k.shared_index(self.weights, consumer.threads.index, 16);
        let q_at = queries.pipeline.consumer_state(k);
        let [ahead, at] = [0; 2].map(|_| gradients.pipeline.consumer_state(k));
        let mut products = self.products();
        let issue_scores = |k: &mut Builder, products: &mut Products| {
            queries.pipeline.consumer_wait(k, &q_at);
            let q = q.stage(k, q_at.stage);
            products.fence(k);
            self.issue_scores(k, products, [own, q], &s);
            products.commit(k)
        };
        let weigh = |k: &mut Builder, visit: Visit| {
            queries.pipeline.consumer_release(k, &q_at, consumer.elected);
            q_at.advance(k);
            gradients.pipeline.consumer_wait(k, &ahead);
            let [minus_log_sums, _] = self.numbers(k, consumer, &ahead);
            ahead.advance(k);
            let p = keys_tile.probabilities(k, consumer, &gradient, &s, &minus_log_sums, visit);
            weights.acquire(k, &slot);
            for (n, &tile) in (0..).zip(p.tiles()) {
                k.st_vec(place.at(vectors(n)), tile);
            }
            weights.publish(k, &slot, consumer.elected);
            p
        };
        let issue_dv = |k: &mut Builder, products: &mut Products| {
            let d_out = d_out.stage(k, at.stage);
            add_product(k, products, &p, d_out, &dv); //                          12: dV += Pᵀ dO
            products.commit(k)
        };

        let loaded = keys.pipeline.consumer_state(k);
        keys_tile.if_visited(k, |k, visit| {
            keys.pipeline.consumer_wait(k, &loaded);
            issue_scores(k, &mut products);
            k.wgmma_wait(0);
            weigh(k, visit).round_to(k, half(self.baked), &p);
            keys_tile.each_further(k, visit, |k| {
                let of_scores = issue_scores(k, &mut products);
                let of_dv = issue_dv(k, &mut products); // The fence of the scores came after P was rounded.
                products.wait(k, of_scores);
                let weights = weigh(k, visit);
                products.wait(k, of_dv);
                gradients.pipeline.consumer_release(k, &at, consumer.elected);
                at.advance(k);
                weights.round_to(k, half(self.baked), &p);
            });
            products.fence(k);
            issue_dv(k, &mut products);
            k.wgmma_wait(0);
        });
        keys_tile.store(k, consumer, &dv, Tensor::Dv); //                              18
    }

    /// The warpgroup of dK.
    fn compute_dk(&self, k: &mut Builder) {
        let consumer = &consumer(k);
        let keys_tile = &self.own_tile(k);
        let [queries, _, values, gradients] = &self.rings;
        let own = SharedMatrix::over_columns(k, values.tile, values.first);
        let q = SharedMatrix::over_rows(k, queries.tile, queries.first);
        let d_out = SharedMatrix::over_columns(k, gradients.tile, gradients.first);
        let (dp, ds) = self.score_registers(k);
        let dk = AccTile::zero(k, 16, self.sizes.multiplied(self.baked, Tensor::K));
        let mask = Masker::new(k, &keys_tile.band, &consumer.threads, &keys_tile.keys, 16, self.sizes.rows);
        let gradient = self.score_gradient(&mask);
        let [weights, of_ds] = self.relays();
        let (slot, ds_slot) = (weights.reader(k), of_ds.writer(k));
        let place = k.shared_index(self.weights, consumer.threads.index, 16);
        let (tile, first) = self.ds;
        let rows = k.shared_index(first, consumer.threads.row_warp, WarpRows::ROWS * SwizzledTile::ROW_BYTES);
        let ds_rows = WarpRows::new(k, tile, rows, &consumer.threads);
        let d_out_at = gradients.pipeline.consumer_state(k);
        let at = queries.pipeline.consumer_state(k);
        let mut products = self.products();
        let issue_dp = |k: &mut Builder, products: &mut Products| {
            gradients.pipeline.consumer_wait(k, &d_out_at);
            let d_out = d_out.stage(k, d_out_at.stage);
            products.fence(k);
            products.wgmma_ss(k, own, d_out, &dp, Accumulate::Set); //            13: dPᵀ = V dOᵀ
            products.commit(k)
        };
        let differentiate = |k: &mut Builder| {
            let numbers = self.numbers(k, consumer, &d_out_at);
            weights.wait(k, &slot);
            for n in 0..dp.n_tiles() {
                let p = AccTile::unset(k, 16, 8);
                k.ld_vec_to(p.tile(0, 0), place.at(vectors(n)));
                let numbers = numbers.clone().map(|numbers| numbers.from_tile(n));
                gradient.scores(k, &p, &p, &dp.columns(n, 1), &numbers); //       14: dS = P ∘ (dP − D)
            }
            weights.release(k, &slot, consumer.elected);
            // All lanes have read their numbers: `release` has synchronised the warp.
            gradients.pipeline.consumer_release(k, &d_out_at, consumer.elected);
            d_out_at.advance(k);
        };
        let pass_on = |k: &mut Builder| {
            dp.round_to(k, half(self.baked), &ds);
            of_ds.acquire(k, &ds_slot);
            ds_rows.at_stage(k, &ds_slot, tile.bytes()).write(k, &ds);
            of_ds.publish_operand(k, &ds_slot, consumer.elected);
        };
        let issue_dk = |k: &mut Builder, products: &mut Products| {
            queries.pipeline.consumer_wait(k, &at);
            let q = q.stage(k, at.stage);
            products.fence(k);
            add_product(k, products, &ds, q, &dk); //                             16: dK += dSᵀ Q
            products.commit(k)
        };

        let loaded = values.pipeline.consumer_state(k);
        keys_tile.if_visited(k, |k, visit| {
            values.pipeline.consumer_wait(k, &loaded);
            issue_dp(k, &mut products);
            k.wgmma_wait(0);
            differentiate(k);
            pass_on(k);
            keys_tile.each_further(k, visit, |k| {
                let of_dp = issue_dp(k, &mut products);
                let of_dk = issue_dk(k, &mut products);
                products.wait(k, of_dp);
                differentiate(k);
                products.wait(k, of_dk);
                queries.pipeline.consumer_release(k, &at, consumer.elected);
                at.advance(k);
                pass_on(k);
            });
            issue_dk(k, &mut products);
            k.wgmma_wait(0);
        });
        keys_tile.store(k, consumer, &dk, Tensor::Dk); //                              18
    }

    /// The warpgroup of dQ.
    fn compute_dq(&self, k: &mut Builder) {
        let consumer = &consumer(k);
        let keys_tile = &self.own_tile(k);
        let [_, keys, ..] = &self.rings;
        let all_keys = SharedMatrix::over_rows(k, keys.tile, keys.first);
        let (tile, first) = self.ds;
        let all_ds = SharedMatrix::over_rows(k, tile, first);
        let dq = AccTile::unset(k, 16, 8 * PART_TILES);
        let [_, of_ds] = self.relays();
        let slot = of_ds.reader(k);
        let order = self.params.order.map(|_| {
            let [turns, additions] = self.turns_and_additions();
            (turns, turns.reader(k), additions, additions.writer(k))
        });
        let mut products = self.products();
        let parts = self.sizes.columns / (8 * PART_TILES);
        let loaded = keys.pipeline.consumer_state(k);
        let visit = keys_tile.first_visit(k);
        let visited = keys_tile.is_visit(k, visit);
        k.if_(visited, |k| keys.pipeline.consumer_wait(k, &loaded));
        k.while_(
            |k| keys_tile.is_visit(k, visit),
            |k| {
                let place = keys_tile.place(k, visit);
                let sums = self.params.row_tiles.sums(k, place);
                let sums = place_of_part(k, sums, consumer.threads.row_warp, consumer.threads.lane);
                of_ds.wait(k, &slot);
                let ds = all_ds.stage(k, slot.stage);
                for part in 0..parts {
                    products.fence(k);
                    let keys = all_keys.from_column(8 * PART_TILES * part);
                    products.wgmma_ss(k, ds, keys, &dq, Accumulate::Set); //          15: dQ = dS K
                    products.commit(k);
                    k.wgmma_wait(0);
                    if let Some((turns, turn, ..)) = order.as_ref().filter(|_| part == 0) {
                        turns.wait(k, turn);
                    }
                    if part + 1 == parts {
                        of_ds.release_operand(k, &slot, consumer.elected);
                    }
                    add_part(k, sums.at(i64::from(part * WARPGROUP_PART_BYTES)), &dq);
                }
                if let Some((turns, turn, additions, addition)) = &order {
                    additions.acquire(k, addition);
                    additions.publish(k, addition, consumer.elected);
                    turns.release_operand(k, turn, consumer.elected);
                }
                keys_tile.advance(k, visit);
            },
        );
    }

    /// Registers of S or dP, and of the operand that it is rounded to.
    fn score_registers(&self, k: &mut Builder) -> (AccTile, OperandTile) {
        let rows = self.sizes.rows;
        (AccTile::unset(k, 16, rows), OperandTile::unset(k, half(self.baked), 16, rows))
    }
}

impl KeyTile<'_> {
    /// Moves `visit` to each visit after the first one.
    fn each_further(&self, k: &mut Builder, visit: Visit, run: impl FnOnce(&mut Builder)) {
        let next = |k: &mut Builder| {
            self.advance(k, visit);
            self.is_visit(k, visit)
        };
        k.while_(next, run);
    }
}

/// D += A B, in products of at most 128 columns: at the launch, a thread has too few registers for an
/// instruction of 256 columns, and ptxas refuses it.
fn add_product(k: &mut Builder, products: &Products, a: &OperandTile, b: SharedMatrix, d: &AccTile) {
    const TILES: u32 = 16;
    for first in (0..d.n_tiles()).step_by(TILES as usize) {
        let d = d.columns(first, TILES.min(d.n_tiles() - first));
        products.wgmma_rs(k, a, b.from_column(8 * first), &d, Accumulate::Add);
    }
}

/// The position of a thread in its consumer warpgroup. Each warpgroup computes its own: registers that live
/// across `setmaxnreg` are spilled.
fn consumer(k: &mut Builder) -> Consumer {
    let index = k.special(SpecialReg::TidX);
    let warp = k.shr_u(index, 5);
    let lane = k.and(index, 31);
    let in_quad = k.and(lane, 3);
    let threads = Threads {
        count: WARPGROUP_THREADS,
        index: k.and(index, WARPGROUP_THREADS - 1),
        lane,
        warp,
        quad: k.shr_u(lane, 2),
        column: k.shl(in_quad, 1),
        row_warp: k.and(warp, 3),
        kv_warps: 1,
        part: None,
    };
    Consumer { group: k.mov(0), threads, elected: k.setp_u(CmpOp::Eq, lane, 0) }
}

/// Offset of vector `n` of four registers of each thread of a warpgroup.
fn vectors(n: u32) -> i64 {
    i64::from(n * 16 * WARPGROUP_THREADS)
}
