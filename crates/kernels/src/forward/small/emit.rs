//! The generator of the `small` family.

use attend::{
    Exchange, KeyBand, Masker, OnlineSoftmax, Place, RowPrograms, RowRange, ScorePrograms, Sinks, Softcap,
};
use problem::{Problem, Tensor};
use ptx::{
    Builder, CmpOp, Dim3, F32, Global, Half, Launch, Pointer, R32, R64, Shared, SpecialReg, Target,
    TensorMapPtr, Violations,
};
use tile::{AccTile, Mbarriers, Products, SwizzledTile, Threads, WARPGROUP_ROWS, divide};

use super::block::{Block, WARP_ROWS};
use super::loads::{Loads, Source};
use super::plan::{Merge, RowOrder, Scores, SmallPlan};
use crate::Program;
use crate::contract::Contract;
use crate::forward::contract::{
    declare_band, declare_head_strides, declare_map, declare_softcap, half, unsigned_factor,
};
use crate::forward::programs::declare_programs;

const ENTRY: &str = "flash_forward_small";

impl SmallPlan {
    /// The kernel; the plan has been checked.
    pub(crate) fn emit(&self, problem: &Problem) -> Result<Program, Violations> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(self.threads());
        k.min_ctas_per_sm(self.resident_ctas);
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, problem, self);
        Forward::new(&mut k, problem, self, params).body(&mut k);
        Ok(contract.into_program(k.into_verified(Target::sm_a(90))?, ENTRY, self.launch(problem)))
    }

    fn launch(&self, problem: &Problem) -> Launch {
        let tiles = self.row_tiles(problem) as u32;
        let (heads, batch) = (self.tile_heads(problem) as u32, problem.batch as u32);
        Launch {
            grid: match self.tile_order {
                RowOrder::ByHead => Dim3(self.cluster * tiles, heads, batch),
                RowOrder::LongestFirst | RowOrder::Folded => Dim3(self.cluster * heads, batch, tiles),
            },
            cluster: Dim3(self.cluster, 1, 1),
            block: Dim3(self.threads(), 1, 1),
            dynamic_shared: self.shared_bytes(problem) as u32,
            overlapping: self.overlapping,
        }
    }
}

/// The kernel's parameters.
pub(super) struct Params {
    /// Tensor maps of Q, K and V.
    maps: [TensorMapPtr; 3],
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
    fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem, plan: &SmallPlan) -> Params {
        let tiles = [
            (Tensor::Q, plan.query_tile(problem)),
            (Tensor::K, plan.key_tile(problem)),
            (Tensor::V, plan.value_tile(problem)),
        ];
        Params {
            maps: tiles.map(|tile| declare_map(k, c, problem, tile)),
            out: c.tensor(k, Tensor::Out),
            lse: problem.pass.lse().then(|| c.lse(k)),
            out_strides: declare_head_strides(k, c, problem, Tensor::Out),
            seq_q: c.u32(k, "seq_q", problem.seq_q as u32),
            seq_kv: c.u32(k, "seq_kv", problem.seq_kv as u32),
            factor: c.f32(k, "scale_log2e", unsigned_factor(problem)),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, plan.tanh),
            programs: declare_programs(k, c, problem, plan.packed_heads(problem) > 1),
            sinks: c.sinks(k),
        }
    }
}

/// State of the warpgroup in registers, with the values known at emission.
pub(super) struct Forward<'a> {
    pub(super) plan: &'a SmallPlan,
    pub(super) problem: &'a Problem,
    pub(super) half: Half,
    pub(super) params: Params,
    pub(super) place: Place,
    pub(super) threads: Threads,
    pub(super) rows: RowRange,
    /// The CTA's query head, or group of packed ones, and batch entry.
    pub(super) head: R32,
    pub(super) batch: R32,
    pub(super) shared: Shared,
    /// The merge with the other parts of the keys, if there are any.
    pub(super) exchange: Option<Exchange>,
}

impl<'a> Forward<'a> {
    fn new(k: &mut Builder, problem: &'a Problem, plan: &'a SmallPlan, params: Params) -> Forward<'a> {
        let place = Place::new(k, plan.division());
        let threads = place.threads(k, plan.division());
        let work = Work::of_cluster(k, plan, &params.band);
        let first = k.mul(work.tile, plan.rows());
        let shared = k.dynamic_shared(SwizzledTile::ALIGNMENT);
        let map = plan.shared_map(problem);
        let at = |offset: u32| shared.at(i64::from(offset));
        let barriers = Mbarriers::new(at(map.barriers)).from(plan.load_barriers());
        let exchange = (plan.division().parts() > 1).then(|| {
            Exchange::new(plan.division(), place, problem.head_dim_v as u32, at(map.messages), barriers)
        });
        Forward {
            plan,
            problem,
            half: half(problem),
            place,
            threads,
            rows: RowRange {
                first,
                rows: plan.rows(),
                seq_q: params.seq_q,
                seq_kv: params.seq_kv,
                heads: plan.packed_heads(problem),
            },
            params,
            head: work.head,
            batch: work.batch,
            shared,
            exchange,
        }
    }

    /// The kernel: attention of 64 rows over one part of their keys, merged with the other parts.
    fn body(&self, k: &mut Builder) {
        let (softmax, o) = if self.plan.streams() {
            let (softmax, o) = self.stream(k);
            softmax.gather_sums(k);
            self.join(k, softmax, o)
        } else {
            self.at_once(k)
        };
        self.store(k, &softmax, &o);
    }

    /// Attention over the only KV block of the warpgroup: no loop, and everything is in flight at once.
    fn at_once(&self, k: &mut Builder) -> (OnlineSoftmax, AccTile) {
        let plan = self.plan;
        let source = self.source(k);
        let loads = Loads::new(k, plan, self.problem, self.place, self.threads.lane, self.shared);
        loads.request(k, &source, self.exchange.as_ref());
        let block = Block::new(k, plan, self.problem, self.products(), &self.place, &loads);
        let mask = Masker::new(k, &self.params.band, &self.threads, &self.rows, WARP_ROWS, plan.block_n);
        let softmax = self.softmax(k);
        let programs = self.row_programs(k);
        self.paths(k, |k, seen| {
            let mut block = block.seen(seen);
            self.attend(k, &mut block, (&mask, programs.as_ref()), &softmax);
            softmax.gather_sums(k);
            if plan.merge == Merge::PeerFirst {
                self.send_to_peer(k, &softmax, &block);
            }
            block.finish(k);
        });
        match plan.merge {
            Merge::Shares => self.join(k, softmax, block.own_share()),
            Merge::PeerFirst => {
                let own = block.own_share();
                let sinks = self.sinks(k);
                (self.exchange().receive(k, softmax, &own, sinks.as_ref()), own)
            }
        }
    }

    /// Softmax and P V of the scores that a path's rows see.
    fn attend(
        &self,
        k: &mut Builder,
        block: &mut Block,
        shown: (&Masker, Option<&RowPrograms<'_>>),
        softmax: &OnlineSoftmax,
    ) {
        let steps = block.steps();
        let ahead = if self.plan.scores == Scores::AllAtOnce { steps } else { steps.min(1) };
        (0..ahead).for_each(|step| block.issue_scores(k, step)); //       S = Q Kᵀ
        for step in 0..steps {
            let maxima = block.maxima(k, self.params.softcap.as_ref(), shown, step);
            let alpha = if step == 0 {
                softmax.set_row_max(k, &maxima); //                             m = max(S·c)
                None
            } else {
                Some(softmax.raise_to(k, &maxima)) //                m = max(m, S·c); l rescaled
            };
            if step + 1 >= ahead && step + 1 < steps {
                block.issue_scores(k, step + 1);
            }
            for piece in block.pv_pieces_of(step) {
                let s = block.scores_of(piece);
                let p = softmax.probabilities(k, &s); //                  P = exp2(S·c − m); l += Σ P
                if let (Some(alpha), true) = (&alpha, piece == block.pv_pieces_of(step).start) {
                    block.rescale(k, alpha); //                           O rescaled
                }
                block.issue_output(k, &p, piece); //                      O += P V
            }
        }
    }

    pub(super) fn products(&self) -> Products {
        let products = Products::new([self.half.ty(); 2]);
        if self.problem.softmax_scale() < 0.0 { products.negating() } else { products }
    }

    pub(super) fn softmax(&self, k: &mut Builder) -> OnlineSoftmax {
        OnlineSoftmax::new(k, self.half, self.plan.rescale, self.params.factor, WARP_ROWS)
    }

    /// The programs for the warpgroup's rows.
    pub(super) fn row_programs(&self, k: &mut Builder) -> Option<RowPrograms<'_>> {
        let (tile, at) = ((WARP_ROWS, self.plan.block_n), [self.head, self.batch]);
        let programs = self.params.programs.as_ref()?;
        Some(programs.for_rows(k, &self.threads, &self.rows, tile, at))
    }

    /// The sinks of the warpgroup's rows.
    fn sinks(&self, k: &mut Builder) -> Option<Sinks> {
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
        let part = self.place.part(k, self.plan.division());
        k.mul(part, self.plan.block_n)
    }

    /// The tensor-map coordinates of the warpgroup's queries, keys and values.
    pub(super) fn source(&self, k: &mut Builder) -> Source {
        let own = self.own_rows(k);
        Source {
            maps: self.params.maps,
            position: own.position(k, own.first),
            first_key: self.first_key(k),
            head: self.head,
            kv_head: divide(k, self.head, self.problem.group_size() as u32 / own.heads),
            batch: self.batch,
        }
    }

    /// The warpgroup's columns of O over all keys, normalised; all columns if the warpgroup has all keys.
    fn join(&self, k: &mut Builder, softmax: OnlineSoftmax, o: AccTile) -> (OnlineSoftmax, AccTile) {
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

    /// With two CTAs, sends the peer's columns before the own ones are complete.
    fn send_to_peer(&self, k: &mut Builder, softmax: &OnlineSoftmax, block: &Block) {
        let theirs = block.peers_share(k);
        self.wait_for_cluster(k);
        self.exchange().send_to_peer(k, softmax, theirs);
    }

    fn exchange(&self) -> &Exchange {
        self.exchange.as_ref().expect("a plan with a peer has two parts")
    }

    /// Waits until the mbarriers of the other CTAs are initialised.
    fn wait_for_cluster(&self, k: &mut Builder) {
        if self.plan.cluster > 1 {
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
    fn of_cluster(k: &mut Builder, plan: &SmallPlan, band: &KeyBand) -> Work {
        let [x, y, z] = [SpecialReg::CtaidX, SpecialReg::CtaidY, SpecialReg::CtaidZ].map(|n| k.special(n));
        let x = divide(k, x, plan.cluster);
        match plan.tile_order {
            RowOrder::ByHead => {
                let tile = if !band.is_full() {
                    let count = k.special(SpecialReg::NctaidX);
                    let count = divide(k, count, plan.cluster);
                    from_last(k, x, count)
                } else {
                    x
                };
                Work { tile, head: y, batch: z }
            }
            RowOrder::LongestFirst => {
                let count = k.special(SpecialReg::NctaidZ);
                Work { tile: from_last(k, z, count), head: x, batch: y }
            }
            RowOrder::Folded => {
                let count = k.special(SpecialReg::NctaidZ);
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
