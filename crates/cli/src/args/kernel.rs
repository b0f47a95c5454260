//! Arguments of the commands about a kernel file, `check` and `explain`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{TIMEOUT, count, percent, positive, problem_help, seconds, target};

#[derive(Debug, Args)]
pub struct Check {
    /// Kernel file: PTX (.ptx), CUDA C++ (.cu) or a Triton kernel (FILE.py:FUNCTION); - reads PTX from
    /// standard input
    pub file: PathBuf,
    /// Launch file: grid, block, and the meaning of each parameter; - reads it from standard input.
    /// `--suggest` writes a first one, and `flashcore man check` lists every key
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["grid", "suggest"])]
    pub launch: Option<PathBuf>,
    #[arg(from_global)]
    pub json: bool,
    /// Use fewer inputs and schedules
    #[arg(long)]
    pub quick: bool,
    /// Time limit for all emulator runs together; beyond it the verdict is incomplete
    #[arg(long, value_name = "SECONDS", default_value = TIMEOUT, value_parser = seconds)]
    pub timeout: Duration,
    /// Time limit of all runs together: run a selection of CTAs, as many as the time allows
    ///
    /// Corners of the grid come first, then CTAs that executed other instructions than those before, pairs
    /// that write to one line of 128 bytes, and others spread evenly. The verdict says how many CTAs and
    /// instructions ran; a pass is a pass of these. Unwritten outputs are not looked for, and there is no
    /// diagnosis. CTAs that may wait for each other, and several launches, run whole.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "mutants")]
    pub budget: Option<Duration>,
    /// Percentage of the kernel's instructions that must be executed; below it the verdict is incomplete
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub require_coverage: Option<f64>,
    /// Place shared variables at their declared alignment and no larger one, so that an access which needs
    /// more fails the check
    #[arg(long)]
    pub strict_alignment: bool,
    /// Findings that fail a check: gpu, those that a GPU can show; ptx, also those that only the memory model
    /// of PTX forbids: lanes that only a shuffle or a vote orders (warp_order), and the plain load that gives
    /// a compare-and-swap loop its first value (cas_seed). With gpu these are notes
    #[arg(long, value_name = "LEVEL", default_value = "gpu", value_parser = ["gpu", "ptx"])]
    pub level: String,
    /// List every source line of which a part never ran
    #[arg(long)]
    pub coverage: bool,
    /// With --json: also every hazard and every counter by line of the PTX
    #[arg(long)]
    pub lines: bool,
    /// File for the findings as SARIF 2.1.0, which code hosts show next to the source lines; - for standard
    /// output
    #[arg(long, value_name = "FILE.sarif")]
    pub sarif: Option<PathBuf>,
    /// Findings of an earlier check as --sarif wrote them: notes now, so that only new findings fail. A
    /// finding is known if its kind, its file and the text of its line are
    #[arg(long, value_name = "FILE.sarif")]
    pub baseline: Option<PathBuf>,
    /// Earlier version of the kernel, checked in the same launch: its findings are notes, and the outputs of
    /// a version that passes judge those that nothing else judges
    #[arg(long, value_name = "FILE", conflicts_with = "suggest")]
    pub against: Option<PathBuf>,
    /// File for the result as JUnit XML, which CI servers list as a test; - for standard output
    #[arg(long, value_name = "FILE.xml")]
    pub junit: Option<PathBuf>,
    /// GPU that the diagnosis and the count of registers are for: H200, H100, A100, L4 or "RTX 4090"
    /// (default: L4, or H200 where the target needs it)
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Also list what costs time on the GPU, as `explain` does
    #[arg(long)]
    pub diagnose: bool,
    /// After a pass, put up to N faults into the kernel, one at a time, and say which of them the check finds
    #[arg(long, value_name = "N", value_parser = count::<usize>)]
    pub mutants: Option<usize>,
    /// Show what printf prints in the first run
    #[arg(long)]
    pub printf: bool,
    /// File for the PTX to which line numbers refer; for CUDA C++ this is the PTX that NVRTC makes
    #[arg(long, value_name = "FILE.ptx")]
    pub keep_ptx: Option<PathBuf>,
    /// GPU architecture, such as 89 or 90a: CUDA C++ is compiled for it (default: 80), and PTX is emulated on
    /// it (default: the target of the PTX; the architecture must be able to run that target)
    #[arg(long, value_name = "NN[a]", value_parser = target)]
    pub sm: Option<ptx::Target>,
    // Options after these would be shown under their headings.
    #[command(flatten)]
    pub stated: Stated,
    #[command(flatten)]
    pub compiling: Compiling,
}

/// A launch without a launch file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Launch without a launch file")]
pub struct Stated {
    /// CTAs of the grid: X, X,Y or X,Y,Z
    #[arg(long, value_name = "X[,Y[,Z]]", value_delimiter = ',')]
    pub grid: Vec<i64>,
    /// Threads of a CTA: X, X,Y or X,Y,Z; default: the entry's .reqntid
    #[arg(long, value_name = "X[,Y[,Z]]", value_delimiter = ',', requires = "grid", conflicts_with_all = ["launch", "suggest"])]
    pub block: Option<Vec<i64>>,
    /// CTAs of a cluster; default: the entry's .reqnctapercluster, or one
    #[arg(long, value_name = "X[,Y[,Z]]", value_delimiter = ',', requires = "grid", conflicts_with_all = ["launch", "suggest"])]
    pub cluster: Option<Vec<i64>>,
    /// Dynamic shared memory in bytes
    #[arg(long, value_name = "BYTES", requires = "grid", conflicts_with_all = ["launch", "suggest"])]
    pub dynamic_shared: Option<i64>,
    /// A cooperative launch: all CTAs are resident together and may use a barrier of the grid
    #[arg(long, requires = "grid", conflicts_with_all = ["launch", "suggest"])]
    pub cooperative: bool,
    /// An argument, one for each parameter, in order: NAME:TYPE=VALUE for a number, NAME:TYPE:SHAPE[=INIT]
    /// for a buffer, such as n:i32=1000 or x:f32:64x32=random; INIT as in a launch file, LOW..HIGH or
    /// @FILE.npy or @FILE.safetensors:NAME
    #[arg(long, value_name = "ARG", requires = "grid", conflicts_with_all = ["launch", "suggest"])]
    pub arg: Vec<String>,
    /// The kernel's entry; default: the only one
    #[arg(long, value_name = "NAME", conflicts_with = "launch")]
    pub entry: Option<String>,
    /// Write a first launch file for the kernel's signature to standard output, and check nothing
    #[arg(long, conflicts_with_all = [
        "grid", "quick", "timeout", "budget", "require_coverage", "strict_alignment", "level", "coverage", "lines", "sarif",
        "baseline", "junit", "gpu", "diagnose", "mutants", "printf",
    ])]
    pub suggest: bool,
}

/// How CUDA C++ is compiled.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "CUDA C++")]
pub struct Compiling {
    /// Standard of C++; default: 17
    #[arg(long = "std", value_name = "NN", requires = "file", value_parser = ["14", "17", "20"])]
    pub standard: Option<String>,
    /// Folder that is searched for included files, after that of the source; repeatable
    #[arg(short = 'I', long = "include", value_name = "FOLDER", requires = "file")]
    pub include: Vec<PathBuf>,
    /// Macro to define; repeatable
    #[arg(short = 'D', long = "define", value_name = "NAME[=VALUE]", requires = "file")]
    pub define: Vec<String>,
    /// Template instance to compile, such as 'scale<float, 64>'; repeatable
    #[arg(long, value_name = "NAME<…>", requires = "file")]
    pub instantiate: Vec<String>,
    /// Another source file of the kernel, compiled together with FILE; repeatable
    #[arg(long = "with", value_name = "FILE.cu", requires = "file")]
    pub others: Vec<PathBuf>,
    /// Triton: the types of the parameters that are not constants, such as '*fp32:16,*fp32,i32' (:16 promises
    /// a multiple of 16); default: those of the arguments, as Triton's launcher chooses them
    #[arg(long, value_name = "TYPES", value_delimiter = ',', requires = "file", help_heading = "Triton")]
    pub signature: Vec<String>,
    /// Triton: a parameter that is a constant, such as BLOCK=64 or DTYPE=tl.float16; repeatable
    #[arg(long, value_name = "NAME=VALUE", requires = "file", value_parser = constant, help_heading = "Triton")]
    pub constexpr: Vec<(String, String)>,
    /// Triton: warps of a CTA; default: Triton's
    #[arg(long, value_name = "N", value_parser = warps, requires = "file", help_heading = "Triton")]
    pub num_warps: Option<u32>,
    /// Triton: stages of the software pipeline; default: Triton's
    #[arg(long, value_name = "N", value_parser = positive::<u32>, requires = "file", help_heading = "Triton")]
    pub num_stages: Option<u32>,
}

/// Reads the number of warps of a Triton kernel.
fn warps(text: &str) -> Result<u32, String> {
    let warps = text.parse().ok().filter(|&warps: &u32| warps.is_power_of_two() && warps <= 32);
    warps.ok_or_else(|| "expected a power of two up to 32".to_owned())
}

/// `NAME=VALUE`.
fn constant(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE, such as BLOCK=64")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

#[derive(Debug, Args)]
pub struct Explain {
    /// Kernel file: PTX, CUDA C++ or a Triton kernel (FILE.py:FUNCTION), or - for PTX from standard input;
    /// default: the kernel of the reference problem (1,8,512,64,f16) on the GPU
    #[arg(requires = "launch")]
    pub file: Option<PathBuf>,
    /// Launch file
    #[arg(long, value_name = "FILE.toml", requires = "file")]
    pub launch: Option<PathBuf>,
    /// Machine whose time is predicted: H200, H100, A100, L4 or "RTX 4090" (default: L4); with --problem, the
    /// same as --device
    #[arg(long)]
    pub gpu: Option<String>,
    /// Machine whose time is predicted: a description that `lab microbench` wrote
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["gpu", "problem"])]
    pub machine: Option<PathBuf>,
    #[arg(from_global)]
    pub json: bool,
    /// Time limit for all emulator runs together; beyond it the verdict is incomplete
    #[arg(long, value_name = "SECONDS", default_value = TIMEOUT, value_parser = seconds, conflicts_with = "problem")]
    pub timeout: Duration,
    /// Kernel to compare with, PTX or CUDA C++, under the same launch file
    #[arg(long, value_name = "FILE", requires = "file")]
    pub against: Option<PathBuf>,
    /// File for the PTX to which line numbers refer; for CUDA C++ this is the PTX that NVRTC makes
    #[arg(long, value_name = "FILE.ptx", conflicts_with = "problem")]
    pub keep_ptx: Option<PathBuf>,
    /// Number of lines to list, the most expensive first
    #[arg(long, default_value_t = 15, value_parser = count::<usize>)]
    pub lines: usize,
    /// GPU architecture, such as 89 or 90a: CUDA C++ is compiled for it (default: 80), and PTX is emulated on
    /// it (default: the target of the PTX; the architecture must be able to run that target)
    #[arg(long, value_name = "NN[a]", value_parser = target, requires = "file")]
    pub sm: Option<ptx::Target>,
    #[arg(long, conflicts_with_all = ["file", "launch", "against", "lines", "sm", "Compiling"], help = problem_help("Say instead which plan computes a problem, and why"))]
    pub problem: Option<String>,
    /// Device of --problem: cuda (this machine's GPU, the default), H200, H100, A100, L4 or "RTX 4090"
    #[arg(long, value_name = "NAME", conflicts_with = "gpu")]
    pub device: Option<String>,
    /// Check this plan for --problem instead of choosing one; JSON as this command or `topk` prints it, a
    /// file with it, or - for standard input
    #[arg(long, value_name = "JSON|FILE")]
    pub plan: Option<String>,
    #[command(flatten)]
    pub compiling: Compiling,
}
