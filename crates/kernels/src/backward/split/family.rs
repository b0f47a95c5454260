//! Implements the registry's trait for the family, and declares its genes.

use problem::{Band, PassKind, Problem};
use serde_json::Value;

use super::SplitPlan;
use super::plan::{Side, widest_copy};
use crate::Symptom;
use crate::backward::sums::draft_sinks;
use crate::draft::Draft;
use crate::family::{FamilyPlan, of_plan};
use crate::forward::contract::{default_tanh, tanh_gene};
use crate::genes::Turn::{Down, To, Up};
use crate::genes::{BLOCK_N, Cure, Gene, RESIDENT_CTAS, STAGES};
use crate::{Arch, Baked, Features, PlanError};

/// Findings that the number of rows of a CTA may cure.
const OWN_ROWS: &[Cure] = &[
    (Symptom::SmallGrid, Down),
    (Symptom::RegisterSpills, Down),
    (Symptom::LocalMemory, Down),
    (Symptom::RedundantLoads, Up),
    (Symptom::L2, Up),
    (Symptom::Dram, Up),
];

/// Findings that the number of warps of a CTA may cure.
const WARPS: &[Cure] = &[
    (Symptom::LowOccupancy, Up),
    (Symptom::RegisterSpills, Up),
    (Symptom::Barriers, Down),
    (Symptom::Shared, Down),
];

/// Findings that the place of a warp's own operands may cure.
const OPERANDS: &[Cure] = &[
    (Symptom::RegisterSpills, To("shared")),
    (Symptom::LocalMemory, To("shared")),
    (Symptom::Issue, To("registers")),
    (Symptom::Shared, To("registers")),
];

impl FamilyPlan for SplitPlan {
    fn pass() -> PassKind {
        PassKind::Backward
    }

    fn features() -> Features {
        Features { lengths: true, sink: true, dropout: true, programs: true, ..Features::default() }
    }

    of_plan!(default_for);

    fn suits(_: &Problem, _: &Arch) -> bool {
        true
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        let tile_orders = if problem.band == Band::FULL { &[][..] } else { &["heads_first", "rows_first"] };
        let dim_warps = if problem.head_dim + problem.head_dim_v > 320 { &[2][..] } else { &[1] };
        vec![
            Gene::new("dq_rows").searched([32, 64, 128]).wider([16, 96, 192, 256]).curing(OWN_ROWS),
            Gene::new("dq_keys").searched([16, 32, 64]).wider([48, 80, 96, 128]).curing(BLOCK_N),
            Gene::new("dq_warps").searched([2, 4, 8]).wider([1, 3, 6]).curing(WARPS),
            Gene::new("dq_stages").searched([2, 3]).wider([4]).curing(STAGES),
            Gene::new("dq_operands").searched(["registers", "shared"]).curing(OPERANDS),
            Gene::new("dq_resident_ctas").searched([Value::Null]).wider([1, 2, 3, 4]).curing(RESIDENT_CTAS),
            Gene::new("dkv_keys").searched([32, 64, 128]).wider([16, 96, 192, 256]).curing(OWN_ROWS),
            Gene::new("dkv_rows").searched([16, 32, 64]).wider([48, 80, 96, 128]).curing(BLOCK_N),
            Gene::new("dkv_warps").searched([2, 4, 8]).wider([1, 3, 6]).curing(WARPS),
            Gene::new("dkv_dim_warps")
                .searched(dim_warps.iter().copied())
                .wider([1, 2])
                .curing(&[(Symptom::RegisterSpills, Up), (Symptom::LocalMemory, Up)]),
            Gene::new("dkv_stages").searched([2, 3]).wider([4]).curing(STAGES),
            Gene::new("dkv_operands").searched(["registers", "shared"]).curing(OPERANDS),
            Gene::new("dkv_resident_ctas").searched([Value::Null]).wider([1, 2, 3, 4]).curing(RESIDENT_CTAS),
            Gene::new("copy"),
            Gene::new("tile_order")
                .searched(tile_orders.iter().copied())
                .wider(["rows_first", "heads_first"])
                .curing(&[(Symptom::L2, To("rows_first"))]),
            tanh_gene(problem),
        ]
    }

    of_plan!(check, baked);

    fn drafts<'a>(&'a self, problem: &'a Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>> {
        let mut drafts: Vec<_> =
            [Side::Queries, Side::Keys].map(|side| self.draft(problem, baked, arch, side)).into();
        let target = arch.target();
        if problem.pass.wants().sinks {
            drafts.push(draft_sinks(problem, target, self.sink_counts(problem)));
        }
        for table in &baked.table_gradients {
            drafts.extend(self.draft_table(problem, baked, target, table));
        }
        drafts
    }

    fn tile(&self) -> [u32; 2] {
        [self.dq_rows, self.dkv_keys]
    }

    fn takes_tiles(&self) -> bool {
        false
    }

    fn max_registers(&self) -> Option<u32> {
        Some(self.tiles(Side::Queries).max_registers())
    }

    fn alignment(&self) -> u64 {
        self.copy.bytes().into()
    }

    fn adapted(mut self, problem: &Problem, arch: &Arch, _: bool) -> SplitPlan {
        self.tanh = default_tanh(problem);
        if matches!(self.check(problem, arch), Err(PlanError::Misaligned { .. })) {
            self.copy = widest_copy(problem);
        }
        let safe = SplitPlan::default_for(problem, arch);
        if self.needs_flat_grid(problem) {
            self.tile_order = safe.tile_order;
        }
        if self.check(problem, arch).is_ok() { self } else { safe }
    }
}
