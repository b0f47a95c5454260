//! The kernel of dQ: query rows stay, keys and values pass.

use attend::{Bound, QueryNumbers, RingBlock, store_lse};
use problem::Tensor;
use ptx::{Builder, CmpOp, F32, Pointer};
use std::f32::consts::LOG2_E;
use tile::{AccTile, MatrixReader, OperandA, Sign, mma_ab, mma_abt, row_dots};

use super::cta::Cta;

impl Cta<'_> {
    /// FlashAttention-2, Algorithm 2, with the loops exchanged: of lines 12, 15 and 16, only the update of
    /// dQ.
    pub(super) fn compute_dq(&self, k: &mut Builder) {
        let (tiles, band) = (self.tiles, &self.params.band);
        let bound = Bound::new(k, band, &self.rows, tiles.streamed, self.baked.divides);
        let ring = self.ring(k, &bound, 1);
        let [q_tile, d_out_tile] = self.own_tiles();
        self.load_own(k, Tensor::Q, q_tile);
        self.load_own(k, Tensor::DOut, d_out_tile);
        self.load_own(k, Tensor::Out, self.last_stage());
        let load = self.load_keys(k);
        ring.start(k, &load);
        ring.wait_for_first(k);
        let [q, d_out] =
            [(0, self.baked.sign), (1, Sign::Keep)].map(|(i, sign)| self.own_operand(k, i, sign));
        let numbers = self.numbers_of_rows(k, &d_out);
        if let Some(sinks) = &self.sinks {
            let at = self.grid_place(k);
            let part = sinks.part(k, at[1], numbers.each_ref().map(Vec::as_slice));
            // The lanes of a quad have the same rows.
            sinks.store(k, at, [self.threads.warp, self.threads.lane], (part, &[4, 8, 16]));
        }
        let numbers = numbers.map(QueryNumbers::Rows);

        let dq = AccTile::zero(k, tiles.warp_rows(), tiles.columns(self.baked)[0]);
        let mask = self.mask(k, band);
        let programs = self.programs(k);
        let gradient = self.params.score_gradient(&mask, programs.as_ref(), false);
        let dropout = self.dropout(k);
        let [keys, values] = [0, 1].map(|number| self.reader(k, number, MatrixReader::chunks_first));
        let key_rows = self.reader(k, 0, MatrixReader::rows_first);
        ring.for_each_block(k, &load, |k, block| {
            let origin = k.mul(block.block, tiles.streamed);
            let partial = bound.is_partial(k, block.block);
            let key = keys.open(k, block);
            let s = mma_abt(k, &q, &key); //                                      10: S = Q Kᵀ
            let p = gradient.probabilities(k, &s, &numbers[0], (origin, partial, None)); // 11: P = exp(S − L)
            let value = values.open(k, block);
            let dp = mma_abt(k, &d_out, &value); //                               13: dP = dO Vᵀ
            if let Some((dropout, head)) = &dropout {
                dropout.drop_gradient(k, &dp, (origin, *head)); //                     dP = Z ∘ dP
            }
            gradient.scores(k, &s, &p, &dp, &numbers); //                          14: dS = P ∘ (dP − D)
            let ds = dp.round(k, self.half());
            let key = key_rows.open(k, block);
            mma_ab(k, self.ty(), &ds, &key, &dq); //                              15: dQ += dS K
        });
        self.scale(k, &dq);
        self.release_own_tiles(k);
        self.store(k, Tensor::Dq, &dq, q_tile);
    }

    /// Requests blocks of keys and values.
    fn load_keys(&self, k: &mut Builder) -> impl Fn(&mut Builder, &RingBlock) + use<> {
        let [_, [key, _]] = self.tiles.layouts(self.baked);
        let tensors = [self.streamed(k, Tensor::K, 0), self.streamed(k, Tensor::V, key.bytes())];
        let (seq_kv, rows, divides) = (self.rows.seq_kv, self.tiles.streamed, self.baked.divides);
        move |k, block| {
            let limit = (!divides).then(|| {
                let before = k.mul(block.block, rows);
                k.sub(seq_kv, before)
            });
            for tensor in &tensors {
                tensor.load(k, block, 1, limit);
            }
        }
    }

    /// −L·log2 e and −D of the lane's rows, which are stored for the second kernel. O is in the last stage.
    fn numbers_of_rows(&self, k: &mut Builder, d_out: &OperandA) -> [Vec<F32>; 2] {
        let out = self.own_rows(k, 1, self.last_stage(), Sign::Keep);
        let deltas = row_dots(k, self.half(), d_out, &out); //                    4: D = rowsum(dO ∘ O)
        let first = k.mad(self.threads.row_warp, self.tiles.warp_rows(), self.rows.first);
        let limit = k.sub(self.rows.seq_q, first);
        let load = |k: &mut Builder, array, missing: f32| {
            let start = self.number_of_row(k, array, first);
            let start = k.index(start, self.threads.quad, 4);
            let left = k.sub(limit, self.threads.quad);
            let rows = (0..deltas.len() as u32).map(|i| i / 2 * 16 + i % 2 * 8);
            let numbers = rows.map(|row| {
                let number: F32 = k.mov(missing);
                let exists = k.setp_s(CmpOp::Gt, left, row);
                k.guarded(exists, |k| k.ld_to(number, start.at(4 * i64::from(row))));
                number
            });
            numbers.collect::<Vec<F32>>()
        };
        let lse = self.params.lse.expect("the backward pass reads the LSE");
        let log_sums = load(k, lse, f32::NEG_INFINITY);
        let d_lse = self.params.d_lse.map(|d_lse| load(k, d_lse, 0.0));
        let minus_deltas = deltas.iter().enumerate().map(|(i, &delta)| match &d_lse {
            None => k.neg(delta),
            // The LSE's gradient reaches each score through P, as −D does.
            Some(d_lse) => k.sub(d_lse[i], delta),
        });
        let minus_deltas: Vec<F32> = minus_deltas.collect();
        let minus_log_sums = log_sums.into_iter().map(|log_sum| {
            let minus = k.mul(log_sum, -LOG2_E);
            // A row that sees no key has probabilities of 0.
            let is_dead = k.setp_f(CmpOp::Eq, log_sum, f32::NEG_INFINITY);
            k.selp(f32::NEG_INFINITY, minus, is_dead)
        });
        let numbers = [minus_log_sums.collect(), minus_deltas];
        for (array, numbers) in
            [self.params.minus_log_sums, self.params.minus_deltas].into_iter().zip(&numbers)
        {
            let to = self.number_of_row(k, array, first);
            store_lse(k, &self.threads, numbers, to, limit);
        }
        numbers
    }
}
