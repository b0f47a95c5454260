//! The generator: launch parameters, shared memory, and the consumers' computation. `produce.rs` has the
//! producer's requests; `rows.rs` selects rows and blocks; `store.rs` stores the results.

use attend::{
    BlockLists, BlockOutput, KeyBand, Lengths, LoopProducts, LoopSchedule, LoopTiles, MainLoop, Masker,
    OnlineSoftmax, OutputSums, ProgramCode, Rescale, Rings, ScoreChain, ScorePrograms, SequenceTiles,
    SharedProbs, Sinks, Skips, Softcap, SpeculativeMax, StagedTables, StreamKMerge, Sums, TileRows, Tiles,
};
use problem::{Operand, Problem, Tensor};
use ptx::{Access, Builder, Dim3, F32, Global, Launch, Pointer, R32, R64, Shared, TensorMapPtr};
use tile::{
    AccTile, BulkStore, COUNTER_BYTES, Cluster, Consumer, Handout, Locate, Ones, OperandTile, OperandType,
    PairSum, Pieces, PingPong, Pipeline, Products, Roles, RowStore, SharedMatrix, Sign, StreamK,
    SwizzledTile, Tail, TileBroadcast, TileGrid, TileRing, TileScheduler, TileStream, Turns, WarpRows,
    WarpgroupVote, WorkTile,
};

use super::fp8::transposes_values;
use super::plan::{Diagonal, Ends, Rescaling, Share, Store, WgmmaPlan};
use super::transpose::TransposedValues;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{
    declare_band, declare_head_strides, declare_map, declare_softcap, factor_or_least, misaligned, out_half,
};
use crate::forward::descale::{ScoreDescale, Scores, ValueDescale};
use crate::forward::fp8::{operand_type, weights};
use crate::forward::lengths::{batch_rows, blocks_divide, declare_lengths};
use crate::forward::lists::ListTiles;
use crate::forward::programs::declare_programs;
use crate::grid::Extents;
use crate::{Arch, Baked};

const ENTRY: &str = "flash_forward_wgmma";
/// The tensors that are loaded through tensor maps.
pub(super) const LOADED: [Tensor; 3] = [Tensor::Q, Tensor::K, Tensor::V];

impl WgmmaPlan {
    /// What the code depends on.
    pub(super) fn baked(&self, problem: &Problem) -> Baked {
        let packed = self.packed_heads(problem) > 1;
        let baked = Baked::of(problem, packed).with_maps(problem, &LOADED);
        let baked = Baked {
            programs: baked.programs.map(|code| self.staging(problem, code)),
            listed: self.visits.lists(problem).then(|| ProgramCode::of_mask(problem, packed)),
            // A bound on later keys is compared with the last key as well. Programs read tables at each key.
            divides: (baked.band.after.is_none() || !problem.programs.is_empty())
                && blocks_divide(problem, self.block_n),
            flat: self.needs_flat_grid(problem),
            ..baked
        };
        if self.store.by_tma() {
            return baked;
        }
        let aligned = misaligned(problem, Tensor::Out, RowStore::Chunks.elements()).is_none();
        let chunks_out = out_half(problem).is_some() && aligned && problem.head_dim_v.is_multiple_of(8);
        Baked { chunks_out, ..baked.with_row_bytes(problem, &[Tensor::Out]) }
    }

    /// Emits the kernel and, if the plan lists blocks, the kernel that lists them before it. The plan has
    /// been checked.
    pub(super) fn drafts<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(self.threads());
        // Without this bound ptxas ignores `setmaxnreg`.
        k.min_ctas_per_sm(self.resident_ctas);
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, (problem, baked), self, arch);
        let target = arch.full_target();
        let launch = (ENTRY, self.launch(problem, arch));
        let body = move |k: &mut Builder| {
            let tiles = params.lengths.map(|lengths| SequenceTiles {
                lengths,
                rows: self.tile_rows(baked),
                heads: self.packed_heads(baked),
            });
            let locate = tiles.as_ref().map(|tiles| tiles as &dyn Locate);
            Forward::new(k, baked, self, params, locate).body(k);
        };
        let lists = self.list_tiles(problem).map(|tiles| tiles.draft(problem, baked, target));
        let transpose = transposes_values(problem).then(|| self.transpose_values(problem, baked, target));
        let forward = Draft::new(k, contract, launch, target, body);
        lists.into_iter().chain(transpose).chain([forward]).collect()
    }

    /// Declares the score and mask programs, with the tables that come from shared memory.
    fn declare_score_programs(
        &self,
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        baked: &Baked,
    ) -> Option<ScorePrograms> {
        let code = baked.programs.as_ref()?;
        let programs = declare_programs(k, c, problem, Some(code))?;
        let programs = programs.with_staged(self.declare_tables(k, c, problem, code));
        let listed = self.list_tiles(problem).is_some();
        let programs = if listed { programs.masking_partial_blocks() } else { programs };
        let programs = programs.on_whole_blocks(baked.divides);
        let ahead = programs.registers_ahead((16, self.block_n)) + AHEAD_REGISTERS;
        let fits = self.registers(problem) + ahead <= self.register_split().1;
        Some(if fits { programs.reading_ahead() } else { programs })
    }

    /// Tiles of Q, K and V as the kernel loads them.
    fn loaded_tiles(&self, baked: &Baked) -> [SwizzledTile; 3] {
        let [q, key, value] = self.tile_shapes(baked);
        [q, key, value.ragged(baked.keys_are_uneven())]
    }

    /// The tiles for which blocks are listed; `None` if the plan does not list any.
    pub(super) fn list_tiles(&self, problem: &Problem) -> Option<ListTiles> {
        let heads = self.packed_heads(problem);
        let rows = self.tile_rows(problem);
        let tiles = ListTiles { rows, heads, block_n: self.block_n, at_least_one: true };
        self.visits.lists(problem).then_some(tiles)
    }

    /// Whether a kernel before the main kernel needs a flat grid.
    fn needs_flat_grid(&self, problem: &Problem) -> bool {
        let values = transposes_values(problem).then(|| TransposedValues::new(problem).grid());
        let lists = self.list_tiles(problem).map(|tiles| tiles.grid(problem));
        values.into_iter().chain(lists).any(Extents::need_flat)
    }

    fn launch(&self, problem: &Problem, arch: &Arch) -> Launch {
        let takers = self.takers(problem, arch) as u32;
        Launch {
            cluster: Dim3(self.cluster, 1, 1),
            dynamic_shared: self.shared_bytes(problem),
            ..Launch::new(Dim3(takers * self.cluster, 1, 1), Dim3(self.threads(), 1, 1))
        }
    }

    fn roles(&self) -> Roles {
        let (producer_registers, consumer_registers) = self.register_split();
        Roles { consumers: self.consumers, producer_registers, consumer_registers }
    }

    /// Shared memory of a CTA in bytes: the tiles of the rings, then their barriers.
    pub fn shared_bytes(&self, problem: &Problem) -> u32 {
        let [q, key, value] = self.tile_shapes(problem);
        let query_stages = self.query_stages();
        let tiles = query_stages * q.bytes() + self.stages * (key.bytes() + value.bytes());
        let barriers = Pipeline::bytes(query_stages) + 2 * Pipeline::bytes(self.stages);
        let broadcast = match self.handout {
            Handout::Static | Handout::Folded | Handout::Grid => 0,
            Handout::Dynamic => TileBroadcast::shared_bytes(!problem.lengths.is_even()),
        };
        let rows_out = match self.store {
            Store::Direct | Store::OverQueries => 0,
            Store::Bulk => 4 * self.consumers * BulkStore::tile(problem.head_dim_v as u32, false).bytes(),
        };
        let probs = self.prob_tile().map_or(0, |tile| self.consumers * tile.bytes());
        let ones = match self.sums {
            Sums::Lanes => 0,
            Sums::Product => Ones::BYTES,
        };
        tiles + self.table_bytes(problem) + probs + self.sum_bytes() + rows_out + ones + barriers + broadcast
    }
}

/// Finds barriers that another barrier makes redundant.
impl WgmmaPlan {
    /// Whether an empty stage for the first keys of a tile implies an empty stage for its Q. Each tile has at
    /// least one block. With no more KV stages than Q stages, the first keys of a tile replace keys of the
    /// tile whose queries are replaced, or of a later tile. Keys are released after the last product that
    /// reads the queries together with them. Where O takes the place of Q, the queries are released later.
    fn queries_without_empty_barriers(&self) -> bool {
        self.store != Store::OverQueries && self.stages <= self.query_stages()
    }

    /// Whether the consumers have received the index of the previous tile when the producer sends the index
    /// of the next one. Consumers receive the index of a tile while they compute the tile before it. With one
    /// Q stage, the producer has requested the queries of its tile, so the consumers have released those of
    /// the tile before it, whose index they had received. Where O takes the place of Q, they release the
    /// queries of a tile during the next one, so two Q stages suffice. With at most two KV stages, the last
    /// values of the producer's tile replace values that the consumers release after they have received the
    /// index. That holds only if the producer sends after its last request, not if it searches for the rows
    /// of tiles (`locates`), and not for consumers that skip blocks at the end of a tile: these release all
    /// values first. In a cluster, the producers also receive indices but release no tiles.
    fn broadcast_without_empty_barriers(&self, band: &KeyBand, locates: bool) -> bool {
        let last = !locates && !self.skips_last(band);
        let released = self.query_stages() == 1 + u32::from(self.store == Store::OverQueries);
        self.cluster == 1 && (released || (last && self.stages <= 2))
    }
}

/// The kernel being emitted: values known at emission, and its parameters.
pub(super) struct Forward<'a> {
    pub(super) plan: &'a WgmmaPlan,
    pub(super) baked: &'a Baked,
    /// The type of P.
    weights: OperandType,
    pub(super) params: Params,
    pub(super) queries: TileRing,
    pub(super) keys: TileRing,
    pub(super) values: TileRing,
    /// The rings of tables that are read from shared memory.
    pub(super) tables: Vec<TileRing>,
    pub(super) schedule: TileScheduler<'a>,
    /// The merge of the parts of shared tiles, if tiles are shared.
    pub(super) merge: Option<StreamKMerge>,
    /// If TMA stores O.
    pub(super) tma_out: Option<TmaOut>,
    /// P of the first warpgroup in shared memory, if P V reads P from there. P of the other warpgroups
    /// follows.
    pub(super) probs: Option<(SwizzledTile, Shared)>,
    /// Memory in which warpgroups that divide the head dim exchange their parts of S.
    pub(super) sum_room: Option<Shared>,
    /// The columns of ones that are added to V, if products compute the row sums.
    pub(super) ones: Option<Ones>,
}

/// The tensor map, the tile and the shared memory of the TMA stores of O.
#[derive(Clone, Copy)]
pub(super) struct TmaOut {
    pub(super) map: TensorMapPtr,
    /// The rows of a warp.
    pub(super) tile: SwizzledTile,
    /// The staging rows of the first warp in shared memory; `None` if O takes the place of Q.
    pub(super) staging: Option<Shared>,
}

/// The kernel's parameters.
pub(super) struct Params {
    pub(super) maps: [TensorMapPtr; 3],
    pub(super) out_map: Option<TensorMapPtr>,
    pub(super) out: Global,
    pub(super) lse: Option<Global>,
    pub(super) counter: Option<Global>,
    /// The parts and the counters of [`StreamKMerge`].
    pub(super) parts: Option<[Global; 2]>,
    pub(super) out_batch_bytes: R64,
    pub(super) out_head_bytes: R64,
    pub(super) seq_q: R32,
    pub(super) seq_kv: R32,
    pub(super) lengths: Option<Lengths>,
    /// The batch stride of V in rows, if tiles of V are ragged.
    pub(super) value_batch_rows: Option<R32>,
    /// The batch stride of O in rows, if tiles of O are ragged.
    pub(super) out_batch_rows: Option<R32>,
    pub(super) grid: TileGrid,
    pub(super) stream_k: Option<StreamK>,
    /// `|scale| · log2 e`.
    pub(super) factor: F32,
    pub(super) band: KeyBand,
    pub(super) softcap: Option<Softcap>,
    pub(super) programs: Option<ScorePrograms>,
    sinks: Option<Global>,
    pub(super) lists: Option<BlockLists>,
    pub(super) score_descale: Option<ScoreDescale>,
    pub(super) value_descale: Option<ValueDescale>,
}

/// Estimated registers that reading tables ahead needs in addition to the elements.
const AHEAD_REGISTERS: u32 = 8;

impl Params {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        plan: &WgmmaPlan,
        arch: &Arch,
    ) -> Params {
        let [q, key, value] = plan.loaded_tiles(baked);
        let maps = [(Tensor::Q, q), (Tensor::K, key), (Tensor::V, value)].map(|(tensor, tile)| {
            if tensor == Tensor::V && transposes_values(problem) {
                TransposedValues::new(problem).declare_map(k, c, tile)
            } else {
                declare_map(k, c, problem, (tensor, tile))
            }
        });
        let rows_out = BulkStore::tile(problem.head_dim_v as u32, !baked.lengths.q.is_even());
        let out_map = plan.store.by_tma().then(|| declare_map(k, c, problem, (Tensor::Out, rows_out)));
        let out = c.tensor(k, Tensor::Out);
        let lse = c.operand(k, Operand::Lse);
        let counter = (plan.handout == Handout::Dynamic).then(|| c.counter(k, COUNTER_BYTES));
        let parts = (plan.tail == Tail::Shared).then(|| {
            // The sizes do not depend on the lengths and are never 0, because an empty buffer has no address.
            let (room, warps) = (plan.room(arch), plan.tile_warps());
            let bytes = StreamKMerge::bytes(room, warps, problem.head_dim_v as u32).max(16);
            let counter_bytes = StreamKMerge::counter_bytes(room, warps).max(16);
            [c.scratch(k, bytes as usize), c.counter(k, counter_bytes as usize)]
        });
        let [out_batch_bytes, out_head_bytes] = declare_head_strides(k, c, problem, Tensor::Out);
        let seq_q = c.u32(k, "seq_q", problem.seq_q as u32);
        let seq_kv = c.u32(k, "seq_kv", problem.seq_kv as u32);
        let lengths = declare_lengths(k, c, problem, [seq_q, seq_kv]);
        let mut rows_of_batch = |name: &str, tensor| c.u32(k, name, batch_rows(problem, tensor) as u32);
        let value_batch_rows = value.ragged.then(|| rows_of_batch("v_batch_rows", Tensor::V));
        let out_batch_rows =
            (out_map.is_some() && rows_out.ragged).then(|| rows_of_batch("out_batch_rows", Tensor::Out));
        let grid = TileGrid {
            order: plan.tile_order,
            tiles: c.u32(k, "tiles", plan.tile_count(problem) as u32),
            row_blocks: c.u32(k, "row_blocks", plan.row_blocks(problem) as u32),
            heads: c.u32(k, "heads", plan.tile_heads(problem) as u32),
            section: c.u32(k, "section", plan.section(problem) as u32),
        };
        let stream_k = plan.last_wave(problem, arch).map(|wave| StreamK {
            blocks: c.u32(k, "blocks", wave.blocks as u32),
            whole: c.u32(k, "whole_tiles", wave.whole() as u32),
            pieces: Pieces {
                piece: c.u32(k, "piece", wave.piece() as u32),
                longer: c.u32(k, "longer", wave.longer() as u32),
            },
        });
        let factor = c.f32(k, "scale_log2e", factor_or_least(problem));
        Params {
            maps,
            out_map,
            out,
            lse,
            counter,
            parts,
            out_batch_bytes,
            out_head_bytes,
            seq_q,
            seq_kv,
            lengths,
            value_batch_rows,
            out_batch_rows,
            grid,
            stream_k,
            factor,
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, plan.tanh),
            programs: plan.declare_score_programs(k, c, problem, baked),
            sinks: c.operand(k, Operand::Sinks),
            lists: plan.list_tiles(problem).map(|tiles| tiles.declare(k, c, problem, Access::Read)),
            score_descale: ScoreDescale::declare(k, c, problem),
            value_descale: ValueDescale::declare(k, c, problem),
        }
    }
}

impl<'a> Forward<'a> {
    fn new(
        k: &mut Builder,
        baked: &'a Baked,
        plan: &'a WgmmaPlan,
        params: Params,
        locate: Option<&'a dyn Locate>,
    ) -> Forward<'a> {
        let [q, key, value] = plan.loaded_tiles(baked);
        let shared = k.dynamic_shared(SwizzledTile::ALIGNMENT);
        let cluster = Cluster::new(k, plan.cluster);
        let mut taken = 0;
        let mut take = |bytes: u32| {
            let at = shared.at(i64::from(taken));
            taken += bytes;
            at
        };
        // Tiles come first: the memory after them needs less alignment.
        let places =
            [(q, plan.query_stages(), None), (key, plan.stages, cluster), (value, plan.stages, cluster)]
                .map(|(tile, stages, cluster)| (tile, stages, cluster, take(stages * tile.bytes())));
        let table_tile = plan.table_tile();
        let table_places: Vec<Shared> = baked
            .programs
            .iter()
            .flat_map(ProgramCode::staged)
            .map(|_| take(plan.stages * table_tile.bytes()))
            .collect();
        let probs = plan.prob_tile().map(|tile| (tile, take(plan.consumers * tile.bytes())));
        let sum_room = (plan.share == Share::HeadDim).then(|| take(plan.sum_bytes()));
        let warp_rows = BulkStore::tile(baked.head_dim_v(), params.out_batch_rows.is_some());
        let bytes = 4 * plan.consumers * warp_rows.bytes();
        let staging = (plan.store == Store::Bulk).then(|| take(bytes));
        let tma_out = params.out_map.map(|map| TmaOut { map, tile: warp_rows, staging });
        let ones = (plan.sums == Sums::Product).then(|| Ones { at: take(Ones::BYTES) });
        let [queries, keys, values] = places.map(|(tile, stages, cluster, first)| {
            let pipeline = Pipeline::new(take(Pipeline::bytes(stages)), stages).in_cluster(cluster);
            TileRing { pipeline, tile, first }
        });
        let tables = table_places.into_iter().map(|first| {
            let pipeline = Pipeline::new(take(Pipeline::bytes(plan.stages)), plan.stages);
            TileRing { pipeline, tile: table_tile, first }
        });
        let tables = tables.collect();
        let queries = TileRing {
            pipeline: queries.pipeline.without_empty_barriers(plan.queries_without_empty_barriers()),
            ..queries
        };
        let broadcast = params.counter.map(|counter| {
            let (spans, bytes) = (locate.is_some(), TileBroadcast::shared_bytes(locate.is_some()));
            let redundant = plan.broadcast_without_empty_barriers(&params.band, spans);
            let mut broadcast = TileBroadcast::new(take(bytes), counter, cluster, spans);
            broadcast.pipeline = broadcast.pipeline.without_empty_barriers(redundant);
            broadcast
        });
        let merge = params.parts.zip(params.stream_k).map(|([parts, counters], stream_k)| {
            let warps = plan.tile_warps();
            StreamKMerge { parts, counters, stream_k, warps, cluster }
        });
        Forward {
            plan,
            baked,
            weights: weights(baked),
            queries,
            keys,
            values,
            tables,
            schedule: TileScheduler {
                handout: plan.handout,
                grid: params.grid,
                locate,
                broadcast,
                cluster,
                stream_k: params.stream_k,
            },
            merge,
            tma_out,
            probs,
            sum_room,
            ones,
            params,
        }
    }

    /// The kernel: FlashAttention-3, Algorithm 1.
    fn body(&self, k: &mut Builder) {
        let roles = self.plan.roles();
        let pipelines = [self.queries.pipeline, self.keys.pipeline, self.values.pipeline];
        let broadcast = self.schedule.broadcast.map(|broadcast| broadcast.pipeline);
        if let (Some(ones), OperandType::Half(half)) = (self.ones, self.weights) {
            ones.write(k, half);
            // The cluster barrier at the start orders only the initialisation of mbarriers, not other writes
            // to shared memory.
            if self.schedule.cluster.is_some() {
                k.bar_sync();
            }
        }
        let tables = self.tables.iter().map(|ring| ring.pipeline);
        roles.prepare(k, pipelines.into_iter().chain(broadcast).chain(tables));
        roles.split(k, |k| self.produce(k), |k, consumer| self.consume(k, consumer));
        if let Some(cluster) = self.schedule.cluster {
            cluster.sync_at_end(k);
        }
    }

    /// A consumer warpgroup, which computes 64 rows of each tile. [`MainLoop::attend`] is the loop over the
    /// KV blocks.
    fn consume(&self, k: &mut Builder, consumer: &Consumer) {
        let plan = self.plan;
        let sharing = (plan.share == Share::HeadDim).then(|| consumer.sharing_rows(k));
        let consumer = sharing.as_ref().unwrap_or(consumer);
        let key_threads = match plan.share {
            Share::Rows => consumer.threads,
            Share::HeadDim => consumer.threads.of_all_columns(),
        };
        let softcap = self.softcap(k);
        let main_loop = self.main_loop(k, consumer);
        let bulk = self.bulk_store(k, consumer);
        let tiles = self.schedule.consumer(k, consumer);
        if plan.tiles == Tiles::Overlapped {
            self.look_ahead(k, consumer, &main_loop, &tiles);
        }
        main_loop.open(k);
        tiles.for_each(k, |k, tile| {
            let rows = self.rows(k, tile);
            let own = self.own_rows(k, &rows, consumer);
            let list = self.list(k, tile);
            let walk = self.walk(k, tile, &own, list.as_ref());
            if plan.tiles == Tiles::InTurn {
                self.skip(k, &main_loop, tile, walk.end);
                self.skip_last(k, &main_loop, tile, &walk);
            }
            self.halve(k, &main_loop, &own);
            let mask = Masker::new(k, &self.params.band, &key_threads, &rows, 16, plan.block_n).by_bits();
            let (factor, programs) = self.tile_factor(k, tile, softcap.as_ref());
            let scores = self.block_factors(k, tile, &rows, consumer);
            let values = self.value_factors(k, tile);
            let softmax = self.softmax(k, factor);
            let softmax = match &scores {
                None => softmax,
                Some(factors) => factors.in_softmax(softmax),
            };
            let programs = programs.as_ref().map(|programs| {
                let at = [tile.head, tile.batch];
                programs.for_rows(k, &key_threads, &rows, (16, plan.block_n), at)
            });
            // A listed block may be partial because of the mask program alone.
            let unmasked = list.is_some() && self.params.band.is_full() && self.divides();
            let chain = ScoreChain {
                descale: scores.as_ref(),
                softcap: softcap.as_ref(),
                programs: programs.as_ref(),
                mask: (!unmasked).then_some(&mask),
            };
            let tile_rows =
                TileRows { chain, softmax: &softmax, list: list.as_ref(), values: values.as_ref() };
            let more = main_loop.attend(k, &walk, &tile_rows, |k| {
                let more = tiles.advance(k);
                if plan.tiles == Tiles::Overlapped {
                    self.look_ahead(k, consumer, &main_loop, &tiles);
                }
                more
            });
            let bulk = bulk.map(|bulk| self.staged(k, bulk, consumer, &main_loop.rings.queries));
            let softmax = softmax.with_output_factor(self.value_descale(k, tile));
            let o = softmax.take_sums(k, &main_loop.tiles.o);
            self.spoil_seen(k, &softmax, factor);
            self.if_complete(k, consumer, tile, &softmax, &o, |k| {
                let sinks = self
                    .params
                    .sinks
                    .map(|start| Sinks::load(k, start, tile.head, &consumer.threads, &rows, 16));
                let finished = softmax.finish(k, &o, sinks.as_ref()); //      O / l, LSE = m + ln l
                match &bulk {
                    None => self.store(k, consumer, tile, &rows, &o),
                    Some(bulk) => self.store_bulk(k, bulk, consumer, tile, &rows, &o),
                }
                self.store_lse(k, consumer, tile, &rows, &finished.lse);
            });
            more
        });
        if let Some(bulk) = &bulk {
            bulk.finish(k);
        }
    }

    /// Runs `finish` on complete results. For a shared tile, only the warps that complete it run `finish`.
    fn if_complete(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        tile: &WorkTile,
        softmax: &OnlineSoftmax,
        o: &AccTile,
        finish: impl FnOnce(&mut Builder),
    ) {
        match self.merge.zip(tile.part) {
            None => finish(k),
            Some((merge, part)) => {
                let complete = merge.join(k, consumer, &part, softmax, o);
                k.if_(complete, finish);
            }
        }
    }

    /// A warpgroup's registers and its positions in the rings.
    fn main_loop(&self, k: &mut Builder, consumer: &Consumer) -> MainLoop {
        let plan = self.plan;
        let [q, key, value] = LOADED.map(|tensor| operand_type(self.baked, tensor));
        let products = Products::new([q, key]);
        let queries = TileStream::own_rows(k, self.queries, consumer);
        let keys = TileStream::over_columns(k, self.keys, consumer);
        let values = match self.ones {
            None if transposes_values(self.baked) => TileStream::over_columns(k, self.values, consumer),
            None => TileStream::over_rows(k, self.values, consumer),
            Some(ones) => TileStream::over_rows_beside(k, self.values, ones, consumer),
        };
        let half = consumer.threads.part.filter(|_| plan.share == Share::HeadDim);
        let [queries, keys, values] = match half {
            None => [queries, keys, values],
            Some(half) => [
                queries.in_halves(k, half),
                keys.in_halves(k, half),
                values.column_part(k, half, plan.columns_out(self.baked)),
            ],
        };
        let sum = half.zip(self.sum_room).map(|(half, room)| {
            let at = [consumer.threads.lane, consumer.threads.row_warp, half];
            PairSum::new(k, room, at, (16, plan.block_n))
        });
        let tables = match &self.params.programs {
            None => StagedTables::default(),
            Some(programs) => StagedTables::new(k, programs, &self.tables, consumer),
        };
        let ping_pong = (plan.turns == Turns::PingPong).then(|| PingPong::new(k, consumer, plan.consumers));
        let products = LoopProducts {
            scores: if self.baked.sign == Sign::Negate { products.negating() } else { products },
            output: Products::new([self.weights.ty(), value]),
            sum,
        };
        let kept_queries = (plan.store == Store::OverQueries).then(|| k.mov(0));
        let schedule = self.loop_schedule(k, consumer, (keys, values, ping_pong), &tables);
        MainLoop {
            weights: self.weights,
            block_n: plan.block_n,
            chains: plan.chains,
            rings: Rings { queries, kept_queries, keys, values, tables },
            products,
            schedule,
            tiles: self.loop_tiles(k, consumer),
        }
    }

    /// The softcap, if there is one.
    fn softcap(&self, k: &mut Builder) -> Option<Softcap> {
        self.params.softcap.map(|softcap| match self.head_descale() {
            None => softcap,
            // Each tile sets its own factor.
            Some(_) => Softcap { factor: k.reg(), ..softcap },
        })
    }

    fn loop_schedule(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        (keys, values, ping_pong): (TileStream, TileStream, Option<PingPong>),
        tables: &StagedTables,
    ) -> LoopSchedule {
        let plan = self.plan;
        LoopSchedule {
            order: plan.products,
            tiles: plan.tiles,
            ping_pong,
            speculative: match plan.rescale {
                Rescaling::Speculative { limit, .. } => Some(SpeculativeMax::new(
                    self.weights,
                    self.rescale(),
                    limit,
                    WarpgroupVote::new(k, consumer.group),
                )),
                _ => None,
            },
            halved: (plan.diagonal == Diagonal::Halved).then(|| k.mov(0)),
            skips: (plan.ends == Ends::Own).then(|| {
                let skips = Skips::none(k, keys, values, ping_pong).with_tables(tables.clone());
                if self.plan.skips_last(&self.params.band) { skips.at_both_ends(k) } else { skips }
            }),
        }
    }

    fn loop_tiles(&self, k: &mut Builder, consumer: &Consumer) -> LoopTiles {
        let plan = self.plan;
        LoopTiles {
            s: AccTile::unset(k, 16, plan.block_n),
            p: OperandTile::unset(k, self.weights, 16, plan.block_n),
            shared_probs: self.probs.map(|(tile, first)| {
                let own = k.shared_index(first, consumer.group, tile.bytes());
                let warp = k.and(consumer.threads.warp, 3);
                let rows = k.shared_index(own, warp, WarpRows::ROWS * SwizzledTile::ROW_BYTES);
                SharedProbs {
                    rows: WarpRows::new(k, tile, rows, &consumer.threads),
                    matrix: SharedMatrix::over_columns(k, tile, own),
                    warpgroup: WarpgroupVote::new(k, consumer.group),
                }
            }),
            o: AccTile::unset(k, 16, plan.columns_out(self.baked)),
            block_output: (plan.output_sums == OutputSums::ByBlock).then(|| {
                let output = BlockOutput::new(k, plan.columns_out(self.baked));
                let by_block = self.params.value_descale.is_some_and(|values| values.is_per_block());
                if by_block { output.descaling() } else { output }
            }),
        }
    }

    /// The softmax of a tile whose scores have the factor `factor` in the exponent.
    fn softmax(&self, k: &mut Builder, factor: F32) -> OnlineSoftmax {
        let softmax =
            OnlineSoftmax::new(k, self.weights, self.rescale(), factor, 16, self.params.programs.as_ref())
                .with_exponentials_by_fma(self.plan.exps_by_fma)
                .of_wide(self.baked.wide);
        match (self.plan.sums, self.plan.rescale) {
            (Sums::Lanes, _) => softmax,
            // A block is recomputed if a probability reaches 2.
            (Sums::Product, Rescaling::Speculative { limit, .. }) => softmax.summed_by_products(limit),
            (Sums::Product, Rescaling::Always | Rescaling::Beyond(_)) => softmax.summed_by_products(0),
        }
    }

    fn rescale(&self) -> Rescale {
        match self.plan.rescale {
            Rescaling::Always => Rescale::Always,
            Rescaling::Beyond(threshold) | Rescaling::Speculative { beyond: threshold, .. } => {
                Rescale::Beyond(threshold)
            }
        }
    }
}
