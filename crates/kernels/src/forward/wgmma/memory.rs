//! The kernel being emitted, and the division of its shared memory among rings of tiles, their barriers and
//! other uses.

use attend::{KeyBand, ProgramCode, StreamKMerge, Sums};
use problem::Problem;
use ptx::{Builder, Pointer, Shared, TensorMapPtr};
use tile::{
    BulkStore, Cluster, Handout, Locate, Ones, OperandType, Pipeline, SwizzledTile, TileBroadcast, TileRing,
    TileScheduler,
};

use super::launch::Params;
use super::plan::{Share, Store, WgmmaPlan};
use crate::Baked;
use crate::forward::fp8::weights;

impl WgmmaPlan {
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
    pub(super) weights: OperandType,
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

impl<'a> Forward<'a> {
    /// Divides shared memory among the rings and the other uses.
    pub(super) fn new(
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
}
