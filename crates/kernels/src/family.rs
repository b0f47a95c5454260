//! The families of kernels: their common trait ([`FamilyPlan`]) and their registry ([`Family`], [`Plan`]). A
//! new family is a line of the registry and a folder.

use problem::{PassKind, Problem};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::backward::fused::FusedPlan;
use crate::backward::split::SplitPlan;
use crate::draft::Draft;
use crate::forward::decode::DecodePlan;
use crate::forward::lengths::row_blocks;
use crate::forward::mma::MmaPlan;
use crate::forward::small::{AtOncePlan, StreamedPlan};
use crate::forward::wgmma::WgmmaPlan;
use crate::genes::Gene;
use crate::{Arch, Baked, Features, KernelError, PlanError};

/// A family of kernels, implemented by its plan. Problems are [canonical](Problem::canonical).
pub(crate) trait FamilyPlan {
    /// The pass that the family computes. By default the forward pass.
    fn pass() -> PassKind
    where
        Self: Sized,
    {
        PassKind::Forward
    }

    /// The features that the family supports.
    fn features() -> Features
    where
        Self: Sized;

    /// A good plan for a problem without measurements. The plan is unchecked: it is a starting point for a
    /// search.
    fn default_for(problem: &Problem, arch: &Arch) -> Self
    where
        Self: Sized;

    /// Whether the family was designed for grids like the problem's.
    fn suits(problem: &Problem, arch: &Arch) -> bool
    where
        Self: Sized;

    /// The genes of the plan, one for each field. Gene values without an effect on the problem are left out.
    fn genes(problem: &Problem) -> Vec<Gene>
    where
        Self: Sized;

    /// Whether a kernel can be emitted.
    ///
    /// # Errors
    /// The first reason why no kernel can be emitted.
    fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError>;

    /// What the code of a plan that was checked depends on.
    fn baked(&self, problem: &Problem) -> Baked;

    /// The kernels of a plan that was checked, in launch order. Arguments come from `problem`, and the code
    /// from `baked`.
    fn drafts<'a>(&'a self, problem: &'a Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>>;

    /// Rows and keys of a tile.
    fn tile(&self) -> [u32; 2];

    /// Whether CTAs take tiles at run time, so that the work of a CTA depends on the whole grid.
    fn takes_tiles(&self) -> bool {
        true
    }

    /// Maximum registers per thread of the first kernel. By default none: `setmaxnreg` moves registers
    /// between warpgroups at run time.
    fn max_registers(&self) -> Option<u32> {
        None
    }

    /// Alignment in bytes that the plan needs of the addresses of tensors. By default that of tensor maps.
    fn alignment(&self) -> u64 {
        16
    }

    /// The plan whose code this plan's code is: genes that are launch parameters have one value.
    #[must_use]
    fn coded(self) -> Self
    where
        Self: Sized,
    {
        self
    }

    /// The tables whose addresses must be multiples of 16 bytes, because tensor maps describe them.
    fn aligned_tables(&self, _: &Problem) -> Vec<u8> {
        Vec::new()
    }

    /// The plan for tables at any address.
    #[must_use]
    fn with_unaligned_tables(self) -> Self
    where
        Self: Sized,
    {
        self
    }

    /// The plan with the nearest genes that the problem allows. A plan that was found for another shape also
    /// loses the genes that fill tiles with queries or the GPU with CTAs. Tuned plans were measured without a
    /// softcap, so the softcap's instructions are set to the default.
    #[must_use]
    fn adapted(self, problem: &Problem, arch: &Arch, own_shape: bool) -> Self
    where
        Self: Sized;
}

/// Methods of [`FamilyPlan`] that the plan itself has under the same names.
macro_rules! of_plan {
    ($($method:ident),*) => { $(of_plan!(@ $method);)* };
    (@ default_for) => {
        fn default_for(problem: &::problem::Problem, arch: &$crate::Arch) -> Self {
            Self::default_for(problem, arch)
        }
    };
    (@ check) => {
        fn check(&self, problem: &::problem::Problem, arch: &$crate::Arch) -> Result<(), $crate::PlanError> {
            self.check(problem, arch)
        }
    };
    (@ baked) => {
        fn baked(&self, problem: &::problem::Problem) -> $crate::Baked {
            self.baked(problem)
        }
    };
    (@ drafts) => {
        fn drafts<'a>(
            &'a self,
            problem: &'a ::problem::Problem,
            baked: &'a $crate::Baked,
            arch: &$crate::Arch,
        ) -> Vec<$crate::draft::Draft<'a>> {
            self.drafts(problem, baked, arch)
        }
    };
}
pub(crate) use of_plan;

/// The registry: one line per family, with its name in files. Of each pass, the families with the lowest
/// requirements on the GPU come first.
macro_rules! families {
    ($($(#[$doc:meta])* $family:ident($plan:ty) = $name:literal;)*) => {
        /// The families for which a default plan can be made.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Family { $($(#[$doc])* $family),* }

        /// How a problem is computed: a kernel family and its genes. A plan is pure data. A generator has no
        /// other input besides the problem and the architecture.
        #[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(tag = "family", try_from = "Stored")]
        pub enum Plan {
            $($(#[$doc])* #[serde(rename = $name)] $family($plan),)*
        }

        /// A plan as stored in files, including plans of former families: `small` was split into two, and the
        /// kernels of `ladder` are plans no more.
        #[derive(Deserialize)]
        #[serde(tag = "family")]
        enum Stored {
            $(#[serde(rename = $name)] $family($plan),)*
            #[serde(rename = "small")]
            Small(Map<String, Value>),
            #[serde(rename = "ladder")]
            Ladder { rung: String },
        }

        impl TryFrom<Stored> for Plan {
            type Error = serde_json::Error;

            fn try_from(stored: Stored) -> serde_json::Result<Plan> {
                Ok(match stored {
                    $(Stored::$family(plan) => Plan::$family(plan),)*
                    Stored::Small(genes) => former_small(genes)?,
                    Stored::Ladder { rung } => return Err(former_ladder(&rung)),
                })
            }
        }

        impl Family {
            /// Every family.
            const EVERY: [Family; [$($name),*].len()] = [$(Family::$family),*];

            /// The name of the family in plans.
            pub const fn name(self) -> &'static str {
                match self { $(Family::$family => $name),* }
            }

            /// Like [`Family::default_for`], but unchecked: a starting point for a search.
            pub fn proposal(self, problem: &Problem, arch: &Arch) -> Plan {
                let problem = &*problem.canonical();
                match self {
                    $(Family::$family => Plan::$family(<$plan as FamilyPlan>::default_for(problem, arch))),*
                }
            }

            /// The plan of the family with these genes, as plans are stored. Other fields are ignored.
            ///
            /// # Errors
            /// When a gene is missing or has an unknown value.
            pub fn plan(self, genes: &Value) -> serde_json::Result<Plan> {
                match self { $(Family::$family => <$plan>::deserialize(genes).map(Plan::$family)),* }
            }

            /// The pass that the family computes.
            pub fn pass(self) -> PassKind {
                match self { $(Family::$family => <$plan as FamilyPlan>::pass()),* }
            }

            /// The features that the family supports.
            pub fn features(self) -> Features {
                match self { $(Family::$family => <$plan as FamilyPlan>::features()),* }
            }

            /// The genes of the family's plans.
            pub fn genes(self, problem: &Problem) -> Vec<Gene> {
                match self { $(Family::$family => <$plan as FamilyPlan>::genes(problem)),* }
            }

            fn suits(self, problem: &Problem, arch: &Arch) -> bool {
                match self { $(Family::$family => <$plan as FamilyPlan>::suits(problem, arch)),* }
            }
        }

        impl Plan {
            /// The plan's family and its genes.
            pub(crate) fn of_family(&self) -> (Family, &dyn FamilyPlan) {
                match self { $(Plan::$family(plan) => (Family::$family, plan)),* }
            }

            /// See [`FamilyPlan::adapted`].
            pub(crate) fn adapted(self, problem: &Problem, arch: &Arch, own_shape: bool) -> Plan {
                match self {
                    $(Plan::$family(plan) => Plan::$family(plan.adapted(problem, arch, own_shape)),)*
                }
            }

            /// The plan whose code this plan's code is.
            #[must_use]
            pub fn coded(self) -> Plan {
                match self { $(Plan::$family(plan) => Plan::$family(plan.coded())),* }
            }

            /// The plan for tables at any address.
            #[must_use]
            pub fn with_unaligned_tables(self) -> Plan {
                match self {
                    $(Plan::$family(plan) => Plan::$family(plan.with_unaligned_tables()),)*
                }
            }
        }

        $(impl From<$plan> for Plan {
            fn from(plan: $plan) -> Plan {
                Plan::$family(plan)
            }
        })*
    };
}

families! {
    /// On `mma.sync`, for every GPU since sm_80; with 8-bit inputs since sm_89.
    Mma(MmaPlan) = "mma";
    /// For large grids, on `wgmma` and TMA.
    Wgmma(WgmmaPlan) = "wgmma";
    /// For small grids, optimised for latency, on `wgmma` and TMA: KV blocks stream.
    SmallStreamed(StreamedPlan) = "small_streamed";
    /// For small grids, optimised for latency, on `wgmma` and TMA: each warpgroup holds the scores of all its
    /// keys at once.
    SmallAtOnce(AtOncePlan) = "small_at_once";
    /// On `mma.sync`, for keys and values in pages and for few query rows: one kernel for any lengths and
    /// page tables.
    Decode(DecodePlan) = "decode";
    /// The backward pass on `mma.sync`, for every GPU since sm_80.
    BackwardSplit(SplitPlan) = "backward_split";
    /// The backward pass with five products, on `wgmma` and TMA. CTAs add to dQ in any order.
    BackwardFused(FusedPlan) = "backward_fused";
}

/// The plan of the former family `small`. With one stage, it held all keys at once.
fn former_small(genes: Map<String, Value>) -> serde_json::Result<Plan> {
    let one_stage = genes.get("stages").and_then(Value::as_u64) == Some(1);
    let family = if one_stage { Family::SmallAtOnce } else { Family::SmallStreamed };
    family.plan(&Value::Object(genes))
}

/// The refusal of a kernel of the original log, which was a plan in older files.
fn former_ladder(rung: &str) -> serde_json::Error {
    let accepted = Family::ALL.map(Family::name).join(", ");
    serde::de::Error::custom(format!(
        "invalid value 'ladder' for family: expected one of {accepted}; `flashcore climb` shows the original \
         kernel '{rung}', and some of these kernels have races"
    ))
}

impl Family {
    /// The families that searches and tables have, which compute keys at strides. Of each pass, those with
    /// the lowest requirements on the GPU come first. [`Family::Decode`] is not among them, because none of
    /// its plans has been measured; it is the default for few rows with keys in pages.
    pub const ALL: [Family; 6] = [
        Family::Mma,
        Family::Wgmma,
        Family::SmallStreamed,
        Family::SmallAtOnce,
        Family::BackwardSplit,
        Family::BackwardFused,
    ];

    /// The families of a pass. Those with the lowest requirements on the GPU come first.
    pub fn of_pass(pass: PassKind) -> impl DoubleEndedIterator<Item = Family> {
        Family::ALL.into_iter().filter(move |family| family.pass() == pass)
    }

    /// The family with this name.
    pub fn named(name: &str) -> Option<Family> {
        Family::EVERY.into_iter().find(|family| family.name() == name)
    }

    /// The family's default for the problem.
    ///
    /// # Errors
    /// When the problem is invalid, or the family does not support it on the architecture.
    pub fn default_for(self, problem: &Problem, arch: &Arch) -> Result<Plan, KernelError> {
        problem.check()?;
        let plan = self.proposal(problem, arch);
        plan.check(problem, arch)?;
        Ok(plan)
    }
}

impl Plan {
    /// A good plan for the problem on the architecture, without measurements. Keys in pages have the family
    /// `decode` if one of its tiles holds the rows of a KV head; an 8-bit cache has `decode`. On sm_90 the
    /// first of `small_at_once`, `small_streamed`, `wgmma` and `mma` is taken that supports the problem and
    /// suits its grid: of keys in pages, `wgmma` for many rows and pages of a multiple of 8 rows, else `mma`.
    /// With few rows and many keys, `mma` comes first with
    /// [`splits`](crate::forward::mma::MmaPlan::splits), or `decode` on sm_90 where it is faster: only these
    /// families divide the keys among more CTAs than a cluster has. With 8-bit inputs, the other families
    /// come first on any grid, because on sm_90 `mma.sync` multiplies 8-bit types no faster than 16-bit
    /// types. An [invariant](problem::Invariant) problem has the family `decode`.
    ///
    /// # Errors
    /// When the problem is invalid, or no family supports it.
    pub fn default_for(problem: &Problem, arch: &Arch) -> Result<Plan, KernelError> {
        if let Some(invariant) = problem.pass.invariant() {
            return Family::Decode.default_for(problem, arch).map_err(|error| match error {
                KernelError::Plan(reason) => PlanError::Invariant { invariant, reason: reason.into() }.into(),
                other => other,
            });
        }
        if Family::Decode.suits(problem, arch)
            && let Ok(plan) = Family::Decode.default_for(problem, arch)
        {
            return Ok(plan);
        }
        let pass = problem.pass.kind();
        let mut families = Family::of_pass(pass);
        let universal = families.next().ok_or(PlanError::NoFamily { pass })?;
        let default = universal.default_for(problem, arch);
        let specific_first = problem.dtypes.has_fp8() || default.is_err();
        if !specific_first && matches!(&default, Ok(Plan::Mma(plan)) if plan.splits > 1) {
            let decode = Family::Decode.default_for(problem, arch);
            return if DecodePlan::divides_faster(problem, arch) { decode.or(default) } else { default };
        }
        for family in families.rev() {
            if let Ok(plan) = family.default_for(problem, arch)
                && (specific_first || family.suits(problem, arch))
            {
                return Ok(plan);
            }
        }
        default
    }
}

/// Number of tiles of `rows` query rows, over all heads.
pub(crate) fn row_tiles(problem: &Problem, rows: u32) -> u64 {
    let [tiles, batch] = row_blocks(problem, rows, 1);
    tiles * batch * problem.heads_q as u64
}

#[cfg(test)]
mod tests {
    use problem::Pass;

    use super::*;

    #[test]
    fn a_family_refuses_another_pass() {
        for (pass, other) in [(Pass::forward(true), Pass::BACKWARD), (Pass::BACKWARD, Pass::default())] {
            let problem = Problem::mission().with_pass(other);
            for family in Family::of_pass(pass.kind()) {
                let refused = family.default_for(&problem, &Arch::SM_90).unwrap_err().to_string();
                let [value, accepted] = [other, pass].map(|pass| pass.kind().name());
                let expected = format!("invalid value '{value}' for pass with family {}", family.name());
                assert!(refused.starts_with(&expected) && refused.ends_with(accepted), "{refused}");
            }
        }
        let count = [PassKind::Forward, PassKind::Backward].map(|pass| Family::of_pass(pass).count());
        assert_eq!(count.iter().sum::<usize>(), Family::ALL.len());
    }
}
