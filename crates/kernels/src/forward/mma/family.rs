//! Implements the registry's trait for the family, and declares its genes.

use problem::{Band, Problem};
use serde_json::{Value, json};

use super::MmaPlan;
use super::plan::default_splits;
use crate::Symptom;
use crate::family::{FamilyPlan, of_plan};
use crate::forward::contract::{default_tanh, rescale_within, tanh_gene};
use crate::forward::fp8::{check_keys_of_factors, output_sums_gene};
use crate::forward::lists::visits_gene;
use crate::genes::Turn::{Down, To, Up};
use crate::genes::{BLOCK_N, Gene, PRODUCTS, RESIDENT_CTAS, STAGES};
use crate::{Arch, Features, PlanError};

impl FamilyPlan for MmaPlan {
    fn features() -> Features {
        Features::ALL
    }

    of_plan!(default_for);

    fn suits(_: &Problem, _: &Arch) -> bool {
        true
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        let tile_orders = if problem.band == Band::FULL { &[][..] } else { &["heads_first", "rows_first"] };
        let dim_warps = if problem.head_dim_v > 256 { &[2][..] } else { &[] };
        // Some number of warps can divide the keys.
        let divided = |keys: u32| {
            let fits = |warps: &u32| check_keys_of_factors(problem, "keys", keys / warps).is_ok();
            [1, 2, 4, 8].iter().any(fits)
        };
        vec![
            Gene::new("block_m").searched([16, 32, 48, 64, 128]).wider([96, 192, 256]).curing(&[
                (Symptom::SmallGrid, Down),
                (Symptom::RegisterSpills, Down),
                (Symptom::LocalMemory, Down),
                (Symptom::RedundantLoads, Up),
                (Symptom::IdleWarps, Up),
                (Symptom::Shared, Up),
                (Symptom::L2, Up),
                (Symptom::Dram, Up),
            ]),
            Gene::new("block_n")
                .searched([32, 48, 64, 80, 96, 128, 256].into_iter().filter(|&keys| divided(keys)))
                .wider([16, 112, 160, 192])
                .curing(BLOCK_N),
            Gene::new("warps").searched([2, 3, 4, 8]).wider([1, 6]).curing(&[
                (Symptom::LowOccupancy, Up),
                (Symptom::Barriers, Down),
                (Symptom::IdleWarps, Down),
                (Symptom::Serial, Down),
                (Symptom::Shared, Down),
            ]),
            Gene::new("kv_warps").searched([1, 2, 4, 8]).curing(&[
                (Symptom::SmallGrid, Up),
                (Symptom::IdleWarps, Up),
                (Symptom::Latency, Up),
            ]),
            Gene::new("dim_warps")
                .searched(dim_warps.iter().copied())
                .wider([1, 2])
                .curing(&[(Symptom::RegisterSpills, Up), (Symptom::LocalMemory, Up)]),
            Gene::new("splits")
                .searched([1, 2, 4, 8])
                .wider([3, 6, 12, 16, 32])
                .curing(&[(Symptom::SmallGrid, Up)]),
            Gene::new("stages").searched([1, 2, 3, 4]).wider([5, 6]).curing(STAGES),
            Gene::new("products").searched(["in_turn", "scores_ahead"]).curing(PRODUCTS),
            Gene::new("resident_ctas").searched([Value::Null]).wider([1, 2, 3, 4]).curing(RESIDENT_CTAS),
            Gene::new("queries").searched(["registers", "shared"]).curing(&[
                (Symptom::LowOccupancy, To("shared")),
                (Symptom::RegisterSpills, To("shared")),
                (Symptom::LocalMemory, To("shared")),
                (Symptom::Issue, To("registers")),
                (Symptom::Shared, To("registers")),
            ]),
            Gene::new("rescale")
                .searched([json!("always"), json!({ "beyond": 8 })])
                .wider([4, 14].map(|n| json!({ "beyond": n }))),
            output_sums_gene(problem),
            Gene::new("copy"),
            Gene::new("tile_order")
                .searched(tile_orders.iter().copied())
                .wider(["rows_first", "heads_first"])
                .curing(&[(Symptom::L2, To("rows_first"))]),
            tanh_gene(problem),
            visits_gene(problem),
        ]
    }

    of_plan!(check, baked, drafts);

    fn tile(&self) -> [u32; 2] {
        [self.block_m, self.block_n]
    }

    fn takes_tiles(&self) -> bool {
        false
    }

    fn max_registers(&self) -> Option<u32> {
        let share = Arch::REGISTERS_PER_SM / (self.threads() * self.resident_ctas.unwrap_or(1)).max(1);
        Some(Arch::REGISTERS_PER_THREAD.min(share))
    }

    fn alignment(&self) -> u64 {
        self.copy.bytes().into()
    }

    fn adapted(mut self, problem: &Problem, arch: &Arch, own_shape: bool) -> MmaPlan {
        self.tanh = default_tanh(problem);
        self = self.visiting(problem).fitted_to_factors(problem);
        if self.splits > 1 && !own_shape {
            self.splits = default_splits(problem, self.block_m, arch);
        }
        let safe = MmaPlan::default_for(problem, arch);
        self.rescale = rescale_within(self.rescale, problem.dtypes.weights());
        if matches!(self.check(problem, arch), Err(PlanError::Misaligned { .. })) {
            self.copy = safe.copy;
        }
        if self.check(problem, arch).is_err() || self.grid(problem).need_flat() {
            self.tile_order = safe.tile_order;
        }
        self
    }
}
