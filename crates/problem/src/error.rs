/// Why a problem cannot be stated. Each variant names the argument, its value and what would be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    /// The softmax scale is not a finite number, or not in units of log2, in which kernels take it.
    #[error(
        "invalid value '{value}' for scale: expected a finite number, also after multiplication by log2(e) in f32; the \
         default is 1/sqrt(head_dim)"
    )]
    Scale {
        /// The value, printed.
        value: String,
    },
    /// The cap on the logits is not a positive number, or not in the units in which kernels take it.
    #[error(
        "invalid value '{value}' for softcap: expected a positive number; softcap · log2(e) and scale / softcap must be \
         finite in f32"
    )]
    Softcap {
        /// The value, printed.
        value: String,
    },
    /// The problem has more elements than an address can reach.
    #[error("{tensor} has more than 2^63 elements, or its strides reach beyond that")]
    TooLarge {
        /// The tensor's name.
        tensor: &'static str,
    },
    /// Two output rows share memory.
    #[error(
        "invalid value '{strides}' for the strides of out: expected strides with which no two rows overlap"
    )]
    OverlappingOutput {
        /// The strides, printed.
        strides: String,
    },
    /// A name that is not one of a closed set.
    #[error("invalid value '{value}' for {what}: expected {accepted}")]
    UnknownName {
        /// The argument.
        what: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        accepted: &'static str,
    },
}
