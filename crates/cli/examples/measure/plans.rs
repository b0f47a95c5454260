//! The plans of problems that nobody tuned for.
//!
//! `plans add TABLE.jsonl [ROWS.jsonl …]` adds the rows of `tune --sweep` to the table of sweeps
//! (`crates/kernels/tuned/sweep.jsonl`), with plans that are faster than those of the table, and weighs all
//! times anew. `plans regret [--evidence FILE] [ROWS.jsonl …]` prints how much longer the chosen plans take
//! than the fastest measured ones: for each problem of the shipped table by the other problems' times, for
//! folds of them, of which no factor and no error is known, and for the problems of the files, which should
//! be none of the table. `plans factors` prints the factors of
//! the families.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

use bench::provenance::Provenance;
use host::store::append_line;
use kernels::select::{self, Device, Shape, Sweep, SweepLine, SweptTimes, TunedTable};
use kernels::{Arch, Plan};
use problem::Problem;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{Outcome, Usage, with};

type Error = Box<dyn std::error::Error>;

/// Largest number of plans for a head dim.
const MOST_PLANS: usize = 16;
/// A plan joins the list if the mean time falls by at least this share.
const LEAST_GAIN: f64 = 0.0005;
/// The measure of choices for folds of the table's problems, and their number.
const FOLDED: &str = "folds";
const FOLDS: usize = 6;

/// A row of `tune --sweep`.
#[derive(Deserialize)]
struct Row {
    problem: Shape,
    plan: Plan,
    us_median: f64,
    commit: Option<String>,
    run: String,
    /// The device, its driver, and the time of the run.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A swept problem with the times of its plans.
struct Swept {
    problem: Problem,
    rows: Vec<Row>,
}

impl Swept {
    fn us(&self, plan: &Plan) -> Option<f64> {
        self.rows.iter().find(|row| row.plan == *plan).map(|row| row.us_median)
    }

    fn best(&self) -> f64 {
        self.rows.iter().map(|row| row.us_median).fold(f64::INFINITY, f64::min)
    }

    /// The times of a plan with the heads of a group apart and packed.
    fn both(&self, plan: &Plan) -> [Option<f64>; 2] {
        select::packings(plan, &self.problem, &Arch::SM_90).map(|plan| self.us(&plan?).map(rounded))
    }

    /// The line of a table with these plans.
    fn line(&self, plans: &[Plan]) -> String {
        let (p, first) = (&self.problem, &self.rows[0]);
        let us = plans.iter().map(|plan| self.both(plan)).collect();
        let extents = [p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_kv];
        let (commit, run) = (first.commit.clone(), first.run.clone());
        let weights = Vec::new();
        json!(SweepLine::Times(SweptTimes { extents, mask: p.band, us, weights, commit, run })).to_string()
    }
}

pub fn main(words: &[String]) -> Outcome {
    match words.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        Some(("add", [table, files @ ..])) => add(table, files)?,
        Some(("regret", [flag, file, files @ ..])) if flag == "--evidence" => regret(files, Some(file))?,
        Some(("regret", files)) => regret(files, None)?,
        Some(("factors", [])) => {
            Sweep::builtin().families().iter().for_each(|family| println!("{family:.3?}"))
        }
        _ => return Err(Usage.into()),
    }
    Ok(true)
}

/// The problems of files of rows, by their shapes.
fn read(files: &[String]) -> Result<Vec<Swept>, Error> {
    let mut all: BTreeMap<String, Swept> = BTreeMap::new();
    for file in files {
        for line in fs::read_to_string(file)?.lines() {
            let row: Row = serde_json::from_str(line)?;
            let problem = row.problem.problem();
            all.entry(row.problem.to_string()).or_insert(Swept { problem, rows: Vec::new() }).rows.push(row);
        }
    }
    Ok(all.into_values().collect())
}

/// Adds rows to a table. Its plans stay, and others join them where they help.
fn add(table: &str, files: &[String]) -> Result<(), Error> {
    let mut dims: BTreeMap<usize, Vec<Swept>> = BTreeMap::new();
    for swept in read(files)? {
        dims.entry(swept.problem.head_dim).or_default().push(swept);
    }
    let (mut lines, mut plans) = (Vec::new(), 0);
    for line in fs::read_to_string(table)?.lines() {
        match serde_json::from_str(line)? {
            SweepLine::Plans(mut stated) => {
                let problems = dims.remove(&stated.head_dim).unwrap_or_default();
                join(&mut stated.plans, &problems);
                plans = stated.plans.len();
                lines.push(json!(SweepLine::Plans(stated.clone())).to_string());
                lines.extend(problems.iter().map(|swept| swept.line(&stated.plans)));
            }
            SweepLine::Times(mut times) => {
                times.us.resize(plans, [None; 2]);
                times.weights.clear();
                lines.push(json!(SweepLine::Times(times)).to_string());
            }
        }
    }
    let sweep = Sweep::parse(&lines.join("\n"))?;
    let weighed: String = sweep.weighed().iter().map(|line| json!(line).to_string() + "\n").collect();
    fs::write(table, weighed)?;
    Ok(())
}

/// Adds the plan that helps most to a list, until none helps.
fn join(list: &mut Vec<Plan>, problems: &[Swept]) {
    let mut others: Vec<Plan> = Vec::new();
    for row in problems.iter().flat_map(|swept| &swept.rows) {
        let is_apart = json!(row.plan).get("packing").is_none_or(|packing| packing == "apart");
        if is_apart && !others.contains(&row.plan) && !list.contains(&row.plan) {
            others.push(row.plan.clone());
        }
    }
    // Without a plan, a problem counts as ten times as long as with the best one.
    let least = |plan: &Plan, swept: &Swept| {
        swept.both(plan).into_iter().flatten().fold(10.0 * swept.best(), f64::min) / swept.best()
    };
    let least_of = |plan: &Plan| -> Vec<f64> { problems.iter().map(|swept| least(plan, swept)).collect() };
    let mut now = vec![10.0_f64; problems.len()];
    for plan in &*list {
        now.iter_mut().zip(least_of(plan)).for_each(|(now, us)| *now = now.min(us));
    }
    let times: Vec<Vec<f64>> = others.iter().map(least_of).collect();
    while list.len() < MOST_PLANS {
        let gain = |times: &Vec<f64>| {
            let of_each = now.iter().zip(times).map(|(now, us)| (now / us.min(*now)).ln());
            of_each.sum::<f64>() / now.len().max(1) as f64
        };
        let gains: Vec<f64> = times.iter().map(gain).collect();
        let Some(best) = (0..gains.len()).max_by(|&a, &b| gains[a].total_cmp(&gains[b])) else { break };
        if gains[best] < LEAST_GAIN {
            break;
        }
        now.iter_mut().zip(&times[best]).for_each(|(now, us)| *now = now.min(*us));
        list.push(others[best].clone());
    }
    let mean = now.iter().map(|ratio| ratio.ln()).sum::<f64>() / now.len().max(1) as f64;
    println!(
        "{} plans; {} problems take {:.2} % longer than with any plan",
        list.len(),
        now.len(),
        100.0 * mean
    );
}

/// The regret of the choices for some problems.
struct Regret {
    measure: &'static str,
    /// The chosen plan's time over the shortest one, and words about the problem.
    ratios: Vec<(f64, String)>,
    /// Problems whose chosen plan was not measured.
    unmeasured: usize,
}

impl Regret {
    fn new(measure: &'static str) -> Regret {
        Regret { measure, ratios: Vec::new(), unmeasured: 0 }
    }

    fn add(&mut self, problem: &Problem, plan: &Plan, us: f64, best: f64) {
        let (words, family) = (bench::suites::words(problem), plan.family());
        self.ratios.push((us / best, format!("{words}: {us:.2} µs with {family}, {best:.2} at best")));
    }

    /// The choices of a table for swept problems.
    fn of(measure: &'static str, table: &TunedTable, all: &[Swept]) -> Result<Regret, Error> {
        let mut regret = Regret::new(measure);
        for swept in all {
            let plan = select::choose(&swept.problem, &DEVICE, table)?.plan;
            match swept.us(&plan) {
                Some(us) => regret.add(&swept.problem, &plan, us, swept.best()),
                None => regret.unmeasured += 1,
            }
        }
        Ok(regret)
    }

    /// A row of evidence.
    fn row(&self) -> Value {
        let logs = self.ratios.iter().map(|(ratio, _)| ratio.ln());
        let mean = logs.sum::<f64>() / self.ratios.len().max(1) as f64;
        let longer: Vec<f64> = self.ratios.iter().map(|(ratio, _)| rounded(ratio - 1.0)).collect();
        json!({
            "suite": "regret", "measure": self.measure, "impl": "flashcore",
            "unmeasured": self.unmeasured, "mean": rounded(mean), "longer": longer,
        })
    }

    /// The row, and the ten worst problems. Puts the worst problem first.
    fn show(&mut self) {
        self.ratios.sort_by(|a, b| b.0.total_cmp(&a.0));
        println!("{}", self.row());
        self.ratios.iter().take(10).for_each(|(ratio, words)| println!("  {ratio:.3}  {words}"));
    }
}

const DEVICE: Device = Device { name: "NVIDIA H200", arch: Arch::SM_90 };

/// Prints regrets. With a file for evidence, appends those of folds and of problems that are in no fit. Rows
/// of the latter have the provenance of the times, and the commit of the choices.
fn regret(files: &[String], evidence: Option<&String>) -> Result<(), Error> {
    let sweep = Sweep::builtin();
    let now = Provenance::of_cpu(Path::new("."), 1);
    let append = |regret: &Regret, about: &Value| -> Result<(), Error> {
        let Some(file) = evidence else { return Ok(()) };
        let commit = now.commit.as_ref().ok_or("a row needs a build of a clean commit")?;
        let row = with(with(regret.row(), about), &json!({ "commit": commit }));
        Ok(append_line(Path::new(file), &row.to_string())?)
    };
    for (measure, all) in [("left_out", sweep.held_back()), (FOLDED, sweep.folds(FOLDS))] {
        let mut regret = Regret::new(measure);
        all.iter().for_each(|held| regret.add(&held.problem, &held.plan, held.us, held.best));
        regret.show();
        if measure == FOLDED {
            let about =
                json!({ "device": DEVICE.name, "driver": "swept times", "when": now.when, "run": now.run });
            append(&regret, &about)?;
        }
    }
    println!("{:.0} µs for a choice in the median, on this machine", choice_us()?);
    let all = read(files)?;
    let Some(first) = all.iter().flat_map(|swept| &swept.rows).next() else { return Ok(()) };
    let nearest = TunedTable::builtin().with_sweep(None);
    for (measure, table) in [("predicted", TunedTable::builtin()), ("nearest_row", &nearest)] {
        let mut regret = Regret::of(measure, table, &all)?;
        regret.show();
        let others = ["device", "driver", "clocks_mhz", "compiler", "when"];
        let others = others.map(|name| (name, first.others.get(name).cloned().unwrap_or_default()));
        append(&regret, &with(json!({ "run": first.run }), &BTreeMap::from(others)))?;
    }
    Ok(())
}

/// The median time of a choice, after the first of each kind, which fits factors.
fn choice_us() -> Result<f64, Error> {
    let mut times = Vec::new();
    for _ in 0..2 {
        times.clear();
        for problem in bench::random(1, 200) {
            let start = Instant::now();
            select::choose(&problem, &DEVICE, TunedTable::builtin())?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(bench::median(&times))
}

fn rounded(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}
