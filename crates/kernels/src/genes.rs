//! Genes as data: what a search may change in a plan, and what for. Each family declares its genes once,
//! beside its plan (`forward/*/family.rs`).

use serde_json::Value;

/// A gene: a field of a plan's serde form, with the values worth trying.
#[derive(Clone, Debug, PartialEq)]
pub struct Gene {
    /// The field's name.
    pub name: &'static str,
    /// The values that an exhaustive search tries; empty if it leaves the gene alone.
    pub searched: Vec<Value>,
    /// Further values for an evolution, so that unexpected plans can be found.
    pub wider: Vec<Value>,
    /// The findings of the diagnosis, and the bounds of kernels, that another value cures.
    pub cures: &'static [Cure],
}

/// A finding or a bound, by its name in `explain --json`, and the direction in which the gene should change.
pub type Cure = (&'static str, Turn);

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
    /// A gene that no search changes yet.
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

    /// States what the gene cures.
    pub(crate) const fn curing(mut self, cures: &'static [Cure]) -> Gene {
        self.cures = cures;
        self
    }
}

/// Cures of the keys of a KV block.
pub(crate) const BLOCK_N: &[Cure] = &[
    ("low occupancy", Down),
    ("barriers", Up),
    ("register spills", Down),
    ("local memory", Down),
    ("latency", Up),
    ("mufu", Up),
    ("issue", Up),
];

/// Cures of the number of KV blocks in shared memory.
pub(crate) const STAGES: &[Cure] = &[
    ("low occupancy", Down),
    ("barriers", Up),
    ("no overlap of copies", Up),
    ("latency", Up),
    ("serial", Up),
];

/// Cures of the interleaving of the products of successive KV blocks.
pub(crate) const PRODUCTS: &[Cure] = &[
    ("register spills", To("in_turn")),
    ("no overlap of copies", To("scores_ahead")),
    ("latency", To("scores_ahead")),
];

/// Cures of the number of resident CTAs per SM.
pub(crate) const RESIDENT_CTAS: &[Cure] =
    &[("low occupancy", Up), ("register spills", Down), ("local memory", Down), ("latency", Up)];

/// Cures of the CTAs of a cluster.
pub(crate) const CLUSTER: &[Cure] = &[("small grid", Up), ("redundant loads", Up), ("l2", Up), ("dram", Up)];

/// Cures of packing the heads of a group.
pub(crate) const PACKING: &[Cure] = &[("dram", To("packed"))];

/// Cures of ping-pong between warpgroups.
pub(crate) const TURNS: &[Cure] =
    &[("serial", To("ping_pong")), ("mufu", To("ping_pong")), ("tensor", To("ping_pong"))];
