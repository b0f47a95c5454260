//! Forecasts every plan that was timed: `retrospect ROWS.jsonl MACHINE`, for rows of one device
//! (`evidence/h200.jsonl`, `crates/kernels/tuned/h200.jsonl`). Prints one line for each row of FlashCore with
//! warm L2, and the quality of the forecasts for each family.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::Instant;

use check::forecast::{Fit, of_plan};
use kernels::{Arch, Plan};
use predict::Gpu;
use predict::resources::Ptxas;
use problem::{Band, DType, Layout, Problem};
use serde_json::Value;

use crate::{Outcome, Usage};

type Failure = Box<dyn std::error::Error>;

pub fn main(args: &[String]) -> Outcome {
    let [rows, machine] = args else { return Err(Usage.into()) };
    run(Path::new(rows), machine).map(|()| true)
}

fn run(rows: &Path, machine: &str) -> Result<(), Failure> {
    let gpu = Gpu::named(machine).ok_or_else(|| format!("no machine is called {machine}"))?;
    let arch = Arch::of(gpu.sm).ok_or_else(|| format!("sm_{} is not a target of the kernels", gpu.sm))?;
    let ptxas = Ptxas::find().ok();
    let mut families: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    let mut seen = HashSet::new();
    // The newest row of each plan on a problem counts.
    for line in std::fs::read_to_string(rows)?.lines().rev() {
        let row: Value = serde_json::from_str(line)?;
        let Some((problem, plan, measured)) = timed(&row) else { continue };
        if !seen.insert((format!("{problem:?}"), plan.clone())) {
            continue;
        }
        let start = Instant::now();
        let name = format!("{} {}", plan.family(), shape(&problem));
        match of_plan(&plan, &problem, gpu, &arch, ptxas.as_ref()) {
            Ok(p) => {
                let seconds = start.elapsed().as_secs_f64();
                println!(
                    "{name:40} {:9.2} µs, measured {measured:9.2}: {:.2}, in {seconds:.1} s",
                    p.us,
                    p.us / measured
                );
                families.entry(plan.family()).or_default().push((p.us, measured));
            }
            Err(error) => println!("{name:40} {error}"),
        }
    }
    for (family, pairs) in families {
        let fit = Fit::of(&pairs);
        println!(
            "{family}: {} plans, Spearman {:.3}, median error {:.1} %",
            fit.count,
            fit.spearman,
            100.0 * fit.median_error
        );
    }
    Ok(())
}

/// Problem, plan and time (µs) of a warm row of FlashCore or of a tuned table, if the plan is still valid.
fn timed(row: &Value) -> Option<(Problem, Plan, f64)> {
    let is = |name: &str, value: &str| row[name].as_str() == Some(value);
    let us = if is("kind", "measured") {
        &row["us"]
    } else if is("impl", "flashcore") && is("mode", "warm") {
        &row["us_median"]
    } else {
        return None;
    };
    let plan: Plan = serde_json::from_value(row["plan"].clone()).ok()?;
    let p = &row["problem"];
    let number = |name: &str| p[name].as_u64().map(|n| n as usize);
    let dtype = DType::OUTPUTS.into_iter().find(|d| Some(d.name()) == p["dtype"].as_str())?;
    let mask = Band::NAMED.into_iter().find(|m| Some(m.to_string().as_str()) == p["mask"].as_str())?;
    let problem =
        Problem::new(number("batch")?, number("heads_q")?, number("seq_q")?, number("head_dim")?, dtype)
            .with_band(mask)
            .with_heads_kv(number("heads_kv")?, Layout::Bhsd)
            .with_seq_kv(number("seq_kv")?, Layout::Bhsd);
    Some((problem, plan, us.as_f64()?))
}

fn shape(p: &Problem) -> String {
    let (dtype, mask) = (p.dtypes.to_string(), p.band.to_string());
    format!("B{} H{} S{} D{} {dtype} {mask}", p.batch, p.heads_q, p.seq_q, p.head_dim)
}
