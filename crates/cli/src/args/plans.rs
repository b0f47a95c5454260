//! The arguments of `flashcore plans`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{race_seconds, shape_help};

#[derive(Debug, Subcommand)]
pub enum PlansCommand {
    /// List the saved plans, and say which of them calls on this machine use
    List(PlansList),
    /// Keep a plan for a problem on this machine
    Add(PlansAdd),
    /// Race the saved plans of this machine against the built-in choice
    ///
    /// Exit code: 0 no plan is slower than the built-in choice, 1 one is, 3 bad usage.
    Check(PlansCheck),
    /// Remove saved plans
    Clear(PlansClear),
}

#[derive(Debug, Args)]
pub struct PlansList {
    #[arg(from_global)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PlansAdd {
    #[arg(long, help = shape_help("The problem"))]
    pub problem: String,
    /// Plan, JSON, as `topk` prints it; - for standard input
    #[arg(long, value_name = "FILE.json")]
    pub plan: PathBuf,
    /// Threads of the calls that use the plan; default: those that calls have on this machine
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    #[arg(from_global)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PlansCheck {
    /// Seconds for each race
    #[arg(long, value_parser = race_seconds, default_value_t = 2.0)]
    pub seconds: f64,
    #[arg(from_global)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PlansClear {
    #[arg(long, help = shape_help("Only the plans of this problem on this machine"))]
    pub problem: Option<String>,
    #[arg(from_global)]
    pub json: bool,
}

/// Reads the number of threads of a plan.
fn threads(text: &str) -> Result<usize, String> {
    let threads = text.parse().ok().filter(|threads| (1..=cpu::MAX_THREADS).contains(threads));
    threads.ok_or_else(|| format!("expected a whole number from 1 to {}", cpu::MAX_THREADS))
}
