//! The arguments of the command line. Each command checks the values of its own arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand};
use lab::bench::suites;

/// The exit codes of [`crate::Status`].
const EXIT_CODES: &str = "Exit codes: 0 done, and right as far as it was to be judged; 1 something is wrong; 2 something could not be \
     judged, or a fault of FlashCore's; 3 bad usage, or a file, ledger or device that cannot be used.";

/// Fused attention, and the machine that makes it faster.
#[derive(Debug, Parser)]
#[command(name = "flashcore", version, about, arg_required_else_help = true, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Climb from the first slow kernel to the fused one: prove, predict, diagnose each rung; write a report
    Climb(Climb),
    /// Prove or refute anyone's kernel (PTX, or CUDA C++ through NVRTC) on the emulator
    ///
    /// Exit code: 0 proven, 1 refuted, 2 incomplete, 3 bad usage.
    #[command(after_long_help = launch_file())]
    Check(Check),
    /// Say why a kernel is slow (root causes, predicted time, what each line costs), or which plan a problem gets and why
    ///
    /// It explains refuted kernels, too, and does not judge: `check` does. Exit code: 0 explained, 3 bad usage.
    Explain(Explain),
    /// Compute attention on tensors in files, on this machine's processor
    Run(Run),
    /// Time kernels: on the CPU interleaved with PyTorch's where python3 can import torch, on a GPU plan against plan
    Bench(Bench),
    /// Fill the tables in documents from the rows in evidence/
    ///
    /// Exit code: 0 done, or with --check nothing is stale; 1 --check found a table that is not what its rows give; 3 bad usage, a
    /// document that cannot be read, or a table without rows, and nothing is written.
    Tables(Tables),
    /// Hold this machine's GPU against the emulator: attention, arithmetic, repeats, compute-sanitizer
    ///
    /// Exit code: 0 all passed, 1 something is wrong, 2 something could not be tested (no sanitizer, say), 3 bad usage or
    /// no GPU.
    Selftest(Selftest),
    /// Write a run of the evolution, as the ledger has it, as one page without script or network
    Report(Report),
    /// Show the ledger in a browser, live
    Serve(Serve),
    /// Show what this machine has and what that enables
    Doctor(Doctor),
    /// Measure on a GPU the unit costs that the time model rests on (ex2, shuffle, ldmatrix, mma, cp.async, barrier, launch, …)
    ///
    /// Writes the machine's description, which --machine of other commands takes. Exit code: 0 all measured, 1 some probes
    /// failed, 3 bad usage or no GPU.
    Microbench(Microbench),
    /// Evaluate candidates: one task a line on standard input, one outcome a line on standard output, both JSON
    #[command(hide = true)]
    Worker(Worker),
    /// Restrict this process, then run a line of the shell in its place: what --proposer-sandbox of `evolve`
    /// runs
    #[command(hide = true)]
    Sandboxed(Sandboxed),
    /// Search for faster kernels: candidates are made, proven, timed and raced; every fact goes into a ledger
    ///
    /// Beside the search's own candidates run an arm of blind draws and a control. On a device that is not at hand (h200, l4, …)
    /// times are the time model's, and everything says so. Ctrl-C ends after the tasks under way, and --resume goes on.
    ///
    /// Exit code: 0 ended or stopped, 2 a fault of FlashCore's, 3 bad usage or a device that cannot be used.
    Evolve(Evolve),
    /// The best plans for a problem on a device, as the ledger knows them
    Topk(Topk),
    /// Say what an idea will bring before it is measured, and see how forecasts came out: people's and the model's
    #[command(subcommand)]
    Forecast(ForecastCommand),
    /// The ledger as a file: export its facts, check it, list its runs
    #[command(subcommand)]
    Ledger(LedgerCommand),
}

#[derive(Debug, Args)]
pub struct Climb {
    /// Where the rungs are measured: cpu (predicted only), cuda, cuda:N, or auto: on a GPU where there is one
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Where the page goes
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub out: PathBuf,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
    /// Every kind of input and schedule for each rung: some minutes
    #[arg(long)]
    pub thorough: bool,
}

/// The format of the launch file, for `--help`.
fn launch_file() -> String {
    format!("The launch file, TOML; every key, with what it means:\n\n{}", lab::launchfile::FORMAT)
}

#[derive(Debug, Args)]
pub struct Check {
    /// PTX (.ptx) or CUDA C++ (.cu)
    pub file: PathBuf,
    /// The launch file: grid, block, and what each parameter is
    #[arg(long, value_name = "FILE.toml")]
    pub launch: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Fewer inputs and schedules
    #[arg(long)]
    pub quick: bool,
    /// Seconds that all runs in the emulator may take; after them the verdict is incomplete
    #[arg(long, value_name = "SECONDS", default_value = TIMEOUT, value_parser = seconds)]
    pub timeout: Duration,
    /// The share of the kernel's instructions that must have been executed, in percent; below it the verdict is incomplete
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub require_coverage: Option<f64>,
    /// Where the PTX goes to which line numbers refer: that of CUDA C++ is NVRTC's
    #[arg(long, value_name = "FILE.ptx")]
    pub keep_ptx: Option<PathBuf>,
    /// The GPU's architecture, as in 89 or 90a: what CUDA C++ is compiled for (default: 80), and what PTX is emulated on (default:
    /// its own target, which the architecture must run)
    #[arg(long, value_name = "NN[a]", value_parser = target)]
    pub sm: Option<ptx::Target>,
}

#[derive(Debug, Args)]
pub struct Explain {
    /// PTX or CUDA C++; left out: the kernel that the mission problem (1,8,512,64,f16) gets on the GPU
    #[arg(requires = "launch")]
    pub file: Option<PathBuf>,
    /// The launch file
    #[arg(long, value_name = "FILE.toml", requires = "file")]
    pub launch: Option<PathBuf>,
    /// The machine whose time is predicted: H200, H100, A100, L4 or "RTX 4090"
    #[arg(long, default_value = "L4")]
    pub gpu: String,
    /// The machine whose time is predicted, as `microbench` described it
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["gpu", "problem"])]
    pub machine: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Seconds that all runs in the emulator may take; after them the verdict is incomplete
    #[arg(long, value_name = "SECONDS", default_value = TIMEOUT, value_parser = seconds, conflicts_with = "problem")]
    pub timeout: Duration,
    /// Lines to list, the most expensive first
    #[arg(long, default_value_t = 15, value_parser = count::<usize>)]
    pub lines: usize,
    /// The GPU's architecture, as in 89 or 90a: what CUDA C++ is compiled for (default: 80), and what PTX is emulated on (default:
    /// its own target, which the architecture must run)
    #[arg(long, value_name = "NN[a]", value_parser = target)]
    pub sm: Option<ptx::Target>,
    #[arg(long, conflicts_with_all = ["file", "gpu", "lines", "sm"], help = problem_help("Say instead which plan computes a problem, and why"))]
    pub problem: Option<String>,
    /// The device of --problem: cuda (this machine's GPU, the default), H200, H100, A100, L4 or "RTX 4090"
    #[arg(long, value_name = "NAME", requires = "problem")]
    pub device: Option<String>,
    /// A plan to use for --problem instead of the chosen one, as JSON (as this command or `topk` prints it): is it possible?
    #[arg(long, value_name = "JSON", requires = "problem")]
    pub plan: Option<String>,
}

#[derive(Debug, Args)]
pub struct Run {
    /// Queries: .npy, or .safetensors with a tensor "q"; keys and values are read from there too unless given
    #[arg(long, value_name = "FILE")]
    pub q: PathBuf,
    /// Keys (tensor "k")
    #[arg(long, value_name = "FILE")]
    pub k: Option<PathBuf>,
    /// Values (tensor "v")
    #[arg(long, value_name = "FILE")]
    pub v: Option<PathBuf>,
    /// The output: .npy, or .safetensors with tensors "out" and "lse"
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Each query sees the keys up to its own position, counted from the end
    #[arg(long)]
    pub causal: bool,
    /// Each query sees the keys up to its own position, counted from the start, as PyTorch's is_causal
    #[arg(long, conflicts_with = "causal")]
    pub causal_top_left: bool,
    /// A sliding window: keys before and after the query's own that it sees, each a number or inf, as in 127,0. The query's own
    /// key is level with it counted from the end, or from the start with --causal-top-left; with either causal mask AFTER is 0
    #[arg(long, value_name = "BEFORE,AFTER")]
    pub window: Option<String>,
    /// Factor on Q·Kᵀ; default 1/sqrt(head_dim)
    #[arg(long)]
    pub scale: Option<f32>,
    /// Cap on the logits, as Gemma 2 has it: softcap · tanh(scale · q·k / softcap)
    #[arg(long, value_name = "CAP")]
    pub softcap: Option<f32>,
    /// Order of dimensions: bhsd (PyTorch) or bshd (FlashAttention)
    #[arg(long, default_value = "bhsd")]
    pub layout: String,
}

#[derive(Debug, Args)]
pub struct Bench {
    /// Where: cpu, cuda, cuda:N (the GPU's number), or auto: a GPU where there is one
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Seconds for each problem and mode; default 3 on a CPU and 1 on a GPU
    #[arg(long)]
    pub seconds: Option<f64>,
    #[arg(long, value_name = "PROBLEM", conflicts_with = "shape", help = problem_help("A problem (may be given several times)"))]
    pub problem: Vec<String>,
    /// Append rows to FILE; refused unless the commit is known and clean; default evidence/DEVICE.jsonl
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub evidence: Option<Option<PathBuf>>,
    /// Print rows as JSON lines instead of a table
    #[arg(long)]
    pub json: bool,
    /// CPU: threads; default: all cores
    #[arg(long, value_parser = count::<usize>)]
    pub threads: Option<usize>,
    /// CPU: one problem instead of the suite: BATCHxHEADSxSEQxDIM, as in 1x8x512x64
    #[arg(long, value_name = "SHAPE")]
    pub shape: Option<String>,
    /// Its element type: f32, f16 or bf16
    #[arg(long, default_value = "f32", requires = "shape")]
    pub dtype: String,
    /// Its mask: none, causal, causal-top-left or window:BEFORE:AFTER
    #[arg(long, default_value = "none", requires = "shape")]
    pub mask: String,
    /// GPU: a suite of problems: mission, small, forward or ampere; may be given several times; default: mission
    #[arg(long)]
    pub suite: Vec<String>,
    /// GPU: a plan (JSON, as `explain --problem` or `topk` prints it) instead of the chosen one; several race against each other, the
    /// first against the rest
    #[arg(long, value_name = "FILE.json")]
    pub plan: Vec<PathBuf>,
    /// GPU: warm, cold, both of these, or sustained (for so long that the clocks are those which the device's power allows); default: both
    #[arg(long)]
    pub mode: Option<String>,
    /// GPU: race the first plan against itself N times, each time anew, and count how often that is undecided
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub control: Option<u32>,
}

#[derive(Debug, Args)]
pub struct Tables {
    /// The documents
    #[arg(required = true, value_name = "FILE.md")]
    pub documents: Vec<PathBuf>,
    /// The folder that documents and rows are named from
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub root: PathBuf,
    /// Change nothing; fail where a table is not what its rows give
    #[arg(long)]
    pub check: bool,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Selftest {
    /// Less of everything: seconds instead of minutes
    #[arg(long)]
    pub quick: bool,
    /// Only kernels of this family: mma, wgmma or small; may be given several times
    #[arg(long, value_name = "NAME", value_parser = family)]
    pub family: Vec<kernels::Family>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
    /// Which GPU, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: i32,
    /// Leave compute-sanitizer out
    #[arg(long)]
    pub no_sanitizer: bool,
    /// Append a row to FILE; refused unless the commit is known
    #[arg(long, value_name = "FILE")]
    pub evidence: Option<PathBuf>,
    /// Test the emulator in place of a GPU: tests the self-test
    #[arg(long)]
    pub emulator: bool,
    /// The short list that the sanitizer runs this program with
    #[arg(long, hide = true)]
    pub under_sanitizer: bool,
}

#[derive(Debug, Args)]
pub struct Sandboxed {
    /// The folder that may be written
    #[arg(long, value_name = "PATH")]
    pub folder: PathBuf,
    /// A file or folder that may be read
    #[arg(long, value_name = "PATH")]
    pub read: Vec<PathBuf>,
    /// An environment variable that is kept
    #[arg(long, value_name = "NAME")]
    pub env: Vec<String>,
    /// A line of the shell
    #[arg(last = true, value_name = "LINE")]
    pub line: String,
}

#[derive(Debug, Args)]
pub struct Worker {
    /// A machine's description, as `microbench --out` writes it: its times are predicted by it
    #[arg(long, value_name = "FILE.json")]
    pub machine: Option<PathBuf>,
    /// The emulator in the place of a GPU: tests the search
    #[arg(long)]
    pub emulator: bool,
    /// Say before each piece of work how long it may take, for whoever ends a worker that hangs
    #[arg(long)]
    pub watched: bool,
}

#[derive(Debug, Args)]
pub struct Microbench {
    /// Which GPU: cuda, or cuda:N
    #[arg(long, default_value = "cuda")]
    pub device: String,
    /// Where the machine's description goes
    #[arg(long, value_name = "FILE.json", default_value = "machine.json")]
    pub out: PathBuf,
    /// Print the description, one JSON object, instead of the tables
    #[arg(long)]
    pub json: bool,
    /// Only the probes with this word in their names; what they do not tell stays as in the table of machines
    #[arg(long, value_name = "WORD")]
    pub only: Option<String>,
    /// Run the probes on the emulator, whose clock counts instructions: tests the command
    #[arg(long)]
    pub emulator: bool,
}

/// The option of every command that reads or writes a ledger.
#[derive(Debug, Args)]
pub struct LedgerFile {
    /// The ledger
    #[arg(long = "ledger", value_name = "FILE", default_value = "flashcore.ledger")]
    pub path: PathBuf,
}

#[derive(Debug, Args)]
pub struct Topk {
    #[arg(long, help = problem_help("The problem"))]
    pub problem: String,
    /// The device: cpu or cuda (this machine's), or the name of one, or part of it, as in h200
    #[arg(long)]
    pub device: String,
    /// How many
    #[arg(short, value_name = "N", default_value_t = 10, value_parser = count::<usize>)]
    pub k: usize,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Subcommand)]
pub enum ForecastCommand {
    /// Add a forecast; prints its number
    Add(ForecastAdd),
    /// Say how a forecast came out
    Outcome(ForecastOutcome),
    /// List people's forecasts, the newest first
    List(ForecastList),
    /// Score everyone whose forecasts came out: bias, coverage of the interval, rank correlation, error
    Score(ForecastScore),
    /// Fit a map of an author's forecasts to the older half of those that came out, judge it on the newer half, and keep it; later
    /// forecasts of the model's use it if it helped
    Recalibrate(ForecastRecalibrate),
}

impl ForecastCommand {
    /// Whether `--json` was given.
    pub fn json(&self) -> bool {
        match self {
            ForecastCommand::List(args) => args.json,
            ForecastCommand::Score(args) => args.json,
            ForecastCommand::Recalibrate(args) => args.json,
            ForecastCommand::Add(args) => args.json,
            ForecastCommand::Outcome(args) => args.json,
        }
    }
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("of what").args(["device", "candidate"]).required(true))]
pub struct ForecastAdd {
    /// The idea, in words
    pub hypothesis: String,
    /// Who says so
    #[arg(long, value_name = "NAME")]
    pub author: String,
    /// The device: cpu or cuda (this machine's), or the name of one, as in h200
    #[arg(long)]
    pub device: Option<String>,
    #[arg(long, help = problem_help("The problem"))]
    pub problem: Option<String>,
    /// A candidate of the ledger, on its device and problem: its measurement is the outcome
    #[arg(long, value_name = "N", conflicts_with_all = ["device", "problem"])]
    pub candidate: Option<i64>,
    /// The time that is expected, µs
    #[arg(long)]
    pub us: f64,
    /// Lower end of what would not surprise; default: 10 % less
    #[arg(long, value_name = "US")]
    pub low: Option<f64>,
    /// Upper end; default: 10 % more
    #[arg(long, value_name = "US")]
    pub high: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastOutcome {
    /// The forecast's number
    pub forecast: i64,
    /// The time that was measured, µs
    #[arg(long)]
    pub us: f64,
    /// Anything to remember
    #[arg(long, default_value = "")]
    pub note: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastList {
    /// How many
    #[arg(short, value_name = "N", default_value_t = 50, value_parser = count::<usize>)]
    pub n: usize,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastScore {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastRecalibrate {
    /// Whose forecasts
    #[arg(long, value_name = "NAME", default_value = "model")]
    pub author: String,
    /// For which device: cpu or cuda (this machine's), or the name of one, or part of it, as in h200
    #[arg(long)]
    pub device: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Subcommand)]
pub enum LedgerCommand {
    /// Write all facts: one JSON object a line into FILE.jsonl, or with --parquet one file a table into a folder
    Export(LedgerExport),
    /// Look over every page, reference and summary
    ///
    /// Exit code: 0 sound, 1 something disagrees, 3 damaged or no ledger.
    Check(LedgerCheck),
    /// List the runs, the newest first
    Runs(LedgerRuns),
}

impl LedgerCommand {
    /// Whether `--json` was given.
    pub fn json(&self) -> bool {
        match self {
            LedgerCommand::Check(args) => args.json,
            LedgerCommand::Runs(args) => args.json,
            LedgerCommand::Export(args) => args.json,
        }
    }
}

#[derive(Debug, Args)]
pub struct LedgerExport {
    /// The file, or the folder
    #[arg(value_name = "FILE.jsonl|FOLDER")]
    pub to: PathBuf,
    /// One Parquet file a table
    #[arg(long)]
    pub parquet: bool,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct LedgerCheck {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct LedgerRuns {
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct Report {
    #[command(flatten)]
    pub ledger: LedgerFile,
    /// Which run; default: the latest
    #[arg(long, value_name = "N")]
    pub run: Option<i64>,
    /// Where the page goes
    #[arg(long, value_name = "FILE", default_value = "evolution.html")]
    pub out: PathBuf,
}

#[derive(Debug, Args)]
pub struct Serve {
    #[command(flatten)]
    pub ledger: LedgerFile,
    /// The port; 0: one that is free
    #[arg(long, value_name = "N", default_value_t = 8765)]
    pub port: u16,
    /// The address to listen at; whoever reaches it can read the ledger
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub bind: std::net::IpAddr,
}

#[derive(Debug, Args)]
pub struct Evolve {
    /// For which device: cpu or cuda, cuda:N (this machine's, measured), or h200, h100, a100, l4, rtx4090 (predicted)
    #[arg(long, default_value = "cpu")]
    pub device: String,
    #[arg(long, value_name = "PROBLEM", help = problem_help(
        "What is to be computed (may be given several times; default: the mission problem, 1,8,512,64,f16)"
    ))]
    pub problem: Vec<String>,
    /// A problem that the search does not see and a winner must not lose on; may be given several times; default: half and twice the
    /// length of each problem
    #[arg(long, value_name = "PROBLEM")]
    pub held_out: Vec<String>,
    /// Minutes that the search may take, its races included; default: 2, unless --candidates limits it
    #[arg(long)]
    pub minutes: Option<f64>,
    /// Candidates that it may make, blind draws included
    #[arg(long, value_name = "N", value_parser = count::<usize>)]
    pub candidates: Option<usize>,
    /// How it searches: full (elites of all niches, every operator), insight (from the best, with what helped and what the diagnosis
    /// says) or free (from the best, blindly)
    #[arg(long, default_value = "full")]
    pub configuration: String,
    /// What chance begins with
    #[arg(long, default_value_t = 1, value_parser = count::<u64>)]
    pub seed: u64,
    /// A plan (JSON, as `explain --problem` or `topk` prints it) as the only seed, which is also what is to be beaten
    #[arg(long, value_name = "FILE.json")]
    pub seed_plan: Option<PathBuf>,
    /// Only kernels of this family: mma, wgmma or small; may be given several times
    #[arg(long, value_name = "NAME")]
    pub family: Vec<String>,
    /// The part of the candidates that is drawn blindly, to show what the search gains
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    pub random_share: f64,
    /// A program that proposes kernels: it reads a JSON object on its standard input and answers with one (the book has a
    /// chapter on proposers)
    #[arg(long, value_name = "CMD")]
    pub proposer: Option<String>,
    /// Run the proposer in a sandbox: no network, no files but the system's programs and libraries and those
    /// that CMD names, a temporary folder of its own to write, and few environment variables
    /// (docs/proposers.md)
    #[arg(long, requires = "proposer")]
    pub proposer_sandbox: bool,
    /// An environment variable that a proposer in a sandbox may see; may be repeated
    #[arg(long, value_name = "NAME", requires = "proposer_sandbox")]
    pub proposer_env: Vec<String>,
    /// A file or folder that a proposer in a sandbox may read; may be repeated
    #[arg(long, value_name = "PATH", requires = "proposer_sandbox")]
    pub proposer_read: Vec<PathBuf>,
    /// What the best library takes on the first problem, µs: the advice at the end compares with it
    #[arg(long = "library-us", value_name = "US")]
    pub peer_us: Option<f64>,
    /// Do not end before the budget when nothing more is to be expected
    #[arg(long)]
    pub no_early_stop: bool,
    /// Go on with a run of the ledger, as it was begun: the last one that did not end, or the one of this number
    #[arg(long, value_name = "RUN", num_args = 0..=1, conflicts_with_all = [
        "device", "problem", "held_out", "minutes", "candidates", "configuration", "seed", "seed_plan", "family", "random_share",
        "proposer", "proposer_sandbox", "peer_us", "no_early_stop", "price",
    ])]
    pub resume: Option<Option<i64>>,
    /// What an hour of the device costs
    #[arg(long, visible_alias = "price-per-hour", value_name = "PRICE")]
    pub price: Option<f64>,
    /// Threads that build and prove candidates beside the device; default: all cores but one, and of a CPU's plans one
    #[arg(long, value_name = "N", value_parser = count::<usize>)]
    pub jobs: Option<usize>,
    /// Append winners to FILE, as rows of the table of tuned plans, which is of GPU kernels
    #[arg(long, value_name = "FILE.jsonl")]
    pub promote: Option<PathBuf>,
    /// Append the report to FILE, as a row with the commit; refused unless that is known and clean
    #[arg(long, value_name = "FILE.jsonl")]
    pub evidence: Option<PathBuf>,
    /// Print one JSON object instead of the tables
    #[arg(long)]
    pub json: bool,
    /// The emulator in the place of a GPU, its times those of the time model: tests the search
    #[arg(long, hide = true)]
    pub emulator: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

/// The help of an option that takes a problem: its purpose, then the notation, which is the same for every
/// command.
fn problem_help(what: &str) -> String {
    format!("{what}: {}", suites::FORM)
}

/// Default time limit for all emulator runs together, in seconds. It ends kernels that loop forever.
const TIMEOUT: &str = "600";

/// Reads a time limit.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0);
    let limit = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    limit.ok_or_else(|| "expected a number of seconds above 0".to_owned())
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

/// Reads a GPU architecture.
fn target(text: &str) -> Result<ptx::Target, String> {
    text.parse().map_err(|_| "expected an architecture, such as 89 or 90a".to_owned())
}

/// Reads the name of a kernel family.
fn family(name: &str) -> Result<kernels::Family, String> {
    let accepted = || format!("expected {}", kernels::Family::ALL.map(kernels::Family::name).join(", "));
    kernels::Family::named(name).ok_or_else(accepted)
}
