//! The TMA requests: which warp issues them and when. Each copy is issued by one lane of a separate warp,
//! directly after that lane has initialised the copy's mbarrier.

use attend::{Exchange, WarpgroupPlace};
use problem::{Operand, Tensor};
use ptx::{Builder, CmpOp, Pred, R32, Shared, Src, TensorMapPtr};
use tile::{Mbarriers, SwizzledTile};

use super::{AtOncePlan, Requests};
use crate::Baked;
use crate::forward::small::common::SharedMap;
use crate::forward::small::copies::{ELECTED_LANE, Source, sync_cta};

/// Warps of a warpgroup.
const WARPS: usize = 4;
/// The warp that issues the late requests.
const LATE_WARP: u32 = 2;
/// A TMA copy of one tile, issued by one thread.
#[derive(Clone)]
struct Copy {
    map: TensorMapPtr,
    tile: SwizzledTile,
    to: Shared,
    /// Row, head and batch entry in the tensor.
    at: [R32; 3],
    barrier: Shared,
    /// Whether this warpgroup issues the request, among those that need the tile; `None` if only one
    /// warpgroup needs it.
    requester: Option<Pred>,
}

impl Copy {
    fn prepare(&self, k: &mut Builder) {
        when(k, self.requester, |k| k.mbarrier_init(self.barrier, 1));
    }

    fn request(&self, k: &mut Builder) {
        when(k, self.requester, |k| {
            k.mbarrier_arrive_expect_tx(self.barrier, self.tile.bytes());
            self.tile.load(k, self.to, self.map, self.at.map(Src::from), self.barrier);
        });
    }
}

/// A warpgroup's tiles in shared memory and their full barriers.
#[derive(Clone, Copy)]
pub(super) struct Loads<'a> {
    plan: &'a AtOncePlan,
    baked: &'a Baked,
    map: SharedMap,
    place: WarpgroupPlace,
    lane: R32,
    /// Address of the warpgroup's first tile of queries; the next fields hold those of keys and values.
    pub queries: Shared,
    pub keys: Shared,
    pub values: Shared,
    query_barrier: Shared,
    key_barriers: Mbarriers,
    value_barrier: Shared,
}

impl<'a> Loads<'a> {
    pub(super) fn new(
        k: &mut Builder,
        plan: &'a AtOncePlan,
        baked: &'a Baked,
        map: SharedMap,
        place: WarpgroupPlace,
        lane: R32,
        shared: Shared,
    ) -> Loads<'a> {
        let at = |offset: u32| ptx::Pointer::at(shared, i64::from(offset));
        let barriers = Mbarriers::new(at(map.barriers));
        let values = barriers.from(plan.row_warpgroups);
        let keys = values.from(plan.kv_warpgroups);
        let (rows, part) = (place.row_warpgroup, place.kv_warpgroup);
        let before = k.mul(part, plan.key_copies);
        let key_bytes = plan.key_copies * map.key_tile.bytes();
        Loads {
            plan,
            baked,
            map,
            place,
            lane,
            queries: k.shared_index(at(map.queries), rows, map.query_tile.bytes()),
            keys: k.shared_index(at(map.keys), part, key_bytes),
            values: k.shared_index(at(map.values), part, map.value_tile.bytes()),
            query_barrier: barriers.index(k, rows),
            key_barriers: keys.skip(k, before),
            value_barrier: values.index(k, part),
        }
    }

    /// Initialises the mbarriers, synchronises the CTA, and issues all requests, early ones before the
    /// barrier.
    pub(super) fn request(&self, k: &mut Builder, from: &Source, exchange: Option<&Exchange>) {
        let (early, late) = self.copies(k, from);
        for warp in 0..WARPS as u32 {
            let mine: Vec<&Copy> = early.iter().skip(warp as usize).step_by(WARPS).collect();
            let prepares_late = warp == LATE_WARP && !late.is_empty();
            if mine.is_empty() && !prepares_late {
                continue;
            }
            self.one_lane_of(k, warp, |k| {
                if self.plan.overlapping {
                    mine.iter().for_each(|copy| k.prefetch_tensor_map(copy.map));
                }
                mine.iter().for_each(|copy| copy.prepare(k));
                if prepares_late {
                    late.iter().for_each(|copy| copy.prepare(k));
                }
                // If all requests are late, the fence of the cluster's exchange covers these mbarriers too.
                if !mine.is_empty() || self.plan.cluster == 1 {
                    k.fence_mbarrier_init();
                }
                // Late requests follow a CTA barrier, and therefore the `griddepcontrol.wait` of the warps
                // that request early.
                if self.plan.overlapping && !mine.is_empty() {
                    k.griddep_wait();
                }
                mine.iter().for_each(|copy| copy.request(k));
            });
        }
        sync_cta(k, self.plan.cluster, self.lane, exchange);
        if !late.is_empty() {
            self.one_lane_of(k, LATE_WARP, |k| late.iter().for_each(|copy| copy.request(k)));
        }
        if self.plan.overlapping {
            k.griddep_launch_dependents();
        }
    }

    /// The warpgroup's copies: those requested at the start, and those requested after the CTA barrier.
    fn copies(&self, k: &mut Builder, from: &Source) -> (Vec<Copy>, Vec<Copy>) {
        let AtOncePlan { row_warpgroups, kv_warpgroups, key_copies, .. } = *self.plan;
        let of_rows = (kv_warpgroups > 1).then(|| k.setp_u(CmpOp::Eq, self.place.kv_warpgroup, 0));
        let of_part = (row_warpgroups > 1).then(|| k.setp_u(CmpOp::Eq, self.place.row_warpgroup, 0));
        let [q, key, v] = [Tensor::Q, Tensor::K, Tensor::V].map(|t| from.head(k, self.baked, t));
        let query = Copy {
            map: from.maps[Operand::Q],
            tile: self.map.query_tile,
            to: self.queries,
            at: [from.position, q[0], q[1]],
            barrier: self.query_barrier,
            requester: of_rows,
        };
        let value = Copy {
            map: from.maps[Operand::V],
            tile: self.map.value_tile,
            to: self.values,
            at: [from.first_key, v[0], v[1]],
            barrier: self.value_barrier,
            requester: of_part,
        };
        let tile = self.map.key_tile;
        let mut keys: Vec<Copy> = Vec::new();
        for i in 0..key_copies {
            let first = if i == 0 { from.first_key } else { k.add(from.first_key, i * tile.rows) };
            keys.push(Copy {
                map: from.maps[Operand::K],
                tile,
                to: ptx::Pointer::at(self.keys, i64::from(i * tile.bytes())),
                at: [first, key[0], key[1]],
                barrier: self.key_barriers.at(i),
                requester: of_part,
            });
        }
        let later_keys = keys.split_off(1);
        let [first_keys, query, value] = [keys, vec![query], vec![value]];
        match self.plan.requests {
            Requests::AtOnce => ([first_keys, query, value, later_keys].concat(), Vec::new()),
            Requests::ValuesLate => ([first_keys, query, later_keys].concat(), value),
            Requests::FirstKeysOnly => ([first_keys, query].concat(), [later_keys, value].concat()),
        }
    }

    fn one_lane_of(&self, k: &mut Builder, warp: u32, body: impl FnOnce(&mut Builder)) {
        let in_warpgroup = k.and(self.place.warp, WARPS as u32 - 1);
        let elected = k.setp_u(CmpOp::Eq, self.lane, ELECTED_LANE);
        let chosen = k.setp_u_and(CmpOp::Eq, in_warpgroup, warp, elected);
        k.if_(chosen, body);
    }

    pub(super) fn wait_for_queries(&self, k: &mut Builder) {
        k.mbarrier_wait_parity(self.query_barrier, 0);
    }

    /// Waits until a copy of keys has arrived.
    pub(super) fn wait_for_keys(&self, k: &mut Builder, copy: u32) {
        k.mbarrier_wait_parity(self.key_barriers.at(copy), 0);
    }

    pub(super) fn wait_for_values(&self, k: &mut Builder) {
        k.mbarrier_wait_parity(self.value_barrier, 0);
    }
}

/// Emits `body` under `condition`, if there is one.
fn when(k: &mut Builder, condition: Option<Pred>, body: impl FnOnce(&mut Builder)) {
    match condition {
        Some(condition) => k.if_(condition, body),
        None => body(k),
    }
}
