//! The pass of a problem: which outputs are computed.

use serde::{Deserialize, Serialize};

use crate::Invariant;

/// Which outputs are computed from the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// `O = softmax(scale · Q Kᵀ) V`.
    Forward {
        /// Whether the LSE of each row is returned as well: f32, natural logarithm, `[batch][head][row]`. GPU
        /// kernels return the LSE if and only if this flag is set. CPU kernels also return it to a caller
        /// that passes a buffer for the LSE.
        lse: bool,
        /// Whether the call continues from a result over other keys, whose O and LSE are inputs: O as the
        /// output in type and strides, the LSE as it is returned. O and the LSE are then those over the keys
        /// of both. A row without a key there has O = 0 and LSE = −∞.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        continues: bool,
        /// The demand on the bits of a row; `None` without a demand.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        invariant: Option<Invariant>,
    },
    /// The gradients dQ, dK and dV of a loss, from its gradient dO and from the forward pass's inputs, output
    /// and LSE. dQ has the type of Q, dK of K and dV of V.
    Backward {
        /// Whether every run must return equal bits.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        deterministic: bool,
        /// Whether the loss also depends on the LSE, whose gradient is then an input: f32, as the LSE.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        d_lse: bool,
        /// The gradients that are returned beside dQ, dK and dV.
        #[serde(default, skip_serializing_if = "Gradients::is_empty")]
        wants: Gradients,
    },
}

/// The gradients that a backward pass returns beside dQ, dK and dV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gradients {
    /// The gradients of the attention sinks: f32, `[head]`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sinks: bool,
    /// Bit `i` stands for the gradient of table `i` of the programs ([`Table::gradient`](crate::Table)).
    #[serde(default, skip_serializing_if = "no_tables")]
    pub tables: u8,
}

/// Whether no bit is set. Files omit this default.
fn no_tables(tables: &u8) -> bool {
    *tables == 0
}

impl Gradients {
    /// Only dQ, dK and dV.
    pub const NONE: Gradients = Gradients { sinks: false, tables: 0 };

    /// Whether only dQ, dK and dV are returned.
    pub fn is_empty(&self) -> bool {
        *self == Gradients::NONE
    }

    /// Whether the gradient of table `table` is returned.
    pub const fn table(self, table: u8) -> bool {
        table < u8::BITS as u8 && self.tables >> table & 1 == 1
    }
}

/// The direction of a [`Pass`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PassKind {
    /// [`Pass::Forward`].
    #[default]
    Forward,
    /// [`Pass::Backward`].
    Backward,
}

impl PassKind {
    /// Lower-case name, used in messages and files.
    pub const fn name(self) -> &'static str {
        match self {
            PassKind::Forward => "forward",
            PassKind::Backward => "backward",
        }
    }

    /// Whether this is the forward pass. Files omit this default.
    pub(crate) fn is_forward(&self) -> bool {
        *self == PassKind::Forward
    }
}

impl Pass {
    /// The backward pass with dQ, dK and dV alone.
    pub const BACKWARD: Pass = Pass::Backward { deterministic: false, d_lse: false, wants: Gradients::NONE };

    /// [`Pass::BACKWARD`] with equal bits in every run.
    pub const DETERMINISTIC: Pass =
        Pass::Backward { deterministic: true, d_lse: false, wants: Gradients::NONE };

    /// The forward pass over all keys, perhaps with the LSE.
    pub const fn forward(lse: bool) -> Pass {
        Pass::Forward { lse, continues: false, invariant: None }
    }

    /// The direction.
    pub const fn kind(self) -> PassKind {
        match self {
            Pass::Forward { .. } => PassKind::Forward,
            Pass::Backward { .. } => PassKind::Backward,
        }
    }

    /// Whether this is the backward pass.
    pub const fn is_backward(self) -> bool {
        matches!(self, Pass::Backward { .. })
    }

    /// Whether the forward pass returns the LSE. The backward pass reads the LSE.
    pub const fn lse(self) -> bool {
        matches!(self, Pass::Forward { lse: true, .. })
    }

    /// Whether the forward pass continues from a result over other keys.
    pub const fn continues(self) -> bool {
        matches!(self, Pass::Forward { continues: true, .. })
    }

    /// The forward pass's demand on the bits of a row.
    pub const fn invariant(self) -> Option<Invariant> {
        match self {
            Pass::Forward { invariant, .. } => invariant,
            Pass::Backward { .. } => None,
        }
    }

    /// Whether the backward pass reads the gradient of the LSE.
    pub const fn d_lse(self) -> bool {
        matches!(self, Pass::Backward { d_lse: true, .. })
    }

    /// Whether the backward pass must return equal bits in every run.
    pub const fn deterministic(self) -> bool {
        matches!(self, Pass::Backward { deterministic: true, .. })
    }

    /// The gradients beside dQ, dK and dV; none in the forward pass.
    pub const fn wants(self) -> Gradients {
        match self {
            Pass::Forward { .. } => Gradients::NONE,
            Pass::Backward { wants, .. } => wants,
        }
    }

    /// Whether this is the forward pass without the LSE. Files omit this default.
    pub(crate) fn is_default(&self) -> bool {
        *self == Pass::default()
    }
}

/// The forward pass without the LSE.
impl Default for Pass {
    fn default() -> Pass {
        Pass::forward(false)
    }
}
