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
        let Some(part) = threads.part else { return (self, o.clone()) };
        let (m_tiles, n_tiles) = (o.m_tiles(), o.n_tiles());
        let sums = k.shared_index(room, threads.lane, 16);
        let tiles = sums.at(i64::from(threads.warps() * m_tiles * WARP_VECTOR_BYTES));

        let own_sums = k.shared_index(sums, threads.warp, WARP_VECTOR_BYTES * m_tiles);
        let own_tiles = k.shared_index(tiles, threads.warp, WARP_VECTOR_BYTES * m_tiles * n_tiles);
        for m in 0..m_tiles {
            k.st_vec(own_sums.at(warp_vectors(m)), self.statistics(m));
            for n in 0..n_tiles {
                k.st_vec(own_tiles.at(warp_vectors(m * n_tiles + n)), o.tile(m, n));
            }
        }
        k.bar_sync();

        let columns = n_tiles / threads.kv_warps;
        let sums = k.shared_index(sums, threads.row_warp, WARP_VECTOR_BYTES * m_tiles);
        let tiles = k.shared_index(tiles, threads.row_warp, WARP_VECTOR_BYTES * m_tiles * n_tiles);
        let tiles = k.shared_index(tiles, part, WARP_VECTOR_BYTES * columns);
        let joined = AccTile::zero(k, 16 * m_tiles, 8 * columns);
        let mut merged = OnlineSoftmax { row_max: Vec::new(), sum: Vec::new(), ..self };
        for m in 0..m_tiles {
            let of_part = |p: u32, quad: u32, each: u32| warp_vectors(p * threads.row_warps() * each + quad);
            let parts: Vec<[F32; 4]> =
                (0..threads.kv_warps).map(|p| k.ld_vec(sums.at(of_part(p, m, m_tiles)))).collect();
            let weights = merged.join(k, &parts);
            for (p, weights) in (0..).zip(&weights) {
                for n in 0..columns {
                    let from = of_part(p, m * n_tiles + n, m_tiles * n_tiles);
                    let tile: [F32; 4] = k.ld_vec(tiles.at(from));
                    for (i, sum) in joined.tile(m, n).into_iter().enumerate() {
                        k.mad_to(sum, tile[i], weights[i / 2], sum);
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
