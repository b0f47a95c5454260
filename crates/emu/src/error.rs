/// Why a kernel could not be run. A kernel that runs and misbehaves is no error: it gives a
/// [`Report`](crate::Report) with hazards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmuError {
    /// The module has no entry of that name.
    #[error("the module has no entry `{name}`; its entries: {}", ptx::quote::list(available))]
    NoEntry {
        /// The name asked for.
        name: String,
        /// The entries there are.
        available: Vec<String>,
    },
    /// The launch contract has another number of arguments than the entry has parameters.
    #[error("entry `{entry}` takes {expected} arguments, the launch contract gives {given}")]
    ArgumentCount {
        /// The entry.
        entry: String,
        /// Parameters of the entry.
        expected: usize,
        /// Arguments given.
        given: usize,
    },
    /// An argument does not fit its parameter.
    #[error("argument {index} has {given} bytes, parameter `{name}` takes {expected}")]
    ArgumentSize {
        /// Position of the argument, from 0.
        index: usize,
        /// The parameter's name.
        name: String,
        /// Bytes the parameter takes.
        expected: u32,
        /// Bytes the argument has.
        given: u32,
    },
    /// An argument names a buffer that the contract does not list.
    #[error("argument {index} names buffer {buffer}, the launch contract lists {buffers}")]
    NoSuchBuffer {
        /// Position of the argument, from 0.
        index: usize,
        /// The buffer it names.
        buffer: usize,
        /// Buffers there are.
        buffers: usize,
    },
    /// The caller gave another number of buffers than the contract lists.
    #[error("the launch contract lists {expected} buffers, {given} were given")]
    BufferCount {
        /// Buffers of the contract.
        expected: usize,
        /// Buffers given.
        given: usize,
    },
    /// A buffer is smaller than the contract says, or a transfer larger than its buffer.
    #[error("buffer `{name}` has {given} bytes, {expected} are needed")]
    BufferSize {
        /// The buffer.
        name: String,
        /// Bytes needed.
        expected: usize,
        /// Bytes it has.
        given: usize,
    },
    /// Grid, block or shared memory out of range, or against the entry's launch bounds.
    #[error("invalid value '{given}' for {what}: expected {accepted}")]
    Launch {
        /// What is wrong.
        what: &'static str,
        /// Its value.
        given: String,
        /// What would be accepted.
        accepted: String,
    },
    /// A tensor map that no machine would accept.
    #[error("tensor map {index}: {error}")]
    TensorMap {
        /// Which one of the launch contract.
        index: usize,
        /// What is wrong.
        error: ptx::TensorMapError,
    },
    /// The kernel needs something that the emulator does not have: nothing was run.
    #[error("line {line}: the emulator does not implement {what}")]
    Unsupported {
        /// Line of the PTX text; 0 when unknown.
        line: u32,
        /// The instruction or operand.
        what: String,
    },
    /// The module contradicts itself (the verifier says so too): nothing was run.
    #[error("line {line}: {what}")]
    Malformed {
        /// Line of the PTX text; 0 when unknown.
        line: u32,
        /// What is wrong.
        what: String,
    },
    /// The kernel did not end within the budget: no verdict.
    #[error("CTA {cta} issued {steps} warp instructions without an end, last at line {line}")]
    StepLimit {
        /// The CTA.
        cta: u64,
        /// Warp instructions it had issued.
        steps: u64,
        /// Line of the last one.
        line: u32,
    },
    /// All CTAs together issued more than the budget: no verdict.
    #[error(
        "{done} of {ctas} CTAs issued {steps} warp instructions, beyond the budget of {limit} for a grid; \
         launch a smaller grid, or a smaller problem of the same kind"
    )]
    GridLimit {
        /// CTAs that ended.
        done: u64,
        /// CTAs of the grid.
        ctas: u64,
        /// Warp instructions issued, each CTA's start counted as some.
        steps: u64,
        /// What they may issue.
        limit: u64,
    },
    /// The start of all CTAs alone is beyond the budget: nothing was run.
    #[error(
        "the grid has {ctas} CTAs, and to start them counts as {least} warp instructions, beyond the budget of {limit} \
         for a grid; launch a smaller grid, or a smaller problem of the same kind"
    )]
    GridSize {
        /// CTAs of the grid.
        ctas: u64,
        /// Warp instructions that starting them counts as.
        least: u64,
        /// What the grid may issue.
        limit: u64,
    },
    /// The time limit of [`Options::stopwatch`](crate::Options::stopwatch) is over: no verdict.
    #[error("the time limit of {} s is over; give more time, or launch a smaller grid", limit.as_secs_f64())]
    TimeLimit {
        /// The limit.
        limit: std::time::Duration,
    },
    /// CTAs that communicate read the same places too often to remember it all: no verdict.
    #[error(
        "after {done} of {ctas} CTAs, to remember which of them read what takes more than {limit} bytes; \
         launch a smaller grid, or a smaller problem of the same kind"
    )]
    MemoryLimit {
        /// CTAs that ended.
        done: u64,
        /// CTAs of the grid.
        ctas: u64,
        /// Bytes they may take.
        limit: u64,
    },
    /// [`Machine::launch`](ptx::Machine::launch) only: the kernel ran and had hazards.
    #[error("the kernel is not correct: {first} ({count} findings)")]
    Hazards {
        /// The first finding.
        first: String,
        /// How many there are.
        count: usize,
    },
}
