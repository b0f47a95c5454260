//! The main kernel: its parameters and shared memory. `produce.rs` has the producer's requests, `consume.rs`
//! the consumers' computation, `tiles.rs` the tiles.

use attend::{KeyBand, Lengths, SequenceTiles, Softcap};
use problem::{Problem, Tensor};
use ptx::{Access, Builder, CmpOp, F32, Global, Launch, Pointer, R32, Shared, SpecialReg, TensorMapPtr};
use tile::{
    COUNTER_BYTES, Handout, Handover, Locate, Pipeline, SwizzledTile, TileBroadcast, TileGrid, TileOrder,
    TileRing, TileScheduler,
};

use super::order::AddOrder;
use super::params::{RowTiles, launch};
use super::parts::KeyGradients;
use super::plan::{FusedPlan, LOADED, ROLES, TileSizes};
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{declare_band, declare_map, declare_softcap, default_tanh, factor_or_one};
use crate::forward::lengths::{batch_rows, declare_lengths};
use crate::{Arch, Baked};

const ENTRY: &str = "flash_backward";

impl FusedPlan {
    /// The main kernel.
    pub(super) fn draft<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Draft<'a> {
        let mut k = Builder::kernel(ENTRY);
        let threads = TileSizes::new(problem).threads();
        k.max_threads(threads);
        // Without this bound ptxas ignores `setmaxnreg`.
        k.min_ctas_per_sm(1);
        let mut c = Contract::new(problem);
        let params = FusedParams::declare(&mut k, &mut c, (problem, baked), self);
        let launch = launch(threads, self.grid(problem, arch), false, self.shared_bytes(problem));
        let launch = Launch { overlapping: true, ..launch };
        let body = move |k: &mut Builder| {
            let rows = TileSizes::new(baked).keys();
            let tiles =
                params.lengths.map(|lengths| SequenceTiles { lengths, of_keys: true, rows, heads: 1 });
            let locate = tiles.as_ref().map(|tiles| tiles as &dyn Locate);
            Main::new(k, self, baked, params, locate).body(k);
        };
        Draft::new(k, c, (ENTRY, launch), arch.full_target(), body)
    }
}

/// The kernel's parameters.
#[derive(Clone)]
pub(super) struct FusedParams {
    /// The tensor maps of [`LOADED`].
    pub maps: [TensorMapPtr; 4],
    /// The batch strides of [`LOADED`] in rows, for those whose tiles are ragged.
    pub batch_rows: [Option<R32>; 4],
    pub gradients: KeyGradients,
    pub row_tiles: RowTiles,
    /// The order of additions to the sums of dQ, if they have one.
    pub order: Option<AddOrder>,
    /// The counter of the tiles of keys that are taken, if a CTA computes several.
    counter: Option<Global>,
    tiles: TileGrid,
    pub seq_q: R32,
    pub seq_kv: R32,
    pub lengths: Option<Lengths>,
    /// The factor of scores in the exponent.
    pub factor: F32,
    /// The factor of dK.
    pub scale: F32,
    pub band: KeyBand,
    /// The softcap, or the factor of wide logits.
    pub softcap: Option<Softcap>,
    /// 1 / (cap · log2 e), with a softcap.
    pub inverse_cap: Option<F32>,
}

impl FusedParams {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        plan: &FusedPlan,
    ) -> FusedParams {
        let maps = LOADED.map(|tensor| declare_map(k, c, problem, (tensor, loaded_tile(baked, tensor))));
        let gradients = KeyGradients::declare(k, c, (problem, plan));
        // A scale of 0 makes all scores equal.
        let factor = if problem.softmax_scale() == 0.0 { 0.0 } else { factor_or_one(problem) };
        let cap = problem.score.softcap;
        let row_tiles = RowTiles::declare(k, c, (problem, baked), [Access::Read, Access::ReadWrite]);
        let order = AddOrder::declare(k, c, problem, Access::ReadWrite);
        let handout = TileSizes::new(problem).handout(problem.pass.deterministic());
        let counter = (handout == Handout::Dynamic).then(|| c.counter(k, COUNTER_BYTES));
        let (tile_order, sections) = plan.order_of_tiles(problem);
        let [section, last_section] = sections;
        let [row_blocks, _] = plan.key_tiles(problem);
        let tiles = TileGrid {
            order: tile_order,
            tiles: c.u32(k, "tiles", plan.tile_count(problem) as u32),
            row_blocks: c.u32(k, "row_blocks", row_blocks as u32),
            heads: c.u32(k, "heads", plan.heads(problem) as u32),
            section: c.u32(k, "section", section as u32),
            last_section: (tile_order == TileOrder::Level)
                .then(|| c.u32(k, "last_section", last_section as u32)),
        };
        let [seq_q, seq_kv] = [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)]
            .map(|(name, length)| c.u32(k, name, length as u32));
        let batch_rows = LOADED.map(|tensor| {
            let rows = batch_rows(problem, tensor) as u32;
            is_ragged(baked, tensor).then(|| c.u32(k, &format!("{}_batch_rows", tensor.name()), rows))
        });
        FusedParams {
            maps,
            batch_rows,
            gradients,
            row_tiles,
            order,
            counter,
            tiles,
            seq_q,
            seq_kv,
            lengths: declare_lengths(k, c, problem, [seq_q, seq_kv]),
            factor: c.f32(k, "scale_log2e", factor),
            scale: c.f32(k, "scale", problem.softmax_scale()),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, default_tanh(problem)),
            inverse_cap: cap.map(|cap| c.f32(k, "inverse_cap", 1.0 / (cap * std::f32::consts::LOG2_E))),
        }
    }
}

/// Whether batch entries differ in the rows of a tensor.
fn is_ragged(baked: &Baked, tensor: Tensor) -> bool {
    if tensor.is_of_keys() { baked.keys_are_uneven() } else { !baked.lengths.q.is_even() }
}

/// The tile of rows of a tensor as it is loaded: rows beyond the end of a batch entry are zeros.
fn loaded_tile(baked: &Baked, tensor: Tensor) -> SwizzledTile {
    TileSizes::new(baked).tile(baked, tensor).ragged(is_ragged(baked, tensor))
}

/// The kernel being emitted: values known at emission, its parameters, and its shared memory.
pub(super) struct Main<'a> {
    pub plan: &'a FusedPlan,
    pub baked: &'a Baked,
    pub params: FusedParams,
    pub sizes: TileSizes,
    /// The rings of [`LOADED`]. Those of K and V have one stage.
    pub rings: [TileRing; 4],
    /// The numbers of the rows of each stage of dO.
    pub numbers: Shared,
    pub ds: (SwizzledTile, Shared),
    /// The parts of dQ on their way to the sums, where bulk reductions add them.
    pub staging: Shared,
    /// The barriers of those parts, if additions have an order.
    pub add_barriers: Shared,
    /// P in f32, if gradients are apart.
    pub weights: Shared,
    /// The barriers between consumers.
    pub barriers: Shared,
    /// The tiles of keys of the CTA.
    pub schedule: TileScheduler<'a>,
}

impl<'a> Main<'a> {
    fn new(
        k: &mut Builder,
        plan: &'a FusedPlan,
        baked: &'a Baked,
        params: FusedParams,
        locate: Option<&'a dyn Locate>,
    ) -> Main<'a> {
        let sizes = TileSizes::new(baked);
        let shared = k.dynamic_shared(SwizzledTile::ALIGNMENT);
        let mut taken = 0;
        let mut take = |bytes: u32| {
            let at = shared.at(i64::from(taken));
            taken += bytes;
            at
        };
        // Tiles come first: the memory after them needs less alignment.
        let places = LOADED.map(|tensor| {
            let (tile, stages) = (loaded_tile(baked, tensor), plan.stages(tensor));
            (tile, stages, take(stages * tile.bytes()))
        });
        let ds = (sizes.ds(), take(sizes.slots() * sizes.ds().bytes()));
        let staging = take(sizes.staging_bytes(baked.deterministic));
        let weights = take(sizes.weight_bytes());
        let numbers = take(plan.gradient_stages * sizes.number_bytes());
        let broadcast = params.counter.map(|counter| {
            let place = take(TileBroadcast::shared_bytes(locate.is_some()));
            TileBroadcast::new(place, counter, None, locate.is_some())
        });
        let mut rings = places.map(|(tile, stages, first)| {
            let pipeline = Pipeline::new(take(Pipeline::bytes(stages)), stages);
            TileRing { pipeline, tile, first }
        });
        let [queries, keys, values, _] = &mut rings;
        let omit = |ring: &mut TileRing, omits| ring.pipeline = ring.pipeline.without_empty_barriers(omits);
        // A CTA that computes one tile loads K and V once. Without turns, K is released with V, which the
        // producer requests first. In turns, Q is released with dO, whose ring has fewer stages.
        let once = broadcast.is_none();
        omit(values, once);
        omit(keys, once || !sizes.takes_turns());
        omit(queries, sizes.takes_turns());
        let add_barriers = take(if baked.deterministic { sizes.order_barrier_bytes() } else { 0 });
        let barriers = take(0);
        let schedule = TileScheduler {
            handout: sizes.handout(baked.deterministic),
            grid: params.tiles,
            locate,
            broadcast,
            cluster: None,
            stream_k: None,
        };
        Main {
            plan,
            baked,
            params,
            sizes,
            rings,
            numbers,
            ds,
            staging,
            add_barriers,
            weights,
            barriers,
            schedule,
        }
    }

    fn body(&self, k: &mut Builder) {
        if self.sizes.gradients_apart() {
            return self.compute_apart(k);
        }
        let thread = k.special(SpecialReg::TidX);
        let first = k.setp_u(CmpOp::Eq, thread, 0);
        k.if_(first, |k| {
            self.handover().init(k, ROLES.consumer_warps());
            self.prepare_order(k);
        });
        let broadcast = self.schedule.broadcast.map(|broadcast| broadcast.pipeline);
        ROLES.prepare(k, self.rings.map(|ring| ring.pipeline).into_iter().chain(broadcast));
        self.await_rows(k);
        ROLES.divide(
            k,
            |k, index, warp| {
                let first = k.setp_u(CmpOp::Eq, index, 0);
                self.produce_in_order(k, first, (index, warp));
            },
            |k, consumer| self.consume(k, consumer),
        );
    }

    /// Waits until the kernel before has ended. The kernel after may start as soon as SMs are idle.
    pub fn await_rows(&self, k: &mut Builder) {
        k.griddep_launch_dependents();
        k.griddep_wait();
    }

    /// The handover of dS among consumers that divide the keys.
    pub fn handover(&self) -> Handover {
        Handover::new(self.barriers, self.sizes.slots())
    }
}
