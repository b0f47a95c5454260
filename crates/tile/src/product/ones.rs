//! Row sums on the tensor cores: with columns of ones added to B, the product A B also yields the row sums of
//! A.

use ptx::{Builder, CmpOp, Half, R32, Shared, SpecialReg};

use crate::{SwizzledTile, WARPGROUP_THREADS};

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
    /// Columns that the ones add to the product: the smallest step of n.
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
