//! The base plan of the `small` family for tests.

use attend::{Packing, Rescale};
use flashcore_kernels::forward::small::{Merge, Requests, RowOrder, Scores, SmallPlan};
use tile::{RowStore, Turns};

/// One warpgroup with all keys, and all requests at once.
pub fn plain() -> SmallPlan {
    SmallPlan {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 1,
        kv_warpgroups: 1,
        block_n: 128,
        stages: 1,
        rescale: Rescale::Always,
        speculative: None,
        turns: Turns::Free,
        tile_order: RowOrder::ByHead,
        key_copies: 1,
        qk_pieces: 1,
        softmax_steps: 1,
        pv_pieces: 1,
        paths: 4,
        requests: Requests::AtOnce,
        scores: Scores::AllAtOnce,
        merge: Merge::Shares,
        store: RowStore::Pairs,
        overlapping: false,
        resident_ctas: 1,
        tanh: attend::Tanh::Exp2,
    }
}
