//! The consumer warpgroups: the blocks of a tile in turn, and the end of a tile.

use std::ops::Range;

use attend::{BlockScores, Chains, Coverage, Masker, OnlineSoftmax, RowRange, ScoreChain, SharedRowMax};
use ptx::{Builder, CmpOp, Pointer, R32, Shared};
use tile::{
    AccTile, Accumulate, Consumer, Mbarriers, OperandTile, Products, SharedMatrix, SwizzledTile, Threads,
    WarpRows, WarpgroupPair, WarpgroupVote,
};

use super::Warpgroups;
use crate::forward::decode::form::{BLOCK, DIMS, P_FROM, PANEL, PART, PARTS, STATE_FROM};
use crate::forward::decode::line::LineCursor;
use crate::forward::decode::plan::ROWS;
use crate::forward::decode::tiles::LineTiles;

/// A stage of keys, as a warpgroup reads it.
#[derive(Clone, Copy)]
struct Stage {
    /// The warpgroup's columns of V.
    values: SharedMatrix,
    /// P, in place of the last columns.
    probs: SharedMatrix,
    /// The barrier of releases.
    released: Shared,
}

/// A consumer warpgroup.
struct State<'a> {
    /// The tiles, with the thread's position among the consumers.
    tiles: LineTiles<'a>,
    consumer: Consumer,
    key_threads: Threads,
    queries: SharedMatrix,
    /// The keys of the warpgroup's own stage.
    keys: SharedMatrix,
    filled: Mbarriers,
    /// The parity of the own stage's barriers.
    parity: R32,
    own: Stage,
    other: Stage,
    /// The warp's rows of P in the own stage.
    own_probs: WarpRows,
    pair: WarpgroupPair,
    group: WarpgroupVote,
    row_max: SharedRowMax,
    softmax: OnlineSoftmax,
    s: AccTile,
    p: OperandTile,
    o: AccTile,
}

impl Warpgroups<'_> {
    fn state(&self, k: &mut Builder, consumer: &Consumer) -> State<'_> {
        let part = consumer.group;
        let consumer = consumer.sharing_rows(k);
        // The warp counts among the consumers.
        let threads = Threads { warp: k.sub(consumer.threads.warp, 4), ..consumer.threads };
        let tiles = LineTiles { threads, part, ..self.tiles.clone() };
        let half = SwizzledTile::new(BLOCK, DIMS[1] as u32 / 2);
        let peer = k.xor(part, 1);
        let mut stage = |number: R32| {
            let after = k.add(number, 1);
            let at = self.tile_at(k, after);
            let of_half = k.shared_index(at, part, half.bytes());
            let released = self.released(k, number);
            let stage = Stage {
                values: SharedMatrix::over_rows(k, half, of_half),
                probs: SharedMatrix::over_columns(k, PANEL, at.at(P_FROM.into())),
                released,
            };
            (at, stage)
        };
        let ((at, own), (_, other)) = (stage(part), stage(peer));
        let own_rows = k.shared_index(at, threads.row_warp, WarpRows::ROWS * SwizzledTile::ROW_BYTES);
        State {
            consumer,
            key_threads: threads.of_all_columns(),
            queries: SharedMatrix::over_columns(k, PART, self.shared),
            keys: SharedMatrix::over_columns(k, PART, at),
            filled: self.filled(k, part),
            parity: k.mov(0),
            own,
            other,
            own_probs: WarpRows::new(k, PANEL, own_rows.at(P_FROM.into()), &threads),
            pair: WarpgroupPair::new(k, part),
            group: WarpgroupVote::new(k, part),
            row_max: SharedRowMax::new(k, self.shared.at(STATE_FROM.into()), &threads),
            softmax: tiles.softmax(k),
            s: AccTile::unset(k, ROWS, BLOCK),
            p: OperandTile::unset(k, tiles.product, ROWS, BLOCK),
            o: AccTile::unset(k, ROWS, half.columns),
            tiles,
        }
    }

    /// A consumer warpgroup: the tiles of `left` blocks from `start` on the line.
    pub(super) fn consume(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        at: &LineCursor,
        (start, left): (R32, R32),
    ) {
        let state = self.state(k, consumer);
        let (at, left, place) = (at.owned(k), k.mov(left), k.mov(start));
        // The warpgroup whose block is next.
        let turn = k.mov(0);
        self.request_queries(k, &at);
        k.do_while(|k| {
            k.cp_async_wait(0);
            k.fence_proxy_async_shared();
            state.pair.sync(k); // Q is written
            state.softmax.reset(k, &state.o);
            let of_tile = k.sub(at.entry.end, at.block);
            let count = k.min_u(of_tile, left);
            let from = k.mov(at.block);
            state.blocks(k, &at, (count, turn));
            let odd = k.and(count, 1);
            k.xor_to(turn, turn, odd);
            state.row_max.write_sums(k, &state.softmax);
            state.pair.sync(k); // Q is read, the sums are written
            state.row_max.add_sums(k, &state.softmax);
            let last = k.sub(count, 1);
            k.add_to(at.block, from, last);
            let done = at.owned(k);
            let block = k.add(place, last);
            k.add_to(place, place, count);
            k.sub_to(left, left, count);
            self.tiles.line.advance(k, &at);
            let more = k.setp_u(CmpOp::Ne, left, 0);
            // The next queries arrive during the merge.
            k.if_(more, |k| self.request_queries(k, &at));
            state.tiles.finish(k, &done, (from, block), (&state.softmax, &state.o));
            k.setp_u(CmpOp::Ne, left, 0)
        });
    }
}

impl State<'_> {
    /// The `count` blocks of a tile from the one under the cursor on, of which the first belongs to
    /// warpgroup `turn`. Each warpgroup computes its own blocks and adds the P V of all.
    fn blocks(&self, k: &mut Builder, at: &LineCursor, (count, turn): (R32, R32)) {
        let rows = self.tiles.rows(k, at);
        let at = LineCursor { block: k.mov(at.block), ..*at };
        let left = k.mov(count);
        let begins = k.setp_u(CmpOp::Eq, turn, self.tiles.part);
        k.if_(begins, |k| {
            k.wgmma_fence();
            self.issue_scores(k, 0..PARTS);
            self.own_block(k, &at, &rows);
            k.add_to(at.block, at.block, 1);
            k.sub_to(left, left, 1);
        });
        let pair = |k: &mut Builder| k.setp_u(CmpOp::Gt, left, 1);
        k.while_(pair, |k| {
            self.issue_other(k);
            self.issue_scores(k, 0..1);
            k.wgmma_wait(1);
            self.release(k, &self.other);
            self.issue_scores(k, 1..PARTS);
            k.add_to(at.block, at.block, 1);
            self.own_block(k, &at, &rows);
            k.add_to(at.block, at.block, 1);
            k.sub_to(left, left, 2);
        });
        let one = k.setp_u(CmpOp::Ne, left, 0);
        k.if_(one, |k| {
            self.issue_other(k);
            k.wgmma_wait(0);
            self.release(k, &self.other);
        });
    }

    /// S = Q Kᵀ of parts of the own stage, as the keys arrive.
    fn issue_scores(&self, k: &mut Builder, parts: Range<u32>) {
        let products = Products::new([self.tiles.product.ty(); 2]);
        for part in parts {
            k.mbarrier_wait_parity(self.filled.at(part), self.parity);
            let accumulate = if part == 0 { Accumulate::Set } else { Accumulate::Add };
            products.wgmma_ss(k, self.queries.tile(part), self.keys.tile(part), &self.s, accumulate);
        }
        k.wgmma_commit();
    }

    /// Waits for P of the other warpgroup's block, and issues its P V.
    fn issue_other(&self, k: &mut Builder) {
        self.pair.receive(k);
        self.row_max.take(k, &self.softmax, &self.o); // m; O, l rescaled
        k.wgmma_fence();
        let products = Products::new([self.tiles.product.ty(); 2]);
        products.wgmma_ss(k, self.other.probs, self.other.values, &self.o, Accumulate::Add);
        k.wgmma_commit();
    }

    /// After S of the own block under the cursor was issued: the softmax, P for the other warpgroup, and P V.
    fn own_block(&self, k: &mut Builder, at: &LineCursor, rows: &RowRange) {
        k.wgmma_wait(0);
        k.xor_to(self.parity, self.parity, 1);
        let LineTiles { params, .. } = &self.tiles;
        let mask = Masker::new(k, &params.band, &self.key_threads, rows, ROWS, BLOCK);
        let chain =
            ScoreChain { softcap: params.softcap.as_ref(), mask: Some(&mask), ..ScoreChain::default() };
        let partial = BlockScores::in_place(Coverage::Partial);
        let origin = k.mul(at.block, BLOCK);
        chain.transform(k, &self.s, &partial, |_| origin);
        let hides = self.tiles.is_partial(k, at, rows);
        k.if_(hides, |k| chain.hide(k, &self.s, &partial, |_| origin)); // −∞ where a row sees no key
        let rescale = self.softmax.update_row_max(k, &self.s, CHAINS); // m = max(m, S·c); l·α
        let sums = self.softmax.exponentials(k, &self.s, CHAINS); // P = exp2(S·c − m)
        self.softmax.add_sums(k, &sums); // l += Σ P
        self.s.round_to(k, self.tiles.product, &self.p);
        self.group.sync(k); // all warps have read the columns in whose place P comes
        self.own_probs.write(k, &self.p);
        self.row_max.pass_on(k, &self.softmax, &rescale);
        k.fence_proxy_async_shared();
        self.pair.pass_on(k);
        rescale.apply(k, &self.o); // O·α
        k.wgmma_fence();
        let products = Products::new([self.tiles.product.ty(); 2]);
        products.wgmma_rs(k, &self.p, self.own.values, &self.o, Accumulate::Add); // O += P V
        k.wgmma_commit();
        k.wgmma_wait(0);
        self.release(k, &self.own);
    }

    /// Says that the warp has read a stage.
    fn release(&self, k: &mut Builder, stage: &Stage) {
        k.guarded(self.consumer.elected, |k| k.mbarrier_arrive(stage.released));
    }
}

/// Chains of the reductions of maximum and sum.
const CHAINS: Chains = Chains { max: 2, sum: 2 };
