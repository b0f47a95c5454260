//! The tensors of a problem: which they are, and where their rows lie.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{PassKind, ProblemError};

/// Distances, in elements, between neighbouring batch entries, heads and rows of a tensor. The last dimension
/// is always contiguous, as every attention library requires. A stride of 0 broadcasts. A negative stride
/// walks backwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Strides {
    /// Elements from one batch entry to the next.
    pub batch: i64,
    /// Elements from one head to the next.
    pub head: i64,
    /// Elements from one sequence position to the next.
    pub row: i64,
}

impl Strides {
    /// Offset in elements of the first element of row (`batch`, `head`, `row`). The indices must lie within
    /// the extents that [`Problem::check`](crate::Problem::check) accepted; the check guarantees that no
    /// offset overflows.
    pub const fn offset(self, batch: usize, head: usize, row: usize) -> i64 {
        batch as i64 * self.batch + head as i64 * self.head + row as i64 * self.row
    }
}

/// Order of the dimensions of a dense tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// `[batch, head, sequence, dim]`: PyTorch SDPA.
    Bhsd,
    /// `[batch, sequence, head, dim]`: FlashAttention.
    Bshd,
}

impl Layout {
    /// Strides of a dense tensor `[batch, heads, seq, dim]` in this layout.
    pub const fn strides(self, heads: usize, seq: usize, dim: usize) -> Strides {
        let (h, s, d) = (heads as i64, seq as i64, dim as i64);
        match self {
            Layout::Bhsd => {
                Strides { batch: h.wrapping_mul(s).wrapping_mul(d), head: s.wrapping_mul(d), row: d }
            }
            Layout::Bshd => {
                Strides { batch: h.wrapping_mul(s).wrapping_mul(d), head: d, row: h.wrapping_mul(d) }
            }
        }
    }

    /// The name used on the command line and in launch files.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Bhsd => "bhsd",
            Layout::Bshd => "bshd",
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Layout {
    type Err = ProblemError;

    fn from_str(s: &str) -> Result<Self, ProblemError> {
        [Layout::Bhsd, Layout::Bshd].into_iter().find(|l| l.name() == s).ok_or_else(|| {
            ProblemError::UnknownName { what: "layout", value: s.to_owned(), accepted: "bhsd, bshd" }
        })
    }
}

/// A tensor of a problem. The gradients are tensors of the backward pass alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tensor {
    /// Queries, `[batch, heads_q, seq_q, head_dim]`.
    Q,
    /// Keys, `[batch, heads_kv, seq_kv, head_dim]`.
    K,
    /// Values, `[batch, heads_kv, seq_kv, head_dim_v]`.
    V,
    /// Output, `[batch, heads_q, seq_q, head_dim_v]`.
    Out,
    /// Gradient of the output, an input of the backward pass.
    DOut,
    /// Gradient of the queries.
    Dq,
    /// Gradient of the keys.
    Dk,
    /// Gradient of the values.
    Dv,
}

impl Tensor {
    /// Every tensor of any pass.
    pub const ALL: [Tensor; 8] =
        [Tensor::Q, Tensor::K, Tensor::V, Tensor::Out, Tensor::DOut, Tensor::Dq, Tensor::Dk, Tensor::Dv];

    /// The tensors of the forward pass, inputs first.
    pub const FORWARD: [Tensor; 4] = [Tensor::Q, Tensor::K, Tensor::V, Tensor::Out];

    /// The tensors that a backward pass writes.
    pub const GRADIENTS: [Tensor; 3] = [Tensor::Dq, Tensor::Dk, Tensor::Dv];

    /// The tensors of a pass.
    pub const fn of_pass(pass: PassKind) -> &'static [Tensor] {
        match pass {
            PassKind::Forward => &Tensor::FORWARD,
            PassKind::Backward => &Tensor::ALL,
        }
    }

    /// Lower-case name, used in messages and files.
    pub const fn name(self) -> &'static str {
        match self {
            Tensor::Q => "q",
            Tensor::K => "k",
            Tensor::V => "v",
            Tensor::Out => "out",
            Tensor::DOut => "d_out",
            Tensor::Dq => "dq",
            Tensor::Dk => "dk",
            Tensor::Dv => "dv",
        }
    }

    /// The tensor of the forward pass with this tensor's type and extents: itself, or the tensor of which it
    /// is the gradient.
    pub const fn primal(self) -> Tensor {
        match self {
            Tensor::Q | Tensor::Dq => Tensor::Q,
            Tensor::K | Tensor::Dk => Tensor::K,
            Tensor::V | Tensor::Dv => Tensor::V,
            Tensor::Out | Tensor::DOut => Tensor::Out,
        }
    }

    /// Whether the rows are keys and the heads are KV heads; otherwise they are queries and query heads.
    pub const fn is_of_keys(self) -> bool {
        matches!(self.primal(), Tensor::K | Tensor::V)
    }

    /// Whether a pass writes the tensor; otherwise it reads it.
    pub const fn is_output(self, pass: PassKind) -> bool {
        match pass {
            PassKind::Forward => matches!(self, Tensor::Out),
            PassKind::Backward => matches!(self, Tensor::Dq | Tensor::Dk | Tensor::Dv),
        }
    }
}

/// Strides of the gradients. `None` means the strides of the tensor of which it is the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradientStrides {
    /// Strides of the gradient of the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub d_out: Option<Strides>,
    /// Strides of the gradient of the queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dq: Option<Strides>,
    /// Strides of the gradient of the keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dk: Option<Strides>,
    /// Strides of the gradient of the values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dv: Option<Strides>,
}

impl GradientStrides {
    /// Whether every gradient has the strides of its tensor. Files omit this default.
    pub(crate) fn is_default(&self) -> bool {
        *self == GradientStrides::default()
    }
}
