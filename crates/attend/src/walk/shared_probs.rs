//! P in shared memory as an operand of P V.

use ptx::Builder;
use tile::{OperandTile, SharedMatrix, WarpRows, WarpgroupVote};

/// P in shared memory, as the A operand of P V.
#[derive(Clone, Copy, Debug)]
pub struct SharedProbs {
    /// The warp's rows of P.
    pub rows: WarpRows,
    /// The warpgroup's rows of P, as an operand.
    pub matrix: SharedMatrix,
    /// Synchronises the warps of the warpgroup, which read each other's rows.
    pub warpgroup: WarpgroupVote,
}

impl SharedProbs {
    /// Writes P for the warpgroup's next product. Returns when all warps have written.
    pub(super) fn write(&self, k: &mut Builder, p: &OperandTile) {
        self.rows.write(k, p);
        k.fence_proxy_async_shared();
        self.warpgroup.sync(k);
    }
}
