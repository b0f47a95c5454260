//! Implements the registry's trait for the family, and declares its genes.

use problem::Problem;
use serde_json::{Value, json};

use super::{DecodePlan, ProductUnit};
use crate::Symptom;
use crate::family::{FamilyPlan, of_plan};
use crate::forward::contract::{default_tanh, rescale_within, tanh_gene};
use crate::genes::Gene;
use crate::genes::Turn::{Down, Up};
use crate::genes::{RESIDENT_CTAS, STAGES};
use crate::{Arch, Features, PlanError};

impl FamilyPlan for DecodePlan {
    fn features() -> Features {
        Features { lengths: true, fp8: true, scales: true, sink: true, pages: true, ..Features::default() }
    }

    of_plan!(default_for);

    fn suits(problem: &Problem, arch: &Arch) -> bool {
        DecodePlan::suits(problem, arch)
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        let dim_warps = if problem.head_dim > 256 { &[2, 4][..] } else { &[] };
        vec![
            Gene::new("products").searched::<Value>([]),
            Gene::new("warps").searched([2, 4, 8]).wider([1]).curing(&[
                (Symptom::LowOccupancy, Up),
                (Symptom::Latency, Up),
                (Symptom::Barriers, Down),
            ]),
            Gene::new("dim_warps")
                .searched(dim_warps.iter().copied())
                .wider([1, 2, 4, 8])
                .curing(&[(Symptom::RegisterSpills, Up), (Symptom::LocalMemory, Up)]),
            Gene::new("warp_keys")
                .searched([16, 32])
                .curing(&[(Symptom::Issue, Up), (Symptom::RegisterSpills, Down)]),
            Gene::new("stages").searched([2, 3, 4, 5]).wider([6, 8]).curing(STAGES),
            Gene::new("resident_ctas").searched([1, 2]).wider([3, 4]).curing(RESIDENT_CTAS),
            Gene::new("least_blocks")
                .searched([1, 2, 4, 8])
                .wider([16])
                .curing(&[(Symptom::SmallGrid, Down)]),
            Gene::new("rescale")
                .searched([json!("always"), json!({ "beyond": 8 })])
                .wider([4, 14].map(|n| json!({ "beyond": n }))),
            Gene::new("copy").searched::<Value>([]),
            Gene::new("tma"),
            Gene::new("overlapping"),
            tanh_gene(problem),
            Gene::new("piece").searched::<Value>([]),
        ]
    }

    of_plan!(check, baked, drafts);

    fn tile(&self) -> [u32; 2] {
        [self.rows(), self.block_n()]
    }

    fn max_registers(&self) -> Option<u32> {
        if self.products == ProductUnit::Warpgroup {
            return None;
        }
        let share = Arch::REGISTERS_PER_SM / (self.threads() * self.resident_ctas).max(1);
        Some(Arch::REGISTERS_PER_THREAD.min(share))
    }

    fn alignment(&self) -> u64 {
        self.copy.bytes().into()
    }

    fn adapted(mut self, problem: &Problem, arch: &Arch, _: bool) -> DecodePlan {
        self.tanh = default_tanh(problem);
        self.rescale = rescale_within(self.rescale, problem.dtypes.weights());
        if problem.pass.invariant().is_some() {
            return DecodePlan::default_for(problem, arch);
        }
        if self.products == ProductUnit::Warpgroup {
            return if self.check(problem, arch).is_ok() {
                self
            } else {
                DecodePlan::default_for(problem, arch)
            };
        }
        self.tma &= self.check_tma(problem, arch).is_ok();
        if matches!(self.check(problem, arch), Err(PlanError::Misaligned { .. })) {
            self.copy = DecodePlan::default_for(problem, arch).copy;
        }
        self
    }
}
