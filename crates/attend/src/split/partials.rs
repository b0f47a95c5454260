//! Partial results of rows whose keys are divided among CTAs: split-KV through global memory in two kernels
//! (FlashDecoding, Dao et al. 2023). The first kernel writes the partial results, the second merges them in
//! the order of the splits, so that the result is the same in every launch.
//!
//! A partial result is the unnormalised O, the row max and the sum. FlashDecoding writes the normalised O and
//! the LSE instead. There the weights of the merge are differences of logarithms, whose roundoff grows with
//! the logits: an LSE of 10⁴ has steps of 10⁻³.

use ptx::{Builder, CmpOp, F32, Global, Pointer, R32, R64};
use tile::{AccTile, Threads};

use crate::OnlineSoftmax;
use crate::softmax::{factor_if_seen, inverse, log_sum};

/// Location of the partial results in global memory. Each row of each split has an index there.
#[derive(Clone, Copy, Debug)]
pub struct Partials {
    /// Unnormalised O, f32, `[index][columns]`.
    pub out: Global,
    /// Row max, in powers of two, and sum of the row, f32, `[index][2]`. The sum of a row that saw no key is
    /// 0.
    pub statistics: Global,
    /// Columns of O: a multiple of 4.
    pub columns: u32,
}

/// The partial results of one row: one in each of `splits` splits.
#[derive(Clone, Copy, Debug)]
pub struct SplitRow {
    /// The row's index in split 0.
    pub first: R64,
    /// How much the index grows from split to split.
    pub step: R32,
    /// Number of splits.
    pub splits: u32,
}

impl Partials {
    /// Bytes of the partial O of `rows` rows over all splits.
    pub const fn out_bytes(rows: usize, columns: usize) -> usize {
        4 * rows * columns
    }

    /// Bytes of the statistics of `rows` rows over all splits.
    pub const fn statistics_bytes(rows: usize) -> usize {
        8 * rows
    }

    /// Stores a warp's rows. The first row has the index `first`, and `left` rows exist. Warps that share
    /// rows have already merged them, and each holds a part of the columns.
    pub fn store(
        &self,
        k: &mut Builder,
        threads: &Threads,
        softmax: &OnlineSoftmax,
        o: &AccTile,
        (first, left): (R64, R32),
    ) {
        softmax.gather_sums(k);
        let quad = k.zext(threads.quad);
        let index = k.add(first, quad);
        let left = k.sub(left, threads.quad);
        let own = o.lane_column(k, threads);
        let column = match threads.part {
            None => own,
            Some(part) => k.mad(part, 8 * o.n_tiles(), own),
        };
        let [out, statistics] = self.place(k, index);
        let out = k.index(out, column, 4);
        let elected = threads.elected_for_row(k);
        for i in 0..o.lane_rows() {
            let below = i / 2 * 16 + i % 2 * 8;
            let exists = k.setp_s(CmpOp::Gt, left, below);
            let row: Vec<F32> = o.row(i).collect();
            k.guarded(exists, |k| {
                for (n, pair) in (0..).zip(row.chunks_exact(2)) {
                    let at = out.at(4 * i64::from(below * self.columns + o.pair_column(n)));
                    k.st_vec(at, [pair[0], pair[1]]);
                }
            });
            let (row_max, sum) = (softmax.row_max[i as usize], softmax.sum[i as usize]);
            let stored = k.and_pred(exists, elected);
            k.guarded(stored, |k| k.st_vec(statistics.at(8 * i64::from(below)), [row_max, sum]));
        }
    }

    /// Four columns of a row of O from `column` on, merged over all splits, and the row's LSE. `sink` is the
    /// row's attention sink times log2 e. `factor` multiplies O of rows that saw a key.
    pub fn merge(
        &self,
        k: &mut Builder,
        SplitRow { first, step, splits }: SplitRow,
        column: R32,
        sink: Option<F32>,
        factor: Option<F32>,
    ) -> ([F32; 4], F32) {
        let step = k.zext(step);
        let mut index = first;
        let mut places = Vec::new();
        for split in 0..splits {
            if split > 0 {
                index = k.add(index, step);
            }
            places.push(self.place(k, index));
        }
        let statistics: Vec<[F32; 2]> = places.iter().map(|&[_, statistics]| k.ld_vec(statistics)).collect();
        let row_max = statistics[1..].iter().fold(statistics[0][0], |max, part| k.max(max, part[0]));
        let row_max = sink.map_or(row_max, |sink| k.max(row_max, sink));
        let sum = match sink {
            None => k.mov(0.0f32),
            Some(sink) => {
                let distance = k.sub(sink, row_max);
                k.ex2(distance)
            }
        };
        let sums: Vec<F32> = statistics.iter().map(|part| part[1]).collect();
        let o: [F32; 4] = std::array::from_fn(|_| k.mov(0.0f32));
        for ([out, _], [part_max, part_sum]) in places.into_iter().zip(statistics) {
            let distance = k.sub(part_max, row_max);
            let weight = k.ex2(distance);
            k.mad_to(sum, part_sum, weight, sum);
            let out = k.index(out, column, 4);
            let part: [F32; 4] = k.ld_vec(out);
            for (&sum, part) in o.iter().zip(part) {
                k.mad_to(sum, part, weight, sum);
            }
        }
        let mut inverse = inverse(k, sum);
        if let Some(factor) = factor {
            let of_keys = sums.into_iter().reduce(|a, b| k.add(a, b)).expect("a split");
            let factor = factor_if_seen(k, factor, of_keys);
            inverse = k.mul(inverse, factor);
        }
        (o.map(|element| k.mul(element, inverse)), log_sum(k, sum, row_max))
    }

    /// The addresses of a row's O and statistics.
    fn place(&self, k: &mut Builder, index: R64) -> [Global; 2] {
        [(self.out, 4 * i64::from(self.columns)), (self.statistics, 8)]
            .map(|(array, bytes)| Global { base: k.mad(index, bytes, array.base), offset: array.offset })
    }
}
