//! Code that the generators of both families share: parameters, the work of a cluster, and the merge of the
//! parts of the keys.

use attend::{
    Exchange, KeyBand, OnlineSoftmax, Rescale, RowPrograms, RowRange, ScorePrograms, Sinks, Softcap,
    WarpgroupPlace,
};
use problem::{Operand, OperandMap, Problem, Tensor};
use ptx::{Builder, CmpOp, Dim3, F32, Global, Half, Launch, Pointer, R32, R64, Shared, TensorMapPtr};
use tile::{AccTile, Mbarriers, Products, Sign, SwizzledTile, Threads, WARPGROUP_ROWS, divide};

use super::common::{Common, RowOrder, SharedMap};
use super::copies::Source;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{
    declare_band, declare_head_strides, declare_map, declare_softcap, factor_or_least, half,
};
use crate::forward::programs::declare_programs;
use crate::grid::{Axis, Grid};
use crate::{Arch, Baked, Dims};

const ENTRY: &str = "flash_forward_small";

/// Methods of [`FamilyPlan`](crate::family::FamilyPlan) that the plans of both families have in common.
macro_rules! of_small_plan {
    () => {
        fn baked(&self, problem: &::problem::Problem) -> $crate::Baked {
            $crate::forward::small::emit::baked(self, problem)
        }

        fn drafts<'a>(
            &'a self,
            problem: &'a ::problem::Problem,
            baked: &'a $crate::Baked,
            _: &$crate::Arch,
        ) -> Vec<$crate::draft::Draft<'a>> {
            vec![$crate::forward::small::emit::draft(self, problem, baked)]
        }

        fn tile(&self) -> [u32; 2] {
            [self.rows(), self.cluster_keys()]
        }

        fn adapted(mut self, problem: &::problem::Problem, _: &$crate::Arch, own_shape: bool) -> Self {
            self.tanh = $crate::forward::contract::default_tanh(problem);
            if !own_shape {
                self = self.filled(problem);
                let common = $crate::forward::small::emit::SmallPlan::common(&self);
                self.cluster = common.cluster_with_keys(problem);
            }
            self.fitted(problem)
        }
    };
}
pub(super) use of_small_plan;

/// Rows of a warp.
pub(super) const WARP_ROWS: u32 = 16;

/// A plan of one of the two families.
pub(super) trait SmallPlan: Sized {
    /// The name of the family.
    const FAMILY: &'static str;

    fn common(&self) -> Common;

    fn shared_map(&self, dims: impl Into<Dims>) -> SharedMap;

    /// What the main loop depends on, besides what every kernel of the two families does.
    fn with_main_loop(&self, baked: Baked, problem: &Problem) -> Baked;

    /// Emits attention of the warpgroup's rows. Returns the softmax and the warpgroup's columns of O over all
    /// keys, normalised.
    fn attend(forward: &Forward<'_, Self>, k: &mut Builder) -> (OnlineSoftmax, AccTile);
}

/// What the code depends on.
pub(super) fn baked<P: SmallPlan>(plan: &P, problem: &Problem) -> Baked {
    let common = plan.common();
    let baked = Baked::of(problem, common.packed_heads(problem) > 1);
    // A bound on later keys is compared with the last key as well.
    let baked = Baked {
        divides: baked.band.after.is_none() && common.divides(problem),
        flat: common.grid(problem).need_flat(),
        ..baked
    };
    plan.with_main_loop(
        baked.with_row_bytes(problem, &[Tensor::Out]).with_maps(problem, &[Tensor::Q, Tensor::K, Tensor::V]),
        problem,
    )
}

/// Emits the kernel of a plan that has been checked.
pub(super) fn draft<'a, P: SmallPlan>(plan: &'a P, problem: &Problem, baked: &'a Baked) -> Draft<'a> {
    let (common, map) = (plan.common(), plan.shared_map(baked));
    let mut k = Builder::kernel(ENTRY);
    k.max_threads(common.threads());
    k.min_ctas_per_sm(common.resident_ctas);
    let mut contract = Contract::new(problem);
    let params = Params::declare(&mut k, &mut contract, (problem, baked), &common, &map);
    let launch = (ENTRY, launch(&common, (problem, baked), map.bytes));
    let body = move |k: &mut Builder| {
        let forward = Forward::new(k, baked, plan, map, params);
        let (softmax, o) = P::attend(&forward, k);
        forward.store(k, &softmax, &o);
    };
    Draft::new(k, contract, launch, Arch::SM_90.full_target(), body)
}

fn launch(common: &Common, (problem, baked): (&Problem, &Baked), dynamic_shared: u32) -> Launch {
    Launch {
        grid: common.grid(problem).launch(baked.flat),
        cluster: Dim3(common.cluster, 1, 1),
        block: Dim3(common.threads(), 1, 1),
        dynamic_shared,
        overlapping: common.overlapping,
    }
}

/// The kernel's parameters.
pub(super) struct Params {
    /// Tensor maps of Q, K and V.
    maps: OperandMap<TensorMapPtr>,
    grid: Grid,
    pub(super) out: Global,
    pub(super) lse: Option<Global>,
    /// Bytes between batch entries and between heads of the output.
    pub(super) out_strides: [R64; 2],
    seq_q: R32,
    seq_kv: R32,
    /// `|scale| · log2 e`.
    factor: F32,
    pub(super) band: KeyBand,
    pub(super) softcap: Option<Softcap>,
    programs: Option<ScorePrograms>,
    sinks: Option<Global>,
}

impl Params {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        common: &Common,
        map: &SharedMap,
    ) -> Params {
        let tiles = [(Tensor::Q, map.query_tile), (Tensor::K, map.key_tile), (Tensor::V, map.value_tile)];
        Params {
            maps: tiles.map(|tile| (tile.0.into(), declare_map(k, c, problem, tile))).into_iter().collect(),
            grid: common.grid(problem).declare(k, c, baked.flat),
            out: c.tensor(k, Tensor::Out),
            lse: c.operand(k, Operand::Lse),
            out_strides: declare_head_strides(k, c, problem, Tensor::Out),
            seq_q: c.u32(k, "seq_q", problem.seq_q as u32),
            seq_kv: c.u32(k, "seq_kv", problem.seq_kv as u32),
            factor: c.f32(k, "scale_log2e", factor_or_least(problem)),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, common.tanh),
            programs: declare_programs(k, c, problem, baked.programs.as_ref()),
            sinks: c.operand(k, Operand::Sinks),
        }
    }
}

/// State of the warpgroup in registers, with the values known at emission.
pub(super) struct Forward<'a, P> {
    pub(super) plan: &'a P,
    pub(super) common: Common,
    pub(super) map: SharedMap,
    pub(super) baked: &'a Baked,
    pub(super) half: Half,
    pub(super) params: Params,
    pub(super) place: WarpgroupPlace,
    pub(super) threads: Threads,
    pub(super) rows: RowRange,
    /// The CTA's query head or group of packed heads, and its batch entry.
    pub(super) head: R32,
    pub(super) batch: R32,
    pub(super) shared: Shared,
    /// The merge with the other parts of the keys, if there are other parts.
    pub(super) exchange: Option<Exchange>,
}

impl<'a, P: SmallPlan> Forward<'a, P> {
    fn new(k: &mut Builder, baked: &'a Baked, plan: &'a P, map: SharedMap, params: Params) -> Forward<'a, P> {
        let common = plan.common();
        let division = common.division();
        let place = WarpgroupPlace::new(k, division);
        let threads = place.threads(k, division);
        let work = Work::of_cluster(k, &common, &params);
        let first = k.mul(work.tile, common.rows());
        let shared = k.dynamic_shared(SwizzledTile::ALIGNMENT);
        let at = |offset: u32| shared.at(i64::from(offset));
        let barriers = Mbarriers::new(at(map.barriers)).from(map.load_barriers);
        let exchange = (division.parts() > 1)
            .then(|| Exchange::new(division, place, baked.head_dim_v(), at(map.messages), barriers));
        Forward {
            plan,
            common,
            map,
            baked,
            half: half(baked),
            place,
            threads,
            rows: RowRange {
                first,
                rows: common.rows(),
                seq_q: params.seq_q,
                seq_kv: params.seq_kv,
                heads: common.packed_heads(baked),
            },
            params,
            head: work.head,
            batch: work.batch,
            shared,
            exchange,
        }
    }

    pub(super) fn products(&self) -> Products {
        let products = Products::new([self.half.ty(); 2]);
        if self.baked.sign == Sign::Negate { products.negating() } else { products }
    }

    pub(super) fn softmax(&self, k: &mut Builder, rescale: Rescale) -> OnlineSoftmax {
        let Params { factor, ref programs, .. } = self.params;
        let softmax = OnlineSoftmax::new(k, self.half, rescale, factor, WARP_ROWS, programs.as_ref());
        softmax.of_wide(self.baked.wide)
    }

    /// The programs for the warpgroup's rows.
    pub(super) fn row_programs(&self, k: &mut Builder) -> Option<RowPrograms<'_>> {
        let (tile, at) = ((WARP_ROWS, self.common.block_n), [self.head, self.batch]);
        let programs = self.params.programs.as_ref()?;
        Some(programs.for_rows(k, &self.threads, &self.rows, tile, at))
    }

    /// The sinks of the warpgroup's rows.
    pub(super) fn sinks(&self, k: &mut Builder) -> Option<Sinks> {
        let start = self.params.sinks?;
        Some(Sinks::load(k, start, self.head, &self.threads, &self.rows, WARP_ROWS))
    }

    /// The warpgroup's rows among those of the CTA.
    pub(super) fn own_rows(&self, k: &mut Builder) -> RowRange {
        let first = k.mad(self.place.row_warpgroup, WARPGROUP_ROWS, self.rows.first);
        RowRange { first, rows: WARPGROUP_ROWS, ..self.rows }
    }

    /// The first key of the warpgroup's part.
    pub(super) fn first_key(&self, k: &mut Builder) -> R32 {
        let part = self.place.part(k, self.common.division());
        k.mul(part, self.common.block_n)
    }

    /// The tensor-map coordinates of the warpgroup's queries, keys and values.
    pub(super) fn source(&self, k: &mut Builder) -> Source {
        let own = self.own_rows(k);
        Source {
            maps: self.params.maps.clone(),
            position: own.position(k, own.first),
            first_key: self.first_key(k),
            head: self.head,
            kv_head: divide(k, self.head, self.baked.group_size() / own.heads),
            batch: self.batch,
        }
    }

    /// The warpgroup's columns of O over all keys, normalised. If the warpgroup has all keys, these are all
    /// columns.
    pub(super) fn join(
        &self,
        k: &mut Builder,
        softmax: OnlineSoftmax,
        o: AccTile,
    ) -> (OnlineSoftmax, AccTile) {
        let Some(exchange) = &self.exchange else {
            let sinks = self.sinks(k);
            softmax.normalize(k, &o, sinks.as_ref());
            return (softmax, o);
        };
        self.wait_for_cluster(k);
        let own = exchange.send(k, &softmax, &o);
        let sinks = self.sinks(k);
        (exchange.receive(k, softmax, &own, sinks.as_ref()), own)
    }

    pub(super) fn exchange(&self) -> &Exchange {
        self.exchange.as_ref().expect("a plan with a peer has two parts")
    }

    /// Waits until the mbarriers of the other CTAs are initialised.
    pub(super) fn wait_for_cluster(&self, k: &mut Builder) {
        if self.common.cluster > 1 {
            k.cluster_wait();
        }
    }
}

/// The work of a cluster: a row tile, a head (or a group of packed heads) and a batch entry.
struct Work {
    tile: R32,
    head: R32,
    batch: R32,
}

impl Work {
    fn of_cluster(k: &mut Builder, common: &Common, &Params { grid, ref band, .. }: &Params) -> Work {
        let [x, y, z] = [Axis::X, Axis::Y, Axis::Z].map(|axis| grid.index(k, axis));
        let x = divide(k, x, common.cluster);
        match common.tile_order {
            RowOrder::ByHead => {
                let tile = if !band.is_full() {
                    let count = grid.extent(k, Axis::X);
                    let count = divide(k, count, common.cluster);
                    from_last(k, x, count)
                } else {
                    x
                };
                Work { tile, head: y, batch: z }
            }
            RowOrder::LongestFirst => {
                let count = grid.extent(k, Axis::Z);
                Work { tile: from_last(k, z, count), head: x, batch: y }
            }
            RowOrder::Folded => {
                let count = grid.extent(k, Axis::Z);
                let up = k.add(count, 1);
                let half = k.shr_u(up, 1);
                let long = from_last(k, z, count);
                let short = k.sub(z, half);
                let is_long = k.setp_u(CmpOp::Lt, z, half);
                Work { tile: k.selp(long, short, is_long), head: x, batch: y }
            }
        }
    }
}

/// The index that is `index` places before the last of `count`.
fn from_last(k: &mut Builder, index: R32, count: R32) -> R32 {
    let last = k.sub(count, 1);
    k.sub(last, index)
}
