use std::path::PathBuf;

/// Why a command stopped. Each names the argument, its value and what would be accepted.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The server cannot listen, or stopped listening.
    #[error("cannot serve: {0}")]
    Serve(std::io::Error),
    /// Standard output is gone.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] std::io::Error),
    /// A file that cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// An argument outside what is accepted.
    #[error("invalid value '{}' for {argument}: expected {accepted}", ptx::quote::cut(value))]
    Argument {
        /// The argument.
        argument: &'static str,
        /// Its value.
        value: String,
        /// What would be accepted.
        accepted: String,
    },
    /// An argument that another one needs.
    #[error("missing {argument}: {why}")]
    Missing {
        /// The argument.
        argument: &'static str,
        /// Why it is needed.
        why: &'static str,
    },
    /// An output that would replace an input.
    #[error(
        "{argument} {path} is the same file as {input} {source_path}; name another file, so that the input is kept"
    )]
    Overwrites {
        /// The output's argument.
        argument: &'static str,
        /// The output.
        path: PathBuf,
        /// The input's argument.
        input: &'static str,
        /// The input.
        source_path: PathBuf,
    },
    /// PTX that does not parse.
    #[error("{path}: {error}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        error: ptx::ParseError,
    },
    /// PTX that no assembler would take.
    #[error(
        "{path}: the PTX is invalid ({} error{}):\n{violations}", violations.0.len(), if violations.0.len() == 1 { "" } else { "s" }
    )]
    Verify {
        /// The file.
        path: PathBuf,
        /// Where and why.
        violations: ptx::Violations,
    },
    /// A kernel of the command's own that the verifier refuses.
    #[error("a kernel of this command breaks the rules of PTX, which is a fault of FlashCore: {0}")]
    Generator(#[from] ptx::Violations),
    /// A fault of ours.
    #[error(
        "internal error: {0}\nThis is a fault of FlashCore, not of the input, and there is no verdict. Please report it \
         at {repository}/issues, with the files and this command; RUST_BACKTRACE=1 prints a backtrace.",
        repository = env!("CARGO_PKG_REPOSITORY")
    )]
    Internal(lab::panics::Panic),
    /// A tensor of the wrong rank.
    #[error("{tensor} has shape {}; expected four dimensions, [batch, heads, sequence, dim]", dims(shape))]
    Rank {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Tensors of different types.
    #[error("{tensor} holds {dtype}, but q holds {expected}; expected one element type for q, k and v")]
    DTypes {
        /// The tensor.
        tensor: &'static str,
        /// Its element type.
        dtype: problem::DType,
        /// That of q.
        expected: problem::DType,
    },
    /// Tensors that do not fit each other.
    #[error(
        "{tensor} has shape {}, which does not fit {other} of shape {}: {rule}",
        dims(shape),
        dims(expected)
    )]
    Shapes {
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// What it must fit.
        other: &'static str,
        /// That one's shape.
        expected: Vec<usize>,
        /// What must agree.
        rule: &'static str,
    },
    /// The ledger's own.
    #[error(transparent)]
    Ledger(#[from] lab::ledger::LedgerError),
    /// A ledger so damaged that nothing of it can be exported.
    #[error(
        "{path} is damaged: {what}; none of it can be read. Restore it from a copy, or use another file with --ledger"
    )]
    BeyondExport {
        /// The ledger.
        path: PathBuf,
        /// What SQLite found.
        what: String,
    },
    /// A file of this name cannot be judged.
    #[error("{0}: expected a .ptx or a .cu file")]
    Extension(PathBuf),
    /// Rows may only come from a commit.
    #[error(
        "--evidence: the commit is not known: this folder's repository has changes that are not committed, or is at another commit \
         than the program was built from, or there is none; commit first, or leave --evidence out"
    )]
    Unclean,
    /// Rows from a GPU machine, which need not have the repository, name the commit that the program was built from.
    #[error(
        "--evidence: the commit of this program is not known; build it with `cargo xtask evidence`, or leave --evidence out"
    )]
    Unbuilt,
    /// A sandbox that was asked for cannot be had.
    #[error("a proposer cannot be put into a sandbox: {0}")]
    Sandbox(String),
    /// The device broke down in a race.
    #[error("the race stopped: {0}")]
    Race(#[from] lab::bench::RaceError<driver::DriverError>),
    #[error(transparent)]
    Driver(#[from] driver::DriverError),
    #[error(transparent)]
    Workbench(#[from] lab::bench::gpu::WorkbenchError),
    #[error(transparent)]
    Tables(#[from] lab::tables::TableError),
    #[error(transparent)]
    Contestant(#[from] lab::bench::gpu::ContestantError),
    /// A launch file that cannot be used, or a kernel that it cannot launch.
    #[error("{path}: {error}")]
    Launch {
        /// The file.
        path: PathBuf,
        /// Why.
        error: Box<lab::launchfile::LaunchError>,
    },
    /// An option that only the other kind of device looks at.
    #[error("{argument} {value} is for {whose}; give --device {device}")]
    OtherDevice {
        /// The option.
        argument: &'static str,
        /// Its value.
        value: String,
        /// Processors or GPUs.
        whose: &'static str,
        /// One of those.
        device: &'static str,
    },
    #[error(transparent)]
    Gate(#[from] lab::gate::GateError),
    #[error(transparent)]
    Climb(#[from] lab::climb::ClimbError),
    #[error(transparent)]
    Kernel(#[from] kernels::KernelError),
    #[error(transparent)]
    Nvrtc(#[from] lab::tools::NvrtcError),
    #[error(transparent)]
    Machine(#[from] lab::machine::MachineFileError),
    #[error(transparent)]
    Worker(#[from] lab::evolve::workers::ServeError),
    #[error(transparent)]
    Store(#[from] lab::store::StoreError),
    #[error(transparent)]
    File(#[from] lab::files::FileError),
    #[error(transparent)]
    Bench(#[from] lab::bench::BenchError),
    #[error(transparent)]
    Cpu(#[from] cpu::CpuError),
    #[error(transparent)]
    Problem(#[from] problem::ProblemError),
    #[error(transparent)]
    Evolution(#[from] lab::evolve::EvolveError),
    #[error(transparent)]
    Setup(#[from] lab::evolve::setup::SetupError),
    /// There is no run to go on with.
    #[error(
        "--resume: {ledger} has no run that can be continued; `flashcore ledger runs --ledger {ledger}` lists its runs"
    )]
    NoRun {
        /// The ledger.
        ledger: PathBuf,
    },
}

/// A shape: many dimensions are cut.
fn dims(shape: &[usize]) -> String {
    match shape {
        [] => "[]".to_owned(),
        shape => format!("[{}]", ptx::quote::list(shape.iter().map(usize::to_string))),
    }
}
