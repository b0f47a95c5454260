//! The reasons why a kernel cannot be run.

/// Why a kernel could not be run. A kernel that runs with hazards is not an error: the run returns a
/// [`Report`](crate::Report) with the hazards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmuError {
    /// The module has no entry with that name.
    #[error("the module has no entry `{name}`; its entries: {}", ptx::quote::list(available))]
    NoEntry {
        /// The requested name.
        name: String,
        /// The entries of the module.
        available: Vec<String>,
    },
    /// The number of arguments in the launch contract differs from the number of parameters of the entry.
    #[error("the launch contract gives {given} arguments, but entry `{entry}` takes {expected}")]
    ArgumentCount {
        /// The entry.
        entry: String,
        /// Number of parameters of the entry.
        expected: usize,
        /// Number of arguments in the launch contract.
        given: usize,
    },
    /// The size of an argument differs from the size of its parameter.
    #[error("argument {index} has {given} bytes, but parameter `{name}` has {expected}")]
    ArgumentSize {
        /// Position of the argument, from 0.
        index: usize,
        /// The parameter's name.
        name: String,
        /// Size of the parameter in bytes.
        expected: u32,
        /// Size of the argument in bytes.
        given: u32,
    },
    /// An argument names a buffer that the contract does not list.
    #[error("argument {index} names buffer {buffer}, but the launch contract lists {buffers} buffers")]
    NoSuchBuffer {
        /// Position of the argument, from 0.
        index: usize,
        /// The buffer index that the argument names.
        buffer: usize,
        /// Number of buffers in the contract.
        buffers: usize,
    },
    /// The number of buffers given by the caller differs from the number in the contract.
    #[error("{given} buffers were given, but the launch contract lists {expected}")]
    BufferCount {
        /// Number of buffers in the contract.
        expected: usize,
        /// Number of buffers given.
        given: usize,
    },
    /// A buffer is smaller than the contract says, or a transfer is larger than its buffer.
    #[error("buffer `{name}` has {given} bytes, but {expected} are needed")]
    BufferSize {
        /// The name of the buffer.
        name: String,
        /// Bytes needed.
        expected: usize,
        /// Size of the buffer in bytes.
        given: usize,
    },
    /// The grid, block, cluster, shared memory or a tensor map is out of range, or contradicts the entry's
    /// launch bounds.
    #[error("invalid value '{given}' for {what}: expected {accepted}")]
    Launch {
        /// The quantity that is out of range.
        what: &'static str,
        /// The value given.
        given: String,
        /// The accepted values.
        accepted: String,
    },
    /// A tensor map that no GPU would accept.
    #[error("tensor map {index}: {error}")]
    TensorMap {
        /// Index of the tensor map in the launch contract.
        index: usize,
        /// What is wrong.
        error: ptx::TensorMapError,
    },
    /// The kernel executed an instruction that the emulator does not implement. There is no verdict.
    #[error("line {line}: the emulator does not implement {what}")]
    Unsupported {
        /// Line of the PTX text; 0 when unknown.
        line: u32,
        /// The instruction or operand.
        what: String,
    },
    /// The module is inconsistent. The verifier reports such modules too. Nothing was run.
    #[error("line {line}: {what}")]
    Malformed {
        /// Line of the PTX text; 0 when unknown.
        line: u32,
        /// What is wrong.
        what: String,
    },
    /// A CTA did not end within its instruction budget. There is no verdict.
    #[error("CTA {cta} issued {steps} warp instructions without ending; the last one is at line {line}")]
    StepLimit {
        /// The CTA.
        cta: u64,
        /// Warp instructions that the CTA had issued.
        steps: u64,
        /// Line of the last instruction.
        line: u32,
    },
    /// All CTAs together issued more than the budget of the grid. There is no verdict.
    #[error(
        "{done} of {ctas} CTAs issued {steps} warp instructions, which exceeds the budget of {limit} for \
        a grid; launch a smaller grid, or a smaller problem of the same kind"
    )]
    GridLimit {
        /// CTAs that ended.
        done: u64,
        /// CTAs of the grid.
        ctas: u64,
        /// Warp instructions issued, including a fixed cost for the start of each CTA.
        steps: u64,
        /// The budget in warp instructions.
        limit: u64,
    },
    /// The fixed cost of starting all CTAs already exceeds the budget. No CTA was run.
    #[error(
        "the grid has {ctas} CTAs; starting them costs {least} warp instructions, which exceeds the \
        budget of {limit} for a grid; launch a smaller grid, or a smaller problem of the same kind"
    )]
    GridSize {
        /// CTAs of the grid.
        ctas: u64,
        /// Cost of starting all CTAs, in warp instructions.
        least: u64,
        /// The budget in warp instructions.
        limit: u64,
    },
    /// The time limit of [`Options::stopwatch`](crate::Options::stopwatch) was exceeded. There is no verdict.
    #[error("the time limit of {} s was exceeded; allow more time, or launch a smaller grid", limit.as_secs_f64())]
    TimeLimit {
        /// The limit.
        limit: std::time::Duration,
    },
    /// The CTAs of the grid communicate, and the race check needs more memory for its records of reads than
    /// the limit. There is no verdict.
    #[error(
        "after {done} of {ctas} CTAs, the race check needs more than {limit} bytes for its records of reads; \
         launch a smaller grid, or a smaller problem of the same kind"
    )]
    MemoryLimit {
        /// CTAs that ended.
        done: u64,
        /// CTAs of the grid.
        ctas: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// Returned only by [`Machine::launch`](ptx::Machine::launch): the kernel ran and had hazards.
    #[error("the kernel is not correct: {first} ({count} findings)")]
    Hazards {
        /// The first finding.
        first: String,
        /// Number of findings.
        count: usize,
    },
}
