//! The main kernel: its parameters, shared memory, and the producer's requests. `consume.rs` has the
//! consumers' computation.

use attend::{Bound, KeyBand, Lengths, RowRange, Sequence, Softcap};
use problem::{Problem, Tensor};
use ptx::{Access, Builder, CmpOp, F32, Pointer, Pred, R32, Shared, SpecialReg, Src, TensorMapPtr};
use tile::{Handover, Pipeline, SwizzledTile, TileRing, divide};

use super::order::{self, AddOrder};
use super::params::{RowTiles, Strided, launch, tile_of_cta};
use super::plan::{FusedPlan, LOADED, ROLES, TileSizes};
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{declare_band, declare_map, declare_softcap, default_tanh, factor_or_one};
use crate::forward::lengths::{batch_rows, declare_lengths};
use crate::grid::Grid;
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
        let launch = launch(threads, self.grid(problem), baked.flat, self.shared_bytes(problem));
        let body = move |k: &mut Builder| Main::new(k, self, baked, params).body(k);
        Draft::new(k, c, (ENTRY, launch), arch.full_target(), body)
    }
}

/// The kernel's parameters.
#[derive(Clone)]
pub(super) struct FusedParams {
    /// The tensor maps of [`LOADED`].
    maps: [TensorMapPtr; 4],
    /// The batch strides of [`LOADED`] in rows, for those whose tiles are ragged.
    batch_rows: [Option<R32>; 4],
    pub gradients: [Strided; 2],
    pub row_tiles: RowTiles,
    /// The order of additions to the sums of dQ, if they have one.
    pub order: Option<AddOrder>,
    grid: Grid,
    seq_q: R32,
    seq_kv: R32,
    lengths: Option<Lengths>,
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
        let gradients = [Tensor::Dk, Tensor::Dv].map(|tensor| Strided::declare(k, c, problem, tensor));
        // A scale of 0 makes all scores equal.
        let factor = if problem.softmax_scale() == 0.0 { 0.0 } else { factor_or_one(problem) };
        let cap = problem.score.softcap;
        let row_tiles = RowTiles::declare(k, c, (problem, baked), [Access::Read, Access::ReadWrite]);
        let order = AddOrder::declare(k, c, problem, Access::ReadWrite);
        let grid = plan.grid(problem).declare(k, c, baked.flat);
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
            grid,
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

    /// The number in [`RowTiles`] of the first tile of query rows of a sequence, if queries are packed
    /// ([`Lengths::tile`]).
    fn first_tile(&self, k: &mut Builder, sequence: Option<Sequence>, sizes: TileSizes) -> Option<R32> {
        self.lengths?.q.packed?;
        let sequence = sequence?;
        let before = divide(k, sequence.q.start?, sizes.rows);
        Some(k.add(before, sequence.batch))
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

/// The kernel being emitted: values known at emission, its parameters, and the CTA's position.
#[derive(Clone)]
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
    /// Batch entry, KV head and tile of keys.
    pub at: [R32; 3],
    /// The rows of the batch entry; `None` if it has all rows of the tensors.
    pub sequence: Option<Sequence>,
    /// The number of the batch entry's first tile of query rows, if queries are packed.
    first_tile: Option<R32>,
    /// The keys of the CTA. Queries and keys have changed places.
    pub keys: RowRange,
    /// The band of queries that a key sees.
    pub band: KeyBand,
    /// The tiles of query rows that the keys see, in each head.
    pub bound: Bound,
}

/// The position of a tile of query rows among those that the CTA visits: all tiles of the first head of the
/// group, then those of the next. At the end, `head` is the size of the group.
#[derive(Clone, Copy)]
pub(super) struct Visit {
    pub head: R32,
    pub tile: R32,
}

impl<'a> Main<'a> {
    fn new(k: &mut Builder, plan: &'a FusedPlan, baked: &'a Baked, params: FusedParams) -> Main<'a> {
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
        let rings = places.map(|(tile, stages, first)| {
            let pipeline = Pipeline::new(take(Pipeline::bytes(stages)), stages);
            TileRing { pipeline: pipeline.without_empty_barriers(stages == 1), tile, first }
        });
        let add_barriers = take(if baked.deterministic { sizes.order_barrier_bytes() } else { 0 });
        let barriers = take(0);
        let [batch, head, tile] = match baked.deterministic {
            true => order::tile_of_cta(k, baked, params.grid),
            false => tile_of_cta(k, plan.tile_order, params.grid),
        };
        let owner = params.lengths.map(|lengths| lengths.key_tile(k, batch, tile, sizes.keys()));
        let (at, sequence) = match owner {
            None => ([batch, head, tile], None),
            Some((sequence, tile)) => ([sequence.batch, head, tile], Some(sequence)),
        };
        let [seq_q, seq_kv] = match sequence {
            None => [params.seq_kv, params.seq_q],
            Some(sequence) => [sequence.kv.len, sequence.q.len],
        };
        if sequence.is_some() {
            let empty = k.setp_u(CmpOp::Eq, seq_q, 0);
            k.exit_if(empty);
        }
        let first_tile = params.first_tile(k, sequence, sizes);
        let keys =
            RowRange { first: k.mul(at[2], sizes.keys()), rows: sizes.keys(), seq_q, seq_kv, heads: 1 };
        let band = params.band.transposed(k);
        // Rows beyond the queries have probabilities of 0, so no mask needs to hide them.
        let bound = Bound::new(k, &band, &keys, sizes.rows, true);
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
            at,
            sequence,
            first_tile,
            keys,
            band,
            bound,
        }
    }

    /// With the bound computed anew.
    pub fn with_bound(&self, k: &mut Builder) -> Main<'a> {
        let band = self.params.band.transposed(k);
        let bound = Bound::new(k, &band, &self.keys, self.sizes.rows, true);
        Main { band, bound, ..self.clone() }
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
        ROLES.prepare(k, self.rings.map(|ring| ring.pipeline));
        ROLES.divide(
            k,
            |k, index, warp| {
                let first = k.setp_u(CmpOp::Eq, index, 0);
                self.produce_in_order(k, first, (index, warp));
            },
            |k, consumer| self.consume(k, consumer),
        );
    }

    /// The handover of dS among consumers that divide the keys.
    pub fn handover(&self) -> Handover {
        Handover::new(self.barriers, self.sizes.slots())
    }

    /// The first visit.
    pub fn first_visit(&self, k: &mut Builder) -> Visit {
        let tile = k.mov(self.bound.from());
        let some = k.setp_s(CmpOp::Lt, tile, self.bound.end);
        Visit { head: k.selp(0, self.baked.group_size(), some), tile }
    }

    /// Whether there is the visit.
    pub fn is_visit(&self, k: &mut Builder, visit: Visit) -> Pred {
        k.setp_u(CmpOp::Lt, visit.head, self.baked.group_size())
    }

    /// Whether a visit is the last.
    pub fn is_last(&self, k: &mut Builder, visit: Visit) -> Pred {
        let next = k.add(visit.tile, 1);
        let ended = k.setp_s(CmpOp::Ge, next, self.bound.end);
        let last = self.baked.group_size() - 1;
        k.setp_u_and(CmpOp::Eq, visit.head, last, ended)
    }

    /// Runs `visits` from the first visit, if there is one.
    pub fn if_visited(&self, k: &mut Builder, visits: impl FnOnce(&mut Builder, Visit)) {
        let visit = self.first_visit(k);
        let some = self.is_visit(k, visit);
        k.if_(some, |k| visits(k, visit));
    }

    /// Moves to the next visit.
    pub fn advance(&self, k: &mut Builder, Visit { head, tile }: Visit) {
        k.add_to(tile, tile, 1);
        let ends = k.setp_s(CmpOp::Ge, tile, self.bound.end);
        k.selp_to(tile, self.bound.from(), tile, ends);
        k.guarded(ends, |k| k.add_to(head, head, 1));
    }

    /// The batch entry, query head and tile of a visit in the values between kernels.
    pub fn place(&self, k: &mut Builder, visit: Visit) -> [R32; 3] {
        let ([batch, ..], head) = (self.at, self.query_head(k, visit));
        match self.first_tile {
            None => [batch, head, visit.tile],
            Some(first) => [k.mov(0), head, k.add(first, visit.tile)],
        }
    }

    fn query_head(&self, k: &mut Builder, visit: Visit) -> R32 {
        let [_, head, _] = self.at;
        k.mad(head, self.baked.group_size(), visit.head)
    }

    /// The producer: K and V once, then Q and dO of each visit, the latter with the numbers of their rows.
    pub fn produce(&self, k: &mut Builder) {
        for map in self.params.maps {
            k.prefetch_tensor_map(map);
        }
        let [queries, keys, values, gradients] = &self.rings;
        let [q_map, key_map, value_map, d_out_map] = self.params.maps;
        let [_, head, _] = self.at;
        for (ring, map, tensor) in [(keys, key_map, Tensor::K), (values, value_map, Tensor::V)] {
            let at = ring.pipeline.producer_state(k);
            let from = self.coordinates(k, tensor, head, self.keys.first);
            ring.request(k, &at, map, from);
        }
        let [q_at, d_out_at] = [queries, gradients].map(|ring| ring.pipeline.producer_state(k));
        let visit = self.first_visit(k);
        let more = |k: &mut Builder| self.is_visit(k, visit);
        k.while_(more, |k| {
            let place = self.place(k, visit);
            let [_, head, _] = place;
            let row = k.mul(visit.tile, self.sizes.rows);
            let from = self.coordinates(k, Tensor::Q, head, row);
            queries.request(k, &q_at, q_map, from);
            let from = self.coordinates(k, Tensor::DOut, head, row);
            let numbers = self.params.row_tiles.numbers(k, place);
            let beside = (self.numbers, numbers, self.sizes.number_bytes());
            gradients.request_beside(k, &d_out_at, (d_out_map, from), beside);
            self.advance(k, visit);
        });
    }

    /// The coordinates in a tensor map of the batch entry's rows from `first` on. Heads and batch entries
    /// with stride 0 count as one.
    fn coordinates(&self, k: &mut Builder, tensor: Tensor, head: R32, first: R32) -> [Src<R32>; 3] {
        let ([batch, ..], repeated) = (self.at, self.baked.repeated[tensor.into()]);
        let head = if repeated.head { 0.into() } else { head.into() };
        let batch_rows = LOADED.into_iter().zip(self.params.batch_rows).find(|&(of, _)| of == tensor);
        let ragged = batch_rows.and_then(|(_, rows)| rows).zip(self.sequence);
        let Some((batch_rows, sequence)) = ragged else {
            return [first.into(), head, if repeated.batch { 0.into() } else { batch.into() }];
        };
        let rows = sequence.side(tensor);
        let start = match rows.start {
            None => k.mul(batch, batch_rows),
            Some(start) => k.mad(batch, batch_rows, start),
        };
        let [row, end] = SwizzledTile::ragged_at(k, first, [start, rows.len]);
        [row.into(), head, end.into()]
    }
}
