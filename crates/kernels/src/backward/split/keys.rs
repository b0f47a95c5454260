//! The kernel of dK and dV: keys and values stay, queries and dO pass. A KV head's CTA visits the rows of all
//! query heads of its group.

use attend::{Bound, ProgramCode, QueryNumbers, RingBlock};
use problem::Tensor;
use ptx::{Builder, CmpOp, F32, Global, Pointer, R32};
use tile::{AccTile, MatrixReader, PairSum, Sign, mma_ab, mma_abt};

use super::cta::Cta;

impl Cta<'_> {
    /// FlashAttention-2, Algorithm 2, without line 15. All tiles are transposed, so that warps own keys, and
    /// Pᵀ and dSᵀ are A operands in registers.
    pub(super) fn compute_dk_and_dv(&self, k: &mut Builder) {
        let (tiles, group) = (self.tiles, self.baked.group_size());
        let band = self.params.band.transposed(k);
        // Rows beyond the queries are zeros in Q and dO, so no mask needs to hide them.
        let bound = Bound::new(k, &band, &self.rows, tiles.streamed, true);
        let ring = self.ring(k, &bound, group);
        let [key_tile, value_tile] = self.own_tiles();
        self.load_own(k, Tensor::K, key_tile);
        self.load_own(k, Tensor::V, value_tile);
        let load = self.load_queries(k, group);
        ring.start(k, &load);
        ring.wait_for_first(k);
        let [keys, values] =
            [(0, self.baked.sign), (1, Sign::Keep)].map(|(i, sign)| self.own_operand(k, i, sign));

        let columns = tiles.columns(self.baked).map(|columns| columns / tiles.dim_warps);
        let [dk, dv] = columns.map(|columns| AccTile::zero(k, tiles.warp_rows(), columns)); // 7
        let mask = self.mask(k, &band);
        let programs = self.programs(k);
        let gradient = self.params.score_gradient(&mask, programs.as_ref(), false);
        let dropout = self.dropout(k);
        let sums = self.pair_sums(k);
        let sum = |k: &mut Builder, number: usize, tile: &AccTile| {
            if let Some(sums) = &sums {
                sums[number].add(k, tile); // of both halves of the head dim
            }
        };
        let [queries, gradients] = [0, 1].map(|number| self.reader(k, number, MatrixReader::chunks_first));
        let [query_rows, gradient_rows] =
            [0, 1].map(|number| self.reader(k, number, MatrixReader::rows_first));
        ring.for_each_block(k, &load, |k, block| {
            let origin = k.mul(block.block, tiles.streamed);
            let partial = bound.is_partial(k, block.block);
            let numbers = self.numbers_of_columns(k, block);
            let q = queries.open(k, block);
            let s = mma_abt(k, &keys, &q); //                                     10: Sᵀ = K Qᵀ
            sum(k, 0, &s);
            let at = (origin, partial, self.head_of_block(k, block));
            let p = gradient.probabilities(k, &s, &numbers[0], at); //        11: P = exp(S − L)
            let d_out = gradients.open(k, block);
            let dp = mma_abt(k, &values, &d_out); //                              13: dPᵀ = V dOᵀ
            sum(k, 1, &dp);
            let dropped = dropout.as_ref().map(|(dropout, first_head)| {
                let head = k.add(*first_head, block.head);
                dropout.drop_both(k, &p, &dp, (origin, head)) //                       P and dP = Z ∘ dP
            });
            let weights = dropped.as_ref().unwrap_or(&p).round(k, self.half());
            let d_out = gradient_rows.open(k, block);
            mma_ab(k, self.ty(), &weights, &d_out, &dv); //                       12: dV += Pᵀ dO
            gradient.scores(k, &s, &p, &dp, &numbers); //                          14: dS = P ∘ (dP − D)
            let ds = dp.round(k, self.half());
            let q = query_rows.open(k, block);
            mma_ab(k, self.ty(), &ds, &q, &dk); //                                16: dK += dSᵀ Q
        });
        self.scale(k, &dk);
        if let Some(dropout) = &self.params.dropout {
            dropout.scale_kept(k, &dv);
        }
        self.release_own_tiles(k);
        self.store(k, Tensor::Dk, &dk, key_tile); //                              18
        self.store(k, Tensor::Dv, &dv, value_tile);
    }

    /// Requests blocks of queries and dO, with the numbers of their rows.
    fn load_queries(&self, k: &mut Builder, group: u32) -> impl Fn(&mut Builder, &RingBlock) + '_ {
        let [_, [query, _]] = self.tiles.layouts(self.baked);
        let tensors = [self.streamed(k, Tensor::Q, 0), self.streamed(k, Tensor::DOut, query.bytes())];
        let zero = k.mov(0);
        let arrays = [self.params.minus_log_sums, self.params.minus_deltas]
            .map(|array| self.number_of_row(k, array, zero));
        move |k, block| {
            let before = k.mul(block.block, self.tiles.streamed);
            let limit = k.sub(self.rows.seq_kv, before);
            for tensor in &tensors {
                tensor.load(k, block, group, Some(limit));
            }
            self.load_numbers(k, block, arrays, [before, limit]);
        }
    }

    /// Requests −L·log2 e and −D of a block's rows, and zeros from row `limit` on.
    ///
    /// With a score program, −L is −∞ there: missing rows may have any logits, and P must be 0.
    fn load_numbers(
        &self,
        k: &mut Builder,
        block: &RingBlock,
        arrays: [Global; 2],
        [before, limit]: [R32; 2],
    ) {
        let (threads, rows) = (self.threads.count, self.tiles.streamed);
        let head = k.mul_wide_u(block.head, self.params.rows_of_head());
        for first in (0..rows).step_by(threads as usize) {
            let row = k.add(self.threads.index, first);
            let exists = k.setp_s(CmpOp::Lt, row, limit);
            let bytes = k.selp(4, 0, exists);
            let position = k.add(before, row);
            let position = k.zext(position);
            let index = k.add(head, position);
            let to = k.shared_index(block.stage, row, 4);
            let in_block = k.setp_u(CmpOp::Lt, row, rows);
            for (number, array) in (0..).zip(arrays) {
                let from = Global { base: k.mad(index, 4, array.base), ..array };
                let to = to.at(self.numbers_at(number));
                if number == 0 && self.has_score_program() {
                    let requested = k.and_pred(in_block, exists);
                    k.guarded(requested, |k| k.cp_async(to, from, 4, None));
                    let padded = k.setp_s_and(CmpOp::Ge, row, limit, in_block);
                    let none: F32 = k.mov(f32::NEG_INFINITY);
                    k.guarded(padded, |k| k.st(to, none));
                } else {
                    k.guarded(in_block, |k| k.cp_async(to, from, 4, Some(bytes)));
                }
            }
        }
    }

    fn has_score_program(&self) -> bool {
        self.baked.programs.as_ref().is_some_and(ProgramCode::has_score)
    }

    /// The place of the numbers in a stage: −L·log2 e (0) and −D (1).
    fn numbers_at(&self, number: u32) -> i64 {
        let [_, [query, gradient]] = self.tiles.layouts(self.baked);
        i64::from(query.bytes() + gradient.bytes() + number * self.tiles.numbers_bytes())
    }

    /// −L·log2 e and −D of the lane's columns.
    fn numbers_of_columns(&self, k: &mut Builder, block: &RingBlock) -> [QueryNumbers; 2] {
        let start = k.shared_index(block.stage, self.threads.column, 4);
        [0, 1].map(|number| QueryNumbers::Columns(start.at(self.numbers_at(number))))
    }

    /// The sums of the two parts of S and of dP, if two warps divide the head dims. The ring's barrier
    /// separates the sums of successive blocks.
    fn pair_sums(&self, k: &mut Builder) -> Option<[PairSum; 2]> {
        let half = self.half_of_dims()?;
        let (tiles, at) = (self.tiles, [self.threads.lane, self.threads.row_warp, half]);
        Some([0, 1].map(|number| {
            let room = self.after_ring().at(i64::from(number * tiles.sum_bytes()));
            PairSum::new(k, room, at, (tiles.warp_rows(), tiles.streamed))
        }))
    }
}
