//! Merges the results of warps that have the same rows and different keys: split-KV inside a CTA, with the
//! merge of FlashDecoding (Dao et al. 2023) through shared memory.

use ptx::{Builder, F32, Pointer, Shared};
use tile::{AccTile, Threads, WARP_VECTOR_BYTES, warp_vectors};

use crate::OnlineSoftmax;

/// Shared memory that [`OnlineSoftmax::merge`] needs, in bytes, for a CTA of `warps` warps, each with an
/// accumulator of `rows` × `columns`.
pub const fn merge_bytes(warps: u32, rows: u32, columns: u32) -> u32 {
    warps * rows / 16 * (1 + columns / 8) * WARP_VECTOR_BYTES
}

impl OnlineSoftmax {
    /// Gives each warp its share of the columns of `o`, merged over the warps that share its rows, and the
    /// merged softmax. `room` has [`merge_bytes`] bytes that are no longer in use; the caller ensures that
    /// with a barrier.
    ///
    /// Every access is 16 bytes per lane with contiguous lanes: registers are stored in fragment layout, and
    /// no lane needs elements of another lane.
    pub fn merge(
        self,
        k: &mut Builder,
        threads: &Threads,
        o: &AccTile,
        room: Shared,
    ) -> (OnlineSoftmax, AccTile) {
        self.merge_rows(k, threads, o, 2, room)
    }

    /// Like [`OnlineSoftmax::merge`], of the first `rows` rows of a lane in each tile, 1 or 2. The others are
    /// zeros then.
    pub fn merge_rows(
        self,
        k: &mut Builder,
        threads: &Threads,
        o: &AccTile,
        rows: usize,
        room: Shared,
    ) -> (OnlineSoftmax, AccTile) {
        let Some(part) = threads.part else { return (self, o.clone()) };
        let (m_tiles, columns) = (o.m_tiles(), o.n_tiles() / threads.kv_warps);
        // The tiles of 8 columns whose elements fill a vector.
        let together = if rows == 1 && columns.is_multiple_of(2) { 2 } else { 1 };
        let n_vectors = o.n_tiles() / together;
        let sums = k.shared_index(room, threads.lane, 16);
        let tiles = sums.at(i64::from(threads.warps() * m_tiles * WARP_VECTOR_BYTES));

        let own_sums = k.shared_index(sums, threads.warp, WARP_VECTOR_BYTES * m_tiles);
        let own_tiles = k.shared_index(tiles, threads.warp, WARP_VECTOR_BYTES * m_tiles * n_vectors);
        for m in 0..m_tiles {
            k.st_vec(own_sums.at(warp_vectors(m)), self.statistics(m));
            for n in 0..n_vectors {
                k.st_vec(own_tiles.at(warp_vectors(m * n_vectors + n)), vector_of(o, m, (n, together)));
            }
        }
        k.bar_sync();

        let sums = k.shared_index(sums, threads.row_warp, WARP_VECTOR_BYTES * m_tiles);
        let tiles = k.shared_index(tiles, threads.row_warp, WARP_VECTOR_BYTES * m_tiles * n_vectors);
        let tiles = k.shared_index(tiles, part, WARP_VECTOR_BYTES * columns / together);
        let joined = AccTile::zero(k, 16 * m_tiles, 8 * columns);
        let mut merged = OnlineSoftmax { row_max: Vec::new(), sum: Vec::new(), ..self };
        for m in 0..m_tiles {
            let of_part = |p: u32, quad: u32, each: u32| warp_vectors(p * threads.row_warps() * each + quad);
            let parts: Vec<[F32; 4]> =
                (0..threads.kv_warps).map(|p| k.ld_vec(sums.at(of_part(p, m, m_tiles)))).collect();
            let weights = merged.join(k, &parts);
            for (p, weights) in (0..).zip(&weights) {
                for n in 0..columns / together {
                    let from = of_part(p, m * n_vectors + n, m_tiles * n_vectors);
                    let tile: [F32; 4] = k.ld_vec(tiles.at(from));
                    for (i, sum) in vector_of(&joined, m, (n, together)).into_iter().enumerate() {
                        let row = if together == 1 { i / 2 } else { 0 };
                        k.mad_to(sum, tile[i], weights[row], sum);
                    }
                }
            }
        }
        (merged, joined)
    }

    /// Row max and sum of the lane's two rows of a 16-row tile.
    pub(crate) fn statistics(&self, m: u32) -> [F32; 4] {
        let [a, b] = [2 * m as usize, 2 * m as usize + 1];
        [self.row_max[a], self.row_max[b], self.sum[a], self.sum[b]]
    }

    /// Appends two rows, merged from the statistics of their parts. Returns each part's weights for the two
    /// rows.
    pub(crate) fn join(&mut self, k: &mut Builder, parts: &[[F32; 4]]) -> Vec<[F32; 2]> {
        let mut weights = vec![[parts[0][0]; 2]; parts.len()];
        for row in 0..2 {
            let row_max = parts[1..].iter().fold(parts[0][row], |a, part| k.max(a, part[row]));
            let sum = k.mov(0.0f32);
            for (part, weights) in parts.iter().zip(&mut weights) {
                let distance = k.sub(part[row], row_max);
                weights[row] = k.ex2(distance);
                k.mad_to(sum, part[2 + row], weights[row], sum);
            }
            self.row_max.push(row_max);
            self.sum.push(sum);
        }
        weights
    }
}

/// The elements of vector `n` of the tiles of 16 rows number `m`: those of a tile, or those of the first row
/// of two tiles.
fn vector_of(o: &AccTile, m: u32, (n, together): (u32, u32)) -> [F32; 4] {
    if together == 1 {
        return o.tile(m, n);
    }
    let [[a, b, ..], [c, d, ..]] = [0, 1].map(|second| o.tile(m, 2 * n + second));
    [a, b, c, d]
}
