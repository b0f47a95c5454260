//! Dropout of probabilities in accumulator fragments. [`problem::Dropout`] states which numbers of the
//! generator belong to which element.

use problem::{PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL};
use ptx::{Builder, CmpOp, F32, Global, Pointer, Pred, R32};
use tile::{AccTile, Threads};

use crate::RowRange;

/// The parameters of dropout.
#[derive(Clone, Copy, Debug)]
pub struct DropoutParams {
    /// The state of the generator: four words.
    pub state: Global,
    /// The least number of an element that is kept, in the high half of a word.
    pub threshold: R32,
    /// The factor of elements that are kept.
    pub scale: F32,
}

impl DropoutParams {
    /// Multiplies sums over elements that are kept by their factor.
    pub fn scale_kept(&self, k: &mut Builder, sums: &AccTile) {
        for row in 0..sums.lane_rows() {
            sums.scale_row(k, row, self.scale);
        }
    }
}

/// Dropout of a warp's tiles.
#[derive(Clone, Copy, Debug)]
pub struct DropoutMask {
    params: DropoutParams,
    key: [R32; 2],
    offset: R32,
    /// Whether the rows of a tile are keys, and its columns queries.
    transposed: bool,
    /// The warp's first row: a multiple of its rows.
    first: R32,
    quad: R32,
    /// The lane's first column in an 8-column tile, and the distance of the warp's columns from the tile's
    /// origin.
    column: R32,
    before: Option<R32>,
}

/// The origin of a tile's columns, and the head: batch entry · heads_q + query head.
pub type DropoutPlace = (R32, R32);

/// Truth table of `a ^ b ^ c`.
const XOR: u8 = 0xF0 ^ 0xCC ^ 0xAA;

impl DropoutMask {
    /// The mask for warps with `warp_rows` rows of the range and `warp_columns` columns of each block.
    /// `transposed` says whether the rows are keys.
    pub fn new(
        k: &mut Builder,
        params: DropoutParams,
        threads: &Threads,
        rows: &RowRange,
        (warp_rows, warp_columns): (u32, u32),
        transposed: bool,
    ) -> DropoutMask {
        // The words may be aligned to four bytes only.
        let [low, high, offset, offset_high] = [0, 4, 8, 12].map(|at| k.ld::<R32>(params.state.at(at)));
        DropoutMask {
            params,
            key: [low, k.xor(high, offset_high)],
            offset,
            transposed,
            first: k.mad(threads.row_warp, warp_rows, rows.first),
            quad: threads.quad,
            column: threads.column,
            before: threads.part.map(|part| k.mul(part, warp_columns)),
        }
    }

    /// Sets the elements that are dropped to 0. Those that are kept have no factor yet.
    pub fn drop(&self, k: &mut Builder, p: &AccTile, at: DropoutPlace) {
        self.each(k, p, at, |k, [m, n, i], kept| {
            let p = p.tile(m, n)[i as usize];
            k.selp_to(p, p, 0.0, kept);
        });
    }

    /// Multiplies the gradient of dropped probabilities by the mask and its factor, in place.
    pub fn drop_gradient(&self, k: &mut Builder, dp: &AccTile, at: DropoutPlace) {
        self.each(k, dp, at, |k, [m, n, i], kept| {
            self.mask_gradient(k, dp.tile(m, n)[i as usize], kept);
        });
    }

    /// [`DropoutMask::drop_gradient`]; and returns the probabilities as [`DropoutMask::drop`] leaves them, in
    /// other registers.
    pub fn drop_both(&self, k: &mut Builder, p: &AccTile, dp: &AccTile, at: DropoutPlace) -> AccTile {
        let dropped = AccTile::unset(k, 16 * p.m_tiles(), 8 * p.n_tiles());
        self.each(k, p, at, |k, [m, n, i], kept| {
            k.selp_to(dropped.tile(m, n)[i as usize], p.tile(m, n)[i as usize], 0.0, kept);
            self.mask_gradient(k, dp.tile(m, n)[i as usize], kept);
        });
        dropped
    }

    fn mask_gradient(&self, k: &mut Builder, x: F32, kept: Pred) {
        let factor = k.selp(self.params.scale, 0.0, kept);
        k.mul_to(x, x, factor);
    }

    /// Calls `take` for each element: its 16×8 tile and place there, and whether it is kept.
    fn each(
        &self,
        k: &mut Builder,
        tile: &AccTile,
        (origin, head): DropoutPlace,
        mut take: impl FnMut(&mut Builder, [u32; 3], Pred),
    ) {
        let origin = self.before.map_or(origin, |before| k.add(origin, before));
        let (m_tiles, pairs) = (tile.m_tiles(), tile.n_tiles() / 2);
        // Two blocks of 16 keys have one counter: along the columns, or along the rows.
        let (m_step, pair_step) = match self.transposed {
            false => (1, if pairs.is_multiple_of(2) { 2 } else { 1 }),
            true => (if m_tiles.is_multiple_of(2) { 2 } else { 1 }, 1),
        };
        let steps =
            (0..m_tiles).step_by(m_step).flat_map(|m| (0..pairs).step_by(pair_step).map(move |p| (m, p)));
        for (m, pair) in steps {
            let row = k.add(self.first, 16 * m);
            let column = k.add(origin, 16 * pair);
            let (key, query) = if self.transposed { (row, column) } else { (column, row) };
            for right in 0..2 {
                let in_column = k.add(self.column, right);
                let [of_key, of_query] =
                    if self.transposed { [self.quad, in_column] } else { [in_column, self.quad] };
                let key_block = k.shr_u(key, 5);
                let query_block = k.shr_u(query, 4);
                let counter =
                    [k.mad(key_block, 8, of_key), k.mad(query_block, 8, of_query), head, self.offset];
                let outputs = self.philox(k, counter);
                let blocks = m_step.max(pair_step) as u32;
                for (block, words) in (0..blocks).zip(words(k, outputs, key, blocks)) {
                    for (eight, word) in (0..).zip(words) {
                        let numbers = [k.shl(word, 16), word];
                        for (half, number) in (0..).zip(numbers) {
                            let kept = k.setp_u(CmpOp::Ge, number, self.params.threshold);
                            let place = match self.transposed {
                                false => [m, 2 * (pair + block) + half, 2 * eight + right],
                                true => [m + block, 2 * pair + eight, 2 * half + right],
                            };
                            take(k, place, kept);
                        }
                    }
                }
            }
        }
    }

    /// The output of Philox4x32-10.
    fn philox(&self, k: &mut Builder, mut counter: [R32; 4]) -> [R32; 4] {
        let mut key = self.key;
        for round in 0..PHILOX_ROUNDS {
            if round > 0 {
                key = [0, 1].map(|i: usize| k.add(key[i], PHILOX_WEYL[i]));
            }
            let [c0, c1, c2, c3] = counter;
            let [a, b] = [(c0, PHILOX_MULTIPLIERS[0]), (c2, PHILOX_MULTIPLIERS[1])].map(|(c, factor)| {
                let product = k.mul_wide_u(c, factor);
                let high = k.shr_u(product, 32);
                [k.trunc(product), k.trunc(high)]
            });
            counter = [k.lop3(b[1], c1, key[0], XOR), b[0], k.lop3(a[1], c3, key[1], XOR), a[0]];
        }
        counter
    }
}

/// For each block of 16 keys, the words of the queries of its first and second eight: of both blocks of a
/// counter, or of the one that begins at `key`.
fn words(k: &mut Builder, [a, b, c, d]: [R32; 4], key: R32, blocks: u32) -> Vec<[R32; 2]> {
    if blocks == 2 {
        return vec![[a, c], [b, d]];
    }
    let odd = k.and(key, 16);
    let odd = k.setp_u(CmpOp::Ne, odd, 0);
    vec![[k.selp(b, a, odd), k.selp(d, c, odd)]]
}
