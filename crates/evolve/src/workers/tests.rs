use kernels::select::Shape;
use problem::{DType, Problem};

use super::*;
use crate::{Candidate, KernelText, Language, Stage, Target};
use ledger::{CandidateId, Reason};

/// A task whose kernel text contains commands for a scripted worker.
fn task(number: i64, stage: Stage, orders: &str) -> Task {
    let source = KernelText { language: Language::Ptx, text: orders.to_owned(), launch: String::new() };
    Task {
        candidate: CandidateId(number),
        stage,
        target: Target::Cuda { ordinal: 0 },
        problem: Shape::of(&Problem::new(1, 1, 64, 64, DType::F16)),
        subject: Candidate::Kernel(source),
        incumbent: None,
        seconds: 0.1,
    }
}

/// A worker as a shell script: it follows the commands in the kernel's text and writes outcomes.
const SCRIPT: &str = r#"
while read -r line; do
    number=${line#*\"candidate\":}; number=${number%%,*}
    stage=${line#*\"stage\":\"}; stage=${stage%%\"*}
    problem=${line#*\"problem\":}; problem=${problem%%\}*}\}
    answer() {
        echo "{\"candidate\":$number,\"stage\":\"$stage\",\"problem\":$problem,\"seconds\":0.1,\"device_seconds\":0.05,\"finding\":\
{\"rejected\":{\"stage\":\"$stage\",\"reason\":\"$1\",\"detail\":\"by $$\"}}}"
    }
    case $line in
        *HANG*) echo '{"allow":1}'; sleep 60;;
        *SLOW*) echo '{"allow":1}'; sleep 0.6; echo '{"allow":1}'; sleep 0.6; answer slower;;
        *CRASH*) echo "no more" >&2; kill -9 $$;;
        *LEAVE*) answer budget; exit 0;;
        *LOST*) answer crashed;;
        *GARBAGE*) echo "%&/";;
        *CLOSE*) exec >&-; sleep 60;;
        *OTHER*) number=999; answer plan;;
        *GREEDY*) exec python3 -c "x = b'x' * (300 << 20); import time; time.sleep(60)";;
        *) answer plan;;
    esac
done
"#;

fn program() -> WorkerProgram {
    let args = ["-c", SCRIPT].map(OsString::from).to_vec();
    WorkerProgram { file: "sh".into(), args, patience: Duration::from_secs(20), memory: 150 << 20 }
}

fn worker() -> Worker {
    Worker::new(program(), Environment::default())
}

fn rejected(worker: &mut Worker, orders: &str) -> (Reason, String) {
    match worker.evaluate(&task(3, Stage::Microbench, orders)).finding {
        Finding::Rejected(found) => {
            assert_eq!(found.stage, Stage::Microbench);
            (found.reason, found.detail)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_ends_a_worker_is_recorded_and_the_next_task_is_done() {
    let mut worker = worker();
    let (_, first) = rejected(&mut worker, "good");
    for (orders, reason, said) in [
        ("HANG", Reason::Hangs, "sent no outcome within 1.0 s"),
        ("CRASH", Reason::Crashed, "no more"),
        ("GARBAGE", Reason::Crashed, "expected an outcome as JSON"),
        ("CLOSE", Reason::Hangs, "closed its output and did not end within 2.0 s"),
        ("OTHER", Reason::Crashed, "another task"),
        ("GREEDY", Reason::Memory, "at most 150 MB are allowed"),
        ("LOST", Reason::Crashed, "by "),
    ] {
        let before = worker.started();
        let (found, detail) = rejected(&mut worker, orders);
        assert!(found == reason && detail.contains(said), "{orders}: {found}, {detail}");
        let (found, detail) = rejected(&mut worker, "good");
        assert_eq!(found, Reason::Plan, "after {orders}: {detail}");
        assert_eq!(worker.started(), before + 1, "{orders}");
    }
    assert_ne!(rejected(&mut worker, "good").1, first);
}

#[test]
fn a_sound_worker_is_kept_and_one_that_left_is_replaced() {
    let mut worker = worker();
    let (_, first) = rejected(&mut worker, "good");
    assert_eq!(rejected(&mut worker, "SLOW"), (Reason::Slower, first.clone()));
    assert_eq!(rejected(&mut worker, "LEAVE"), (Reason::Budget, first.clone()));
    // The worker ended after its outcome, so no candidate is rejected.
    while matches!(worker.running.as_mut().unwrap().group.ended(), Ok(None)) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (reason, second) = rejected(&mut worker, "good");
    assert_eq!((reason, worker.started()), (Reason::Plan, 2));
    assert_ne!(first, second);
}

#[test]
fn a_program_that_is_none_is_told() {
    let absent = WorkerProgram { file: "/nonexistent/worker".into(), ..program() };
    let mut worker = Worker::new(absent, Environment::default());
    let (reason, detail) = rejected(&mut worker, "good");
    assert!(
        reason == Reason::Crashed && detail.contains("/nonexistent/worker cannot be started"),
        "{detail}"
    );
    let brief = WorkerProgram { args: vec!["-c".into(), "exit 3".into()], ..program() };
    let (reason, detail) = rejected(&mut Worker::new(brief, Environment::default()), "good");
    assert!(reason == Reason::Crashed && detail.contains("exit status: 3"), "{detail}");
}

#[test]
fn the_device_does_not_wait_for_the_host() {
    let boxed =
        |count: usize| -> Vec<Box<dyn Evaluator>> { (0..count).map(|_| Box::new(worker()) as _).collect() };
    let pool = WorkerPool::start(boxed(2), boxed(1));
    // Both host workers are busy, one of them forever.
    pool.submit(task(1, Stage::Check, "SLOW"));
    pool.submit(task(2, Stage::Screen, "HANG"));
    for number in 10..15 {
        pool.submit(task(number, Stage::Microbench, "good"));
    }
    pool.submit(task(20, Stage::Screen, "good"));
    let outcomes: Vec<Outcome> = (0..8).map(|_| pool.outcome(Duration::from_secs(20)).unwrap()).collect();
    let order: Vec<i64> = outcomes.iter().map(|outcome| outcome.candidate.0).collect();
    assert_eq!(order[..5], [10, 11, 12, 13, 14], "{order:?}");
    assert!(order.contains(&1) && order.contains(&2) && order.contains(&20), "{order:?}");
    assert!(outcomes.iter().all(|outcome| outcome.seconds < 10.0));
    assert_eq!(pool.waiting(), (0, 0));
}

#[test]
fn tasks_are_served_line_by_line() {
    let tasks = [task(1, Stage::Screen, "a"), task(2, Stage::Check, "b")];
    let input: String = tasks.iter().map(|task| serde_json::to_string(task).unwrap() + "\n").collect();
    let mut output = Vec::new();
    let evaluate = |task: &Task| {
        Ok(Outcome {
            candidate: task.candidate,
            stage: task.stage,
            problem: task.problem,
            seconds: 1.0,
            device_seconds: 0.0,
            finding: Finding::Rejected(TaskFault::new(Reason::Plan, "no").at(task.stage)),
        })
    };
    serve(input.as_bytes(), &mut output, evaluate).unwrap();
    let answers: Vec<Outcome> =
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        answers.iter().map(|o| (o.candidate.0, o.stage)).collect::<Vec<_>>(),
        [(1, Stage::Screen), (2, Stage::Check)]
    );
    let refused = serve(b"no task\n".as_slice(), Vec::new(), evaluate).unwrap_err().to_string();
    assert!(refused.contains("invalid task in line 1 of standard input"), "{refused}");
    let mut said = Vec::new();
    allow(&mut said, Duration::from_millis(1500));
    assert_eq!(said, b"{\"allow\":1.5}\n");
}
