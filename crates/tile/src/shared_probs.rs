//! P through shared memory.

use ptx::Builder;

use crate::{Agreement, ProbTile, SharedMatrix, WarpRows};

/// Probabilities in shared memory, for products that take them from there.
#[derive(Clone, Copy, Debug)]
pub struct SharedProbs {
    /// The rows of the warp.
    pub rows: WarpRows,
    /// Those of the warpgroup, as an operand.
    pub matrix: SharedMatrix,
    /// How the warpgroup's warps wait for each other's.
    pub agreement: Agreement,
}

impl SharedProbs {
    /// Writes what the warpgroup's next product takes.
    pub(crate) fn publish(&self, k: &mut Builder, p: &ProbTile) {
        self.rows.write(k, p);
        k.fence_proxy_async_shared();
        self.agreement.meet(k);
    }
}
