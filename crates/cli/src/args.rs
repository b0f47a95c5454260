//! The arguments of the command line. Each command checks the values of its own arguments.

use std::path::PathBuf;
use std::time::Duration;

use bench::suites;
use clap::{Args, Parser, Subcommand};
use problem::{Band, DTypes};

mod capture;
mod evolve;
pub mod forecast;
mod kernel;
mod plans;
mod run;

pub use capture::Capture;
pub use evolve::Evolve;
pub use kernel::{Check, Compiling, Explain, Stated};
pub use plans::{PlansAdd, PlansCheck, PlansClear, PlansCommand, PlansList};
pub use run::Run;

/// The exit codes of [`crate::Status`].
const EXIT_CODES: &str = "Exit codes: 0 success; 1 a check or comparison failed; 2 no verdict was \
possible, or a bug in FlashCore; 3 bad usage, or a file, ledger or device that cannot be used.";

/// Fused attention, and an automated search that tunes it.
#[derive(Debug, Parser)]
#[command(name = "flashcore", version, about, arg_required_else_help = true, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub output: Output,
}

/// Options of every command. They may be given before or after the command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub struct Output {
    /// Print JSON instead of text; the book describes each output with a schema
    #[arg(long, global = true)]
    pub json: bool,
    /// Show no progress and no notes; errors are still shown
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more: tools and settings that were used, all hazards, the time taken
    #[arg(short, long, global = true)]
    pub verbose: bool,
    /// When to colour the output; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto", value_enum)]
    pub color: Colour,
}

/// When to colour the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Colour {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check, time or predict, and diagnose every version of the kernel, from the first slow one to the fused
    /// one; write a report
    Climb(Climb),
    /// Check a kernel (PTX, CUDA C++ or Triton) in the emulator: data races, out-of-bounds accesses,
    /// wrong results
    ///
    /// Exit code: 0 passed, 1 failed, 2 incomplete, 3 bad usage.
    Check(Check),
    /// Explain why a kernel is slow (root causes, predicted time, cost of each line), or which plan a problem
    /// gets
    ///
    /// A kernel that fails its check is explained too. Exit code: 0 explained, whatever the verdict; 3 bad
    /// usage.
    Explain(Explain),
    /// Compute attention on tensors in files, on the CPU
    Run(Run),
    /// Time kernels: on the CPU against PyTorch if python3 can import torch, on a GPU plan against plan
    Bench(Bench),
    /// Write a run of the evolution as one page, without scripts or network access
    Report(Report),
    /// Show a ledger in a browser, live
    Serve(Serve),
    /// Show how the error of attention on 8-bit inputs grows with the number of keys, with the sums of
    /// Hopper's tensor cores
    Accuracy(Accuracy),
    /// Show what this machine has and what each part enables
    Doctor(Doctor),
    /// Run kernels in the emulator on given memory, for another program: requests on standard input, answers
    /// with the memory and the hazards on standard output
    ///
    /// A request is one line of JSON, followed by the bytes of its buffers; so is an answer. The page of JSON
    /// outputs in the book describes both. Exit code: 0 standard input ended, 3 a request that cannot be
    /// read; a launch that cannot run gets an answer.
    Emulate(Emulate),
    /// Record launches of kernels of another program on a GPU, to be checked anywhere: PTX, launch file and
    /// memory
    ///
    /// The program runs under a library that wraps the CUDA driver (LD_PRELOAD). Exit code: 0 recorded, 1 no
    /// launch was selected, 2 a selected launch cannot be checked, and the reason is printed; 3 bad usage.
    Capture(Capture),
    /// Evaluate candidates: one task per line on standard input, one outcome per line on standard output,
    /// both JSON
    #[command(hide = true)]
    Worker(Worker),
    /// Restrict this process, then replace it by a shell command: `evolve --proposer-sandbox` runs this
    #[command(hide = true)]
    Sandboxed(Sandboxed),
    /// Search for faster kernels: make, check, time and race candidates; write every result to a ledger
    ///
    /// Some of the candidates are random samples (a control group), and one is an A/A test of the baseline.
    /// For a device that this machine lacks (h200, l4, …) the time model predicts the times, and all output
    /// says so. Ctrl-C ends the run after the tasks under way; --resume continues it.
    ///
    /// Exit code: 0 complete or stopped, 2 an internal error of FlashCore, 3 bad usage or a device that
    /// cannot be used.
    Evolve(Evolve),
    /// List the best plans in the ledger for a problem on a device
    Topk(Topk),
    /// List, add, check or remove the plans that `run`, the Rust API and the Python package use on this
    /// machine's processor
    #[command(subcommand)]
    Plans(PlansCommand),
    /// Record the time that an idea is expected to give, and score the forecasts of people and of the time
    /// model
    #[command(subcommand)]
    Forecast(forecast::ForecastCommand),
    /// Export the facts of a ledger, check it, or list its runs
    #[command(subcommand)]
    Ledger(LedgerCommand),
    /// Commands of FlashCore's developers: compare a GPU with the emulator, measure its unit costs, update
    /// documents
    #[command(subcommand)]
    Lab(LabCommand),
    /// Print the completions of a shell, to be loaded by it
    Completions(Completions),
    /// Print the manual page, or write the pages of all commands
    Man(Man),
    /// Print the version, the commit and the targets of this build
    Version(Version),
}

#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// Update the tables in documents from the rows in evidence/
    ///
    /// Exit code: 0 done, or with --check no table is stale; 1 --check found a stale table; 3 bad usage, a
    /// document that cannot be read, or a table without rows (then nothing is written).
    Tables(Tables),
    /// Compare this machine's GPU with the emulator: attention, arithmetic, repeats, compute-sanitizer
    ///
    /// Exit code: 0 all passed, 1 something is wrong, 2 something could not be tested (for example without
    /// the sanitizer), 3 bad usage or no GPU.
    Selftest(Selftest),
    /// Measure the unit costs of a GPU for the time model (ex2, shuffle, ldmatrix, mma, cp.async, barrier,
    /// launch, …)
    ///
    /// Writes a description of the machine for the option --machine of other commands. Exit code: 0 all
    /// measured, 1 some probes failed, 3 bad usage or no GPU.
    Microbench(Microbench),
}

#[derive(Debug, Args)]
pub struct Completions {
    /// Shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// Command whose page is printed, such as check or ledger export; default: the program
    pub command: Vec<String>,
    /// Folder for the pages of all commands, flashcore.1, flashcore-check.1, …
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Version {
    #[arg(from_global)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Climb {
    /// Device to measure on: cpu (times are predicted), cuda, cuda:N, or auto (a GPU if there is one)
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// File for the page, or - for standard output instead of the table
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub out: PathBuf,
    #[arg(from_global)]
    pub json: bool,
    /// Check each version with every kind of input and schedule; takes about half as long again
    #[arg(long)]
    pub thorough: bool,
}

#[derive(Debug, Args)]
pub struct Bench {
    /// Device: cpu, cuda, cuda:N (the GPU's number), or auto (a GPU if there is one)
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Seconds for each problem and mode; default: 3 on a CPU, 1 on a GPU
    #[arg(long, value_parser = race_seconds)]
    pub seconds: Option<f64>,
    #[arg(long, value_name = "PROBLEM", conflicts_with = "shape", help = problem_help("A problem; repeatable"))]
    pub problem: Vec<String>,
    /// Append rows to FILE, in a folder that is there (default: evidence/DEVICE.jsonl); refused unless the
    /// commit is known and clean
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub evidence: Option<Option<PathBuf>>,
    #[arg(from_global)]
    pub json: bool,
    /// CPU: number of threads; default: all cores
    #[arg(long, value_parser = positive::<usize>)]
    pub threads: Option<usize>,
    /// CPU: one problem instead of the suite: BATCHxHEADSxSEQxDIM, such as 1x8x512x64
    #[arg(long, value_name = "SHAPE")]
    pub shape: Option<String>,
    /// Element type of --shape: f32, f16, bf16, tf32, e4m3 or e5m2, or the types of Q, K, V and O as in
    /// e4m3/e4m3/bf16:f16
    #[arg(long, default_value = "f32", requires = "shape", conflicts_with = "problem")]
    pub dtype: DTypes,
    /// Mask of --shape: none, causal, causal-top-left, window:BEFORE:AFTER or window-top-left:BEFORE:AFTER
    #[arg(long, default_value = "none", requires = "shape", conflicts_with = "problem")]
    pub mask: Band,
    /// GPU: suite of problems: mission (the reference problem, also causal and bf16), small, forward, ampere,
    /// windows or fp8; repeatable; default: mission
    #[arg(long)]
    pub suite: Vec<String>,
    /// GPU: plan to time instead of the chosen one; JSON, as `explain --problem` or `topk` prints it;
    /// repeatable: the first plan races against the others
    #[arg(long, value_name = "FILE.json")]
    pub plan: Vec<PathBuf>,
    /// GPU: warm, cold, both, or sustained (long enough for the clock to settle at the power limit); default:
    /// both
    #[arg(long)]
    pub mode: Option<String>,
    /// GPU: race the first plan against itself N times, loading it again each time, and count the undecided
    /// races
    #[arg(long, value_name = "N", value_parser = positive::<u32>)]
    pub control: Option<u32>,
}

#[derive(Debug, Args)]
pub struct Tables {
    #[arg(from_global)]
    pub json: bool,
    /// Documents to update
    #[arg(required = true, value_name = "FILE.md")]
    pub documents: Vec<PathBuf>,
    /// Folder to which the paths of documents and rows are relative
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub root: PathBuf,
    /// Change nothing; fail if a table differs from its rows
    #[arg(long)]
    pub check: bool,
}

#[derive(Debug, Args)]
pub struct Accuracy {
    #[arg(from_global)]
    pub json: bool,
    /// Most keys: a power of two from 512 to 1048576
    #[arg(long, value_parser = count::<usize>, value_name = "N", default_value_t = 131_072)]
    pub keys: usize,
    /// File for a page with the curves, or - for standard output instead of the table
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Append a row per error to FILE, in a folder that is there (default: evidence/emulator.jsonl); refused
    /// unless the commit is known and clean
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub evidence: Option<Option<PathBuf>>,
}

#[derive(Debug, Args)]
pub struct Doctor {
    #[arg(from_global)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Emulate {
    /// The output is JSON with and without this option
    #[arg(from_global)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Selftest {
    /// Run fewer checks: seconds instead of minutes
    #[arg(long)]
    pub quick: bool,
    /// Use only kernels of this family: mma, wgmma, small_streamed or small_at_once; repeatable
    #[arg(long, value_name = "NAME", value_parser = family)]
    pub family: Vec<kernels::Family>,
    #[arg(from_global)]
    pub json: bool,
    /// Number of the GPU, from 0
    #[arg(long, value_parser = whole::<i32>, value_name = "N", default_value_t = 0)]
    pub device: i32,
    /// Do not run compute-sanitizer
    #[arg(long)]
    pub no_sanitizer: bool,
    /// Append a row to FILE, in a folder that is there; refused unless the commit is known
    #[arg(long, value_name = "FILE")]
    pub evidence: Option<PathBuf>,
    /// Use the emulator instead of a GPU, to test the self-test
    #[arg(long)]
    pub emulator: bool,
    /// Run the short list, which the sanitizer watches
    #[arg(long, hide = true)]
    pub under_sanitizer: bool,
}

#[derive(Debug, Args)]
pub struct Sandboxed {
    /// Folder that the process may write
    #[arg(long, value_name = "PATH")]
    pub folder: PathBuf,
    /// File or folder that the process may read
    #[arg(long, value_name = "PATH")]
    pub read: Vec<PathBuf>,
    /// Environment variable to keep
    #[arg(long, value_name = "NAME")]
    pub env: Vec<String>,
    /// Shell command
    #[arg(last = true, value_name = "LINE")]
    pub line: String,
}

#[derive(Debug, Args)]
pub struct Worker {
    /// Machine description, as `lab microbench --out` writes it; the time model uses it
    #[arg(long, value_name = "FILE.json")]
    pub machine: Option<PathBuf>,
    /// Use the emulator instead of a GPU, to test the search
    #[arg(long)]
    pub emulator: bool,
    /// Print a time limit before each step, so that the parent process can end a worker that hangs
    #[arg(long)]
    pub watched: bool,
}

#[derive(Debug, Args)]
pub struct Microbench {
    /// GPU: cuda or cuda:N
    #[arg(long, default_value = "cuda")]
    pub device: String,
    /// File for the machine description
    #[arg(long, value_name = "FILE.json", default_value = "machine.json")]
    pub out: PathBuf,
    #[arg(from_global)]
    pub json: bool,
    /// Run only the probes with this word in their names; other constants keep their values from the table
    #[arg(long, value_name = "WORD")]
    pub only: Option<String>,
    /// Run the probes on the emulator, whose clock counts instructions, to test the command
    #[arg(long)]
    pub emulator: bool,
}

/// The option of every command that reads or writes a ledger.
#[derive(Debug, Args)]
pub struct LedgerFile {
    /// Ledger file
    #[arg(long = "ledger", value_name = "FILE", default_value = "flashcore.ledger")]
    pub path: PathBuf,
}

#[derive(Debug, Args)]
pub struct Topk {
    #[arg(long, help = shape_help("The problem (default: the only one of the ledger)"))]
    pub problem: Option<String>,
    /// Device: cpu or cuda (of this machine), or a name or words of a name, such as h200; default: the
    /// ledger's only one, or the only one that is of this machine
    #[arg(long)]
    pub device: Option<String>,
    /// Number of plans to list
    #[arg(short, value_name = "N", default_value_t = 10, value_parser = positive::<usize>)]
    pub k: usize,
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Subcommand)]
pub enum LedgerCommand {
    /// Write all facts: to FILE.jsonl as one JSON object per line, or with --parquet to a folder as one file
    /// per table
    Export(LedgerExport),
    /// Check every page, reference and summary of the file
    ///
    /// Exit code: 0 sound, 1 something disagrees, 3 damaged or no ledger.
    Check(LedgerCheck),
    /// List the runs, newest first
    Runs(LedgerRuns),
}

#[derive(Debug, Args)]
pub struct LedgerExport {
    /// The file to write, or - for standard output; the folder with --parquet
    #[arg(value_name = "FILE.jsonl|FOLDER")]
    pub to: PathBuf,
    /// Write one Parquet file per table
    #[arg(long)]
    pub parquet: bool,
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct LedgerCheck {
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct LedgerRuns {
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct Report {
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
    /// Number of the run; default: the latest
    #[arg(long, value_parser = whole::<i64>, value_name = "N")]
    pub run: Option<i64>,
    /// File for the page, or - for standard output
    #[arg(long, value_name = "FILE", default_value = "evolution.html")]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub struct Serve {
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
    /// Port; 0 for a free one
    #[arg(long, value_name = "N", default_value_t = 8765, value_parser = port)]
    pub port: u16,
    /// Address to listen at; anyone who can reach it can read the ledger
    #[arg(long, value_parser = address, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub bind: std::net::IpAddr,
}

/// The help of an option that takes a problem: its purpose, then the notation.
fn problem_help(what: &str) -> String {
    format!("{what}: {}", suites::FORM)
}

/// Like [`problem_help`], for searches and the ledger, whose problems have neither softcap nor LSE.
fn shape_help(what: &str) -> String {
    format!("{what}: {}", suites::SHAPE_FORM)
}

/// Default time limit for all emulator runs together, in seconds. It ends kernels that loop forever.
const TIMEOUT: &str = "600";
/// Largest time limit in seconds: 31 years.
const MOST_SECONDS: f64 = 1e9;

/// Reads a time limit.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds <= MOST_SECONDS);
    let limit = seconds.map(Duration::from_secs_f64).filter(|limit| !limit.is_zero());
    limit.ok_or_else(|| format!("expected a number of seconds above 0, at most {MOST_SECONDS:.0}"))
}

/// Reads the duration of a race in seconds.
fn race_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds <= 3600.0);
    seconds.ok_or_else(|| "expected a number of seconds above 0, at most 3600".to_owned())
}

/// Reads a percentage.
fn percent(text: &str) -> Result<f64, String> {
    let percent = text.parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
    percent.ok_or_else(|| "expected a number from 0 to 100".to_owned())
}

/// Reads a count, 0 or more.
fn count<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| "expected a whole number, 0 or more".to_owned())
}

/// Reads a count, 1 or more.
fn positive<N: std::str::FromStr + PartialOrd + From<u8>>(text: &str) -> Result<N, String> {
    text.parse::<N>()
        .ok()
        .filter(|count| *count >= N::from(1))
        .ok_or_else(|| "expected a whole number, 1 or more".to_owned())
}

/// Reads a number.
fn number<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| "expected a number".to_owned())
}

/// Reads a whole number.
fn whole<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| "expected a whole number".to_owned())
}

/// Reads an address.
fn address(text: &str) -> Result<std::net::IpAddr, String> {
    text.parse().map_err(|_| "expected an IP address, such as 127.0.0.1".to_owned())
}

/// Reads a port.
fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "expected a port, 0 to 65535".to_owned())
}

/// Reads a GPU architecture that exists.
fn target(text: &str) -> Result<ptx::Target, String> {
    let name = text.strip_prefix("sm_").unwrap_or(text);
    let known = ptx::Target::KNOWN.contains(&name).then(|| name.parse().ok()).flatten();
    known.ok_or_else(|| format!("expected an architecture, one of {}", ptx::Target::KNOWN.join(", ")))
}

/// Reads the name of a kernel family.
fn family(name: &str) -> Result<kernels::Family, String> {
    let accepted = || format!("expected {}", kernels::Family::ALL.map(kernels::Family::name).join(", "));
    kernels::Family::named(name).ok_or_else(accepted)
}
