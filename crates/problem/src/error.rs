/// Why a problem cannot be stated. Each variant names the argument, its value and what would be accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// A dimension that must be positive is zero.
    #[error("{argument} is 0; it must be at least 1")]
    Zero {
        /// The dimension's name.
        argument: &'static str,
    },
    /// Query heads are not a multiple of key/value heads.
    #[error(
        "heads_q = {heads_q} is not a multiple of heads_kv = {heads_kv}; grouped-query attention needs one"
    )]
    HeadsNotGrouped {
        /// Query heads.
        heads_q: usize,
        /// Key/value heads.
        heads_kv: usize,
    },
    /// The softmax scale is not a finite number, or not in units of log2, in which kernels take it.
    #[error(
        "scale = {value}; accepted: a number whose log2(e)-fold is finite in f32; leave it out for 1/sqrt(head_dim)"
    )]
    Scale {
        /// The value, printed.
        value: String,
    },
    /// The problem has more elements than an address can reach.
    #[error("{tensor} has more than 2^63 elements or its strides reach beyond that")]
    TooLarge {
        /// The tensor's name.
        tensor: &'static str,
    },
    /// Two output rows share memory.
    #[error("strides of out ({strides}) make two rows overlap; an output row needs memory of its own")]
    OverlappingOutput {
        /// The strides, printed.
        strides: String,
    },
    /// A name that is not one of a closed set.
    #[error("{what} = \"{value}\" is unknown; accepted: {accepted}")]
    UnknownName {
        /// The argument.
        what: &'static str,
        /// What was given.
        value: String,
        /// What would be accepted.
        accepted: &'static str,
    },
}
