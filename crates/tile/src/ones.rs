//! Row sums by the tensor cores: a column of ones beside the values, so that P V has a column that is P's row
//! sums.

use ptx::{Builder, CmpOp, Half, R32, Shared, SpecialReg};

use crate::{AccTile, OnlineSoftmax, SwizzledTile, WARPGROUP_THREADS};

/// Who adds up the probabilities of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sums {
    /// The lanes, before they round: an addition each.
    #[default]
    Lanes,
    /// The product with the values, after rounding, by a column of [`Ones`]: eight columns more of it, and no
    /// addition. A sum is that of the very weights that O is made of.
    Product,
}

/// Ones, as a panel's rows that one step of a product reads. In whatever order the swizzle takes them, they
/// are the same.
#[derive(Clone, Copy, Debug)]
pub struct Ones {
    /// Where they are.
    pub at: Shared,
}

impl Ones {
    /// Shared memory that they take.
    pub const BYTES: u32 = 16 * SwizzledTile::ROW_BYTES;
    /// Columns of a product that they add, the fewest there can be.
    pub const COLUMNS: u32 = 8;

    /// Writes them: for all threads of a CTA, before a barrier of all.
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
    /// The columns of O without those of [`Ones`], which become the rows' sums: all lanes of a quad have a
    /// row's, so a quarter is each one's part.
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
