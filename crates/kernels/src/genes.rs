//! Genes: the fields of a plan that a search may change, with the values to try and the findings that a
//! change may cure. Each family declares its genes once, next to its plan (`forward/*/family.rs`).

use serde_json::Value;

use crate::symptom::Symptom;

/// A gene: a field of a plan's serde form, with the values to try.
#[derive(Clone, Debug, PartialEq)]
pub struct Gene {
    /// The field's name.
    pub name: &'static str,
    /// The values that an exhaustive search tries; empty if the search does not change the gene.
    pub searched: Vec<Value>,
    /// Additional values that an evolution tries, so that it can find unexpected plans.
    pub wider: Vec<Value>,
    /// The findings of the diagnosis, and the bottlenecks of kernels, that another value may cure.
    pub cures: &'static [Cure],
}

/// A finding of the diagnosis or the limit of a kernel's time, and the direction in which the gene should
/// change.
pub type Cure = (Symptom, Turn);

/// The direction in which a gene should change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// To a larger number.
    Up,
    /// To a smaller number.
    Down,
    /// To this value.
    To(&'static str),
}

use Turn::{Down, To, Up};

impl Gene {
    /// Creates a gene that no search changes yet.
    pub(crate) const fn new(name: &'static str) -> Gene {
        Gene { name, searched: Vec::new(), wider: Vec::new(), cures: &[] }
    }

    /// Adds values for the exhaustive search.
    pub(crate) fn searched<T: Into<Value>>(mut self, values: impl IntoIterator<Item = T>) -> Gene {
        self.searched.extend(values.into_iter().map(Into::into));
        self
    }

    /// Adds values for an evolution.
    pub(crate) fn wider<T: Into<Value>>(mut self, values: impl IntoIterator<Item = T>) -> Gene {
        self.wider.extend(values.into_iter().map(Into::into));
        self
    }

    /// States the findings that the gene may cure.
    pub(crate) const fn curing(mut self, cures: &'static [Cure]) -> Gene {
        self.cures = cures;
        self
    }
}

/// Findings that the number of keys of a KV block may cure.
pub(crate) const BLOCK_N: &[Cure] = &[
    (Symptom::LowOccupancy, Down),
    (Symptom::Barriers, Up),
    (Symptom::RegisterSpills, Down),
    (Symptom::LocalMemory, Down),
    (Symptom::Latency, Up),
    (Symptom::Mufu, Up),
    (Symptom::Issue, Up),
];

/// Findings that the number of KV blocks in shared memory may cure.
pub(crate) const STAGES: &[Cure] = &[
    (Symptom::LowOccupancy, Down),
    (Symptom::Barriers, Up),
    (Symptom::NoOverlap, Up),
    (Symptom::Latency, Up),
    (Symptom::Serial, Up),
];

/// Findings that the interleaving of the products of successive KV blocks may cure.
pub(crate) const PRODUCTS: &[Cure] = &[
    (Symptom::RegisterSpills, To("in_turn")),
    (Symptom::NoOverlap, To("scores_ahead")),
    (Symptom::Latency, To("scores_ahead")),
];

/// Findings that the number of resident CTAs per SM may cure.
pub(crate) const RESIDENT_CTAS: &[Cure] = &[
    (Symptom::LowOccupancy, Up),
    (Symptom::RegisterSpills, Down),
    (Symptom::LocalMemory, Down),
    (Symptom::Latency, Up),
];

/// Findings that the number of CTAs of a cluster may cure.
pub(crate) const CLUSTER: &[Cure] =
    &[(Symptom::SmallGrid, Up), (Symptom::RedundantLoads, Up), (Symptom::L2, Up), (Symptom::Dram, Up)];

/// Findings that packing the heads of a group may cure.
pub(crate) const PACKING: &[Cure] = &[(Symptom::Dram, To("packed"))];

/// Findings that ping-pong between warpgroups may cure.
pub(crate) const TURNS: &[Cure] = &[
    (Symptom::Serial, To("ping_pong")),
    (Symptom::Mufu, To("ping_pong")),
    (Symptom::Tensor, To("ping_pong")),
];
