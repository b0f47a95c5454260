//! Reductions along the rows of a tile: within a lane, and over the quad of lanes that share a row.

use ptx::{Builder, F32};
use tile::AccTile;

/// Number of independent chains in a row's reductions. More chains hide latency and cost one more instruction
/// each at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Chains {
    /// Chains of the maximum.
    pub max: u32,
    /// Chains of the sum.
    pub sum: u32,
}

/// Lane masks of the butterfly shuffles within a quad. The four lanes of a quad share their rows.
pub(super) const QUAD: [u32; 2] = [1, 2];

/// The largest score of each row among the scores that one lane holds, accumulated tile by tile.
#[derive(Clone, Debug)]
pub struct LaneMaxima(pub(crate) Vec<F32>);

impl LaneMaxima {
    /// The maxima of one tile of scores.
    pub fn of(k: &mut Builder, s: &AccTile) -> LaneMaxima {
        LaneMaxima((0..s.lane_rows()).map(|i| reduce(k, s.row(i), |k, a, b| k.max(a, b))).collect())
    }

    /// Combines the maxima with those of another tile of the same rows.
    #[must_use]
    pub fn and(self, k: &mut Builder, other: &LaneMaxima) -> LaneMaxima {
        LaneMaxima(self.0.iter().zip(&other.0).map(|(&a, &b)| k.max(a, b)).collect())
    }
}

/// Reduces values in four independent chains, which hide the instruction latency.
pub(super) fn reduce(
    k: &mut Builder,
    values: impl Iterator<Item = F32>,
    mut combine: impl FnMut(&mut Builder, F32, F32) -> F32,
) -> F32 {
    let mut values: Vec<F32> = values.collect();
    for i in 4..values.len() {
        values[i % 4] = combine(k, values[i % 4], values[i]);
    }
    let mut width = values.len().min(4);
    while width > 1 {
        width /= 2;
        for i in 0..width {
            values[i] = combine(k, values[i], values[i + width]);
        }
    }
    values[0]
}

/// Reduces over the four lanes that share a row.
pub(super) fn quad_reduce(
    k: &mut Builder,
    mut value: F32,
    mut combine: impl FnMut(&mut Builder, F32, F32) -> F32,
) -> F32 {
    for mask in QUAD {
        let other = k.shfl_xor(value, mask);
        value = combine(k, value, other);
    }
    value
}

impl LaneMaxima {
    /// The maxima of one tile of scores. Columns are taken in order, rows are interleaved, and each row has
    /// `chains` chains.
    pub(super) fn in_chains(k: &mut Builder, s: &AccTile, chains: u32) -> LaneMaxima {
        LaneMaxima(fold_rows(
            k,
            s,
            chains,
            |_, _, score| score,
            |k, a, b| k.max_to(a, a, b),
            |k, a, b| k.max(a, b),
        ))
    }
}

/// Reduces each row of a tile; columns are taken in order and rows are interleaved. `map` prepares an
/// element, `fold` adds it to one of `chains` chains, and `join` combines the chains.
pub(super) fn fold_rows(
    k: &mut Builder,
    s: &AccTile,
    chains: u32,
    map: impl Fn(&mut Builder, (usize, usize), F32) -> F32,
    fold: impl Fn(&mut Builder, F32, F32),
    join: impl Fn(&mut Builder, F32, F32) -> F32,
) -> Vec<F32> {
    let rows: Vec<Vec<F32>> = (0..s.lane_rows()).map(|row| s.row(row).collect()).collect();
    let chains = (chains as usize).min(rows[0].len());
    let mut folded: Vec<Vec<F32>> = vec![Vec::new(); rows.len()];
    for column in 0..rows[0].len() {
        for (row, folded) in folded.iter_mut().enumerate() {
            let element = map(k, (row, column), rows[row][column]);
            if column < chains {
                let chain = k.mov(element);
                folded.push(chain);
            } else {
                fold(k, folded[column % chains], element);
            }
        }
    }
    folded.into_iter().map(|row| row.into_iter().reduce(|a, b| join(k, a, b)).expect("a chain")).collect()
}
