//! The arguments of `flashcore forecast`.

use clap::{ArgGroup, Args, Subcommand};

use super::{LedgerFile, number, positive, shape_help, whole};

#[derive(Debug, Subcommand)]
pub enum ForecastCommand {
    /// Add a forecast and print its number
    Add(ForecastAdd),
    /// Record the measured time of a forecast
    Outcome(ForecastOutcome),
    /// List the forecasts of people, newest first
    List(ForecastList),
    /// Score each author with measured forecasts: bias, coverage of the interval, rank correlation, error
    Score(ForecastScore),
    /// Correct an author's forecasts: fit a map to the older half of the measured ones, and test it on the
    /// newer half. A map that helps is kept and applied to later forecasts of the time model
    Recalibrate(ForecastRecalibrate),
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("of what").args(["device", "candidate"]).required(true))]
pub struct ForecastAdd {
    /// The idea in words
    pub hypothesis: String,
    /// Name of the person who makes the forecast
    #[arg(long, value_name = "NAME")]
    pub author: String,
    /// Device: cpu or cuda (of this machine), or a name, such as h200
    #[arg(long)]
    pub device: Option<String>,
    #[arg(long, help = shape_help("The problem"))]
    pub problem: Option<String>,
    /// Candidate of the ledger, on its own device and problem; its measurement is the outcome
    #[arg(long, value_parser = whole::<i64>, value_name = "N", conflicts_with_all = ["device", "problem"])]
    pub candidate: Option<i64>,
    /// Expected time, µs
    #[arg(long, value_parser = number::<f64>)]
    pub us: f64,
    /// Lower end of the expected interval, µs; default: 10 % below --us
    #[arg(long, value_parser = number::<f64>, value_name = "US")]
    pub low: Option<f64>,
    /// Upper end of the expected interval, µs; default: 10 % above --us
    #[arg(long, value_parser = number::<f64>, value_name = "US")]
    pub high: Option<f64>,
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastOutcome {
    /// Number of the forecast
    #[arg(value_parser = whole::<i64>)]
    pub forecast: i64,
    /// Measured time, µs
    #[arg(long, value_parser = number::<f64>)]
    pub us: f64,
    /// A note to keep with the outcome
    #[arg(long, default_value = "")]
    pub note: String,
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastList {
    /// Number of forecasts to list
    #[arg(short, value_name = "N", default_value_t = 50, value_parser = positive::<usize>)]
    pub n: usize,
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastScore {
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}

#[derive(Debug, Args)]
pub struct ForecastRecalibrate {
    /// Author of the forecasts
    #[arg(long, value_name = "NAME", default_value = "model")]
    pub author: String,
    /// Device: cpu or cuda (of this machine), or a name or words of a name, such as h200
    #[arg(long)]
    pub device: String,
    #[arg(from_global)]
    pub json: bool,
    #[command(flatten)]
    pub ledger: LedgerFile,
}
