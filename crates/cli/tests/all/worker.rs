//! Tests `flashcore worker` as a run uses it: in a child process, with the emulator in place of a GPU.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use check::gate::Verdict;
use evolve::evaluate::Evaluator;
use evolve::workers::{Worker, WorkerProgram};
use evolve::{Candidate, Finding, KernelText, Language, Outcome, Stage, Target, Task};
use kernels::select::Shape;
use kernels::{Arch, Family};
use ledger::{CandidateId, Environment, Reason};
use problem::{DType, Problem};

fn tiny() -> Problem {
    Problem::new(1, 1, 64, 64, DType::F16)
}

fn task(stage: Stage, subject: Candidate) -> Task {
    Task {
        candidate: CandidateId(1),
        stage,
        target: Target::Cuda { ordinal: 0 },
        problem: Shape::of(&tiny()),
        subject,
        incumbent: None,
        seconds: 0.01,
    }
}

fn plan() -> Candidate {
    Candidate::Gpu(Family::Mma.default_for(&tiny(), &Arch::SM_90).unwrap())
}

fn worker(args: &[&str]) -> Worker {
    let args = ["worker", "--watched"].iter().chain(args).map(Into::into).collect();
    let file = env!("CARGO_BIN_EXE_flashcore").into();
    let program = WorkerProgram { file, args, patience: Duration::from_secs(60), memory: 4 << 30 };
    Worker::new(program, Environment::default())
}

/// A kernel with this body.
fn kernel(body: &str) -> Candidate {
    let text = format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry attention(.param .u64 q, .param .u64 k, \
         .param .u64 v, .param .u64 out)\n{{\n    .reg .b64 %rd<4>;\n    ld.param.u64 %rd1, [out];\n{body}\n    ret;\n}}\n"
    );
    let args: String = ["q", "k", "v", "out"].map(|role| format!("[[arg]]\nrole = \"{role}\"\n")).concat();
    let launch = format!(
        "[problem]\nheads_q = 1\nseq_q = 64\nhead_dim = 64\ndtype = \"f16\"\n[launch]\ngrid = [1]\nblock = [32]\n{args}"
    );
    Candidate::Kernel(KernelText { language: Language::Ptx, text, launch })
}

fn rejected(worker: &mut Worker, stage: Stage, subject: Candidate) -> (Reason, String) {
    match worker.evaluate(&task(stage, subject)).finding {
        Finding::Rejected(found) => (found.reason, found.detail),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_worker_takes_a_plan_through_the_cascade() {
    let mut worker = worker(&["--emulator"]);
    let mut look = |stage| worker.evaluate(&task(stage, plan())).finding;
    assert!(matches!(look(Stage::Screen), Finding::Screened { .. }));
    let Finding::Judged(check) = look(Stage::Check) else { panic!("judged") };
    assert_eq!(check.verdict, Verdict::Passed, "{:?}", check.reasons);
    let Finding::Timed { measurement, .. } = look(Stage::Microbench) else { panic!("timed") };
    assert!(measurement.us > 0.0);
    assert_eq!(worker.started(), 1);
}

/// Kernels that a proposer may bring, at the emulator's gate and on the device: the run continues after each.
#[test]
fn kernels_that_misbehave_are_contained() {
    let mut worker = worker(&["--emulator"]);
    let hang = || kernel("FOREVER:\n    bra FOREVER;");
    let outside = || kernel("    st.global.u32 [%rd1+16777216], 7;");
    let nothing = || kernel("");
    for (subject, reason) in
        [(hang(), Reason::Hangs), (outside(), Reason::Crashed), (nothing(), Reason::Wrong)]
    {
        let (found, detail) = rejected(&mut worker, Stage::Microbench, subject);
        assert_eq!(found, reason, "{detail}");
    }
    for (subject, verdict) in
        [(hang(), Verdict::Incomplete), (outside(), Verdict::Failed), (nothing(), Verdict::Failed)]
    {
        let Finding::Judged(check) = worker.evaluate(&task(Stage::Check, subject)).finding else {
            panic!("judged")
        };
        assert_eq!(check.verdict, verdict, "{:?}", check.reasons);
    }
    // Each lost device cost one process, and rejected only its own candidate.
    assert_eq!(worker.started(), 3);
    assert!(matches!(worker.evaluate(&task(Stage::Microbench, plan())).finding, Finding::Timed { .. }));
    let (reason, _) = rejected(&mut worker, Stage::Screen, kernel("    garbage;"));
    assert_eq!(reason, Reason::Source);
}

#[test]
fn a_worker_without_its_device_says_so() {
    if driver::devices().is_ok_and(|devices| !devices.is_empty()) {
        return filetest::not_run("this machine has a GPU");
    }
    let (reason, detail) = rejected(&mut worker(&[]), Stage::Microbench, plan());
    assert!(reason == Reason::Crashed && detail.contains("CUDA driver"), "{reason}: {detail}");
}

#[test]
fn lines_in_lines_out() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_flashcore"))
        .args(["worker", "--emulator"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let line = serde_json::to_string(&task(Stage::Screen, plan())).unwrap();
    write!(child.stdin.take().unwrap(), "{line}\n{line}\nno task\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let answers: Vec<Outcome> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!((answers.len(), output.status.code()), (2, Some(3)));
    assert_eq!(answers[0].finding, answers[1].finding);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("invalid task in line 3 of standard input"), "{said}");
}
