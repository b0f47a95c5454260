//! Where the row sums of P are computed.

use ptx::Builder;
use tile::AccTile;

use super::OnlineSoftmax;

/// Where the row sums of P are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sums {
    /// In the lanes, before rounding: one addition per probability.
    #[default]
    Lanes,
    /// In the product with V, after rounding, by columns of [`tile::Ones`]: the product has eight more
    /// columns, and the additions are saved. The product sums exactly the rounded weights that are used for
    /// O.
    Product,
}

impl OnlineSoftmax {
    /// Splits off the columns of [`tile::Ones`]: returns the columns of O and stores the row sums in the
    /// softmax. Every lane of a quad holds the complete sum, so each lane keeps a quarter of it as its part.
    #[must_use]
    pub fn take_sums(&self, k: &mut Builder, o: &AccTile) -> AccTile {
        if self.sums == Sums::Lanes {
            return o.clone();
        }
        let own = o.n_tiles() - 1;
        let [even, _, odd, _] = o.tile(0, own);
        for (&sum, whole) in self.sum.iter().zip([even, odd]) {
            k.mul_to(sum, whole, 0.25f32);
        }
        o.columns(0, own)
    }
}
