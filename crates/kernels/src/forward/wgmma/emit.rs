//! The generator: the producer's requests and the consumers' computation. Rows and blocks are chosen in
//! `rows.rs`; results are stored in `store.rs`.

use problem::{Problem, Tensor};
use ptx::{
    Builder, CmpOp, F32, Global, Half, Kernel, Pointer, R32, R64, Shared, Src, Target, TensorMapPtr,
    Violations,
};
use tile::{
    AccTile, Accumulate, Agreement, BlockSteps, BulkStore, Circle, Consumer, Coverage, Guess, Handout,
    Handover, KeyBand, Mailbox, Masker, Ones, OnlineSoftmax, Partials, Peers, ProbTile, Products, Rescale,
    Roles, Scheduler, SharedMatrix, SharedProbs, Shares, Skips, Softcap, Sums, SwizzledTile, Tail, TileGrid,
    TileRing, TileStream, Tiles, Turns, Visits, WarpRows, WorkTile,
};

use super::launch::LOADED;
use super::plan::{Diagonal, Ends, Rescaling, Store, WgmmaPlan};
use crate::Arch;
use crate::forward::contract::{declare_band, declare_softcap, half};

const ENTRY: &str = "flash_forward_wgmma";

impl WgmmaPlan {
    /// The kernel; the plan has been checked.
    pub(crate) fn emit(&self, problem: &Problem, arch: &Arch) -> Result<Kernel, Violations> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(self.threads());
        // Without this bound ptxas ignores `setmaxnreg`.
        k.min_ctas_per_sm(self.resident_ctas);
        Forward::new(&mut k, problem, self).body(&mut k);
        Ok(Kernel {
            module: k.into_verified(Target::sm_a(arch.sm))?,
            entry: ENTRY.to_owned(),
            launch: self.launch(problem, arch),
            buffers: self.buffers(problem, arch),
            tensor_maps: self.tensor_maps(problem),
            args: self.args(problem, arch),
        })
    }

    fn roles(&self) -> Roles {
        let (feeds_with, computes_with) = self.register_split();
        Roles { consumers: self.consumers, feeds_with, computes_with }
    }

    /// Shared memory of a CTA in bytes: the tiles of the rings, then their barriers.
    pub fn shared_bytes(&self, problem: &Problem) -> u32 {
        let [q, key, value] = self.tile_shapes(problem);
        let query_stages = self.query_stages();
        let tiles = query_stages * q.bytes() + self.stages * (key.bytes() + value.bytes());
        let barriers = Handover::bytes(query_stages) + 2 * Handover::bytes(self.stages);
        let mailbox = match self.handout {
            Handout::Static | Handout::Folded | Handout::Grid => 0,
            Handout::Dynamic => Mailbox::SHARED_BYTES,
        };
        let rows_out = match self.store {
            Store::Direct => 0,
            Store::Bulk => 4 * self.consumers * BulkStore::tile(problem.head_dim_v as u32).bytes(),
        };
        let probs = self.prob_tile().map_or(0, |tile| self.consumers * tile.bytes());
        let ones = match self.sums {
            Sums::Lanes => 0,
            Sums::Product => Ones::BYTES,
        };
        tiles + probs + rows_out + ones + barriers + mailbox
    }
}

/// Barriers that another barrier makes redundant.
impl WgmmaPlan {
    /// Whether a stage of Q is empty whenever the first keys of its tile have an empty stage. Each tile has
    /// at least one block. With no more KV stages than Q stages, the first keys of a tile replace keys of the
    /// tile whose queries are replaced, or of a later tile; and keys are released after the last product that
    /// reads the queries with them.
    fn keys_pace_queries(&self) -> bool {
        self.stages <= self.query_stages()
    }

    /// Whether the consumers have received the index of the previous tile when the producer sends the index
    /// of the next one. Consumers receive a tile's index while they compute the tile before it. The producer
    /// has then requested all of a tile. With one Q stage, the consumers have therefore released the queries
    /// of the tile before; with at most two KV stages, they have released the last values of the tile two
    /// before, after which they received the index. In a cluster the producers receive indices as well and
    /// release no tile, so this does not hold.
    fn tiles_pace_numbers(&self) -> bool {
        self.cluster == 1 && (self.query_stages() == 1 || self.stages <= 2)
    }
}

/// The kernel being emitted: values known at emission, and its parameters.
pub(super) struct Forward<'a> {
    pub(super) plan: &'a WgmmaPlan,
    pub(super) problem: &'a Problem,
    pub(super) half: Half,
    pub(super) params: Params,
    pub(super) queries: TileRing,
    pub(super) keys: TileRing,
    pub(super) values: TileRing,
    pub(super) schedule: Scheduler,
    /// Where the parts of shared tiles are merged.
    pub(super) partials: Option<Partials>,
    /// Staging rows of O for TMA stores.
    pub(super) rows_out: Option<(TensorMapPtr, Shared)>,
    /// The first warpgroup's P in shared memory, if P V takes it from there; those of the other warpgroups
    /// follow.
    pub(super) probs: Option<(SwizzledTile, Shared)>,
    /// The ones beside V, if products compute the row sums.
    pub(super) ones: Option<Ones>,
}

/// The kernel's parameters, in the order of [`WgmmaPlan::args`].
pub(super) struct Params {
    pub(super) maps: [TensorMapPtr; 3],
    pub(super) out_map: Option<TensorMapPtr>,
    pub(super) out: Global,
    pub(super) lse: Option<Global>,
    pub(super) counter: Option<Global>,
    /// Of [`Partials`]: the parts and the counters.
    pub(super) parts: Option<[Global; 2]>,
    pub(super) out_batch_bytes: R64,
    pub(super) out_head_bytes: R64,
    pub(super) seq_q: R32,
    pub(super) seq_kv: R32,
    pub(super) grid: TileGrid,
    pub(super) shares: Option<Shares>,
    /// `|scale| · log2 e`.
    pub(super) factor: F32,
    pub(super) band: KeyBand,
    pub(super) softcap: Option<Softcap>,
}

impl Params {
    fn declare(k: &mut Builder, problem: &Problem, plan: &WgmmaPlan) -> Params {
        let maps = LOADED.map(|tensor| k.param_tensor_map(&format!("{}_map", tensor.name())));
        let out_map = (plan.store == Store::Bulk).then(|| k.param_tensor_map("out_map"));
        let out = k.param_pointer("out");
        let lse = problem.pass.lse().then(|| k.param_pointer("lse"));
        let counter = (plan.handout == Handout::Dynamic).then(|| k.param_pointer("counter"));
        let shared = plan.tail == Tail::Shared;
        let parts = shared.then(|| ["scratch", "counter"].map(|name| k.param_pointer(name)));
        let [out_batch_bytes, out_head_bytes] = ["out_batch_bytes", "out_head_bytes"].map(|n| k.param_u64(n));
        let [seq_q, seq_kv, tiles, row_blocks, heads, section] =
            ["seq_q", "seq_kv", "tiles", "row_blocks", "heads", "section"].map(|name| k.param_u32(name));
        let grid = TileGrid { order: plan.tile_order, tiles, row_blocks, heads, section };
        let shares = shared.then(|| {
            let [blocks, whole, piece, longer] =
                ["blocks", "whole_tiles", "piece", "longer"].map(|name| k.param_u32(name));
            Shares { blocks, whole, piece, longer }
        });
        let factor = k.param_f32("scale_log2e");
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
            grid,
            shares,
            factor,
            band: declare_band(k, problem),
            softcap: declare_softcap(k, problem),
        }
    }
}

impl<'a> Forward<'a> {
    fn new(k: &mut Builder, problem: &'a Problem, plan: &'a WgmmaPlan) -> Forward<'a> {
        let params = Params::declare(k, problem, plan);
        let [q, key, value] = plan.tile_shapes(problem);
        let shared = k.dynamic_shared(SwizzledTile::ALIGNMENT);
        let peers = Peers::new(k, plan.cluster);
        let mut taken = 0;
        let mut take = |bytes: u32| {
            let at = shared.at(i64::from(taken));
            taken += bytes;
            at
        };
        // Tiles first: what follows them needs less alignment.
        let places = [(q, plan.query_stages(), None), (key, plan.stages, peers), (value, plan.stages, peers)]
            .map(|(tile, stages, peers)| (tile, stages, peers, take(stages * tile.bytes())));
        let probs = plan.prob_tile().map(|tile| (tile, take(plan.consumers * tile.bytes())));
        let bytes = 4 * plan.consumers * BulkStore::tile(problem.head_dim_v as u32).bytes();
        let rows_out = params.out_map.map(|map| (map, take(bytes)));
        let ones = (plan.sums == Sums::Product).then(|| Ones { at: take(Ones::BYTES) });
        let [queries, keys, values] = places.map(|(tile, stages, peers, first)| {
            let handover = Handover::new(take(Handover::bytes(stages)), stages).among(peers);
            TileRing { handover, tile, first }
        });
        let queries =
            TileRing { handover: queries.handover.paced_by_others(plan.keys_pace_queries()), ..queries };
        let mailbox = params.counter.map(|counter| {
            let mut mailbox = Mailbox::new(take(Mailbox::SHARED_BYTES), counter, peers);
            mailbox.handover = mailbox.handover.paced_by_others(plan.tiles_pace_numbers());
            mailbox
        });
        let partials = params.parts.zip(params.shares).map(|([parts, counters], shares)| {
            let warps = plan.tile_warps();
            Partials { parts, counters, shares, warps, peers }
        });
        Forward {
            plan,
            problem,
            half: half(problem),
            queries,
            keys,
            values,
            schedule: Scheduler {
                handout: plan.handout,
                grid: params.grid,
                mailbox,
                peers,
                shares: params.shares,
            },
            partials,
            rows_out,
            probs,
            ones,
            params,
        }
    }

    /// The kernel: FlashAttention-3, Algorithm 1.
    fn body(&self, k: &mut Builder) {
        let roles = self.plan.roles();
        let handovers = [self.queries.handover, self.keys.handover, self.values.handover];
        let mailbox = self.schedule.mailbox.map(|mailbox| mailbox.handover);
        if let Some(ones) = self.ones {
            ones.write(k, self.half);
            // The initial cluster barrier orders only the initialisation of mbarriers, not the other writes
            // to shared memory.
            if self.schedule.peers.is_some() {
                k.bar_sync();
            }
        }
        roles.prepare(k, handovers.into_iter().chain(mailbox));
        roles.split(k, |k| self.feed(k), |k, consumer| self.compute(k, consumer));
        if let Some(peers) = self.schedule.peers {
            peers.end(k);
        }
    }

    /// The producer: keys one block ahead of values, in the order in which the consumers read them.
    fn feed(&self, k: &mut Builder) {
        let [q_map, key_map, value_map] = self.params.maps;
        for map in self.params.maps {
            k.prefetch_tensor_map(map);
        }
        let [q_at, key_at, value_at] =
            [&self.queries, &self.keys, &self.values].map(|ring| ring.handover.filler(k));
        self.schedule.feed_each(k, |k, tile, take_next| {
            let rows = self.rows(k, tile);
            let (from, end) = self.span(k, tile);
            let key_head = tile::divide(k, tile.head, self.problem.group_size() as u32 / rows.heads);
            let position = rows.position(k, rows.first);
            let [q_part, key_part, value_part] = LOADED.map(|tensor| {
                let head = if tensor == Tensor::Q { tile.head } else { key_head };
                self.distinct(tensor, [head, tile.batch])
            });
            let request =
                |k: &mut Builder, ring: &TileRing, at, map, block: R32, [head, batch]: [Src<R32>; 2]| {
                    let first = k.mul(block, self.plan.block_n);
                    ring.request(k, at, map, [first.into(), head, batch]);
                };
            let block = k.sub(end, 1);
            // The keys come before Q, whose stage is released later.
            request(k, &self.keys, &key_at, key_map, block, key_part.clone());
            let [head, batch] = q_part;
            self.queries.request(k, &q_at, q_map, [position.into(), head, batch]);
            k.while_(
                |k| k.setp_u(CmpOp::Ne, block, from),
                |k| {
                    let next = k.sub(block, 1);
                    request(k, &self.keys, &key_at, key_map, next, key_part.clone());
                    request(k, &self.values, &value_at, value_map, block, value_part.clone());
                    k.mov_to(block, next);
                },
            );
            take_next(k);
            request(k, &self.values, &value_at, value_map, block, value_part.clone());
        });
    }

    /// Head and batch entry in a tensor map, where those with stride 0 are one.
    fn distinct(&self, tensor: Tensor, [head, batch]: [R32; 2]) -> [Src<R32>; 2] {
        let strides = self.problem.strides(tensor);
        [(head, strides.head), (batch, strides.batch)]
            .map(|(index, stride)| if stride == 0 { 0.into() } else { index.into() })
    }

    /// A consumer warpgroup: 64 rows of each tile.
    fn compute(&self, k: &mut Builder, consumer: &Consumer) {
        let plan = self.plan;
        let visits = self.visits(k, consumer);
        let shared_probs = visits.shared_probs;
        let products = Products::new(self.half);
        let products = if self.problem.softmax_scale() < 0.0 { products.negating_scores() } else { products };
        let scores = |k: &mut Builder, q: SharedMatrix, key: SharedMatrix, s: &AccTile| {
            products.wgmma_qk(k, q, key, s); //                               S = Q Kᵀ
        };
        let accumulate = |k: &mut Builder, p: &ProbTile, value: SharedMatrix, o: &AccTile| {
            match shared_probs {
                None => products.wgmma_pv(k, p, value, o, Accumulate::Add), //    O += P V
                Some(p) => products.wgmma_pv_shared(k, p.matrix, value, o),
            }
        };
        let bulk = self
            .rows_out
            .map(|(map, place)| BulkStore::new(k, self.problem.head_dim_v as u32, place, map, consumer));
        let turn = self.schedule.consumer(k, consumer);
        if plan.tiles == Tiles::Overlapped {
            self.look_ahead(k, consumer, &visits, &turn);
        }
        visits.open(k, &scores);
        turn.for_each(k, |k, tile| {
            let rows = self.rows(k, tile);
            let own = self.own_rows(k, &rows, consumer);
            let blocks = self.own_blocks(k, tile, &own);
            if plan.tiles == Tiles::InTurn {
                self.skip(k, &visits, tile, blocks.end);
            }
            self.halve(k, &visits, &own);
            let mask =
                Masker::new(k, &self.params.band, &consumer.threads, &rows, 16, self.plan.block_n).by_bits();
            let hide = |k: &mut Builder, s: &AccTile, origin: R32, coverage: Coverage| {
                mask.apply(k, s, origin, coverage); //                        S = −∞ where a row does not see a key
            };
            let softmax = self.softmax(k);
            let steps = BlockSteps { scores, hide, accumulate };
            // Of each block, S is issued beside what the block before it adds to O (`tile::Visits`); then, by
            // the rules of `softmax`, m follows max(S·c), and O and l are rescaled where it moved; P =
            // exp2(S·c − m), rounded, and l += Σ P.
            let more = visits.for_each_block(k, blocks, &softmax, &steps, |k| {
                let more = turn.advance(k);
                if plan.tiles == Tiles::Overlapped {
                    self.look_ahead(k, consumer, &visits, &turn);
                }
                more
            });
            let o = softmax.take_sums(k, &visits.o);
            self.if_complete(k, consumer, tile, &softmax, &o, |k| {
                let finished = softmax.finish(k, &o); //                      O / l
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

    /// Runs `finish` on complete results: for a shared tile, only in the warps that complete it.
    fn if_complete(
        &self,
        k: &mut Builder,
        consumer: &Consumer,
        tile: &WorkTile,
        softmax: &OnlineSoftmax,
        o: &AccTile,
        finish: impl FnOnce(&mut Builder),
    ) {
        match self.partials.zip(tile.part) {
            None => finish(k),
            Some((partials, part)) => {
                let complete = partials.join(k, consumer, &part, softmax, o);
                k.if_(complete, finish);
            }
        }
    }

    /// A warpgroup's registers and its positions in the rings.
    fn visits(&self, k: &mut Builder, consumer: &Consumer) -> Visits {
        let plan = self.plan;
        Visits {
            half: self.half,
            block_n: plan.block_n,
            tiles: plan.tiles,
            products: plan.products,
            queries: TileStream::own_rows(k, self.queries, consumer),
            keys: TileStream::over_columns(k, self.keys, consumer),
            values: match self.ones {
                None => TileStream::over_rows(k, self.values, consumer),
                Some(ones) => TileStream::over_rows_beside(k, self.values, ones, consumer),
            },
            circle: (plan.turns == Turns::PingPong).then(|| Circle::new(k, consumer, plan.consumers)),
            guess: match plan.rescale {
                Rescaling::Speculative { limit, .. } => {
                    Some(Guess::new(self.half, limit, Agreement::new(k, consumer.group)))
                }
                _ => None,
            },
            chains: plan.chains,
            halved: (plan.diagonal == Diagonal::Halved).then(|| k.mov(0)),
            skips: (plan.ends == Ends::Own).then(|| Skips::none(k)),
            softcap: self.params.softcap,
            s: AccTile::unset(k, 16, plan.block_n),
            p: ProbTile::unset(k, 16, plan.block_n),
            shared_probs: self.probs.map(|(tile, first)| {
                let own = k.shared_index(first, consumer.group, tile.bytes());
                let warp = k.and(consumer.threads.warp, 3);
                let rows = k.shared_index(own, warp, WarpRows::ROWS * SwizzledTile::ROW_BYTES);
                SharedProbs {
                    rows: WarpRows::new(k, tile, rows, &consumer.threads),
                    matrix: SharedMatrix::over_columns(k, tile, own),
                    agreement: Agreement::new(k, consumer.group),
                }
            }),
            o: AccTile::unset(k, 16, plan.columns_out(self.problem)),
        }
    }

    fn softmax(&self, k: &mut Builder) -> OnlineSoftmax {
        let softmax = OnlineSoftmax::new(k, self.half, self.rescale(), self.params.factor, 16)
            .with_exponentials_by_fma(self.plan.exps_by_fma);
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
