//! The arguments of `flashcore evolve`.

use std::path::PathBuf;

use clap::Args;

use super::{LedgerFile, count, number, positive, shape_help, whole};

#[derive(Debug, Args)]
pub struct Evolve {
    /// Device: cpu, cuda or cuda:N (measured on this machine), or h200, h100, a100, l4, rtx4090 (predicted)
    #[arg(long, default_value = "cpu")]
    pub device: String,
    #[arg(long, value_name = "PROBLEM", help = shape_help(
        "What is to be computed, repeatable (default: the reference problem, 1,8,512,64,f16)"
    ))]
    pub problem: Vec<String>,
    /// Problem that the search does not see and on which a winner must not lose; repeatable; default: half
    /// and twice the length of each problem on a GPU, none on a CPU, whose plans serve their own problem only
    #[arg(long, value_name = "PROBLEM")]
    pub held_out: Vec<String>,
    /// Time limit of the search with its races, minutes; default: 2, or none if --candidates is given
    #[arg(long, value_parser = number::<f64>)]
    pub minutes: Option<f64>,
    /// Maximum number of candidates, including random samples
    #[arg(long, value_name = "N", value_parser = positive::<usize>)]
    pub candidates: Option<usize>,
    /// Kind of search: full (from the best of every bound and tile shape, every operator), guided (from the
    /// best, guided by past gains and by the diagnosis) or free (random changes of the best)
    #[arg(long, default_value = "full")]
    pub configuration: String,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1, value_parser = count::<u64>)]
    pub seed: u64,
    /// Plan (JSON, as `explain --problem` or `topk` prints it) that is the only starting plan and the
    /// baseline
    #[arg(long, value_name = "FILE.json")]
    pub seed_plan: Option<PathBuf>,
    /// Use only kernels of this family: mma, wgmma, small_streamed or small_at_once; repeatable
    #[arg(long, value_name = "NAME")]
    pub family: Vec<String>,
    /// Fraction of the candidates that are random samples, a control group that shows what the search gains
    #[arg(long, value_parser = number::<f64>, value_name = "SHARE", default_value_t = 0.5)]
    pub random_share: f64,
    /// Program that proposes kernels: it reads a JSON object on standard input and answers with one (see the
    /// chapter on proposers in the book)
    #[arg(long, value_name = "CMD")]
    pub proposer: Option<String>,
    /// Run the proposer in a sandbox: no network, few environment variables, a temporary folder to write, and
    /// read access to the system's programs and libraries and the files that CMD names (see the chapter on
    /// proposers in the book)
    #[arg(long, requires = "proposer")]
    pub proposer_sandbox: bool,
    /// Environment variable that a proposer in a sandbox may see; repeatable
    #[arg(long, value_name = "NAME", requires = "proposer_sandbox")]
    pub proposer_env: Vec<String>,
    /// File or folder that a proposer in a sandbox may read; repeatable
    #[arg(long, value_name = "PATH", requires = "proposer_sandbox")]
    pub proposer_read: Vec<PathBuf>,
    /// Time of the best library on the first problem, µs, for the advice at the end
    #[arg(long = "library-us", value_parser = number::<f64>, value_name = "US")]
    pub peer_us: Option<f64>,
    /// Use the whole budget, even if no further gain is expected
    #[arg(long)]
    pub no_early_stop: bool,
    /// Continue a run of the ledger with its original settings: the latest unfinished run, or the run of this
    /// number
    #[arg(long, value_parser = whole::<i64>, value_name = "RUN", num_args = 0..=1, conflicts_with_all = [
        "device", "problem", "held_out", "minutes", "candidates", "configuration", "seed", "seed_plan", "family", "random_share",
        "proposer", "proposer_sandbox", "peer_us", "no_early_stop", "price",
    ])]
    pub resume: Option<Option<i64>>,
    /// Price of an hour of the device
    #[arg(long, value_parser = number::<f64>, visible_alias = "price-per-hour", value_name = "PRICE")]
    pub price: Option<f64>,
    /// Threads that build and check candidates while the device measures; default: all cores but one (with
    /// --device cpu: one)
    #[arg(long, value_name = "N", value_parser = positive::<usize>)]
    pub jobs: Option<usize>,
    /// CPU: do not keep a promoted plan for `run`, the Rust API and the Python package (see `flashcore
    /// plans`)
    #[arg(long)]
    pub no_keep: bool,
    /// Append winners to FILE as rows of the table of tuned plans; GPU kernels only
    #[arg(long, value_name = "FILE.jsonl")]
    pub promote: Option<PathBuf>,
    /// Append the report to FILE as a row with its commit; refused unless the commit is known and clean
    #[arg(long, value_name = "FILE.jsonl")]
    pub evidence: Option<PathBuf>,
    #[arg(from_global)]
    pub json: bool,
    /// Use the emulator instead of a GPU, with times from the time model, to test the search
    #[arg(long, hide = true)]
    pub emulator: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}
