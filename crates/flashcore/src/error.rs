//! The error types of this crate.

use std::time::Duration;

use cpu::CpuError;
use driver::DriverError;
use kernels::KernelError;
use problem::{ProblemError, ProgramError};

/// Why attention was rejected. Each message names the argument, its value and what is accepted. Nothing has
/// been computed or written, unless a GPU failed during the call ([`AttentionError::Driver`]).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// The slice is shorter than the view's shape and strides need.
    #[error("a view of shape {shape:?} needs {needed} elements, but the slice has {len}")]
    SliceTooShort {
        /// `[batch, heads, sequence, dim]`.
        shape: [usize; 4],
        /// Elements needed.
        needed: usize,
        /// Elements given.
        len: usize,
    },
    /// The view's shape and strides exceed the address space.
    #[error("a view of shape {shape:?} with strides {strides} exceeds the address space")]
    ViewTooLarge {
        /// `[batch, heads, sequence, dim]`.
        shape: [usize; 4],
        /// The strides as text.
        strides: String,
    },
    /// A dimension of two tensors must be equal and differs.
    #[error("{tensor} has {what} = {value}, but {other} has {expected}; they must be equal")]
    Shape {
        /// The tensor that does not fit.
        tensor: &'static str,
        /// The dimension: `batch`, `heads`, `sequence length` or `head_dim`.
        what: &'static str,
        /// The dimension of `tensor`.
        value: usize,
        /// The tensor that `tensor` must match.
        other: &'static str,
        /// The dimension of `other`.
        expected: usize,
    },
    /// The last dimension of a tensor is not contiguous.
    #[error("{tensor}'s last dimension has stride {stride}; it must be contiguous (stride 1)")]
    Strided {
        /// The tensor.
        tensor: &'static str,
        /// Elements from one element of a row to the next.
        stride: i64,
    },
    /// The slice for the LSE has the wrong length.
    #[error("lse has {len} elements; expected {needed}, one per row and query head")]
    Lse {
        /// Elements given.
        len: usize,
        /// Elements needed.
        needed: usize,
    },
    /// There is no host memory for the result of [`run`](crate::Attention::run).
    #[error(
        "not enough host memory for {elements} elements of {tensor}; run_into takes memory of the caller"
    )]
    HostMemory {
        /// `out` or `lse`.
        tensor: &'static str,
        /// Elements needed.
        elements: usize,
    },
    /// A bias, a mask, slopes, sinks or packed lengths do not fit the problem.
    #[error("invalid value '{value}' for the {what} of {argument}: expected {expected}")]
    Operand {
        /// The builder's method, the tensor or the array of lengths.
        argument: &'static str,
        /// The property of the argument that does not fit.
        what: &'static str,
        /// Its value.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// A table's shape or strides cannot be read.
    #[error("invalid table: {reason}")]
    Table {
        /// The shape or the strides, and what is accepted.
        reason: String,
    },
    /// A slice is shorter than its table.
    #[error(
        "invalid value '{len}' for the number of elements of a table: expected {needed} for shape {shape:?}"
    )]
    TableTooShort {
        /// Elements given.
        len: usize,
        /// Elements needed.
        needed: usize,
        /// The table's shape.
        shape: Vec<usize>,
    },
    /// An expression is not a valid program.
    #[error("invalid {what} program: {error}")]
    Program {
        /// `score` or `mask`.
        what: &'static str,
        /// The reason.
        error: ProgramError,
    },
    /// An operand of a prepared kernel is missing, or is given although the kernel does not take it.
    #[error(
        "{operand} is {}",
        if *wanted { "missing: the problem has it" } else { "given, but the problem has none" }
    )]
    OperandWanted {
        /// The operand's name.
        operand: &'static str,
        /// Whether the kernel takes it.
        wanted: bool,
    },
    /// An operand is given more than once.
    #[error("{operand} is given twice; expected each operand once")]
    OperandTwice {
        /// The operand's name.
        operand: &'static str,
    },
    /// A slice of device memory is shorter than its tensor.
    #[error("{tensor} has {bytes} bytes of device memory; its shape and strides need {needed}")]
    DeviceSlice {
        /// The tensor: q, k, v, out, lse, or another operand.
        tensor: &'static str,
        /// Bytes given.
        bytes: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// An address in host memory is null, or not a multiple of the element size.
    #[error(
        "invalid value '{address:#x}' for the address of {tensor}: expected a multiple of {accepted} bytes"
    )]
    HostAddress {
        /// The operand.
        tensor: &'static str,
        /// The address of the lowest element.
        address: u64,
        /// The required multiple, in bytes.
        accepted: u64,
    },
    /// A device address is not a multiple of the element size, or of 2 bytes for 8-bit elements.
    #[error(
        "invalid value '{address:#x}' for the address of {tensor}: expected a multiple of {accepted} bytes, \
         the size of an element or of two 8-bit elements"
    )]
    Alignment {
        /// The tensor: q, k, v, out, lse, or another operand.
        tensor: &'static str,
        /// The device address.
        address: u64,
        /// The required multiple, in bytes.
        accepted: u64,
    },
    /// The LSE was passed to a kernel prepared without it, or not passed to a kernel prepared with it.
    #[error(
        "{}",
        if *prepared { "lse is missing: the kernel was prepared to return it" }
        else { "lse is given, but the kernel was prepared without it; ask for it in the problem" }
    )]
    LseWanted {
        /// Whether the kernel was prepared to return the LSE.
        prepared: bool,
    },
    /// The library does not support this.
    #[error("invalid value '{value}' for {argument}: expected {accepted}")]
    Unsupported {
        /// The setting that failed, such as the device or the plan.
        argument: &'static str,
        /// The value that is not supported.
        value: String,
        /// The accepted values.
        accepted: String,
    },
    /// The problem is not valid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The CPU kernels rejected the call.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// No GPU kernel family supports the problem.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The GPU driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The ranks of a group cannot compute together.
    #[error(transparent)]
    Group(#[from] GroupError),
}

/// The error of an argument with a property that is not accepted ([`AttentionError::Operand`]).
pub fn refused(
    argument: &'static str,
    what: &'static str,
    value: impl ToString,
    expected: impl Into<String>,
) -> AttentionError {
    AttentionError::Operand { argument, what, value: value.to_string(), expected: expected.into() }
}

/// Why ranks cannot compute together. Each rank of the group gets an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// Another rank ended, failed or left the group.
    #[error("rank {rank} waits for rank {other}, which has ended, failed or left the group")]
    Ended {
        /// This rank.
        rank: usize,
        /// The rank that is missing.
        other: usize,
    },
    /// Another rank did not answer within the time-out.
    #[error("rank {rank} has waited for rank {other} for {time_out:?}, the time-out of the group")]
    TimedOut {
        /// This rank.
        rank: usize,
        /// The rank that did not answer.
        other: usize,
        /// The time-out.
        time_out: Duration,
    },
    /// This rank has left the group, by itself or after an error.
    #[error("rank {rank} has left the group; make a new group")]
    Left {
        /// This rank.
        rank: usize,
    },
    /// Ranks could not connect to each other.
    #[error("rank {rank} could not {what}: {message}")]
    Connection {
        /// This rank.
        rank: usize,
        /// The step that failed.
        what: &'static str,
        /// The reason.
        message: String,
    },
    /// A message has another size than this rank expects.
    #[error("invalid value '{size}' for the bytes of a message of rank {from}: expected {expected}")]
    Size {
        /// The sender.
        from: usize,
        /// Bytes received.
        size: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// There must be one message for each rank.
    #[error("invalid value '{given}' for the number of messages: expected {ranks}, one for each rank")]
    Messages {
        /// Messages given.
        given: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// The arguments of two ranks differ.
    #[error("invalid value '{value}' for {argument} on rank {rank}: expected {expected}, as on rank 0")]
    Differs {
        /// The argument that must be equal.
        argument: &'static str,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Its value.
        value: String,
        /// The value of rank 0.
        expected: String,
    },
    /// Another rank has refused its arguments.
    #[error("rank {rank} refused its arguments; its error says why")]
    Refused {
        /// That rank.
        rank: usize,
    },
}
