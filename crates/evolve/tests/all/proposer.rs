//! Tests the example proposer, asked as in a run.

use std::time::Duration;

use check::gate::Verdict;
use flashcore_evolve::children::ProcessLimits;
use flashcore_evolve::evaluate::{Cuda, bound};
use flashcore_evolve::evaluate::{EmulatedCard, Evaluator};
use flashcore_evolve::proposer::Proposer;
use flashcore_evolve::{Candidate, Finding, Language, Stage, Target, Task};
use kernels::select::Shape;
use kernels::{Arch, Family};
use ledger::CandidateId;
use problem::{DType, Problem};
use serde_json::{Value, json};

const ARCH: Arch = Arch::SM_90;

fn proposer() -> Proposer {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/proposer.py");
    let limits =
        ProcessLimits { wall: Duration::from_secs(30), cpu_seconds: 10, memory: 1 << 30, output: 16 << 20 };
    Proposer::new(&format!("python3 '{script}'"), limits)
}

fn problem() -> Problem {
    Problem::new(1, 1, 64, 64, DType::F16)
}

/// The brief of a run: an incumbent with its source, and the history.
fn brief(candidate: &Candidate, history: &[Value]) -> Value {
    let kernel = bound(candidate, &problem(), &ARCH).unwrap();
    json!({
        "problem": Shape::of(&problem()),
        "incumbent": {
            "candidate": candidate, "us": 4.0, "source": kernel.kernel.module.to_string(), "launch": kernel.launch_file(),
        },
        "history": history,
    })
}

fn task(stage: Stage, subject: Candidate) -> Task {
    let target = Target::Cuda { ordinal: 0 };
    let (candidate, problem) = (CandidateId(1), Shape::of(&problem()));
    Task { candidate, stage, target, problem, subject, incumbent: None, seconds: 0.01 }
}

/// The example's plans are new and some of them fit; the example's kernel is complete and right.
#[test]
fn the_example_proposes_plans_and_a_kernel() {
    let incumbent = Candidate::Gpu(Family::Mma.default_for(&problem(), &ARCH).unwrap());
    let mut evaluator = Cuda::new(EmulatedCard::new(ARCH), None);
    let (mut history, mut fits, mut kernels) = (Vec::new(), 0, 0);
    for _ in 0..8 {
        let proposal = proposer().propose(&brief(&incumbent, &history)).unwrap();
        assert!(proposal.hypothesis.is_some() && proposal.predicted_us == Some(4.0), "{proposal:?}");
        let candidate = proposal.candidate;
        assert!(
            history.iter().all(|entry: &Value| entry["candidate"] != json!(candidate)),
            "{candidate:?} again"
        );
        let screened = evaluator.evaluate(&task(Stage::Screen, candidate.clone())).finding;
        fits += u32::from(matches!(screened, Finding::Screened { .. }));
        if let Candidate::Kernel(source) = &candidate {
            assert!(source.language == Language::Ptx && source.text.contains(".minnctapersm"));
            let Finding::Judged(check) = evaluator.evaluate(&task(Stage::Check, candidate.clone())).finding
            else {
                panic!("judged")
            };
            assert_eq!(check.verdict, Verdict::Passed, "{:?}", check.reasons);
            kernels += 1;
        }
        history.push(json!({ "candidate": candidate, "us": null, "rejection": null }));
    }
    assert!(fits >= 2 && kernels == 2, "{fits} of 8 fit, {kernels} kernels");
}
