//! The KV block of a warpgroup that holds all its keys at once: its scores and its P V, in pieces that
//! overlap.

use std::ops::Range;

use attend::{BlockScores, LaneMaxima, ScoreChain, WarpgroupPlace};
use ptx::{Builder, F32, R32};
use tile::{AccTile, Accumulate, Group, OperandTile, Products, SharedMatrix};

use super::loads::Loads;
use super::paths::Seen;
use super::{AtOncePlan, Merge};
use crate::Baked;
use crate::forward::small::common::SharedMap;
use crate::forward::small::emit::WARP_ROWS;

/// The operands, the accumulators, and the products in flight.
#[derive(Clone)]
pub(super) struct Block<'a> {
    plan: &'a AtOncePlan,
    seen: Seen,
    loads: &'a Loads<'a>,
    products: Products,
    queries: SharedMatrix,
    keys: SharedMatrix,
    /// S: 64 rows × `block_n` keys.
    scores: AccTile,
    /// O in shares that are computed one after the other, each with its columns of V.
    shares: Vec<(AccTile, SharedMatrix)>,
    score_groups: Vec<Group>,
    /// The product groups of the last piece of P V, one for each share.
    share_groups: Vec<Group>,
}

impl<'a> Block<'a> {
    /// Creates the block and waits for the queries.
    pub(super) fn new(
        k: &mut Builder,
        plan: &'a AtOncePlan,
        baked: &Baked,
        map: &SharedMap,
        products: Products,
        place: &WarpgroupPlace,
        loads: &'a Loads<'a>,
    ) -> Block<'a> {
        loads.wait_for_queries(k);
        let queries = SharedMatrix::over_columns(k, map.query_tile, loads.queries);
        let keys = SharedMatrix::over_columns(k, map.key_tile, loads.keys);
        let values = SharedMatrix::over_rows(k, map.value_tile, loads.values);
        let columns = baked.head_dim_v();
        let o = AccTile::unset(k, WARP_ROWS, columns);
        let shares = match plan.merge {
            Merge::Shares => vec![(o, values)],
            Merge::PeerFirst => {
                let n_tiles = o.n_tiles() / 2;
                let peer = k.xor(place.cta, 1);
                vec![
                    (o.columns(0, n_tiles), values.column_part(k, peer, columns / 2)),
                    (o.columns(n_tiles, n_tiles), values.column_part(k, place.cta, columns / 2)),
                ]
            }
        };
        Block {
            plan,
            seen: Seen::whole(plan.block_n),
            loads,
            products,
            queries,
            keys,
            scores: AccTile::unset(k, WARP_ROWS, plan.block_n),
            shares,
            score_groups: Vec::new(),
            share_groups: Vec::new(),
        }
    }

    /// The block, restricted to the keys that the rows of a path see.
    pub(super) fn seen(&self, seen: Seen) -> Block<'a> {
        Block { seen, ..self.clone() }
    }

    /// Number of softmax steps with at least one visible key.
    pub(super) fn steps(&self) -> u32 {
        self.seen.keys.div_ceil(self.plan.block_n / self.plan.softmax_steps)
    }

    /// The pieces of P that a softmax step produces.
    pub(super) fn pv_pieces_of(&self, step: u32) -> Range<u32> {
        let Range { start, end } = self.plan.pv_pieces_of(step);
        start..end.min(self.pv_pieces())
    }

    fn pv_pieces(&self) -> u32 {
        self.seen.pieces(self.plan.pv_keys())
    }

    fn qk_pieces_of(&self, step: u32) -> Range<u32> {
        let Range { start, end } = self.plan.qk_pieces_of(step);
        start..end.min(self.seen.pieces(self.plan.qk_keys()))
    }

    /// Issues S = Q Kᵀ of a softmax step, each piece after its keys have arrived.
    pub(super) fn issue_scores(&mut self, k: &mut Builder, step: u32) {
        let AtOncePlan { qk_pieces, key_copies, .. } = *self.plan;
        let (keys, pieces_per_copy) = (self.plan.qk_keys(), qk_pieces / key_copies);
        for piece in self.qk_pieces_of(step) {
            let (copy, in_copy) = (piece / pieces_per_copy, piece % pieces_per_copy);
            if in_copy == 0 {
                self.loads.wait_for_keys(k, copy);
            }
            if piece == 0 {
                self.products.fence(k);
            }
            let keys_of_piece = self.keys.tile(copy).from_row(in_copy * keys);
            let s = self.piece_of_scores(piece);
            self.products.wgmma_ss(k, self.queries, keys_of_piece, &s, Accumulate::Set);
            self.score_groups.push(self.products.commit(k));
        }
    }

    /// The row maxima of a softmax step, reduced piece by piece.
    pub(super) fn maxima(&self, k: &mut Builder, chain: &ScoreChain<'_>, step: u32) -> LaneMaxima {
        let mut maxima: Option<LaneMaxima> = None;
        for piece in self.qk_pieces_of(step) {
            self.products.wait(k, self.score_groups[piece as usize]);
            let s = self.piece_of_scores(piece);
            let coverage = self.seen.coverage(piece, self.plan.qk_keys());
            let origin: R32 = k.mov(piece * self.plan.qk_keys());
            chain.apply(k, &s, &BlockScores::in_place(coverage), |_| origin);
            let of_piece = LaneMaxima::of(k, &s);
            maxima = Some(match maxima {
                None => of_piece,
                Some(others) => others.and(k, &of_piece),
            });
        }
        maxima.expect("a step has a piece")
    }

    fn piece_of_scores(&self, piece: u32) -> AccTile {
        let n_tiles = self.plan.qk_keys() / 8;
        self.scores.columns(piece * n_tiles, n_tiles)
    }

    /// The scores that become one piece of P.
    pub(super) fn scores_of(&self, piece: u32) -> AccTile {
        let n_tiles = self.plan.pv_keys() / 8;
        self.scores.columns(piece * n_tiles, n_tiles)
    }

    /// Rescales O after all issued products have been added to it.
    pub(super) fn rescale(&self, k: &mut Builder, factors: &[F32]) {
        self.wait_for_output(k);
        for (share, _) in &self.shares {
            for (row, &factor) in (0..).zip(factors) {
                share.scale_row(k, row, factor);
            }
        }
    }

    /// Issues O += P V of one piece of P.
    pub(super) fn issue_output(&mut self, k: &mut Builder, p: &OperandTile, piece: u32) {
        if piece == 0 {
            self.loads.wait_for_values(k);
        }
        let accumulate = if piece == 0 { Accumulate::Set } else { Accumulate::Add };
        let last = piece + 1 == self.pv_pieces();
        // The products of a step must be complete before the next step rescales O.
        let ends_step = (piece + 1).is_multiple_of(self.plan.pv_pieces);
        let first_key = piece * self.plan.pv_keys();
        self.products.fence(k);
        self.share_groups.clear();
        for (i, (share, values)) in self.shares.iter().enumerate() {
            self.products.wgmma_rs(k, p, values.from_row(first_key), share, accumulate);
            // The shares of the last piece complete one after another, so that the first can be sent early.
            if last || ends_step && i + 1 == self.shares.len() {
                self.share_groups.push(self.products.commit(k));
            }
        }
    }

    fn wait_for_output(&self, k: &mut Builder) {
        let last = self.share_groups.last().expect("products were issued");
        self.products.wait(k, *last);
    }

    /// The share of O that the peer CTA merges, complete.
    pub(super) fn peers_share(&self, k: &mut Builder) -> &AccTile {
        let (share, _) = &self.shares[0];
        match self.share_groups.first() {
            Some(&group) => self.products.wait(k, group),
            None => share.clear(k),
        }
        share
    }

    /// The share that the warpgroup merges itself; complete after [`Block::finish`].
    pub(super) fn own_share(&self) -> AccTile {
        self.shares.last().expect("there is one at least").0.clone()
    }

    /// Waits for all of O, and for requested tiles that were never read: every copy must arrive before its
    /// CTA exits.
    pub(super) fn finish(&self, k: &mut Builder) {
        match self.share_groups.last() {
            Some(&group) => self.products.wait(k, group),
            None => self.own_share().clear(k),
        }
        let keys_of_copy = self.plan.block_n / self.plan.key_copies;
        for copy in self.seen.keys.div_ceil(keys_of_copy)..self.plan.key_copies {
            self.loads.wait_for_keys(k, copy);
        }
        if self.seen.keys == 0 {
            self.loads.wait_for_values(k);
        }
    }
}
