//! Implements the registry's trait for the family, and declares its genes.

use problem::{Band, Problem};
use serde_json::{Value, json};

use super::{Tables, WgmmaPlan};
use crate::Symptom;
use crate::family::{FamilyPlan, of_plan, row_tiles};
use crate::forward::contract::{default_tanh, tanh_gene};
use crate::forward::fp8::{check_keys_of_factors, output_sums_gene};
use crate::forward::lists::visits_gene;
use crate::genes::Turn::{Down, To, Up};
use crate::genes::{BLOCK_N, CLUSTER, Gene, PACKING, PRODUCTS, RESIDENT_CTAS, STAGES, TURNS};
use crate::{Arch, Features};

/// The smallest section where a plan that was tuned without a window is taken for a window. Tiles then use
/// only a part of the keys of their heads: 16k keys with windows of 1k and 4k are 1 to 2 % faster than with
/// 48 (`evidence/changes.jsonl`).
const WINDOWED_SECTION_MIB: u32 = 64;

impl FamilyPlan for WgmmaPlan {
    fn features() -> Features {
        Features {
            lengths: true,
            sink: true,
            continues: true,
            programs: true,
            fp8: true,
            scales: true,
            block_scales: true,
            pages: true,
            ..Features::default()
        }
    }

    of_plan!(default_for);

    /// Suits grids with many rows: warpgroups have 64 rows and each SM gets a CTA, so few rows leave most of
    /// them idle.
    fn suits(problem: &Problem, arch: &Arch) -> bool {
        row_tiles(problem, 64) >= arch.multiprocessors.into()
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        // Without grouped heads there is nothing to pack. Only tiles of equal length can be shared.
        let packings = if problem.group_size() > 1 { &["apart", "packed"][..] } else { &[] };
        let tails = if problem.band == Band::FULL { &["whole", "shared"][..] } else { &[] };
        let divided = |keys: u32| check_keys_of_factors(problem, "block_n", keys).is_ok();
        let shares =
            if problem.head_dim_v > 256 && !problem.dtypes.q.is_fp8() { &["head_dim"][..] } else { &[] };
        let tables = if WgmmaPlan::may_share_tables(problem) { &["registers", "shared"][..] } else { &[] };
        let beyond = |threshold: u32| json!({ "beyond": threshold });
        let speculative = |limit: u32| json!({ "speculative": { "beyond": 8, "limit": limit } });
        let chains = |max: u32| json!({ "max": max, "sum": 1 });
        vec![
            Gene::new("consumers").searched([1, 2, 3]).curing(&[
                (Symptom::SmallGrid, Down),
                (Symptom::RedundantLoads, Up),
                (Symptom::L2, Up),
            ]),
            Gene::new("share").searched(shares.iter().copied()).wider(["rows", "head_dim"]),
            Gene::new("resident_ctas").searched([1, 2, 3]).wider([4]).curing(RESIDENT_CTAS),
            // Since arrivals have the scope of the cluster, clusters of two were slower in all measurements
            // (evidence/notes/hopper.md).
            Gene::new("cluster").searched([1]).wider([2]).curing(CLUSTER),
            Gene::new("packing")
                .searched(packings.iter().copied())
                .wider(["apart", "packed"])
                .curing(PACKING),
            Gene::new("block_n")
                .searched([64, 80, 96, 112, 128, 144, 160, 176].into_iter().filter(|&keys| divided(keys)))
                .wider([32, 48, 192, 208, 224, 240, 256])
                .curing(BLOCK_N),
            Gene::new("stages").searched([2, 3, 4]).wider([5, 6]).curing(STAGES),
            Gene::new("tiles")
                .searched(["in_turn", "overlapped"])
                .curing(&[(Symptom::Mufu, To("overlapped")), (Symptom::Tensor, To("overlapped"))]),
            Gene::new("products").searched(["in_turn"]).curing(PRODUCTS),
            Gene::new("producer_registers").searched([24, 32, 40]),
            Gene::new("queries_ahead").searched([0, 1]).wider([2]),
            Gene::new("store").searched(["direct", "bulk", "over_queries"]),
            Gene::new("turns").searched(["free", "ping_pong"]).curing(TURNS),
            // With a threshold above 0, O is not rescaled if no row of the warp exceeds its stored max by
            // more.
            Gene::new("rescale")
                .searched([Value::from("always"), beyond(0), beyond(8), speculative(15), speculative(40)])
                .wider([beyond(4), beyond(12), speculative(10), speculative(25)]),
            Gene::new("exps_by_fma").searched([0, 1, 2, 3]).wider([4]),
            Gene::new("probabilities").searched(["shared"]),
            Gene::new("tables").searched(tables.iter().copied()).curing(&[(Symptom::Issue, To("shared"))]),
            Gene::new("chains").searched([1, 2, 4].map(chains)),
            Gene::new("sums").searched(["lanes", "product"]),
            output_sums_gene(problem),
            Gene::new("ends")
                .searched(["common", "own"])
                .curing(&[(Symptom::Issue, To("own")), (Symptom::Tensor, To("own"))]),
            Gene::new("diagonal")
                .searched(["whole", "halved"])
                .curing(&[(Symptom::Issue, To("halved")), (Symptom::Tensor, To("halved"))]),
            Gene::new("handout").searched(["static", "folded", "dynamic", "grid"]),
            Gene::new("tail").searched(tails.iter().copied()).curing(&[(Symptom::SmallGrid, To("shared"))]),
            Gene::new("tile_order").searched(["in_order", "longest_first", "strided"]).wider(["level"]),
            Gene::new("section_mib").searched([16, 32, 48, 64, 96, 128]),
            tanh_gene(problem),
            visits_gene(problem),
        ]
    }

    of_plan!(check, baked, drafts);

    fn tile(&self) -> [u32; 2] {
        [self.block_m() * self.cluster, self.block_n]
    }

    fn aligned_tables(&self, problem: &Problem) -> Vec<u8> {
        self.aligned_tables(problem)
    }

    fn with_unaligned_tables(self) -> WgmmaPlan {
        WgmmaPlan { tables: Tables::Registers, ..self }
    }

    fn adapted(mut self, problem: &Problem, _: &Arch, own_shape: bool) -> WgmmaPlan {
        self.tanh = default_tanh(problem);
        if problem.band.before.is_some() && !own_shape {
            self.section_mib = self.section_mib.max(WINDOWED_SECTION_MIB);
        }
        let plan = self.visiting(problem);
        if own_shape { plan.fitted(problem) } else { plan.filled(problem).fitted(problem) }
    }
}
