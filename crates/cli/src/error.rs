//! The error type of the command.

use std::path::PathBuf;

use host::store::{self, StoreError};

/// Why a command stopped. The message names the argument, its value and what is accepted.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The server cannot listen, or stopped listening.
    #[error("cannot serve: {0}")]
    Serve(std::io::Error),
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[from] std::io::Error),
    /// A file that cannot be read.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// A file or folder that cannot be written.
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    /// The environment names no folder for the file of saved plans.
    #[error("missing a folder for saved plans: set FLASHCORE_CONFIG_DIR, XDG_CONFIG_HOME or HOME")]
    NoConfigFolder,
    /// The command writes for another program and has no JSON output.
    #[error("invalid value '--json' for {0}: expected no --json, because another program reads the output")]
    NoJson(&'static str),
    /// The value of an argument is not accepted.
    #[error(
        "invalid value '{}' for {argument}: expected {accepted}{}",
        ptx::quote::cut(value),
        near(value, accepted)
    )]
    Argument { argument: &'static str, value: String, accepted: String },
    /// An argument is missing that another argument needs.
    #[error("missing {argument}: {why}")]
    Missing { argument: &'static str, why: String },
    /// An option has no effect without another option.
    #[error("{argument} needs {needed}")]
    Needs {
        argument: &'static str,
        /// The other option, with a hint where one helps.
        needed: &'static str,
    },
    /// An output file would replace an input file.
    #[error(
        "{argument} {path} is the same file as {input} {source_path}; name another file, so that the \
        input is not overwritten"
    )]
    Overwrites { argument: &'static str, path: PathBuf, input: &'static str, source_path: PathBuf },
    /// A comment of the source that allows a finding and cannot be read.
    #[error(transparent)]
    Comment(#[from] check::sources::CommentError),
    /// PTX that does not parse.
    #[error("{path}: {error}")]
    Parse { path: PathBuf, error: ptx::ParseError },
    /// The launched kernel uses a feature that the emulator does not support.
    #[error("incomplete: {0}")]
    Unknown(Box<crate::unjudged::Unjudged>),
    /// A Triton kernel that does not compile.
    #[error(transparent)]
    Triton(#[from] host::triton::TritonError),
    /// PTX that violates a rule of the verifier.
    #[error(
        "{path}: the PTX is invalid ({} error{}):\n{violations}", violations.0.len(), if violations.0.len() == 1 { "" } else { "s" }
    )]
    Verify { path: PathBuf, violations: ptx::Violations },
    /// The verifier rejects a kernel that the command generated.
    #[error("a kernel that this command generated is invalid PTX, which is a bug in FlashCore: {0}")]
    Generator(#[from] ptx::Violations),
    /// An internal error of FlashCore.
    #[error(
        "internal error: {0}\nThis is a bug in FlashCore, not an error in the input, and there is no \
        verdict. Please report it \
         at {repository}/issues, with the files and this command; RUST_BACKTRACE=1 prints a backtrace.",
        repository = env!("CARGO_PKG_REPOSITORY")
    )]
    Internal(host::panics::Panic),
    /// A tensor has the wrong number of dimensions.
    #[error("{tensor} has shape {}; expected four dimensions, [batch, heads, sequence, dim]", dims(shape))]
    Rank { tensor: &'static str, shape: Vec<usize> },
    /// Tensors of different element types.
    #[error("{tensor} holds {dtype}, but q holds {expected}; expected one element type for q, k and v")]
    DTypes {
        tensor: &'static str,
        dtype: problem::DType,
        /// The element type of q.
        expected: problem::DType,
    },
    /// Tensors whose shapes do not fit each other.
    #[error(
        "{tensor} has shape {}, which does not fit {other} of shape {}: {rule}",
        dims(shape),
        dims(expected)
    )]
    Shapes {
        tensor: &'static str,
        shape: Vec<usize>,
        /// The tensor that `tensor` must fit.
        other: &'static str,
        /// The shape of `other`.
        expected: Vec<usize>,
        /// The dimensions that must agree.
        rule: &'static str,
    },
    /// The program was built without the search.
    #[error(
        "this program was built without the search and its ledger; build it with `--features search`, as in `cargo run --release \
         --features search -- evolve`"
    )]
    NoSearch,
    /// An error of the ledger.
    #[cfg(feature = "search")]
    #[error(transparent)]
    Ledger(#[from] ledger::LedgerError),
    /// A ledger that is so damaged that nothing can be exported.
    #[error(
        "{path} is damaged: {what}; none of it can be read. Restore it from a copy, or use another file with --ledger"
    )]
    BeyondExport {
        path: PathBuf,
        /// SQLite's description of the damage.
        what: String,
    },
    /// A request to `emulate` that cannot be read, after which the next one has no known beginning.
    #[error("invalid request: {0}")]
    Request(String),
    /// A kernel file with an unknown extension.
    #[error("invalid value '{0}' for FILE: expected a .ptx file, a .cu file or FILE.py:FUNCTION")]
    Extension(PathBuf),
    /// An option about a language in which the kernel is not written.
    #[error("{argument} is for {of}, but {path} is {is}; omit {argument}")]
    OtherLanguage {
        argument: &'static str,
        /// The language of the option.
        of: &'static str,
        path: PathBuf,
        /// The language of the file.
        is: &'static str,
    },
    /// The repository is not at a clean commit, so the rows could not name one.
    #[error(
        "--evidence: the commit is unknown, because this folder is not in a repository, its repository \
        has uncommitted changes, or the program was built from another commit; commit the changes and \
        build again, or omit --evidence"
    )]
    Unclean,
    /// The program was built without a known commit. Rows from a GPU machine name the commit of the build,
    /// because that machine need not have the repository.
    #[error(
        "--evidence: the commit of this program is unknown; build it with `cargo xtask evidence`, or omit \
        --evidence"
    )]
    Unbuilt,
    /// The system cannot provide the sandbox that was asked for.
    #[error("cannot set up the sandbox for a proposer: {0}")]
    Sandbox(String),
    /// The device failed during a race.
    #[error("the race failed: {0}")]
    Race(#[from] bench::RaceError<driver::DriverError>),
    #[error(transparent)]
    Driver(#[from] driver::DriverError),
    #[error(transparent)]
    Workbench(#[from] bench::gpu::WorkbenchError),
    #[error(transparent)]
    Tables(#[from] report::tables::TableError),
    #[error(transparent)]
    Contestant(#[from] bench::gpu::ContestantError),
    /// A launch file that cannot be used, or a kernel that it cannot launch.
    #[error("{path}: {error}{}", check::names::legend(&error.to_string()))]
    Launch { path: PathBuf, error: Box<check::launchfile::LaunchError> },
    /// A launch on the command line that cannot be used.
    #[error("{}", stated(error, args))]
    Stated {
        error: Box<check::launchfile::LaunchError>,
        /// The values of `--arg`.
        args: Vec<String>,
    },
    /// A CUDA C++ file whose kernels are all templates.
    #[error(
        "{path}: all kernels are templates ({templates}); name an instance, such as --instantiate '{example}'"
    )]
    Templates { path: PathBuf, templates: String, example: String },
    /// An option that only applies to the other kind of device.
    #[error(
        "invalid value '{value}' for {argument}: expected --device {device}, since {argument} is for {whose}"
    )]
    OtherDevice {
        argument: &'static str,
        value: String,
        /// "processors" or "GPUs".
        whose: &'static str,
        /// A value of `--device` to which the option applies.
        device: &'static str,
    },
    #[error(transparent)]
    Gate(#[from] check::gate::GateError),
    #[error(transparent)]
    Climb(#[from] climb::ClimbError),
    #[error(transparent)]
    Rung(#[from] climb::ladder::RungError),
    #[error(transparent)]
    Kernel(#[from] kernels::KernelError),
    #[error(transparent)]
    Nvrtc(#[from] host::tools::NvrtcError),
    #[error(transparent)]
    Machine(#[from] calibrate::machine::MachineFileError),
    #[cfg(feature = "search")]
    #[error(transparent)]
    Worker(#[from] evolve::workers::ServeError),
    #[error(transparent)]
    Store(StoreError),
    #[error(transparent)]
    File(#[from] check::files::FileError),
    #[error(transparent)]
    Bench(#[from] bench::BenchError),
    #[error(transparent)]
    Cpu(#[from] cpu::CpuError),
    #[error(transparent)]
    Problem(#[from] problem::ProblemError),
    #[cfg(feature = "search")]
    #[error(transparent)]
    Evolution(#[from] evolve::EvolveError),
    #[cfg(feature = "search")]
    #[error(transparent)]
    Setup(evolve::setup::SetupError),
    /// The ledger has no run that can be resumed.
    #[error(
        "--resume: {ledger} has no run that can be continued; `flashcore ledger runs --ledger {ledger}` lists its runs"
    )]
    NoRun { ledger: PathBuf },
}

#[cfg(feature = "search")]
impl From<evolve::setup::SetupError> for CliError {
    fn from(mut error: evolve::setup::SetupError) -> CliError {
        use evolve::setup::SetupError;
        if let SetupError::Argument { argument, .. } | SetupError::Memory { argument, .. } = &mut error {
            *argument = match *argument {
                "family" => "--family",
                "problem" => "--problem",
                "held_out" => "--held-out",
                other => other,
            };
        }
        match error {
            SetupError::Argument { argument, value, accepted } => {
                CliError::Argument { argument, value, accepted }
            }
            error => CliError::Setup(error),
        }
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> CliError {
        match error {
            StoreError::Write { path, source } if store::is_standard(&path) => CliError::Output(source),
            error => CliError::Store(error),
        }
    }
}

/// An error of a launch file in the words of the command line: the options in place of the keys. The names of
/// the module are explained.
fn stated(error: &check::launchfile::LaunchError, args: &[String]) -> String {
    let mut said = error.to_string();
    if let check::launchfile::LaunchError::Value { value, .. } = error
        && let Some(list) = value.strip_prefix('[').and_then(|value| value.strip_suffix(']'))
    {
        // Lists stand without brackets on the command line.
        said = said.replacen(&format!("'{value}'"), &format!("'{}'", list.replace(", ", ",")), 1);
    }
    said = said.strip_prefix("launch file: ").map(str::to_owned).unwrap_or(said);
    for (key, option) in [
        ("launch.entry", "--entry"),
        ("launch.grid", "--grid"),
        ("launch.block", "--block"),
        ("launch.cluster", "--cluster"),
        ("launch.dynamic_shared", "--dynamic-shared"),
        ("[[arg]] given", "--arg given"),
    ] {
        said = said.replace(key, option);
    }
    for (index, arg) in args.iter().enumerate() {
        let mut option = String::from("--arg ");
        option.push_str(&ptx::quote::cut(arg));
        said = said.replace(&format!("[[arg]] {index} "), &format!("{option} "));
        said = said.replace(&format!("[[arg]] {index}:"), &format!("{option}:"));
    }
    said + &check::names::legend(&error.to_string())
}

/// A shape as text. A long list of dimensions is cut.
fn dims(shape: &[usize]) -> String {
    match shape {
        [] => "[]".to_owned(),
        shape => format!("[{}]", ptx::quote::list(shape.iter().map(usize::to_string))),
    }
}

/// The listed value of `accepted` that a mistyped value probably meant, as the end of a sentence. Empty if
/// none is within one edit of the value for each three characters, and if `accepted` lists no values.
fn near(value: &str, accepted: &str) -> String {
    let value = value.to_lowercase();
    let edits = |word: &&str| strsim::damerau_levenshtein(&word.to_lowercase(), &value);
    // The values after `a GPU that runs sm_90a: `, without explanations in parentheses.
    let list = accepted.rsplit(": ").next().unwrap_or_default();
    let items = list.split([',', ';']).flat_map(|item| item.split(" or "));
    let items = items.map(|item| item.split(" (").next().unwrap_or_default().trim());
    let words: Vec<&str> = items.filter(|item| !item.is_empty() && !item.contains(' ')).collect();
    let words = words.iter().copied().filter(|word| words.len() > 1 && word.len() > 2);
    let nearest =
        words.min_by_key(edits).filter(|word| (1..=value.chars().count() / 3).contains(&edits(word)));
    nearest.map_or(String::new(), |word| format!("; did you mean '{word}'?"))
}

#[cfg(test)]
mod tests {
    use super::{near, stated};

    #[test]
    fn errors_of_a_stated_launch_name_the_options() {
        let value = |key: &str| check::launchfile::LaunchError::Value {
            key: key.to_owned(),
            value: "[0]".to_owned(),
            accepted: "more".to_owned(),
        };
        let args = ["x:f32:1".to_owned(), "n:i32=1.5".to_owned()];
        assert_eq!(stated(&value("launch.grid"), &args), "invalid value '0' for --grid: expected more");
        assert_eq!(
            stated(&value("[[arg]] 1 value"), &args),
            "invalid value '0' for --arg n:i32=1.5 value: expected more"
        );
    }

    #[test]
    fn a_typo_is_recognised() {
        let devices = "cpu, cuda, cuda:N, h200, rtx4090";
        assert_eq!(near("cdua", devices), "; did you mean 'cuda'?");
        assert_eq!(near("H20", devices), "; did you mean 'h200'?");
        assert_eq!(near("tpu-pod", devices), "");
        assert_eq!(near("x", devices), "");
        assert_eq!(near("H20", "a GPU that runs sm_90: H200, H100"), "; did you mean 'H200'?");
        assert_eq!(near("wrm", "warm, cold, both (warm and cold), sustained"), "; did you mean 'warm'?");
        // Words of prose are no values.
        assert_eq!(near("fils", "a file, since --json prints to standard output"), "");
        assert_eq!(near("ones", "one plan as JSON, as `explain --problem` prints it"), "");
    }
}
