use cpu::CpuError;
use driver::DriverError;
use kernels::KernelError;
use problem::ProblemError;

/// Why attention was refused. Each variant names the argument, its value and what would be accepted; nothing has been
/// computed or written, unless a GPU failed on the way ([`AttentionError::Driver`]).
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
    /// A device slice ends before its tensor does.
    #[error("{tensor} has {bytes} bytes of device memory; its shape and strides reach over {needed}")]
    DeviceSlice {
        /// The tensor: q, k, v, out or lse.
        tensor: &'static str,
        /// Bytes given.
        bytes: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// An address that no element can have.
    #[error(
        "{tensor} is at address {address:#x}; accepted: multiples of {accepted} bytes, the size of its elements"
    )]
    Alignment {
        /// The tensor: q, k, v, out or lse.
        tensor: &'static str,
        /// Where it is.
        address: u64,
        /// What it must be a multiple of.
        accepted: u64,
    },
    /// The LSE was given and not prepared for, or the other way round.
    #[error(
        "{}",
        if *prepared { "lse is missing: the kernel was prepared to return it" }
        else { "lse is given, but the kernel was prepared without it; prepare with lse = true" }
    )]
    LseWanted {
        /// Whether the kernel returns it.
        prepared: bool,
    },
    /// Something that no part of this library does.
    #[error("{what} cannot be used; accepted: {accepted}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What would be accepted.
        accepted: String,
    },
    /// The problem cannot be stated.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The CPU kernels refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// No GPU kernel can be made for it.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The GPU's driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
