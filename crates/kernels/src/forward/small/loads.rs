//! The TMA requests: which warp issues them and when. One lane of a separate warp issues each copy, directly
//! after it has initialised the copy's mbarrier.

use attend::{Exchange, Place};
use problem::{Problem, Tensor};
use ptx::{Builder, CmpOp, Pred, R32, Shared, Src, TensorMapPtr};
use tile::{Mbarriers, SwizzledTile};

use super::plan::{Requests, SmallPlan};

/// Warps of a warpgroup.
const WARPS: usize = 4;
/// The warp that issues the late requests.
const LATE_WARP: u32 = 2;
/// The elected lane, which initialises, requests and arrives for its warp. ptxas predicates `mbarrier.init`
/// for the whole warp, and compute-sanitizer attributes it to the last lane. With any other elected lane,
/// compute-sanitizer would report a race of two lanes where there is none.
const ELECTED_LANE: u32 = 31;

/// A TMA copy of one tile, issued by one thread.
#[derive(Clone)]
struct Copy {
    map: TensorMapPtr,
    tile: SwizzledTile,
    to: Shared,
    /// Row, head and batch entry in the tensor.
    at: [R32; 3],
    barrier: Shared,
    /// Whether this warpgroup issues the request, among those that need the tile; `None` if only one needs
    /// it.
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
    plan: &'a SmallPlan,
    problem: &'a Problem,
    place: Place,
    lane: R32,
    /// Address of the warpgroup's first tile of queries; keys and values likewise.
    pub queries: Shared,
    pub keys: Shared,
    pub values: Shared,
    query_barrier: Shared,
    key_barriers: Mbarriers,
    value_barrier: Shared,
}

/// The coordinates of the copies: tensor maps, first position and key, head and batch entry.
pub(super) struct Source {
    pub maps: [TensorMapPtr; 3],
    /// Sequence position of the first query row.
    pub position: R32,
    pub first_key: R32,
    /// Head of Q, or group of packed heads.
    pub head: R32,
    pub kv_head: R32,
    pub batch: R32,
}

impl Source {
    /// Head and batch entry in a tensor's map, where those with stride 0 are one.
    pub(super) fn head(&self, k: &mut Builder, problem: &Problem, tensor: Tensor) -> [R32; 2] {
        let strides = problem.strides(tensor);
        let head = if tensor == Tensor::Q { self.head } else { self.kv_head };
        let mut index = |stride: i64, index: R32| if stride == 0 { k.mov(0) } else { index };
        [index(strides.head, head), index(strides.batch, self.batch)]
    }
}

impl<'a> Loads<'a> {
    pub(super) fn new(
        k: &mut Builder,
        plan: &'a SmallPlan,
        problem: &'a Problem,
        place: Place,
        lane: R32,
        shared: Shared,
    ) -> Loads<'a> {
        let map = plan.shared_map(problem);
        let at = |offset: u32| ptx::Pointer::at(shared, i64::from(offset));
        let barriers = Mbarriers::new(at(map.barriers));
        let values = barriers.from(plan.row_warpgroups);
        let keys = values.from(plan.kv_warpgroups);
        let (rows, part) = (place.row_warpgroup, place.kv_warpgroup);
        let before = k.mul(part, plan.key_copies);
        let key_bytes = plan.key_copies * plan.key_tile(problem).bytes();
        Loads {
            plan,
            problem,
            place,
            lane,
            queries: k.shared_index(at(map.queries), rows, plan.query_tile(problem).bytes()),
            keys: k.shared_index(at(map.keys), part, key_bytes),
            values: k.shared_index(at(map.values), part, plan.value_tile(problem).bytes()),
            query_barrier: barriers.index(k, rows),
            key_barriers: keys.skip(k, before),
            value_barrier: values.index(k, part),
        }
    }

    /// Initialises the mbarriers, issues all requests, and synchronises the CTA in between.
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
                // If all requests come later, the exchange of a cluster has a fence that covers these
                // mbarriers, too.
                if !mine.is_empty() || self.plan.cluster == 1 {
                    k.fence_mbarrier_init();
                }
                // Late requests follow a CTA barrier, and so the `griddepcontrol.wait` of the warps that
                // request early.
                if self.plan.overlapping && !mine.is_empty() {
                    k.griddep_wait();
                }
                mine.iter().for_each(|copy| copy.request(k));
            });
        }
        sync_cta(k, self.plan, self.lane, exchange);
        if !late.is_empty() {
            self.one_lane_of(k, LATE_WARP, |k| late.iter().for_each(|copy| copy.request(k)));
        }
        if self.plan.overlapping {
            k.griddep_launch_dependents();
        }
    }

    /// The warpgroup's copies: those requested first, and those requested after the CTA's barrier.
    fn copies(&self, k: &mut Builder, from: &Source) -> (Vec<Copy>, Vec<Copy>) {
        let SmallPlan { row_warpgroups, kv_warpgroups, key_copies, .. } = *self.plan;
        let of_rows = (kv_warpgroups > 1).then(|| k.setp_u(CmpOp::Eq, self.place.kv_warpgroup, 0));
        let of_part = (row_warpgroups > 1).then(|| k.setp_u(CmpOp::Eq, self.place.row_warpgroup, 0));
        let [q, key, v] = [Tensor::Q, Tensor::K, Tensor::V].map(|t| from.head(k, self.problem, t));
        let query = Copy {
            map: from.maps[0],
            tile: self.plan.query_tile(self.problem),
            to: self.queries,
            at: [from.position, q[0], q[1]],
            barrier: self.query_barrier,
            requester: of_rows,
        };
        let value = Copy {
            map: from.maps[2],
            tile: self.plan.value_tile(self.problem),
            to: self.values,
            at: [from.first_key, v[0], v[1]],
            barrier: self.value_barrier,
            requester: of_part,
        };
        let tile = self.plan.key_tile(self.problem);
        let mut keys: Vec<Copy> = Vec::new();
        for i in 0..key_copies {
            let first = if i == 0 { from.first_key } else { k.add(from.first_key, i * tile.rows) };
            keys.push(Copy {
                map: from.maps[1],
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

/// Initialises the exchange's mbarriers and synchronises the CTA: afterwards all mbarriers of the CTA are
/// initialised.
pub(super) fn sync_cta(k: &mut Builder, plan: &SmallPlan, lane: R32, exchange: Option<&Exchange>) {
    if let Some(exchange) = exchange {
        let elected = k.setp_u(CmpOp::Eq, lane, ELECTED_LANE);
        k.if_(elected, |k| exchange.expect(k));
    }
    if plan.cluster > 1 {
        k.cluster_arrive_relaxed();
    }
    k.bar_sync();
}

/// Emits `body` under `condition`, if there is one.
fn when(k: &mut Builder, condition: Option<Pred>, body: impl FnOnce(&mut Builder)) {
    match condition {
        Some(condition) => k.if_(condition, body),
        None => body(k),
    }
}
