//! Tests candidates on a GPU's driver without a GPU: the driver is the fake one of `flashcore-driver`'s
//! tests, and its launches run in the emulator if a scenario requests it.
#![cfg(target_os = "linux")]

#[path = "../../driver/tests/fake/harness.rs"]
mod harness;
#[path = "../../driver/tests/fake/runner.rs"]
mod runner;

use flashcore_evolve::evaluate::cuda::Card;
use flashcore_evolve::evaluate::{Cuda, Evaluator, GpuCard, bound};
use flashcore_evolve::{Candidate, Finding, KernelText, Language, Stage, Target, Task};
use harness::{SCENARIO, all_pass};
use kernels::Family;
use kernels::select::Shape;
use ledger::{CandidateId, Reason, TimeKind};
use problem::{DType, Problem};

#[test]
fn scenario() {
    match std::env::var(SCENARIO).as_deref() {
        Ok("cascade") => cascade(),
        Ok("unwritten") => unwritten(),
        Ok("crash") => crash(),
        Ok("spills") => spills(),
        Ok("threads") => refused(),
        Ok("unknown") => unknown(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

#[test]
fn runner() {
    runner::emulate_given();
}

fn tiny() -> Problem {
    Problem::new(1, 1, 64, 64, DType::F16)
}

fn card() -> GpuCard {
    GpuCard::open(0).unwrap()
}

fn plan(card: &GpuCard) -> Candidate {
    Candidate::Gpu(Family::Mma.default_for(&tiny(), &card.arch()).unwrap())
}

fn task(stage: Stage, subject: Candidate) -> Task {
    Task {
        candidate: CandidateId(1),
        stage,
        target: Target::Cuda { ordinal: 0 },
        problem: Shape::of(&tiny()),
        subject,
        incumbent: None,
        seconds: 0.0,
    }
}

fn rejected(evaluator: &mut Cuda<GpuCard>, task: &Task) -> (Reason, String) {
    match evaluator.evaluate(task).finding {
        Finding::Rejected(found) => (found.reason, found.detail),
        other => panic!("{other:?}"),
    }
}

/// Resources come from the driver, outputs from the driver's memory, and times from the driver's events.
fn cascade() {
    let card = card();
    let plan = plan(&card);
    assert_eq!((card.arch().sm, card.arch().multiprocessors, card.kind()), (90, 132, TimeKind::Measured));
    let mut evaluator = Cuda::new(card, None);
    assert!(!evaluator.environment().device.is_empty());
    let Finding::Screened { screening, predicted_us, .. } =
        evaluator.evaluate(&task(Stage::Screen, plan.clone())).finding
    else {
        panic!("screened")
    };
    // The fake's compiler gives every kernel 40 registers, and the linker's cubin is available.
    assert_eq!((screening.registers, screening.spill_bytes, predicted_us), (Some(40), Some(0), None));
    assert!(screening.sass_hash.is_some());
    let outcome = evaluator.evaluate(&task(Stage::Microbench, plan));
    let Finding::Timed { check, measurement } = outcome.finding else { panic!("{:?}", outcome.finding) };
    assert!(check.unwrap().error_rel.unwrap() > 0.0);
    // Every pair of its events is 250 µs apart, so a sample is one call.
    assert!(
        (measurement.us - 250.0).abs() < 1e-6 && measurement.kind == TimeKind::Measured,
        "{measurement:?}"
    );
    assert!(measurement.samples.len() >= 7 && measurement.low_us <= measurement.high_us);
    assert!(outcome.device_seconds > 0.0);
}

/// A device that does not run launches: no output is written, and both the gate and the race reject that.
fn unwritten() {
    let card = card();
    let plan = plan(&card);
    let mut evaluator = Cuda::new(card, None);
    let (reason, detail) = rejected(&mut evaluator, &task(Stage::Microbench, plan.clone()));
    assert!(reason == Reason::Wrong && detail.contains("never written"), "{reason}: {detail}");
    let incumbent = Some((CandidateId(2), plan.clone()));
    for stage in [Stage::Race, Stage::HeldOut] {
        let race = Task { incumbent: incumbent.clone(), ..task(stage, plan.clone()) };
        let (reason, detail) = rejected(&mut evaluator, &race);
        assert_eq!(reason, Reason::Wrong, "{detail}");
    }
}

/// A kernel that breaks the GPU's context: the outcome reports the failure, and that the process can no
/// longer use the GPU.
fn crash() {
    let card = card();
    let plan = plan(&card);
    let kernel = bound(&plan, &tiny(), &card.arch()).unwrap();
    let rename = |text: String| text.replace(kernel.kernel.entry.as_str(), "fail");
    let (text, launch) = (rename(kernel.kernel.module.to_string()), rename(kernel.launch_file().unwrap()));
    let fails = Candidate::Kernel(KernelText { language: Language::Ptx, text, launch });
    let mut evaluator = Cuda::new(card, None);
    for subject in [fails, plan] {
        let (reason, detail) = rejected(&mut evaluator, &task(Stage::Microbench, subject));
        assert!(reason == Reason::Crashed && detail.contains("ILLEGAL_ADDRESS"), "{reason}: {detail}");
    }
}

/// The spills of a kernel are reported; the cascade decides whether they are too many.
fn spills() {
    let card = card();
    let plan = plan(&card);
    let Finding::Screened { screening, .. } =
        Cuda::new(card, None).evaluate(&task(Stage::Screen, plan)).finding
    else {
        panic!("screened")
    };
    assert_eq!(screening.spill_bytes, Some(16));
}

/// A kernel that needs more resources than the device has.
fn refused() {
    let card = card();
    let plan = plan(&card);
    let (reason, detail) = rejected(&mut Cuda::new(card, None), &task(Stage::Screen, plan));
    assert!(reason == Reason::Resources && detail.contains("expected"), "{reason}: {detail}");
}

fn unknown() {
    let fault = GpuCard::open(0).err().unwrap();
    assert!(fault.reason == Reason::Device && fault.detail.contains("invalid value 'sm_75'"), "{fault}");
    assert_eq!(GpuCard::open(7).err().unwrap().reason, Reason::Device);
}

#[test]
fn every_scenario_passes() {
    let runner = std::env::current_exe().unwrap();
    let scenarios: [(&str, &[(&str, &str)]); 6] = [
        ("cascade", &[("FAKE_RUNNER", runner.to_str().unwrap())]),
        ("unwritten", &[]),
        ("crash", &[]),
        ("spills", &[("FAKE_LOCAL", "16")]),
        ("threads", &[("FAKE_THREADS", "32")]),
        ("unknown", &[("FAKE_SM", "75")]),
    ];
    all_pass(&[], &scenarios);
}
