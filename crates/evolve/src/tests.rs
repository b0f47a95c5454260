//! Tests of the engine on known landscapes, without a clock and without randomness beyond the seed.

use ledger::Reason;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use kernels::select::Shape;
use kernels::{Arch, Family, Plan};
use problem::{Band, DType, Problem};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::proposer::Proposal;
use super::seeding::{Wishes, gpu};
use super::space::{family, genome};
use super::*;
use bench::SpeedVerdict;
use bench::provenance::hash;
use check::gate::Verdict;
use ledger::*;

mod cuts;
mod earlier;
mod proposers;
mod rules;

use cuts::essence;

/// A pseudo-random number in [0, 1) derived from a text.
fn chance(text: &str) -> f64 {
    u32::from_str_radix(&hash(text.as_bytes())[..8], 16).unwrap_or(0) as f64 / 4_294_967_296.0
}

/// A landscape of times: a product of effects of single genes and of neighbouring genes. Some candidates are
/// wrong, some cannot be built, and one gene in each family has no effect.
struct Landscape {
    seed: u64,
    /// Relative scatter of the times.
    noise: f64,
    /// Number of evaluations by stage and kernel.
    seen: HashMap<(Stage, String), usize>,
    looks: usize,
    /// The kernel that never fails, used as the baseline.
    spared: String,
    /// Whether there is a time model.
    predicts: bool,
    /// The fraction of candidates for which the evaluator itself fails.
    panics: f64,
}

/// The gene without effect, in families that have it.
const NEUTRAL: &str = "queries_ahead";

impl Landscape {
    fn new(seed: u64, config: &Config) -> Landscape {
        let spared = Landscape::identity(&config.cases[0].baseline);
        Landscape { seed, noise: 0.004, seen: HashMap::new(), looks: 0, spared, predicts: true, panics: 0.0 }
    }

    fn us(&self, candidate: &Candidate) -> f64 {
        let seed = self.seed;
        let genes: Vec<(String, Value)> = genome(candidate).into_iter().filter(|g| g.0 != NEUTRAL).collect();
        let alone = genes
            .iter()
            .map(|(gene, value)| 1.0 + 0.5 * chance(&format!("{seed} {} {gene} {value}", family(candidate))));
        let beside = genes.windows(2).map(|two| 1.0 + 0.15 * chance(&format!("{seed} {two:?}")));
        10.0 * alone.chain(beside).product::<f64>()
    }

    fn identity(candidate: &Candidate) -> String {
        let mut genes = genome(candidate);
        genes.remove(NEUTRAL);
        hash(format!("{} {genes:?}", family(candidate)).as_bytes())
    }

    fn measure(
        &mut self,
        candidate: &Candidate,
        trial: Trial,
        problem: Shape,
        against: Option<Against>,
    ) -> Finding {
        self.looks += 1;
        let jitter = 1.0 + self.noise * (chance(&format!("{} {}", self.looks, candidate.hash())) - 0.5);
        let us = self.us(candidate) * jitter;
        let (low_us, high_us) = (us * (1.0 - self.noise), us * (1.0 + self.noise));
        let samples = vec![us; 3];
        let kind = TimeKind::Measured;
        let measurement = MeasurementFact { trial, kind, problem, samples, us, low_us, high_us, against };
        Finding::Timed { check: None, measurement }
    }

    fn race(&mut self, task: &Task, trial: Trial) -> Finding {
        let against = task.incumbent.as_ref().map(|(id, theirs)| {
            let ratio = self.us(theirs) / self.us(&task.subject);
            let (low, high, noise) = (ratio * 0.99, ratio * 1.01, 1.005);
            let verdict = match () {
                () if low > noise => SpeedVerdict::Faster,
                () if high < 1.0 / noise => SpeedVerdict::Slower,
                () => SpeedVerdict::Undecided,
            };
            Against { incumbent: *id, ratio, low, high, noise, verdict }
        });
        self.measure(&task.subject, trial, task.problem, against)
    }
}

impl Evaluator for Landscape {
    fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
        let subject = &task.subject;
        let own = Landscape::identity(subject);
        *self.seen.entry((task.stage, own.clone())).or_default() += 1;
        let fails = |share: f64, what: &str| {
            own != self.spared && chance(&format!("{} {what} {own}", self.seed)) < share
        };
        let finding = match task.stage {
            Stage::Screen => {
                if fails(0.05, "builds") {
                    let (reason, detail) = (Reason::Ptxas, "no".to_owned());
                    return Err(Rejection { stage: Stage::Screen, reason, detail });
                }
                assert!(!fails(self.panics, "panics"), "a fault of the evaluator's");
                // The model's predictions deviate by up to a tenth.
                let us = self.us(subject) * (0.9 + 0.2 * chance(&format!("model {own}")));
                let screening = Screening {
                    ptx_hash: own.clone(),
                    sass_hash: None,
                    registers: Some(64),
                    spill_bytes: Some(if fails(0.02, "spills") { 999 } else { 0 }),
                    shared_bytes: Some(0),
                    bound: Some(
                        if genome(subject).get("block_n").and_then(Value::as_u64) > Some(96) {
                            "tensor"
                        } else {
                            "latency"
                        }
                        .into(),
                    ),
                    tile: Some(genome(subject).get("block_n").map(Value::to_string).unwrap_or_default()),
                };
                let predicted_us = self.predicts.then_some([us * 0.7, us, us * 1.3]);
                Finding::Screened { screening, predicted_us, findings: json!([]) }
            }
            Stage::Check => {
                let verdict = if fails(0.05, "is right") { Verdict::Failed } else { Verdict::Passed };
                let (judge, reasons) = (Judge::Emulator, vec!["a reason".to_owned()]);
                Finding::Judged(CheckFact {
                    judge,
                    verdict,
                    reasons,
                    hazards: json!([]),
                    error_rel: None,
                    seconds: 0.0,
                })
            }
            Stage::Microbench => self.measure(subject, Trial::Microbench, task.problem, None),
            Stage::Race => self.race(task, Trial::Race),
            Stage::HeldOut => self.race(task, Trial::HeldOut),
            Stage::Propose => unreachable!("proposers are not evaluated"),
        };
        Ok(Look::without_device(finding))
    }

    fn environment(&self) -> Environment {
        Environment::default()
    }
}

/// A ledger that is removed after its test.
struct Page(PathBuf);

impl Page {
    fn new(name: &str) -> Page {
        let path = std::env::temp_dir().join(format!("flashcore-evolve-{}-{name}.db", std::process::id()));
        let page = Page(path);
        page.clear();
        page
    }

    fn open(&self) -> Ledger {
        Ledger::open(&self.0).unwrap()
    }

    fn clear(&self) {
        for end in ["", "-wal", "-shm", ".run-1.lock", ".run-2.lock", ".run-3.lock"] {
            let _ = std::fs::remove_file(format!("{}{end}", self.0.display()));
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A run on the mma family from its default plan.
fn config(problem: &Problem, candidates: usize, seed: u64) -> Config {
    let wishes = Wishes { draws: 4, ..Wishes::default() };
    let mut case = gpu(&Shape::of(problem), "NVIDIA H200", &Arch::SM_90, &wishes).unwrap();
    // A baseline that every landscape accepts, independent of the tuned table.
    case.baseline = Candidate::Gpu(Family::Mma.default_for(problem, &Arch::SM_90).unwrap());
    case.seeds.retain(|(_, seed)| *seed != case.baseline);
    let target = Target::Cuda { ordinal: 0 };
    let mut config = Config::new(target, "NVIDIA H200", Some(Arch::SM_90), vec![case]);
    (config.candidates, config.seed) = (Some(candidates), seed);
    config.early_stop = false;
    config
}

fn begin(page: &Page, config: &Config, limits: Limits) -> Evolution {
    Evolution::begin(page.open(), config.clone(), Environment::default(), None, limits).unwrap()
}

/// A run of the mission problem without a device beside it.
fn alone(name: &str, candidates: usize, seed: u64) -> (Page, Config, Evolution) {
    let (page, config) = (Page::new(name), config(&Problem::mission(), candidates, seed));
    let evolution = begin(&page, &config, Limits::ALONE);
    (page, config, evolution)
}

/// Drives a run with all tasks that it gives out open at once, answered in random order. Stops after `cut`
/// outcomes.
fn drive(evolution: &mut Evolution, landscape: &mut Landscape, order: u64, cut: usize) -> usize {
    let mut rng = SmallRng::seed_from_u64(order);
    let mut under_way: Vec<Task> = Vec::new();
    let mut told = 0;
    while told < cut {
        match evolution.ask(0.0).unwrap() {
            Ask::Task(task) => under_way.push(*task),
            Ask::Wait => {
                let at = if order == 0 { 0 } else { rng.random_range(0..under_way.len()) };
                let outcome = landscape.evaluate(&under_way.remove(at));
                evolution.tell(&Outcome { seconds: 0.0, ..outcome.clone() }).unwrap();
                // A repeated outcome counts once.
                evolution.tell(&outcome).unwrap();
                told += 1;
            }
            Ask::Propose(_) => panic!("nobody proposes"),
            Ask::Done => break,
        }
    }
    told
}

fn problems() -> [Problem; 5] {
    let p = |b, h, s, d, dtype| Problem::new(b, h, s, d, dtype);
    [
        Problem::mission(),
        p(1, 8, 512, 128, DType::Bf16).with_band(Band::CAUSAL),
        p(2, 16, 2048, 64, DType::F16).with_band(Band::CAUSAL),
        p(4, 16, 4096, 128, DType::Bf16),
        p(1, 32, 256, 64, DType::Bf16),
    ]
}

#[test]
fn it_beats_blind_draws_at_equal_budget() {
    let mut better = 0;
    let mut gains = Vec::new();
    // A single landscape may favour either arm; all of them together do not.
    let landscapes: Vec<Problem> = (0..4).flat_map(|_| problems()).collect();
    for (seed, problem) in landscapes.iter().enumerate() {
        let page = Page::new(&format!("beats-{seed}"));
        let config = config(problem, 160, seed as u64 + 1);
        let mut evolution = begin(&page, &config, Limits::ALONE);
        let mut landscape = Landscape::new(seed as u64, &config);
        drive(&mut evolution, &mut landscape, 0, usize::MAX);
        let report = json!(evolution.report());
        let arm = &report["random_arm"];
        assert_eq!((&report["candidates"]["evolution"], &arm["candidates"]), (&json!(80), &json!(80)));
        better += usize::from(arm["gain"]["verdict"] == "FASTER");
        gains.push(arm["gain"]["ratio"].as_f64().unwrap_or(f64::NAN));
        assert_eq!(report["control"]["verdict"], "UNDECIDED", "{}", report["control"]);
        // A kernel is checked and timed once. The baseline is timed twice, because the control is the same
        // kernel.
        for ((stage, own), count) in &landscape.seen {
            let most = if *own == Landscape::identity(&config.cases[0].baseline) { 2 } else { 1 };
            let once = [Stage::Check, Stage::Microbench].contains(stage);
            assert!(!once || *count <= most, "{stage:?} {count} times");
        }
    }
    let mean = (gains.iter().map(|gain| gain.ln()).sum::<f64>() / gains.len() as f64).exp();
    assert!(better >= 14 && mean > 1.2, "{better} of {}, {mean} on average: {gains:?}", gains.len());
}

#[test]
fn every_candidate_has_an_end_with_its_reason() {
    let page = Page::new("ends");
    let config = config(&Problem::mission(), 120, 9);
    let mut evolution = begin(&page, &config, Limits::beside_device(3));
    let mut landscape = Landscape { panics: 0.1, ..Landscape::new(9, &config) };
    drive(&mut evolution, &mut landscape, 5, usize::MAX);
    let report = json!(evolution.report());
    assert_eq!(report["candidates"]["total"], 120, "{report}");
    for reason in ["predicted_slow", "ptxas", "crashed", "slower"] {
        assert!(report["rejected"][reason].as_u64() > Some(0), "{reason}: {}", report["rejected"]);
    }
    let ledger = page.open();
    let known = ledger.resume(evolution.run()).unwrap();
    let mut ends: BTreeMap<Reason, u64> = BTreeMap::new();
    for candidate in &known.candidates {
        let dossier = ledger.candidate(candidate.id).unwrap();
        // A forecast precedes every time.
        let is_baseline = candidate.new.arm == Arm::Baseline;
        assert!(dossier.measurements.is_empty() || !dossier.forecasts.is_empty() || is_baseline);
        if !matches!(candidate.new.arm, Arm::Evolution | Arm::Random) {
            continue;
        }
        // Each candidate has one rejection, unless it raced and did not lose.
        match &dossier.rejections[..] {
            [] => assert!(dossier.measurements.iter().any(|m| m.trial == Trial::Race), "{:?}", dossier.known),
            [one] => *ends.entry(one.reason).or_default() += 1,
            several => panic!("{several:?}"),
        }
    }
    assert_eq!(report["rejected"], json!(ends));
    let mut deaths: BTreeMap<Reason, i64> = BTreeMap::new();
    for death in
        ledger.rejections_by_reason(evolution.run()).unwrap().iter().filter(|d| d.arm != Arm::Baseline)
    {
        *deaths.entry(death.reason).or_default() += death.candidates;
    }
    assert_eq!(report["rejected"], json!(deaths));
    let what: Vec<&str> = known.decisions.iter().map(|d| d.decision.what.as_str()).collect();
    assert!(what.contains(&"promoted") && (what.contains(&"continue") || what.contains(&"stop")), "{what:?}");
    assert_eq!(ledger.events(evolution.run()).unwrap().last().unwrap().1, RunEvent::Finished);
    // A finished run stays finished.
    assert_eq!(evolution.ask(0.0).unwrap(), Ask::Done);
    assert!(!report["held_out"].as_array().unwrap().is_empty());
}

/// Rows at the same distance are chosen by their times, so the time of a row must not be that of a lucky
/// short timing.
#[test]
fn a_promoted_row_has_the_time_of_its_race() {
    let (page, config, mut evolution) = alone("row", 60, 9);
    drive(&mut evolution, &mut Landscape { noise: 0.05, ..Landscape::new(9, &config) }, 0, usize::MAX);
    let rows = evolution.promoted(&Environment::default(), "run", "now");
    let [Promoted::Row(row)] = &rows[..] else { panic!("{rows:?}") };
    let report = json!(evolution.report());
    let promoted = &report["promoted"];
    assert_eq!((&promoted["no_row"], &promoted["row"]["us"]), (&Value::Null, &json!(row.us)));
    assert_eq!((&promoted["row"]["plan"], &promoted["row"]["when"]), (&json!(row.plan), &Value::Null));
    let winner = page.open().candidate(CandidateId(promoted["id"].as_i64().unwrap())).unwrap();
    let of = |trial: Trial| {
        let mut own = winner.measurements.iter().filter(|m| m.problem == config.cases[0].problem);
        own.find(|m| m.trial == trial).unwrap().us
    };
    // The time is that of the second race, because the first one has a selection bias.
    assert!(row.us == of(Trial::HeldOut) && row.us != of(Trial::Race), "{row:?}");
    assert_ne!(row.us, of(Trial::Microbench));
    assert!(report["forecasts"]["bias"].as_f64() > Some(0.5), "{}", report["forecasts"]);
}

/// Without the claim, two processes would make the same candidates without knowing of each other.
#[test]
fn a_run_is_driven_by_one_at_a_time() {
    let page = Page::new("driven");
    let mut evolution = begin(&page, &config(&Problem::mission(), 4, 1), Limits::ALONE);
    let run = evolution.run();
    let second = Evolution::resume(page.open(), run, Limits::ALONE).err().unwrap();
    assert!(second.to_string().contains(".run-1.lock"), "{second}");
    evolution.stop().unwrap();
    Evolution::resume(page.open(), run, Limits::ALONE).unwrap();
}

/// The run, `topk` and the page agree on the best candidate and its speed-up.
#[test]
fn all_agree_on_the_best() {
    for seed in 1..=4 {
        let (page, config, mut evolution) = alone(&format!("agree-{seed}"), 60, seed);
        drive(&mut evolution, &mut Landscape { noise: 0.05, ..Landscape::new(seed, &config) }, 0, usize::MAX);
        let (report, ledger, problem) = (json!(evolution.report()), page.open(), config.cases[0].problem);
        let best = &report["best"];
        let top = ledger.topk(&problem, "NVIDIA H200", 3).unwrap();
        let told = |r: &Ranked| json!([r.candidate, r.us, r.against.map(|race| race.ratio)]);
        assert_eq!(told(&top[0]), json!([best["id"], best["us"], report["speedup"]]));
        assert_eq!(ledger.best_of_run(evolution.run(), &problem, 3).unwrap(), top);
        let drawn = ledger.best_of_arm(evolution.run(), &problem, Arm::Random).unwrap().unwrap();
        let blind = &report["random_arm"]["best"];
        assert_eq!(json!([drawn.candidate, drawn.us]), json!([blind["id"], blind["us"]]));
        let view = ::report::evolution::RunView::of(&ledger, evolution.run()).unwrap();
        let shown = &view.problems[0];
        assert_eq!(shown.best.as_ref().map(told), Some(told(&top[0])));
        assert_eq!(
            shown.speedup().map(|(ratio, range)| (json!(ratio), range.is_some())),
            Some((report["speedup"].clone(), true))
        );
        assert_eq!((view.candidates, json!(view.candidates)), (60, report["candidates"]["total"].clone()));
        let decided = ledger.decisions(evolution.run()).unwrap();
        let advice = decided.last().unwrap().decision.candidate;
        assert_eq!(advice, Some(top[0].candidate));
        let rejected: i64 = view.rejections.iter().map(|found| found.count).sum();
        assert_eq!(
            json!(rejected),
            json!(report["rejected"].as_object().unwrap().values().filter_map(Value::as_i64).sum::<i64>())
        );
    }
}

/// Checks run ahead, so that the device always has a candidate to time.
#[test]
fn the_device_does_not_wait_for_checks() {
    let page = Page::new("queue");
    let config = config(&Problem::mission(), 60, 5);
    let mut evolution = begin(&page, &config, Limits::beside_device(4));
    let mut landscape = Landscape { predicts: false, ..Landscape::new(5, &config) };
    let mut under_way: Vec<Task> = Vec::new();
    let (mut idle, mut turns) = (0, 0);
    loop {
        match evolution.ask(0.0).unwrap() {
            Ask::Task(task) => under_way.push(*task),
            Ask::Wait => {
                // A timing takes as long as all other open tasks together.
                let device = under_way.iter().position(|t| t.stage.is_of_device());
                turns += 1;
                idle += usize::from(device.is_none());
                let rest: Vec<Task> = if device.is_some() && under_way.len() > 1 {
                    std::mem::take(&mut under_way)
                } else {
                    vec![under_way.remove(device.unwrap_or(0))]
                };
                for task in rest {
                    let outcome = landscape.evaluate(&task);
                    evolution.tell(&outcome).unwrap();
                }
            }
            Ask::Propose(_) => panic!("nobody proposes"),
            Ask::Done => break,
        }
    }
    assert!(idle * 4 < turns, "{idle} of {turns}");
}

#[test]
fn a_baseline_that_is_no_good_is_said_at_once() {
    let page = Page::new("baseline");
    let mut evolution = begin(&page, &config(&Problem::mission(), 20, 1), Limits::ALONE);
    let Ask::Task(task) = evolution.ask(0.0).unwrap() else { panic!("a task") };
    let finding =
        Finding::Rejected(Rejection { stage: task.stage, reason: Reason::Ptxas, detail: "no room".into() });
    let outcome = Outcome {
        candidate: task.candidate,
        stage: task.stage,
        problem: task.problem,
        seconds: 0.0,
        device_seconds: 0.0,
        finding,
    };
    evolution.tell(&outcome).unwrap();
    let error = evolution.ask(0.0).unwrap_err().to_string();
    assert!(error.contains("1,8,512,64,f16") && error.contains("no room"), "{error}");
    // The run is finished: it is not resumed without its number, and its lock file is gone.
    let (ledger, run) = (page.open(), evolution.run());
    assert_eq!(ledger.events(run).unwrap().last().map(|(_, event)| *event), Some(RunEvent::Finished));
    assert_eq!(super::setup::which(&ledger, None).unwrap(), None);
    let why = &ledger.decisions(run).unwrap()[0].decision;
    assert!(
        why.what == "failed" && why.why["why"].as_str().is_some_and(|why| why.contains("no room")),
        "{why:?}"
    );
    assert!(!PathBuf::from(format!("{}.run-1.lock", page.0.display())).exists());
    // Resumed by number, the run reports the same error and does not finish a second time.
    drop(evolution);
    let again = Evolution::resume(page.open(), run, Limits::ALONE).unwrap().ask(0.0).unwrap_err();
    assert_eq!(again.to_string(), error);
    assert_eq!(ledger.events(run).unwrap().len(), 1);
}

/// From a kernel without genes, the findings of the diagnosis lead to a family, and in that family to a fast
/// plan.
#[test]
fn from_a_kernel_alone_a_family_is_found() {
    let page = Page::new("kernel");
    let problem = Problem::mission();
    let kernel = Candidate::Kernel(KernelText {
        language: Language::Ptx,
        text: "a kernel".into(),
        launch: String::new(),
    });
    let wishes = Wishes { only: Some(kernel), ..Wishes::default() };
    let case = gpu(&Shape::of(&problem), "NVIDIA H200", &Arch::SM_90, &wishes).unwrap();
    let mut config = Config::new(Target::Cuda { ordinal: 0 }, "NVIDIA H200", Some(Arch::SM_90), vec![case]);
    (config.candidates, config.random_share) = (Some(60), 0.25);
    let mut evolution = begin(&page, &config, Limits::ALONE);
    struct Slow(Landscape);
    impl Evaluator for Slow {
        fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
            let mut look = self.0.look(task)?;
            if let (Finding::Screened { findings, predicted_us, .. }, "ptx") =
                (&mut look.finding, family(&task.subject))
            {
                *findings = json!([{ "name": "tensor cores unused" }, { "name": "serial reduction" }]);
                *predicted_us = Some([1e5, 1e6, 1e7]);
            }
            if let (Finding::Timed { measurement, .. }, "ptx") = (&mut look.finding, family(&task.subject)) {
                (measurement.low_us, measurement.us, measurement.high_us) = (9e5, 1e6, 2e6);
            }
            Ok(look)
        }
        fn environment(&self) -> Environment {
            self.0.environment()
        }
    }
    let mut landscape = Slow(Landscape::new(3, &config));
    loop {
        match evolution.ask(0.0).unwrap() {
            Ask::Task(task) => {
                let outcome = landscape.evaluate(&task);
                evolution.tell(&outcome).unwrap();
            }
            Ask::Done => break,
            other => panic!("{other:?}"),
        }
    }
    let known = page.open().resume(evolution.run()).unwrap();
    let made = Operator::Guided.with("tensor_cores_unused");
    let by_guidance = known.candidates.iter().find(|c| c.new.operator == made);
    let found = by_guidance.expect("a guided candidate");
    assert_eq!(
        (family(&found.new.candidate), &found.new.changes),
        ("mma", &json!({ "family": ["ptx", "mma"] }))
    );
    let report = json!(evolution.report());
    assert!(report["best"]["candidate"]["gpu"]["family"].is_string(), "{}", report["best"]);
    assert!(report["shipped"]["race"]["ratio"].as_f64().is_some(), "{}", report["shipped"]);
}

#[test]
fn proposals_pass_the_same_cascade() {
    let page = Page::new("proposals");
    let mut config = config(&Problem::mission(), 140, 6);
    config.proposer = Some("anything".into());
    config.random_share = 0.2;
    let mut evolution = begin(&page, &config, Limits::ALONE);
    let mut landscape = Landscape::new(6, &config);
    let mut asked = 0;
    loop {
        match evolution.ask(0.0).unwrap() {
            Ask::Task(task) => {
                let outcome = landscape.evaluate(&task);
                evolution.tell(&outcome).unwrap();
            }
            Ask::Propose(question) => {
                asked += 1;
                assert!(
                    question.brief["incumbent"]["source"].as_str().is_some_and(|ptx| ptx.contains(".entry"))
                );
                let mut plan = kernels::forward::mma::MmaPlan::default_for(&Problem::mission(), &Arch::SM_90);
                plan.block_n = if asked == 1 { 48 * plan.kv_warps } else { 7 };
                let answer = match asked {
                    3 => Err(Rejection {
                        stage: Stage::Propose,
                        reason: Reason::Proposer,
                        detail: "garbage".into(),
                    }),
                    _ => Ok(Proposal {
                        candidate: Candidate::Gpu(Plan::Mma(plan)),
                        hypothesis: None,
                        predicted_us: Some(9.5),
                    }),
                };
                evolution.answer(&question, answer).unwrap();
            }
            Ask::Done => break,
            Ask::Wait => panic!("nothing is under way"),
        }
    }
    assert!(asked >= 3, "{asked}");
    let ledger = page.open();
    let known = ledger.resume(evolution.run()).unwrap();
    let proposed: Vec<_> =
        known.candidates.iter().filter(|c| c.new.operator.operator == Operator::Propose).collect();
    assert_eq!(proposed.len(), asked);
    let of = |at: usize| ledger.candidate(proposed[at].id).unwrap();
    assert!(of(0).screening.is_some(), "{:?}", of(0).rejections);
    assert!(of(0).forecasts.iter().any(|f| f.author == "proposer" && f.us == 9.5));
    assert_eq!((of(1).rejections[0].stage, of(1).rejections[0].reason), (Stage::Propose, Reason::Plan));
    assert_eq!(of(2).rejections[0].detail, "garbage");
}

/// Several problems share a run: each gets its part, and all are reported.
#[test]
fn several_problems_share_a_run() {
    let page = Page::new("several");
    let other = config(&problems()[1], 0, 8).cases;
    let mut config = config(&Problem::mission(), 45, 8);
    config.cases.extend(other);
    let mut evolution = begin(&page, &config, Limits::beside_device(2));
    drive(&mut evolution, &mut Landscape::new(8, &config), 2, usize::MAX);
    let report = json!(evolution.report());
    let totals: Vec<Option<u64>> =
        report["problems"].as_array().unwrap().iter().map(|p| p["candidates"]["total"].as_u64()).collect();
    assert_eq!(totals, [Some(23), Some(22)]);
    assert_eq!(report["device"], "NVIDIA H200");
}

#[test]
fn a_budget_of_seconds_leaves_room_for_the_races() {
    let page = Page::new("seconds");
    let mut config = config(&Problem::mission(), 0, 2);
    (config.candidates, config.seconds) = (None, Some(60.0));
    let mut evolution = begin(&page, &config, Limits::ALONE);
    let mut landscape = Landscape::new(2, &config);
    let mut now = 0.0;
    let mut races = 0;
    loop {
        match evolution.ask(now).unwrap() {
            Ask::Task(task) => {
                races += usize::from(task.stage >= Stage::Race);
                now += if task.stage.is_of_device() { task.seconds } else { 0.5 };
                let outcome = landscape.evaluate(&task);
                evolution.tell(&outcome).unwrap();
            }
            Ask::Done => break,
            other => panic!("{other:?}"),
        }
    }
    assert!((50.0..=60.0).contains(&now), "{now}");
    assert!(races >= 4, "{races}");
}
