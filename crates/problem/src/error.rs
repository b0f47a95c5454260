//! The reasons why a problem is rejected.

use crate::PassKind;

/// Why a [`Problem`](crate::Problem) is rejected. Each message names the argument, its value and what is
/// accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// A dimension that must be positive is zero.
    #[error("invalid value '0' for {argument}: expected 1 or more")]
    Zero {
        /// The dimension's name.
        argument: &'static str,
    },
    /// Query heads are not a multiple of key/value heads.
    #[error("invalid value '{heads_q}' for heads_q: expected a multiple of heads_kv = {heads_kv}")]
    HeadsNotGrouped {
        /// Query heads.
        heads_q: usize,
        /// Key/value heads.
        heads_kv: usize,
    },
    /// The softmax scale, or the scale times log2(e), is not finite in f32. GPU kernels take the scale in
    /// units of log2.
    #[error(
        "invalid value '{value}' for scale: expected a finite number, also after multiplication by log2(e) in f32; the \
         default is 1/sqrt(head_dim)"
    )]
    Scale {
        /// The value as text.
        value: String,
    },
    /// The cap on the logits is not positive, or `softcap · log2(e)` or `scale / softcap` is not finite in
    /// f32. GPU kernels take the cap in these units.
    #[error(
        "invalid value '{value}' for softcap: expected a positive number; softcap · log2(e) and scale / softcap must be \
         finite in f32"
    )]
    Softcap {
        /// The value as text.
        value: String,
    },
    /// The probability of dropout is not one.
    #[error("invalid value '{value}' for dropout_p: expected a number from 0 to 1")]
    Dropout {
        /// The value as text.
        value: String,
    },
    /// The tensor has more elements, or its strides reach further, than 64-bit byte offsets can address.
    #[error("{tensor} is too large: its shape and strides span 2^60 elements or more")]
    TooLarge {
        /// The tensor's name.
        tensor: &'static str,
    },
    /// Two rows of an output overlap in memory.
    #[error(
        "invalid value '{strides}' for the strides of {tensor}: expected strides with which no two rows overlap"
    )]
    OverlappingOutput {
        /// The tensor's name.
        tensor: &'static str,
        /// The strides as text.
        strides: String,
    },
    /// An array of lengths, sinks or descale factors has the wrong number of elements.
    #[error("invalid value '{len}' for the number of elements of {argument}: expected {expected}")]
    Lengths {
        /// The array's name.
        argument: &'static str,
        /// The number of elements given.
        len: usize,
        /// The accepted number of elements.
        expected: usize,
    },
    /// An operand has elements of another type.
    #[error("invalid value '{dtype}' for the element type of {argument}: expected {expected}")]
    OperandType {
        /// The operand's name.
        argument: &'static str,
        /// The name of the type that was given.
        dtype: &'static str,
        /// The name of the accepted type.
        expected: &'static str,
    },
    /// A slice is shorter than its tensor or table.
    #[error("{argument} has {len} elements; its shape and strides need {needed}")]
    OperandTooShort {
        /// The operand's name.
        argument: &'static str,
        /// The number of elements given.
        len: usize,
        /// The number of elements needed.
        needed: usize,
    },
    /// An element of an array is out of range.
    #[error("invalid value '{value}' for {argument}[{index}]: expected {expected}")]
    Length {
        /// The array's name.
        argument: &'static str,
        /// Index in the array.
        index: usize,
        /// The element.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// An entry of the page table is no page of the pool.
    #[error(
        "invalid value '{value}' for page_table[{sequence}][{index}]: expected 0 to {last}, the pages of the pool",
        last = pages.saturating_sub(1)
    )]
    Page {
        /// The batch entry.
        sequence: usize,
        /// Index in the batch entry's row of the page table.
        index: usize,
        /// The entry.
        value: i32,
        /// Pages of the pool.
        pages: usize,
    },
    /// Lengths or pages of the queries or of the keys that no kernel supports.
    #[error("invalid lengths of {argument}: {reason}")]
    Side {
        /// `q` or `kv`.
        argument: &'static str,
        /// The reason, and what is accepted.
        reason: &'static str,
    },
    /// A V that cannot be a view of K ([`Problem::v_in_k`](crate::Problem::v_in_k)).
    #[error("invalid view of v in k: {reason}")]
    View {
        /// The accepted values.
        reason: &'static str,
    },
    /// The programs of a call have too many tables.
    #[error("invalid value '{count}' for the number of tables: expected at most {most}")]
    Tables {
        /// The number of tables given.
        count: usize,
        /// The largest accepted number.
        most: usize,
    },
    /// A score or mask program that does not fit the problem.
    #[error("invalid {what} program: {reason}")]
    Program {
        /// `score` or `mask`.
        what: &'static str,
        /// The reason, and what is accepted.
        reason: String,
    },
    /// A combination of element types that no implementation supports.
    #[error(
        "invalid value '{value}' for the element types of q/k/v:out: expected one type for all four tensors: f16, bf16 or f32 \
         (products in tf32 only with f32), or e4m3 or e5m2 for q and k with v in e4m3, e5m2, f16 or bf16 and out in f16, bf16 or f32, \
         or e4m3 or e5m2 for k and v with q in f16 or bf16"
    )]
    DTypes {
        /// The types as text.
        value: String,
    },
    /// The function computes another pass.
    #[error("invalid value '{pass}' for the pass: expected {expected}", pass = pass.name(), expected = expected.name())]
    Pass {
        /// The problem's pass.
        pass: PassKind,
        /// The pass that the function computes.
        expected: PassKind,
    },
    /// A backward pass that cannot be computed.
    #[error("invalid backward pass: {reason}")]
    Backward {
        /// The reason, and what is accepted.
        reason: &'static str,
    },
    /// Descale factors that no kernel supports.
    #[error("invalid factors {argument}: {reason}")]
    Scales {
        /// `descale_q`, `descale_k` or `descale_v`.
        argument: &'static str,
        /// The reason, and what is accepted.
        reason: &'static str,
    },
    /// An option of a quantisation has a value that is not accepted.
    #[error("invalid value '{value}' for {option}: expected {accepted}")]
    Quantization {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// The accepted values.
        accepted: &'static str,
    },
    /// An unknown name.
    #[error("invalid value '{value}' for {what}: expected {accepted}")]
    UnknownName {
        /// The kind of name: `mask`, `dtype` or `layout`.
        what: &'static str,
        /// The name that was given.
        value: String,
        /// The accepted names.
        accepted: &'static str,
    },
}
