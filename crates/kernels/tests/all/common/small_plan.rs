//! Base plans of the families for small grids, for tests.

use attend::{Packing, Rescale};
use flashcore_kernels::forward::small::{AtOncePlan, Merge, Requests, RowOrder, Scores, StreamedPlan};
use tile::RowStore;

/// One warpgroup with all keys, and all requests at once.
pub fn at_once() -> AtOncePlan {
    AtOncePlan {
        row_warpgroups: 1,
        packing: Packing::Apart,
        cluster: 1,
        kv_warpgroups: 1,
        block_n: 128,
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
        tanh: attend::Tanh::Exp2,
    }
}

/// One warpgroup, and two stages of few keys.
pub fn streamed() -> StreamedPlan {
    StreamedPlan { block_n: 32, rescale: Rescale::Always, store: RowStore::Pairs, ..StreamedPlan::BASE }
}
