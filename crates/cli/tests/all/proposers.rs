//! A run with a proposer that misbehaves in every known way, one answer at a time. Each misbehaviour is
//! contained and recorded with its reason, and the run continues to its end.

use std::path::PathBuf;
use std::time::Duration;

use check::gate::Verdict;
use evolve::children::ProcessLimits;
use evolve::evaluate::{Evaluator, bound};
use evolve::proposer::Proposer;
use evolve::workers::{Worker, WorkerPool, WorkerProgram};
use evolve::{Ask, Candidate, Case, Config, Configuration, Evolution, Stage, Target, config};
use host::store::Scratch;
use kernels::select::Shape;
use kernels::{Arch, Family};
use ledger::{CandidateId, Dossier, Environment, Judge, Ledger, RunEvent};
use problem::{DType, Problem};
use serde_json::json;

const ARCH: Arch = Arch::SM_90;

/// The proposer: performs the next entry of a list of answers and misbehaviours. `KERNEL` and `LAUNCH` name
/// files with a correct kernel for the problem.
const SCRIPT: &str = r#"
import json, os, subprocess, sys, time
folder = os.path.dirname(os.path.abspath(sys.argv[1]))
brief = json.load(sys.stdin)
turn = int(open(sys.argv[1]).read() or 0)
open(sys.argv[1], "w").write(str(turn + 1))
text, launch = (open(os.path.join(folder, name)).read() for name in ("kernel.ptx", "launch.toml"))
empty = launch.split("[launch]")[0] + "[launch]\ngrid = [1]\nblock = [32]\n" + "".join(
    f"[[arg]]\nrole = \"{role}\"\n" for role in ("q", "k", "v", "out"))
def body(lines):
    return (".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry attention(.param .u64 q, .param .u64 k, "
            ".param .u64 v, .param .u64 out)\n{\n .reg .b64 %rd<4>;\n ld.param.u64 %rd1, [out];\n" + lines + "\n ret;\n}\n")
def say(**answer):
    json.dump(answer, sys.stdout)
def flood():
    while True:
        sys.stdout.write("x" * (1 << 20))
deeds = [
    ("hangs", lambda: time.sleep(600)),
    ("garbage", lambda: print("I am sorry, but")),
    ("floods", flood),
    ("greedy", lambda: len(b"x" * (8 << 30))),
    ("fails", lambda: sys.exit("no network")),
    ("family", lambda: say(plan={"family": "magic"})),
    ("children", lambda: (subprocess.Popen(["sleep", "61234.5"]), say(plan={"family": "mma"}))),
    ("loops", lambda: say(ptx=body("L: bra L;"), launch=empty)),
    ("outside", lambda: say(ptx=body(" st.global.u32 [%rd1+16777216], 7;"), launch=empty)),
    ("ignores", lambda: say(ptx=body(""), launch=empty)),
    ("launch", lambda: say(ptx=text, launch=launch.replace("grid = [", "grid = [7, 7, 7] #"))),
    ("grid", lambda: say(ptx=body(""), launch=empty.replace("grid = [1]", "grid = [2147483647]"))),
    ("nested", lambda: say(ptx=body("{" * 200000), launch=empty)),
    ("cuda", lambda: say(cuda="int main(", launch=empty)),
    ("right", lambda: say(ptx=text, launch=launch)),
]
deeds[turn % len(deeds)][1]()
"#;
const DEEDS: usize = 15;
/// The budget, in seconds. The run's clock stands still until the last answer is judged, and then jumps past
/// it.
const SECONDS: f64 = 1e6;

struct Folder {
    scratch: Scratch,
}

impl Folder {
    fn new(problem: &Problem) -> Folder {
        let scratch = Scratch::new().unwrap();
        let plan = Candidate::Gpu(Family::Mma.default_for(problem, &ARCH).unwrap());
        let kernel = bound(&plan, problem, &ARCH).unwrap();
        // The text differs from the family's kernel, so that the ledger does not know the candidate yet.
        let text = kernel.kernel.module.to_string().replace("ret;", "bar.sync 0;\n\tret;");
        for (name, contents) in [
            ("proposer.py", SCRIPT.to_owned()),
            ("turn", String::new()),
            ("kernel.ptx", text),
            ("launch.toml", kernel.launch_file().unwrap()),
        ] {
            std::fs::write(scratch.path(name), contents).unwrap();
        }
        Folder { scratch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    fn turns(&self) -> usize {
        std::fs::read_to_string(self.path("turn")).unwrap().parse().unwrap_or(0)
    }
}

fn worker() -> Box<dyn Evaluator> {
    let args = ["worker", "--watched", "--emulator"].map(Into::into).to_vec();
    let file = env!("CARGO_BIN_EXE_flashcore").into();
    let program = WorkerProgram { file, args, patience: Duration::from_secs(60), memory: 2 << 30 };
    Box::new(Worker::new(program, Environment::default()))
}

fn evolution(ledger: &Folder, problem: &Problem) -> Evolution {
    let baseline = Candidate::Gpu(Family::Mma.default_for(problem, &ARCH).unwrap());
    let case = Case {
        problem: Shape::of(problem),
        seeds: vec![("seed:default".into(), baseline.clone())],
        baseline,
        draws: 0,
        held_out: Vec::new(),
        shipped: None,
    };
    let (target, device) = (Target::Cuda { ordinal: 0 }, "emulator, sm_90");
    let mut config = Config::new(target, device, Some(ARCH), vec![case]);
    (config.candidates, config.seconds, config.random_share) = (Some(400), Some(SECONDS), 0.1);
    config.early_stop = false;
    // `Free` has few operators, so the proposer is chosen often.
    config.configuration = Configuration::Free;
    config.proposer = Some("proposer.py".to_owned());
    let ledger = Ledger::open(&ledger.path("ledger.sqlite")).unwrap();
    Evolution::begin(ledger, config, Environment::default(), None, config::Limits::beside_device(2)).unwrap()
}

#[test]
fn a_run_survives_every_proposer() {
    let problem = Problem::new(1, 1, 32, 32, DType::F16);
    let folder = Folder::new(&problem);
    let line =
        format!("python3 '{}' '{}'", folder.path("proposer.py").display(), folder.path("turn").display());
    let limits =
        ProcessLimits { wall: Duration::from_secs(2), cpu_seconds: 10, memory: 1 << 30, output: 4 << 20 };
    let proposer = Proposer::new(&line, limits);
    let mut evolution = evolution(&folder, &problem);
    let run = evolution.run();
    let pool = WorkerPool::start(vec![worker(), worker()], vec![worker()]);
    let mut now = 0.0;
    loop {
        if folder.turns() >= DEEDS && proposed(&evolution).iter().take(DEEDS).all(is_judged) {
            now = SECONDS;
        }
        match evolution.ask(now).unwrap() {
            Ask::Task(task) => pool.submit(*task),
            Ask::Propose(question) => {
                let answer = proposer.propose(&question.brief);
                evolution.answer(&question, answer).unwrap();
            }
            Ask::Wait => {
                if let Some(outcome) = pool.outcome(Duration::from_secs(60)) {
                    evolution.tell(&outcome).unwrap();
                }
            }
            Ask::Done => break,
        }
    }
    assert!(folder.turns() >= DEEDS, "{} of {DEEDS} turns", folder.turns());
    let ledger = evolution.ledger();
    assert_eq!(ledger.events(run).unwrap().last().map(|(_, event)| *event), Some(RunEvent::Finished));
    let proposed = proposed(&evolution);
    assert!(proposed.len() >= DEEDS, "{} of {DEEDS} are in the ledger", proposed.len());
    for (dossier, (deed, stage, reason, said)) in proposed.iter().zip(EXPECTED) {
        let found = dossier.rejections.first().unwrap_or_else(|| panic!("{deed} lives: {dossier:?}"));
        assert!(
            found.stage == stage && reason.contains(&found.reason.name()) && found.detail.contains(said),
            "{deed}: {found:?} {:?}",
            dossier.checks
        );
    }
    // The correct kernel was timed on the device.
    let right = &proposed[DEEDS - 1];
    assert!(
        right.checks.iter().any(|check| check.judge == Judge::Emulator && check.verdict == Verdict::Passed),
        "{right:?}"
    );
    // Every candidate has a final result. A candidate is rejected for the budget only if it was unfinished
    // when the budget ended.
    let rejected = json!(evolution.report())["rejected"]
        .as_object()
        .unwrap()
        .values()
        .filter_map(|n| n.as_u64())
        .sum::<u64>();
    assert_eq!(json!(evolution.report())["candidates"]["total"], rejected);
    // No child process of the proposer is left.
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let lines = processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    assert_eq!(lines.filter(|line| String::from_utf8_lossy(line).contains("61234.5")).count(), 0);
}

/// The candidates that came from the proposer's answers, in order.
fn proposed(evolution: &Evolution) -> Vec<Dossier> {
    let ledger = evolution.ledger();
    let all = ledger.candidates(evolution.run(), CandidateId(0), 10_000).unwrap().into_iter();
    all.filter(|known| known.new.operator.to_string() == "proposer")
        .map(|known| ledger.candidate(known.id).unwrap())
        .collect()
}

fn is_judged(answer: &Dossier) -> bool {
    !answer.rejections.is_empty() || !answer.checks.is_empty()
}

/// The expected rejection for each misbehaviour: stage, reasons, and a word of the detail.
const EXPECTED: [(&str, Stage, &[&str], &str); DEEDS - 1] = [
    ("hangs", Stage::Propose, &["hangs"], "did not end within 2 s"),
    ("garbage", Stage::Propose, &["proposer"], "I am sorry"),
    ("floods", Stage::Propose, &["proposer"], "more than 4194304 bytes"),
    ("greedy", Stage::Propose, &["proposer"], "MemoryError"),
    ("fails", Stage::Propose, &["proposer"], "no network"),
    ("family", Stage::Propose, &["proposer"], "magic"),
    ("children", Stage::Propose, &["proposer"], "missing field"),
    ("loops", Stage::Check, &["incomplete"], ""),
    ("outside", Stage::Check, &["failed"], ""),
    ("ignores", Stage::Check, &["failed"], ""),
    ("launch", Stage::Check, &["failed"], ""),
    ("grid", Stage::Screen, &["launch"], "invalid value '2147483647' for the CTAs of its grid"),
    ("nested", Stage::Screen, &["source"], ""),
    // Without NVRTC the reason is the missing compiler.
    ("cuda", Stage::Screen, &["source", "compiler"], ""),
];
