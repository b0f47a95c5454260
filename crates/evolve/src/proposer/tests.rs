use kernels::{Arch, Family};
use problem::{DType, Problem};
use serde_json::json;

use super::*;
use crate::{Candidate, KernelText, Language};
use host::store::Scratch;

const SHORT: ProcessLimits =
    ProcessLimits { wall: Duration::from_secs(30), cpu_seconds: 3, memory: 1 << 30, output: 1 << 20 };

fn ask(line: &str, limits: ProcessLimits) -> Result<Proposal, Rejection> {
    Proposer::new(line, limits).propose(&json!({ "problem": { "seq_q": 64 } }))
}

fn refused(line: &str) -> (&'static str, String) {
    let limits = ProcessLimits { wall: Duration::from_secs(1), ..SHORT };
    let found = ask(line, if line.contains("sleep") { limits } else { SHORT }).unwrap_err();
    assert_eq!(found.stage, Stage::Propose);
    (found.reason.name(), found.detail)
}

fn plan() -> Candidate {
    let problem = Problem::new(1, 1, 64, 64, DType::F16);
    Candidate::Gpu(Family::Mma.default_for(&problem, &Arch::SM_90).unwrap())
}

/// A candidate in the form of a proposer's answer.
fn as_answer(candidate: &Candidate) -> serde_json::Value {
    match candidate {
        Candidate::Gpu(plan) => json!({ "plan": plan }),
        Candidate::Cpu(plan) => json!({ "cpu_plan": plan }),
        Candidate::Kernel(KernelText { language: Language::Ptx, text, launch }) => {
            json!({ "ptx": text, "launch": launch })
        }
        Candidate::Kernel(KernelText { language: Language::Cuda, text, launch }) => {
            json!({ "cuda": text, "launch": launch })
        }
    }
}

#[test]
fn answers_are_candidates() {
    let source = |language| {
        Candidate::Kernel(KernelText { language, text: "text \"\n".into(), launch: "[launch]\n".into() })
    };
    let scratch = Scratch::new().unwrap();
    for candidate in [plan(), source(Language::Ptx), source(Language::Cuda)] {
        let mut answer = as_answer(&candidate);
        answer["hypothesis"] = "fewer barriers".into();
        answer["predicted_us"] = 4.5.into();
        let file = scratch.path("answer.json");
        std::fs::write(&file, format!("\n{answer}\n")).unwrap();
        let found = ask(&format!("cat {}", file.display()), SHORT).unwrap();
        assert_eq!(found.candidate, candidate);
        assert_eq!((found.hypothesis.as_deref(), found.predicted_us), (Some("fewer barriers"), Some(4.5)));
    }
}

#[test]
fn a_program_that_the_shell_does_not_find_is_named() {
    for line in
        ["cat", "cd / && cat", "if true; then cat; fi", "KEY=1 no-such", "'no such' x", "(no-such)", ""]
    {
        assert_eq!(missing(line), None, "{line}");
    }
    assert_eq!(missing(" no-such-program x"), Some("no-such-program"));
    assert_eq!(missing("./none.py"), Some("./none.py"));
}

/// The proposer gets the brief and the description of answers on its standard input.
#[test]
fn a_proposer_reads_the_brief() {
    let script = "import json, sys; b = json.load(sys.stdin); assert 'launch' in b['answers']; \
                  print(json.dumps({'ptx': str(b['problem']['seq_q']), 'launch': ''}))";
    let found = ask(&format!("python3 -c \"{script}\""), SHORT).unwrap();
    let Candidate::Kernel(KernelText { text, .. }) = found.candidate else { panic!("{found:?}") };
    assert_eq!(text, "64");
}

#[test]
fn what_is_no_answer_is_refused_with_its_reason() {
    let plan = as_answer(&plan());
    let family = plan.to_string().replace("\"family\":\"mma\"", "\"family\":\"magic\"");
    let gene = plan.to_string().replace("block_n", "block_q");
    for (line, reason, said) in [
        ("sleep 60", "hangs", "did not end within 1 s"),
        ("sleep 60 & sleep 60", "hangs", "did not end"),
        ("while :; do :; done", "proposer", "signal"),
        ("echo garbage", "proposer", "garbage"),
        ("head -c 100 /dev/urandom | tr -d '\\0-\\177'", "proposer", "in UTF-8"),
        ("exec head -c 2000000000 /dev/zero", "proposer", "more than 1048576 bytes"),
        ("echo '{}'", "proposer", "none of them"),
        ("echo '{\"ptx\": \"x\"}'", "proposer", "invalid answer with ptx: expected"),
        ("echo '{\"ptx\": \"x\", \"cuda\": \"y\", \"launch\": \"\"}'", "proposer", "ptx, cuda, launch"),
        (
            "echo '{\"ptx\": \"x\", \"launch\": \"\", \"predicted_us\": -1}'",
            "proposer",
            "invalid value '-1e0' for predicted_us",
        ),
        (
            "echo '{\"ptx\": \"x\", \"launch\": \"\", \"predicted_us\": 1e-310}'",
            "proposer",
            "invalid value '1e-310' for predicted_us: expected 1e-6 to 1e15",
        ),
        (
            "python3 -c \"import json; print(json.dumps({'ptx': 'x', 'launch': 'x' * 65537}))\"",
            "proposer",
            "invalid value '65537' for the length of the launch file in bytes: expected at most 65536",
        ),
        ("echo '{\"kernel\": \"x\"}'", "proposer", "unknown field `kernel`"),
        ("echo no network >&2; exit 7", "proposer", "exit status: 7: no network"),
        ("kill -SEGV $$", "proposer", "signal"),
        ("nonexistent-program --flag", "proposer", "not found"),
        (&format!("echo '{family}'"), "proposer", "magic"),
        (&format!("echo '{gene}'"), "proposer", "block_"),
        ("python3 -c \"print('[' * 500000)\"", "proposer", "recursion"),
    ] {
        let (found, detail) = refused(line);
        assert!(found == reason && detail.contains(said), "{line}: {found}: {detail}");
        assert!(detail.len() < 1200, "{} characters", detail.len());
    }
}
