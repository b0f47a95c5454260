//! The target and the `.version` that instructions and directives need (PTX ISA, the notes under each
//! instruction).

use std::fmt;

use crate::{LaunchBounds, Module, Scope, SpecialReg, Statement, Target, TargetSuffix, Version};

/// The lowest target and the lowest `.version` that an instruction, directive or module needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The lowest `.version`.
    pub version: Version,
    /// The lowest compute capability, times ten.
    pub sm: u32,
    /// Whether the target must be architecture- or family-specific (`sm_90a`, `sm_100f`).
    pub specific: bool,
}

impl Requirement {
    /// The requirement of every module: `.version 7.0` and sm_75. Differences below these are not modelled.
    pub const BASE: Requirement = need(70, 75);

    /// The requirement that satisfies both `self` and `other`.
    #[must_use]
    pub fn and(self, other: Requirement) -> Requirement {
        Requirement {
            version: self.version.max(other.version),
            sm: self.sm.max(other.sm),
            specific: self.specific || other.specific,
        }
    }

    /// Whether `target` is new enough and, if required, architecture- or family-specific.
    pub fn met_by(&self, target: Target) -> bool {
        target.sm >= self.sm && (!self.specific || target.suffix != TargetSuffix::None)
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{} and .version {}", self.sm, if self.specific { "a" } else { "" }, self.version)
    }
}

/// A requirement from `.version` times ten and the compute capability times ten.
pub(crate) const fn need(version: u32, sm: u32) -> Requirement {
    Requirement { version: Version { major: version / 10, minor: version % 10 }, sm, specific: false }
}

/// Like [`need`], for features of an architecture- or family-specific target (`sm_90a`).
pub(crate) const fn need_specific(version: u32, sm: u32) -> Requirement {
    Requirement { specific: true, ..need(version, sm) }
}

/// [`Requirement::BASE`].
pub(crate) const BASE: Requirement = Requirement::BASE;

/// `requirement` if `condition`, else [`BASE`].
pub(crate) fn when(condition: bool, requirement: Requirement) -> Requirement {
    if condition { requirement } else { BASE }
}

/// The requirement that satisfies all of them.
pub(crate) fn all<const N: usize>(requirements: [Requirement; N]) -> Requirement {
    requirements.into_iter().fold(BASE, Requirement::and)
}

/// The cluster scope needs the `.version` and the target of clusters.
pub(crate) fn scope(scope: Option<Scope>) -> Requirement {
    when(scope == Some(Scope::Cluster), need(78, 90))
}

impl Target {
    /// The first `.version` that supports this target (PTX ISA, "Release Notes").
    pub const fn minimum_version(self) -> Version {
        let v = match (self.sm, self.suffix) {
            (..=80, _) => 70,
            (81..=86, _) => 71,
            (87, _) => 74,
            (88..=90, TargetSuffix::None) => 78,
            (88..=90, _) => 80,
            (91..=101, TargetSuffix::None | TargetSuffix::ArchSpecific) => 86,
            (102..=120, TargetSuffix::None | TargetSuffix::ArchSpecific) => 87,
            _ => 88,
        };
        need(v, 0).version
    }
}

impl Module {
    /// The combined requirement of all instructions and directives of the module.
    pub fn requirement(&self) -> Requirement {
        let mut all = BASE;
        for function in self.functions() {
            all = all.and(function.bounds.requirement());
            for statement in function.body.iter().flat_map(|body| &body.statements) {
                if let Statement::Inst(inst) = statement {
                    all = all.and(inst.requirement());
                }
            }
        }
        all
    }

    /// The lowest `.version` that supports the target and everything in the module.
    pub fn minimum_version(&self) -> Version {
        self.target.minimum_version().max(self.requirement().version)
    }
}

impl LaunchBounds {
    /// The requirement of the directives.
    pub fn requirement(&self) -> Requirement {
        let cluster =
            self.required_cluster.is_some() || self.max_cluster_rank.is_some() || self.explicit_cluster;
        when(cluster, need(78, 90))
    }
}

pub(super) fn special(register: SpecialReg) -> Requirement {
    use SpecialReg as S;
    match register {
        S::ClusteridX | S::ClusteridY | S::ClusteridZ | S::NclusteridX | S::NclusteridY | S::NclusteridZ => {
            need(78, 90)
        }
        S::ClusterCtaidX | S::ClusterCtaidY | S::ClusterCtaidZ => need(78, 90),
        S::ClusterNctaidX | S::ClusterNctaidY | S::ClusterNctaidZ => need(78, 90),
        S::ClusterCtarank | S::ClusterNctarank | S::IsExplicitCluster => need(78, 90),
        S::AggrSmemSize => need(81, 90),
        _ => BASE,
    }
}
