//! Emits the kernel that streams KV blocks. The warpgroups that share a part of the keys have one thread that
//! requests the blocks of that part. The issue order is that of FlashAttention-3's Algorithm 2.

use attend::{
    Bound, Chains, LoopProducts, LoopSchedule, LoopTiles, MainLoop, Masked, Masker, OnlineSoftmax, Order,
    Rings, RowRange, ScoreChain, Skips, SpeculativeMax, StagedTables, TileRows, Tiles, Walk,
};
use problem::{Operand, Tensor};
use ptx::{Builder, CmpOp, Pointer, Pred, Shared, Src};
use tile::{
    AccTile, Consumer, OperandTile, PingPong, Pipeline, Supply, SwizzledTile, TileRing, TileStream, Turns,
    WarpgroupVote,
};

use super::StreamedPlan;
use crate::forward::small::copies::sync_cta;
use crate::forward::small::emit::{Forward, WARP_ROWS};

/// Warps of a warpgroup.
const WARPS: u32 = 4;

impl Forward<'_, StreamedPlan> {
    /// Attention of the warpgroup's rows over its part of the keys.
    pub(super) fn stream(&self, k: &mut Builder) -> (OnlineSoftmax, AccTile) {
        let tile = self.bound(k, &self.rows);
        let own_rows = self.own_rows(k);
        let own = self.bound(k, &own_rows);
        let end = if self.ends_differ() { own.end } else { tile.end };
        let masked = match own.full_to {
            None => Masked::Never,
            Some(_) if self.params.band.is_full() => Masked::First,
            Some(full) => Masked::From(full),
        };
        let main_loop = self.main_loop(k, &tile);
        if let Some(skips) = &main_loop.schedule.skips {
            let blocks = k.sub(tile.end, end);
            skips.set(k, blocks);
        }
        let mask = Masker::new(k, &self.params.band, &self.threads, &self.rows, WARP_ROWS, self.plan.block_n);
        let softmax = self.softmax(k, self.plan.rescale);
        let walk =
            Walk { from: tile.from(), full_from: own.lower.and_then(|lower| lower.full_from), end, masked };
        let programs = self.row_programs(k);
        let chain = ScoreChain {
            descale: None,
            softcap: self.params.softcap.as_ref(),
            programs: programs.as_ref(),
            mask: Some(&mask),
        };
        let rows = TileRows { chain, softmax: &softmax, list: None, values: None };
        main_loop.attend_once(k, &walk, &rows);
        (softmax, main_loop.tiles.o)
    }

    /// The KV blocks that the rows see. Rows that see no key visit one fully masked block.
    fn bound(&self, k: &mut Builder, rows: &RowRange) -> Bound {
        let (keys, divides) = (self.common.cluster_keys(), self.baked.divides);
        Bound::new(k, &self.params.band, rows, keys, divides).at_least_one(k)
    }

    /// Whether row warpgroups visit different numbers of blocks, each only the blocks that its own rows see.
    /// With ping-pong they all visit the same blocks: otherwise the requesting warpgroup would wait for a
    /// stage that the next warpgroup releases only in a later turn.
    fn ends_differ(&self) -> bool {
        let several = self.plan.row_warpgroups > 1 && self.plan.turns == Turns::Free;
        !self.params.band.is_full() && several
    }

    /// The warpgroup's registers and rings, with the first blocks already requested.
    fn main_loop(&self, k: &mut Builder, tile: &Bound) -> MainLoop {
        let plan = self.plan;
        let rings = self.rings(k);
        let requests = self.requests(k);
        let elected = k.setp_u(CmpOp::Eq, self.threads.lane, 0);
        let consumer = Consumer { group: self.place.row_warpgroup, threads: self.threads, elected };
        let keys = TileStream::over_columns(k, rings[1], &consumer);
        let values = TileStream::over_rows(k, rings[2], &consumer);
        let keys = keys.supplied(self.supply(k, Tensor::K, tile, requests));
        let values = values.supplied(self.supply(k, Tensor::V, tile, requests));
        k.if_(requests, |k| {
            self.prepare(k, &rings);
            // The tiles that are needed first are requested first.
            keys.request_first(k, 0);
            self.request_queries(k, &rings[0]);
            for stage in 1..plan.stages {
                keys.request_first(k, stage);
                values.request_first(k, stage - 1);
            }
            values.request_first(k, plan.stages - 1);
        });
        sync_cta(k, plan.cluster, self.threads.lane, self.exchange.as_ref());
        if plan.overlapping {
            k.griddep_launch_dependents();
        }
        let [keys, values] =
            if self.baked.resident { [keys.resident(), values.resident()] } else { [keys, values] };
        let queries = TileStream::own_rows(k, rings[0], &consumer);
        let ping_pong =
            (plan.turns == Turns::PingPong).then(|| PingPong::new(k, &consumer, plan.row_warpgroups));
        let schedule = LoopSchedule {
            order: Order::ScoresAhead,
            tiles: Tiles::InTurn,
            ping_pong,
            halved: None,
            speculative: plan.speculative.map(|limit| {
                let warpgroup = k.shr_u(self.place.warp, 2);
                SpeculativeMax::new(self.half, plan.rescale, limit, WarpgroupVote::new(k, warpgroup))
            }),
            skips: self.ends_differ().then(|| Skips::none(k, keys, values, ping_pong)),
        };
        MainLoop {
            weights: self.half.into(),
            block_n: self.common.cluster_keys(),
            chains: Chains { max: 2, sum: 1 },
            rings: Rings { queries, kept_queries: None, keys, values, tables: StagedTables::default() },
            products: LoopProducts { scores: self.products(), output: self.products(), sum: None },
            schedule,
            tiles: LoopTiles {
                s: AccTile::unset(k, WARP_ROWS, plan.block_n),
                p: OperandTile::unset(k, self.half, WARP_ROWS, plan.block_n),
                shared_probs: None,
                o: AccTile::unset(k, WARP_ROWS, self.baked.head_dim_v()),
                block_output: None,
            },
        }
    }

    /// Whether this thread requests the blocks. It is one thread among the warpgroups of a part.
    fn requests(&self, k: &mut Builder) -> Pred {
        let later_rows = k.mul(self.place.row_warpgroup, tile::WARPGROUP_THREADS);
        let thread = k.add(later_rows, self.place.thread);
        k.setp_u(CmpOp::Eq, thread, 0)
    }

    /// Initialises the mbarriers of the part's rings; part 0 also initialises those of the queries. Then
    /// waits for the previous kernel, on whose completion all later accesses depend.
    fn prepare(&self, k: &mut Builder, [queries, keys, values]: &[TileRing; 3]) {
        if self.plan.kv_warpgroups == 1 {
            queries.pipeline.init_full(k);
        } else {
            let first_part = k.setp_u(CmpOp::Eq, self.place.kv_warpgroup, 0);
            k.if_(first_part, |k| queries.pipeline.init_full(k));
        }
        for ring in [keys, values] {
            match self.plan.row_warpgroups {
                readers if readers > 1 && !self.baked.resident => {
                    ring.pipeline.init(k, WARPS * readers);
                }
                _ => ring.pipeline.init_full(k),
            }
        }
        k.fence_mbarrier_init();
        if self.plan.overlapping {
            k.griddep_wait();
        }
    }

    /// The part's blocks of a tile, the last block first.
    fn supply(&self, k: &mut Builder, tensor: Tensor, tile: &Bound, requests: Pred) -> Supply {
        let step = self.common.cluster_keys();
        let source = self.source(k);
        let in_warpgroup = k.and(self.place.warp, WARPS - 1);
        let warp = k.mad(self.place.row_warpgroup, WARPS, in_warpgroup);
        let first = k.mad(tile.end, step, source.first_key);
        Supply {
            map: source.maps[tensor.into()],
            next: k.sub(first, (1 + self.plan.stages) * step),
            last: tile.lower.map(|lower| k.mul(lower.from, step)),
            step,
            head: source.head(k, self.baked, tensor),
            requests,
            warp: k.setp_u(CmpOp::Eq, warp, 0),
            readers: self.plan.row_warpgroups,
        }
    }

    /// Requests the queries of all row warpgroups. Only part 0 does this.
    fn request_queries(&self, k: &mut Builder, ring: &TileRing) {
        let source = self.source(k);
        let request = |k: &mut Builder| {
            let at = ring.pipeline.consumer_state(k);
            let [head, batch] = source.head(k, self.baked, Tensor::Q);
            let first = self.rows.position(k, self.rows.first);
            ring.fill(k, &at, source.maps[Operand::Q], [first, head, batch].map(Src::from));
        };
        if self.plan.kv_warpgroups == 1 {
            return request(k);
        }
        let first_part = k.setp_u(CmpOp::Eq, self.place.kv_warpgroup, 0);
        k.if_(first_part, request);
    }

    /// The ring of the queries, which all warpgroups share, and the rings of the part's keys and values.
    fn rings(&self, k: &mut Builder) -> [TileRing; 3] {
        let (plan, map) = (self.plan, self.map);
        let at = |offset: u32| self.shared.at(i64::from(offset));
        let of_queries = at(map.barriers);
        let of_keys = of_queries.at(i64::from(Pipeline::bytes(1)));
        let of_values = of_keys.at(i64::from(plan.kv_warpgroups * Pipeline::bytes(plan.stages)));
        let own = |k: &mut Builder, barriers: Shared, tiles: Shared, tile: SwizzledTile| {
            let barriers = k.shared_index(barriers, self.place.kv_warpgroup, Pipeline::bytes(plan.stages));
            let first = k.shared_index(tiles, self.place.kv_warpgroup, TileRing::bytes(tile, plan.stages));
            TileRing { pipeline: Pipeline::new(barriers, plan.stages), tile, first }
        };
        let (first, tile) = (at(map.queries), map.query_tile);
        [
            TileRing { pipeline: Pipeline::new(of_queries, 1), tile, first },
            own(k, of_keys, at(map.keys), map.key_tile),
            own(k, of_values, at(map.values), map.value_tile),
        ]
    }
}
