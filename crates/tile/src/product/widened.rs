//! Products of 16-bit A with 8-bit B, which is widened to f16 in registers. Every 8-bit float is exact in
//! f16.

use ptx::{Builder, Half, R32, Type};

use super::mma::OperandA;
use crate::{AccTile, OpenTile, OperandTile};

/// D = A Bᵀ for A in f16. The rows of the tile of B are the columns of D, with k contiguous, a multiple of
/// 32. Of each 16 elements along k, a lane of A holds the four neighbouring elements that begin at four times
/// its index in the quad: those of the lane's register of B.
pub fn mma_abt_widened(k: &mut Builder, from: Type, a: &OperandA, b: &OpenTile) -> AccTile {
    let columns = b.layout().rows;
    let d = AccTile::zero(k, 16, columns);
    let open = a.open(k);
    for pair in 0..a.steps() / 2 {
        let fragments = [0, 1].map(|step| a.halves(k, &open, 2 * pair + step));
        for rows in 0..columns / 16 {
            let words: [R32; 4] = k.ldmatrix(b.address(16 * rows, 2 * pair));
            for (number, word) in (0..).zip(words) {
                let (n, step) = (2 * rows + number / 2, number % 2);
                let fragment = widen(k, from, word);
                k.mma_m16n8k16(Half::F16, d.tile(0, n), fragments[step as usize], fragment);
            }
        }
    }
    d
}

/// D += A B for A in f16. The rows of the tile of B are along k, and its columns are contiguous. The columns
/// of D are in the order of [`AccTile::in_quads`].
pub fn mma_ab_widened(k: &mut Builder, from: Type, a: &OperandTile, b: &OpenTile, d: &AccTile) {
    // `ldmatrix.trans` moves pairs of bytes: a lane gets two rows of two neighbouring columns. The even
    // column comes first.
    const BY_COLUMN: u32 = 0x3120;
    for j in 0..a.k_tiles() {
        for n in (0..d.n_tiles()).step_by(4) {
            // Without this barrier, ptxas would widen many columns at once, and spill registers.
            if n > 0 && d.n_tiles() > 16 {
                k.warp_sync();
            }
            let from_tile = b.address(16 * j, n / 2);
            let words: Vec<R32> = match d.n_tiles() - n {
                2 => k.ldmatrix_trans::<2>(from_tile).to_vec(),
                _ => k.ldmatrix_trans::<4>(from_tile).to_vec(),
            };
            for (chunk, rows) in (0..).zip(words.chunks_exact(2)) {
                let of_rows = [rows[0], rows[1]].map(|word| {
                    let by_column = k.prmt(word, word, BY_COLUMN);
                    widen(k, from, by_column)
                });
                for column in 0..2 {
                    let fragment = of_rows.map(|columns| columns[column as usize]);
                    let acc = d.tile(0, n + 2 * chunk + column);
                    k.mma_m16n8k16(Half::F16, acc, a.fragment(0, j), fragment);
                }
            }
        }
    }
}

/// Four 8-bit floats as two pairs of f16, the lowest first.
fn widen(k: &mut Builder, from: Type, word: R32) -> [R32; 2] {
    k.split16(word).map(|pair| k.widen_fp8(from, pair))
}
