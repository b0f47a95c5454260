//! Row sums on the tensor cores: columns of ones beside V, so that P V also yields the row sums of P.

use ptx::{Builder, CmpOp, Half, R32, Shared, SpecialReg};

use crate::{AccTile, OnlineSoftmax, SwizzledTile, WARPGROUP_THREADS};

/// Where the row sums of P are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sums {
    /// In the lanes, before rounding: one addition per probability.
    #[default]
    Lanes,
    /// In the product with V, after rounding, by columns of [`Ones`]: the product has eight more columns and
    /// the additions vanish. The sum is that of exactly the rounded weights that O is made of.
    Product,
}

/// A block of ones as wide as a panel, with the rows that one k-step of a product reads. All elements are
/// equal, so the swizzle has no effect.
#[derive(Clone, Copy, Debug)]
pub struct Ones {
    /// Address in shared memory.
    pub at: Shared,
}

impl Ones {
    /// Bytes of shared memory.
    pub const BYTES: u32 = 16 * SwizzledTile::ROW_BYTES;
    /// Columns that the ones add to the product: the smallest possible step of n.
    pub const COLUMNS: u32 = 8;

    /// Writes the ones. Run by all threads of a CTA, before a barrier of the whole CTA.
    pub fn write(self, k: &mut Builder, half: Half) {
        let pair = match half {
            Half::F16 => 0x3C00_3C00u32,
            Half::Bf16 => 0x3F80_3F80,
        };
        let thread = k.special(SpecialReg::TidX);
        let writes = k.setp_u(CmpOp::Lt, thread, WARPGROUP_THREADS);
        k.if_(writes, |k| {
            let to = k.shared_index(self.at, thread, Ones::BYTES / WARPGROUP_THREADS);
            let pair: R32 = k.mov(pair);
            k.st_vec(to, [pair; 4]);
            k.fence_proxy_async();
        });
    }
}

impl OnlineSoftmax {
    /// Splits off the columns of [`Ones`]: returns the columns of O and stores the row sums in the softmax.
    /// Every lane of a quad holds the complete sum, so each lane takes a quarter of it as its part.
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
