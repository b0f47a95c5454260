use cpu::CpuError;
use problem::ProblemError;

/// Why attention was refused. Each variant names the argument, its value and what would be accepted; nothing has been
/// computed or written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AttentionError {
    /// A view does not lie inside its slice.
    #[error("a view of shape {shape:?} needs {needed} elements, the slice has {len}")]
    SliceTooShort {
        /// `[batch, heads, sequence, dim]`.
        shape: [usize; 4],
        /// Elements needed.
        needed: usize,
        /// Elements given.
        len: usize,
    },
    /// A view reaches further than can be addressed.
    #[error("a view of shape {shape:?} with strides {strides} reaches further than can be addressed")]
    ViewTooLarge {
        /// `[batch, heads, sequence, dim]`.
        shape: [usize; 4],
        /// The strides, printed.
        strides: String,
    },
    /// Two tensors disagree.
    #[error("{tensor} has {what} = {value}, {other} has {expected}; they must be equal")]
    Shape {
        /// The tensor that does not fit.
        tensor: &'static str,
        /// The dimension.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The tensor it must fit.
        other: &'static str,
        /// That tensor's value.
        expected: usize,
    },
    /// The buffer for LSE has another size.
    #[error("lse has {len} elements; it takes batch · heads_q · seq_q = {needed}")]
    Lse {
        /// Elements given.
        len: usize,
        /// Elements needed.
        needed: usize,
    },
    /// The problem cannot be stated.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The CPU kernels refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
}
