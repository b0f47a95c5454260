//! The pass of a problem: which outputs are computed.

use std::fmt;

use serde::{Deserialize, Serialize};

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
    },
}

/// A pass without its options. Each family of GPU kernels computes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PassKind {
    /// [`Pass::Forward`].
    Forward,
}

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PassKind::Forward => "forward",
        })
    }
}

impl Pass {
    /// The pass without its options.
    pub const fn kind(self) -> PassKind {
        match self {
            Pass::Forward { .. } => PassKind::Forward,
        }
    }

    /// Whether the LSE is returned.
    pub const fn lse(self) -> bool {
        match self {
            Pass::Forward { lse } => lse,
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
        Pass::Forward { lse: false }
    }
}
