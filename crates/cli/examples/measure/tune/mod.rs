//! Finds the fastest plans on a GPU.
//!
//! ```text
//! tune FOLDER [--family NAME …] [--near [--gene NAME …]] [--sweep|--sweep-wide] [--plans FILE]
//!     [--limit SECONDS] [--from N] SUITE|PROBLEM|random:SEED:COUNT …
//! ```
//!
//! With `--near`, the search begins with the shipped plan and the plans of a file (one JSON object per line:
//! good plans of other problems). It continues with plans that differ from the fastest in a single gene (one
//! of the named ones) until none of them is faster. Without `--near`, families are tried in turn (all that
//! support a problem, unless some are named). For each, groups of genes are applied one after the other to
//! the fastest plans so far, timed in a graph. The fastest plans of all families race in turns, together with
//! their defaults and the plan of the shipped table. `FOLDER/tuned.jsonl` gets the winners as rows of that
//! table (`kernels::select`), `FOLDER/candidates.jsonl` every timed plan. A plan that never ends, or breaks
//! the device, is written to `FOLDER/broken.jsonl` and left out, and the search continues in another process.
//! With `--sweep`, nothing is searched: `FOLDER/sweep.jsonl` gets the time of each candidate of
//! `kernels::select`, and with `--sweep-wide` of many other structures too. After the time limit no further
//! problem is started; the last line names the `--from` value for continuing.

mod compiler;
mod device;
mod sweep;

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use bench::provenance::Provenance;
use bench::{Suite, median, suites};
use device::{Candidate, Device, Tensors};
use evolve::search::{KEPT, groups, ideas, vary};
use host::child::{Ended, follow};
use host::store::append_line;
use kernels::select::{self, Kind, Shape, TunedRow, TunedTable};
use kernels::{Family, Plan};
use problem::{DType, Problem};
use serde_json::json;

use crate::{Outcome, Usage};

type Error = Box<dyn std::error::Error>;

/// Number of plans that race at the end, besides the defaults.
const FINALISTS: usize = 5;
/// Duration of the race for each of them, µs; `ROUNDS` limits the number of rounds.
const FINAL_US: f64 = 200_000.0;
const ROUNDS: RangeInclusive<usize> = 15..=400;
/// Maximum number of steps of one gene from the start of a search.
const DESCENTS: usize = 4;
/// Duration of a race's turn, µs.
const TURN_US: f64 = 150.0;
/// The beginning of a worker's output line that names the plan about to run. Other lines are for the user.
const TRIES: &str = "try ";
/// A worker that prints nothing for this long is hanging. The longest compilation of a group takes less time.
const SILENCE: Duration = Duration::from_secs(60);

struct Args {
    folder: PathBuf,
    families: Vec<Family>,
    near: bool,
    is_sweep: bool,
    is_wide: bool,
    genes: Vec<String>,
    plans: Vec<Plan>,
    limit: Duration,
    from: usize,
    worker: bool,
    problems: Vec<Problem>,
}

pub fn main(words: &[String]) -> Outcome {
    if words == [compiler::COMPILES] {
        compiler::serve()?;
        return Ok(true);
    }
    let args = parse(words)?;
    let done = if args.worker { work(&args) } else { watch(args, words) };
    done.map(|()| true)
}

fn parse(words: &[String]) -> Result<Args, Error> {
    let mut words = words.iter();
    let folder = words.next().filter(|word| !word.starts_with('-')).ok_or(Usage)?.into();
    let (mut families, mut genes, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    let (mut is_sweep, mut is_wide) = (false, false);
    let (mut near, mut plans, mut limit, mut from, mut worker) = (false, Vec::new(), Duration::MAX, 0, false);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(Usage);
        match word.as_str() {
            "--family" => {
                let name = value()?;
                let accepted = || {
                    format!(
                        "invalid value '{name}' for --family: expected {}",
                        Family::ALL.map(Family::name).join(", ")
                    )
                };
                families.push(Family::named(name).ok_or_else(accepted)?);
            }
            "--plans" => {
                let text = std::fs::read_to_string(value()?)?;
                plans = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
            }
            "--near" => near = true,
            "--sweep" => is_sweep = true,
            "--sweep-wide" => (is_sweep, is_wide) = (true, true),
            "--gene" => genes.push(value()?.clone()),
            "--limit" => limit = Duration::try_from_secs_f64(value()?.parse()?)?,
            "--from" => from = value()?.parse()?,
            "--worker" => worker = true,
            word if word.starts_with("random:") => problems.extend(drawn(word)?),
            word => match Suite::named(word) {
                Some(suite) => problems.extend(suite.problems()),
                None => problems.push(suites::parse(word).map_err(|accepted| {
                    format!("invalid value '{word}' for the problem: expected {accepted}")
                })?),
            },
        }
    }
    if families.is_empty() {
        families = Family::ALL.to_vec();
    }
    if problems.is_empty() {
        return Err(Usage.into());
    }
    Ok(Args { folder, families, near, is_sweep, is_wide, genes, plans, limit, from, worker, problems })
}

/// The problems of `random:SEED:COUNT`. They differ from those of the benchmark in having bf16 alone: f16
/// takes as long.
fn drawn(word: &str) -> Result<Vec<Problem>, Error> {
    let accepted =
        || format!("invalid value '{word}' for the problem: expected random:SEED:COUNT as in random:7:40");
    let (seed, count) = word["random:".len()..].split_once(':').ok_or_else(accepted)?;
    let (seed, count) = (seed.parse().map_err(|_| accepted())?, count.parse().map_err(|_| accepted())?);
    Ok(bench::random(seed, count).into_iter().map(|p| p.with_dtypes(DType::Bf16.into())).collect())
}

/// Starts workers one after another; each continues where the previous one ended.
fn watch(args: Args, words: &[String]) -> Result<(), Error> {
    std::fs::create_dir_all(&args.folder)?;
    let (began, mut next) = (Instant::now(), args.from);
    let mut failures = (next, 0);
    while next < args.problems.len() {
        let left = args.limit.saturating_sub(began.elapsed());
        if left.is_zero() {
            println!("time is up; --from {next} goes on from here");
            return Ok(());
        }
        let mut worker = Command::new(std::env::current_exe()?);
        worker.arg("tune").args(words).args(["--worker", "--from", &next.to_string()]);
        worker.args(["--limit", &left.min(Duration::from_secs(1 << 30)).as_secs_f64().to_string()]);
        let mut tried = None;
        let ended = follow(&mut worker, SILENCE, |line| match line.strip_prefix(TRIES) {
            Some(plan) => tried = Some(plan.to_owned()),
            None => {
                println!("{line}");
                (tried, next) = (None, next + 1);
            }
        })?;
        match (ended, tried) {
            (Ended::Exited(status), None) if status.success() && next < args.problems.len() => {
                println!("time is up; --from {next} goes on from here");
                return Ok(());
            }
            (Ended::Exited(status), _) if status.success() => {}
            (ended, Some(plan)) => {
                println!("{ended:?}: {plan}");
                append_line(&args.folder.join(BROKEN), &plan)?;
                failures = if failures.0 == next { (next, failures.1 + 1) } else { (next, 1) };
                if failures.1 == MOST_FAILURES {
                    println!("problem {next}: left out");
                    next += 1;
                }
            }
            (ended, None) => {
                println!("{ended:?} at problem {next}: left out");
                next += 1;
            }
        }
    }
    Ok(())
}

/// A problem where so many plans do not end, or break the device, is left out.
const MOST_FAILURES: u32 = 3;
/// The file of plans that must not be tried again.
const BROKEN: &str = "broken.jsonl";

fn work(args: &Args) -> Result<(), Error> {
    let device = Device::open()?.with_compilers()?;
    let provenance = Provenance::of_gpu(device.context.info());
    let broken = std::fs::read_to_string(args.folder.join(BROKEN)).unwrap_or_default();
    let broken: HashSet<&str> = broken.lines().collect();
    let began = Instant::now();
    for problem in args.problems.iter().skip(args.from) {
        let start = Instant::now();
        if began.elapsed() > args.limit {
            return Ok(());
        }
        let search = Search { device: &device, problem, args, broken: &broken, provenance: &provenance };
        match if args.is_sweep { search.sweep() } else { search.run() } {
            Ok(line) => println!("{line}  ({:.1} s)", start.elapsed().as_secs_f64()),
            Err(error) => println!("{problem:?}: {error}"),
        }
    }
    Ok(())
}

struct Search<'a> {
    device: &'a Device,
    problem: &'a Problem,
    args: &'a Args,
    broken: &'a HashSet<&'a str>,
    provenance: &'a Provenance,
}

impl Search<'_> {
    fn run(&self) -> Result<String, Error> {
        let (problem, arch) = (self.problem, &self.device.arch);
        // The family that every GPU supports provides the expected output.
        let tensors = self.device.tensors(problem, &Family::Mma.default_for(problem, arch)?)?;
        let mut found: Vec<Candidate> = Vec::new();
        let families = self.args.families.iter();
        let mut defaults: Vec<Plan> = families.filter_map(|f| f.default_for(problem, arch).ok()).collect();
        let device = select::Device { name: &self.device.context.info().name, arch: *arch };
        let shipped = select::choose(problem, &device, TunedTable::builtin())?.plan;
        if self.args.near {
            self.descend(&shipped, &tensors, &mut found)?;
        } else {
            for default in &defaults {
                self.by_groups(default, &tensors, &mut found)?;
            }
            self.try_all(vec![shipped.clone()], &tensors, &mut found)?;
        }
        defaults.push(shipped);
        found.retain(|c| c.us.is_finite());
        found.sort_by(|a, b| a.us.total_cmp(&b.us));
        for c in &found {
            let row = json!({ "problem": Shape::of(problem), "plan": c.plan, "us": c.us, "registers": c.registers });
            append_line(&self.args.folder.join("candidates.jsonl"), &row.to_string())?;
        }
        self.finals(&tensors, found, &defaults)
    }

    /// Tries groups of genes one after the other, on the fastest plans so far.
    fn by_groups(&self, default: &Plan, tensors: &Tensors, found: &mut Vec<Candidate>) -> Result<(), Error> {
        let (problem, arch) = (self.problem, &self.device.arch);
        let Some(family) = Family::named(default.family()) else { return Ok(()) };
        let (mut best, mut own) = (vec![default.clone()], Vec::new());
        self.try_all(best.clone(), tensors, &mut own)?;
        for group in groups(family, problem) {
            let plans = best.iter().flat_map(|plan| vary(plan, &group, problem, arch)).collect();
            self.try_all(plans, tensors, &mut own)?;
            own.sort_by(|a, b| a.us.total_cmp(&b.us));
            best = own.iter().take(KEPT).map(|c| c.plan.clone()).collect();
            if best.is_empty() {
                best = vec![default.clone()];
            }
        }
        found.append(&mut own);
        Ok(())
    }

    /// Starts from the shipped plan and the listed ones, and changes one gene at a time.
    fn descend(&self, shipped: &Plan, tensors: &Tensors, found: &mut Vec<Candidate>) -> Result<(), Error> {
        let (problem, arch) = (self.problem, &self.device.arch);
        let listed = self.args.plans.iter().filter(|plan| plan.check(problem, arch).is_ok());
        let mut next = vec![shipped.clone()];
        next.extend(listed.cloned());
        for _ in 0..DESCENTS {
            let before = found.first().map(|c| c.plan.clone());
            self.try_all(next, tensors, found)?;
            found.sort_by(|a, b| a.us.total_cmp(&b.us));
            let Some(best) = found.first().map(|c| c.plan.clone()) else { break };
            if before.as_ref() == Some(&best) {
                break;
            }
            let near = ideas(&best, problem, arch, &self.args.genes);
            next = near.into_iter().map(|(_, plan)| plan).collect();
        }
        Ok(())
    }

    /// Times the plans that are new.
    fn try_all(&self, plans: Vec<Plan>, tensors: &Tensors, found: &mut Vec<Candidate>) -> Result<(), Error> {
        let mut new: Vec<Plan> = Vec::new();
        for plan in plans {
            let known = new.contains(&plan) || found.iter().any(|c| c.plan == plan);
            if !known && !self.broken.contains(json!(plan).to_string().as_str()) {
                new.push(plan);
            }
        }
        for mut candidate in self.device.compile(self.problem, new) {
            println!("{TRIES}{}", json!(candidate.plan));
            if let Err(error) = self.device.try_out(&mut candidate, tensors) {
                eprintln!("{error}: {:?}", candidate.plan);
                // The device is unusable for this process, and releasing its resources would wait for the
                // kernel.
                std::process::abort();
            }
            found.push(candidate);
        }
        Ok(())
    }

    /// Races the fastest plans in turns, together with the default plans.
    fn finals(&self, tensors: &Tensors, found: Vec<Candidate>, defaults: &[Plan]) -> Result<String, Error> {
        let timed = found.len();
        let finals = |(place, c): &(usize, Candidate)| *place < FINALISTS || defaults.contains(&c.plan);
        let found: Vec<Candidate> = found.into_iter().enumerate().filter(finals).map(|(_, c)| c).collect();
        let calls = (TURN_US / found.first().ok_or("no candidate")?.us).clamp(1.0, 20.0) as u32;
        let graphs =
            found.iter().map(|c| self.device.graph(c, tensors, calls)).collect::<Result<Vec<_>, _>>()?;
        let mut times = vec![Vec::new(); found.len()];
        let turn = found.first().map_or(f64::INFINITY, |c| c.us) * f64::from(calls);
        let rounds = ((FINAL_US / turn) as usize).clamp(*ROUNDS.start(), *ROUNDS.end());
        for round in 0..rounds {
            for i in 0..graphs.len() {
                let i = (i + round) % graphs.len();
                times[i].push(self.device.time(&graphs[i], calls)?);
            }
        }
        let medians: Vec<f64> = times.iter().map(|t| median(t)).collect();
        let best = (0..found.len()).min_by(|&a, &b| medians[a].total_cmp(&medians[b])).unwrap_or(0);
        let row = self.row(&found[best].plan, medians[best]);
        append_line(&self.args.folder.join("tuned.jsonl"), &serde_json::to_string(&row)?)?;
        let of = |plan: &Plan| found.iter().position(|c| c.plan == *plan).map_or(f64::NAN, |i| medians[i]);
        let beside: Vec<String> = defaults.iter().map(|p| format!("{} {:.2}", p.family(), of(p))).collect();
        let p = self.problem;
        let rate = p.flops() / medians[best] / 1e6;
        Ok(format!(
            "D{:3} S{:5} B{:2} H{:2} {} {}: {:8.2} µs {rate:4.0} TFLOP/s (defaults: {})  {} {} regs; {timed} timed",
            p.head_dim,
            p.seq_q,
            p.batch,
            p.heads_q,
            p.dtypes,
            p.band,
            medians[best],
            beside.join(", "),
            json!(found[best].plan),
            found[best].registers,
        ))
    }

    fn row(&self, plan: &Plan, us: f64) -> TunedRow {
        let info = self.device.context.info();
        TunedRow {
            device: info.name.clone(),
            sm: self.device.arch.sm,
            multiprocessors: info.sms,
            problem: Shape::of(self.problem),
            plan: plan.clone(),
            us,
            kind: Kind::Measured,
            driver: self.provenance.driver.clone(),
            commit: self.provenance.commit.clone().unwrap_or_default(),
            run: self.provenance.run.clone(),
            when: self.provenance.when.clone(),
        }
    }
}
