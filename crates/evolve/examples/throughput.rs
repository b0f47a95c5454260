//! Measures how fast candidates are made: plans drawn, checked and identified per second, PTX emitted and
//! assembled per second and, with a GPU, kernels of a small problem checked and timed per second.
//!
//! ```text
//! cargo run --release -p flashcore-evolve --example throughput [-- ROWS.jsonl]
//! ```
//!
//! A build that knows its commit appends a row for each rate, with the machine: the GPU if there is one.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use bench::provenance::Provenance;
use flashcore_evolve::evaluate::cuda::Card;
use flashcore_evolve::evaluate::kernel::Bench;
use flashcore_evolve::evaluate::{Cuda, GpuCard};
use flashcore_evolve::space::Space;
use flashcore_evolve::{Candidate, Evaluator, Finding, Stage, Target, Task};
use host::store::{StoreError, append_line};
use kernels::Arch;
use kernels::select::Shape;
use ledger::CandidateId;
use predict::machine::H200;
use problem::{Band, DType, Problem};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rayon::prelude::*;
use serde_json::{Value, json};

/// Duration of each measurement, s.
const SECONDS: f64 = 5.0;
/// Number of kernels that are checked and timed on a GPU. `TIMING` is the duration of a timing, s, as in an
/// evolution.
const JUDGED: usize = 60;
const TIMING: f64 = 0.05;

/// The measured rates.
#[derive(Default)]
struct Rates(Vec<(String, f64)>);

impl Rates {
    /// Prints a rate and stores it.
    fn say(&mut self, problem: &str, what: &str, count: f64, began: Instant, more: &str) {
        let rate = count / began.elapsed().as_secs_f64();
        println!("{problem}: {rate:.1}/s {what}{more}");
        self.0.push((format!("{problem}: {what}"), rate));
    }

    /// Appends a row for each rate.
    fn append(&self, rows: &Path, provenance: &Provenance) -> Result<(), StoreError> {
        let threads = rayon::current_num_threads();
        self.0.iter().try_for_each(|(measure, rate)| {
            let mut row = json!({
                "suite": "throughput", "impl": "flashcore", "measure": measure, "rate": rate, "unit": "1/s", "threads": threads,
            });
            if let (Value::Object(row), Value::Object(part)) = (&mut row, json!(provenance)) {
                row.extend(part);
            }
            append_line(rows, &row.to_string())
        })
    }
}

fn main() -> ExitCode {
    let rows = std::env::args().nth(1).map(PathBuf::from);
    let mut rates = Rates::default();
    host(&mut rates);
    let provenance = match GpuCard::open(0) {
        Ok(card) => {
            let provenance = Provenance::of_gpu(card.info());
            judged(card, &mut rates);
            provenance
        }
        Err(fault) => {
            println!("no GPU: {fault}");
            Provenance::of_cpu(Path::new("."), rayon::current_num_threads())
        }
    };
    match rows.filter(|_| provenance.commit.is_some()).map(|rows| rates.append(&rows, &provenance)) {
        None | Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

/// Rates that need no GPU.
fn host(rates: &mut Rates) {
    let problems = [
        ("mission", Problem::mission()),
        ("large", Problem::new(4, 16, 4096, 128, DType::Bf16).with_band(Band::CAUSAL)),
    ];
    for (name, problem) in problems {
        let space = Space::gpu(&problem, &Arch::SM_90, &[]);
        let mut rng = SmallRng::seed_from_u64(1);
        let (began, mut plans, mut distinct) = (Instant::now(), 0_u64, HashSet::new());
        let mut kept = Vec::new();
        while began.elapsed().as_secs_f64() < SECONDS {
            let Some(plan) = space.random(&mut rng) else { continue };
            plans += 1;
            if distinct.insert(plan.hash()) && kept.len() < 400 {
                kept.push(plan);
            }
        }
        let more = format!(" ({} distinct)", distinct.len());
        rates.say(name, "plans drawn blindly, checked and identified", plans as f64, began, &more);
        let parent = kept.first().unwrap_or(&space.families[0].template);
        let (began, mut plans) = (Instant::now(), 0_u64);
        while began.elapsed().as_secs_f64() < SECONDS {
            let Some(plan) = space.mutate(parent, &mut rng) else { continue };
            distinct.insert(plan.hash());
            plans += 1;
        }
        rates.say(name, "mutants checked and identified", plans as f64, began, "");
        let Some(bench) = Bench::of(&H200) else { return };
        let began = Instant::now();
        let emitted =
            |plan| bench.bound(plan, &problem).is_ok_and(|bound| !bound.kernel.module.to_string().is_empty());
        let count = kept.par_iter().filter(|plan| emitted(plan)).count();
        rates.say(name, "PTX emitted", count as f64, began, "");
        if bench.ptxas.is_none() {
            println!("{name}: no ptxas");
            continue;
        }
        let began = Instant::now();
        let count = kept.par_iter().take(160).filter(|plan| bench.build(plan, &problem).is_ok()).count();
        let more = format!(" ({count}, {} threads)", rayon::current_num_threads());
        rates.say(name, "PTX emitted and assembled by ptxas", count as f64, began, &more);
    }
}

/// Rates of kernels through the gate and a short timing on a GPU. The kernels are compiled beforehand.
fn judged(card: GpuCard, rates: &mut Rates) {
    let (problem, arch, name) = (Problem::mission(), card.arch(), card.info().name.clone());
    let space = Space::gpu(&problem, &arch, &[]);
    let mut evaluator = Cuda::new(card, None);
    let mut rng = SmallRng::seed_from_u64(2);
    let task = |number, stage, subject: &Candidate| Task {
        candidate: CandidateId(number),
        stage,
        target: Target::Cuda { ordinal: 0 },
        problem: Shape::of(&problem),
        subject: subject.clone(),
        incumbent: None,
        seconds: TIMING,
    };
    let mut compiled = Vec::new();
    let began = Instant::now();
    while compiled.len() < JUDGED {
        let Some(plan) = space.random(&mut rng) else { continue };
        let screen = task(compiled.len() as i64, Stage::Screen, &plan);
        if let Finding::Screened { .. } = evaluator.evaluate(&screen).finding {
            compiled.push(plan);
        }
    }
    rates.say(&name, "kernels compiled on one thread", JUDGED as f64, began, "");
    // The first candidate of a problem waits for the reference results.
    evaluator.evaluate(&task(0, Stage::Microbench, &compiled[0]));
    let (began, mut timed, mut held) = (Instant::now(), 0, 0.0);
    for (number, plan) in compiled.iter().enumerate() {
        let outcome = evaluator.evaluate(&task(number as i64, Stage::Microbench, plan));
        held += outcome.device_seconds;
        match outcome.finding {
            Finding::Timed { .. } => timed += 1,
            other => println!("{}: {other:?}", plan.hash()),
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let more = format!(" ({timed} of {JUDGED} right, {held:.1} of {seconds:.1} s with the device)");
    rates.say(&name, "kernels through gate and short timing", JUDGED as f64, began, &more);
}
