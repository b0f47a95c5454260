//! Implements the registry's trait for the family, and declares its genes.

use problem::{PassKind, Problem, Tensor};
use tile::Sign;

use super::FusedPlan;
use super::plan::{KEYS, LOADED, TileSizes};
use crate::backward::sums::draft_sinks;
use crate::draft::Draft;
use crate::family::{FamilyPlan, of_plan};
use crate::genes::Turn::Up;
use crate::genes::{Gene, PRODUCTS, STAGES};
use crate::{Arch, Baked, Features, Symptom};

impl FamilyPlan for FusedPlan {
    fn pass() -> PassKind {
        PassKind::Backward
    }

    fn features() -> Features {
        Features { sink: true, lengths: true, ..Features::default() }
    }

    of_plan!(default_for);

    /// Suits all grids: those of a few CTAs take a third to two thirds of the split family's time, and about
    /// the same time at 128 rows of head dim 64.
    fn suits(_: &Problem, _: &Arch) -> bool {
        true
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        let sizes = TileSizes::new(problem);
        let query_stages = Gene::new("query_stages").curing(STAGES);
        let gradient_stages = Gene::new("gradient_stages").curing(STAGES);
        let products = Gene::new("products").curing(PRODUCTS);
        vec![
            match sizes.takes_turns() {
                true => query_stages.searched([3]),
                false => query_stages.searched([2, 3]).wider([4]),
            },
            match sizes.takes_turns() {
                true => gradient_stages.searched([2]),
                false => gradient_stages.searched([2, 3]).wider([4]),
            },
            match sizes.columns > 64 || problem.pass.deterministic() {
                true => Gene::new("key_stages").searched([1]),
                false => Gene::new("key_stages").searched([1, 2]),
            },
            match sizes.columns > 64 {
                true => products.searched(["scores_ahead"]),
                false => products.searched(["in_turn", "scores_ahead"]),
            },
            Gene::new("tile_order").searched(["rows_first", "heads_first"]),
            match problem.lengths.is_even() {
                true => Gene::new("row_parts")
                    .searched([1, 2, 3, 4])
                    .wider([6, 8, 16])
                    .curing(&[(Symptom::SmallGrid, Up)]),
                false => Gene::new("row_parts").searched([1]),
            },
        ]
    }

    of_plan!(check);

    fn baked(&self, problem: &Problem) -> Baked {
        let baked = Baked::of(problem, false).with_maps(problem, &LOADED);
        Baked {
            lse: problem.pass.d_lse(),
            heads_q: problem.heads_q,
            sign: if problem.softmax_scale() < 0.0 { Sign::Negate } else { Sign::Keep },
            flat: self.needs_flat_grid(problem),
            deterministic: problem.pass.deterministic(),
            ..baked
        }
        .with_row_bytes(problem, &[Tensor::Out, Tensor::DOut, Tensor::Dq, Tensor::Dk, Tensor::Dv])
    }

    fn drafts<'a>(&'a self, problem: &'a Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>> {
        let mut drafts = vec![
            self.draft_rows(problem, baked, arch),
            self.draft(problem, baked, arch),
            self.draft_convert(problem, baked, arch),
        ];
        if self.row_parts > 1 {
            drafts.push(self.draft_merge(problem, baked, arch));
        }
        if problem.pass.wants().sinks {
            drafts.push(draft_sinks(problem, arch.full_target(), self.sink_counts(problem)));
        }
        drafts
    }

    fn tile(&self) -> [u32; 2] {
        [KEYS, KEYS]
    }

    fn takes_tiles(&self) -> bool {
        false
    }

    /// All numbers of parts above 1 have one code.
    fn coded(self) -> FusedPlan {
        FusedPlan { row_parts: self.row_parts.min(2), ..self }
    }

    fn adapted(self, problem: &Problem, arch: &Arch, own_shape: bool) -> FusedPlan {
        if own_shape { self } else { FusedPlan { row_parts: 1, ..self }.balanced(problem, arch) }
    }
}
