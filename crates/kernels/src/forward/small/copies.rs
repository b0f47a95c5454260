//! The sources of the TMA copies of both families, and the barrier that follows the requests.

use attend::Exchange;
use problem::{OperandMap, Tensor};
use ptx::{Builder, CmpOp, R32, TensorMapPtr};

use crate::{Baked, Repeated};

/// The elected lane, which initialises mbarriers, requests copies and arrives for its warp. ptxas predicates
/// `mbarrier.init` for the whole warp, and compute-sanitizer attributes it to the last lane. With any other
/// elected lane, compute-sanitizer would report a false race between two lanes.
pub(super) const ELECTED_LANE: u32 = 31;

/// The coordinates of the copies: tensor maps, first position and key, head and batch entry.
pub(super) struct Source {
    pub maps: OperandMap<TensorMapPtr>,
    /// Sequence position of the first query row.
    pub position: R32,
    pub first_key: R32,
    /// Head of Q, or group of packed heads.
    pub head: R32,
    pub kv_head: R32,
    pub batch: R32,
}

impl Source {
    /// Head and batch entry in a tensor's map, in which heads or batch entries with stride 0 count as one.
    pub(super) fn head(&self, k: &mut Builder, baked: &Baked, tensor: Tensor) -> [R32; 2] {
        let Repeated { batch: one_batch, head: one_head } = baked.repeated[tensor.into()];
        let head = if tensor == Tensor::Q { self.head } else { self.kv_head };
        let mut index = |one: bool, index: R32| if one { k.mov(0) } else { index };
        [index(one_head, head), index(one_batch, self.batch)]
    }
}

/// Initialises the exchange's mbarriers and synchronises the CTA: afterwards all mbarriers of the CTA are
/// initialised.
pub(super) fn sync_cta(k: &mut Builder, cluster: u32, lane: R32, exchange: Option<&Exchange>) {
    if let Some(exchange) = exchange {
        let elected = k.setp_u(CmpOp::Eq, lane, ELECTED_LANE);
        k.if_(elected, |k| exchange.expect(k));
    }
    if cluster > 1 {
        k.cluster_arrive_relaxed();
    }
    k.bar_sync();
}
