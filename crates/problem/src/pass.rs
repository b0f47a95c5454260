use serde::{Deserialize, Serialize};

/// What is computed of a problem's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// `O = softmax(scale · Q Kᵀ) V`.
    Forward {
        /// Whether the LSE of each row is returned as well: f32, natural logarithm, `[batch][head][row]`.
        /// GPU kernels return it exactly if this is set. On the CPU, a caller who passes a buffer for the LSE
        /// gets it in any case.
        lse: bool,
    },
}

impl Pass {
    /// Whether the LSE is returned.
    pub const fn lse(self) -> bool {
        match self {
            Pass::Forward { lse } => lse,
        }
    }

    /// Whether this is the forward pass without the LSE, which files do not state.
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
