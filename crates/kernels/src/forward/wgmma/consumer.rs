//! A consumer warpgroup: its registers, its positions in the rings, and a tile as it sees it.

use attend::{
    BlockList, BlockOutput, LoopProducts, LoopSchedule, LoopTiles, MainLoop, Masker, OnlineSoftmax,
    OutputSums, Rescale, Rings, RowRange, ScoreChain, ScoreFactors, ScorePrograms, SharedProbs, Skips,
    Softcap, SpeculativeMax, StagedTables, Sums, TileRows, Tiles, ValueFactors, Walk,
};
use ptx::{Builder, F32, Pred};
use tile::{
    AccTile, BulkStore, Consumer, OperandTile, PairSum, PingPong, Products, SharedMatrix, Sign, SwizzledTile,
    Threads, TileCursor, TileStream, Turns, WarpRows, WarpgroupVote, WorkTile,
};

use super::fp8::transposes_values;
use super::launch::LOADED;
use super::memory::Forward;
use super::plan::{Diagonal, Ends, Rescaling, Share, Store};
use crate::forward::descale::Scores;
use crate::forward::fp8::operand_type;

/// A consumer warpgroup, which computes 64 rows of each tile.
pub(super) struct ConsumerState<'a> {
    /// The warpgroup; with divided head dims, the pair of warpgroups that shares rows.
    pub consumer: Consumer,
    /// The threads among those that divide the keys of a block.
    key_threads: Threads,
    softcap: Option<Softcap>,
    pub main_loop: MainLoop,
    pub bulk: Option<BulkStore>,
    pub tiles: TileCursor<'a>,
}

/// A tile of query rows, as a warpgroup computes it.
pub(super) struct ConsumerTile {
    /// The rows of the CTA.
    pub rows: RowRange,
    list: Option<BlockList>,
    walk: Walk,
    mask: Masker,
    /// The factor of the scores in the exponent.
    pub factor: F32,
    programs: Option<ScorePrograms>,
    scores: Option<ScoreFactors>,
    values: Option<ValueFactors>,
    pub softmax: OnlineSoftmax,
}

impl Forward<'_> {
    /// The state of a warpgroup before its first tile.
    pub(super) fn state(&self, k: &mut Builder, consumer: &Consumer) -> ConsumerState<'_> {
        let sharing = (self.plan.share == Share::HeadDim).then(|| consumer.sharing_rows(k));
        let consumer = sharing.unwrap_or(*consumer);
        let key_threads = match self.plan.share {
            Share::Rows => consumer.threads,
            Share::HeadDim => consumer.threads.of_all_columns(),
        };
        let softcap = self.softcap(k);
        let main_loop = self.main_loop(k, &consumer);
        let bulk = self.bulk_store(k, &consumer);
        let tiles = self.schedule.consumer(k, &consumer);
        ConsumerState { consumer, key_threads, softcap, main_loop, bulk, tiles }
    }

    /// Before the first tile, or after the cursor has moved: sets the blocks of the next tile to skip, if its
    /// first scores are computed together with the last values of this tile.
    pub(super) fn prepare_next(&self, k: &mut Builder, state: &ConsumerState) {
        if self.plan.tiles == Tiles::Overlapped {
            self.look_ahead(k, &state.consumer, &state.main_loop, &state.tiles);
        }
    }

    /// The KV blocks, the mask, the factors and the softmax of a tile.
    pub(super) fn tile(&self, k: &mut Builder, state: &ConsumerState, tile: &WorkTile) -> ConsumerTile {
        let ConsumerState { consumer, key_threads, main_loop, .. } = state;
        let rows = self.rows(k, tile);
        let own = self.own_rows(k, &rows, consumer);
        let list = self.list(k, tile);
        let walk = self.walk(k, tile, &own, list.as_ref());
        if self.plan.tiles == Tiles::InTurn {
            self.skip(k, main_loop, tile, walk.end);
            self.skip_last(k, main_loop, tile, &walk);
        }
        self.halve(k, main_loop, &own);
        let mask = Masker::new(k, &self.params.band, key_threads, &rows, 16, self.plan.block_n).by_bits();
        let (factor, programs) = self.tile_factor(k, tile, state.softcap.as_ref());
        let scores = self.block_factors(k, tile, &rows, consumer);
        let values = self.value_factors(k, tile);
        let softmax = self.softmax(k, factor);
        let softmax = match &scores {
            None => softmax,
            Some(factors) => factors.in_softmax(softmax),
        };
        ConsumerTile { rows, list, walk, mask, factor, programs, scores, values, softmax }
    }

    /// The main loop over the tile's KV blocks. Moves to the next tile, and returns whether there is one.
    pub(super) fn attend(
        &self,
        k: &mut Builder,
        state: &ConsumerState,
        at: &WorkTile,
        tile: &ConsumerTile,
    ) -> Pred {
        let programs = tile.programs.as_ref().map(|programs| {
            let at = [at.head, at.batch];
            programs.for_rows(k, &state.key_threads, &tile.rows, (16, self.plan.block_n), at)
        });
        // A listed block may be partial because of the mask program alone.
        let unmasked = tile.list.is_some() && self.params.band.is_full() && self.divides();
        let chain = ScoreChain {
            descale: tile.scores.as_ref(),
            softcap: state.softcap.as_ref(),
            programs: programs.as_ref(),
            mask: (!unmasked).then_some(&tile.mask),
        };
        let rows = TileRows {
            chain,
            softmax: &tile.softmax,
            list: tile.list.as_ref(),
            values: tile.values.as_ref(),
        };
        state.main_loop.attend(k, &tile.walk, &rows, |k| {
            let more = state.tiles.advance(k);
            self.prepare_next(k, state);
            more
        })
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
