//! Runs `flashcore evolve` as a user does: short runs, bad usage, and a run that is killed repeatedly.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use evolve::setup::{self, Wanted};
use evolve::{Configuration, Target};
use kernels::select::{Shape, TunedTable};
use kernels::{Arch, Family};
use ledger::{Arm, Environment, Ledger, Run, RunEvent, RunId};
use problem::{DType, Problem};
use serde_json::{Value, json};

/// A folder that is deleted at the end of its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("flashcore-cli-evolve-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn command(args: &[&str]) -> Command {
    command_of("evolve", args)
}

fn command_of(name: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    // The plans that are kept must not be those of the user who runs the tests.
    let config = std::env::temp_dir().join(format!("flashcore-evolve-{}", std::process::id()));
    command.arg(name).args(args).env("FLASHCORE_CONFIG_DIR", config);
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

const SMALL: &str = "1,2,128,64,f16";

/// Two runs of one search on one ledger: the second run takes known times from the first, races again, and
/// pays for the time for which it holds the device.
#[test]
fn a_second_run_on_a_processor_takes_over_what_the_first_found() {
    let folder = Folder::new("again");
    let (ledger, price) = (folder.file("l.ledger"), "3600");
    let args = [
        "--device",
        "cpu",
        "--problem",
        "1,1,64,32,f32",
        "--held-out",
        "1,1,48,32,f32",
        "--candidates",
        "6",
        // A saved plan would be the baseline of the second run.
        "--no-keep",
    ];
    let again =
        || json(&run(&[&args[..], &["--ledger", &ledger, "--price-per-hour", price, "--json"]].concat()));
    let (first, second) = (again(), again());
    let count = |report: &Value, what: &str| report["taken_over"][what].as_u64().unwrap();
    assert_eq!((count(&first, "verdicts"), count(&first, "times")), (0, 0));
    assert!(count(&second, "verdicts") > 0 && count(&second, "times") > 0, "{}", second["taken_over"]);
    assert!(second["candidates"]["raced"].as_u64().unwrap() > 0);
    for report in [&first, &second] {
        let cost = &report["cost"];
        let held = cost["device_seconds"].as_f64().unwrap();
        assert!(held >= report["seconds"]["device"].as_f64().unwrap() - 1e-9 && held > 0.0, "{cost}");
        assert!((cost["price"].as_f64().unwrap() - held).abs() < 1e-9, "{cost}");
        // The processor's peaks were measured, so the report has a bound on what is still possible.
        let possible = &report["decision"]["rows"][0];
        assert!(report["decision"]["possible"].as_f64().unwrap() >= 1.0, "{possible}");
        assert!(possible["says"].as_str().unwrap().contains("measured here"), "{possible}");
    }
    let kept = Ledger::read(ledger.as_ref()).unwrap();
    // The ledger may sum the same numbers in another order.
    let price = kept.cost(RunId(2)).unwrap().price.unwrap();
    assert!((price - second["cost"]["price"].as_f64().unwrap()).abs() < 1e-9, "{price}: {second}");
}

/// The whole search for a device that this machine lacks: real kernels, the emulator's gate, predicted times.
#[test]
fn a_short_run_against_the_model() {
    let folder = Folder::new("model");
    let (ledger, rows) = (folder.file("l.ledger"), folder.file("tuned.jsonl"));
    let seed = folder.file("seed.json");
    let problem = Problem::new(1, 2, 128, 64, DType::F16);
    let mut slow = json!(Family::Mma.default_for(&problem, &Arch::SM_90).unwrap());
    for (gene, value) in [("block_m", 16), ("block_n", 16), ("warps", 1), ("kv_warps", 1), ("stages", 1)] {
        slow[gene] = value.into();
    }
    (slow["copy"], slow["products"], slow["queries"]) =
        ("elements".into(), "in_turn".into(), "shared".into());
    slow["resident_ctas"] = Value::Null;
    std::fs::write(&seed, slow.to_string()).unwrap();
    let found = json(&run(&[
        "--device",
        "h200",
        "--problem",
        SMALL,
        "--held-out",
        "1,2,192,64,f16",
        "--candidates",
        "10",
        "--random-share",
        "0.3",
        "--seed-plan",
        &seed,
        "--ledger",
        &ledger,
        "--promote",
        &rows,
        "--json",
    ]));
    for key in [
        "problem",
        "device",
        "baseline",
        "best",
        "speedup",
        "interval",
        "verdict",
        "random_arm",
        "candidates",
        "rejected",
        "forecasts",
        "decision",
        "operators",
        "control",
        "run",
        "ledger",
    ] {
        assert!(!found[key].is_null(), "{key}: {found}");
    }
    assert_eq!((&found["device"], &found["kind"]), (&"H200".into(), &"predicted".into()));
    assert_eq!(
        (&found["candidates"]["total"], &found["control"]["verdict"]),
        (&10.into(), &"UNDECIDED".into())
    );
    // From one warp that copies single elements: a larger gain than the time model's error.
    assert_eq!(found["verdict"], "FASTER", "{found}");
    assert!(found["speedup"].as_f64() > Some(2.0), "{found}");
    assert!(found["shipped"]["race"]["ratio"].as_f64().is_some());
    let table = TunedTable::parse(&std::fs::read_to_string(&rows).unwrap()).unwrap();
    assert_eq!(table.rows().len(), 1);
    assert!(serde_json::to_string(&table.rows()[0]).unwrap().contains("predicted"));
    let known = Ledger::read(ledger.as_ref()).unwrap().resume(RunId(1)).unwrap();
    assert!(known.decisions.iter().any(|d| d.decision.what == "promoted"));
    // The report for people, made from the ledger alone. The promoted rows are in the file already.
    let again = run(&["--resume", "1", "--ledger", &ledger, "--promote", &rows]);
    assert_eq!(std::fs::read_to_string(&rows).unwrap().lines().count(), 1);
    assert!(String::from_utf8_lossy(&again.stderr).contains("has this row already"), "{again:?}");
    let text = String::from_utf8(again.stdout).unwrap();
    assert_eq!(again.status.code(), Some(0), "{}", String::from_utf8_lossy(&again.stderr));
    for part in
        ["predicted by the time model", "best against baseline", "decision:", "random sampling", "FASTER"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    // The ledger has one device and one problem, which need no option, and the run's verdict.
    let topk = |more: &[&str]| command_of("topk", &[&["--ledger", &ledger], more].concat()).output().unwrap();
    let best = json(&topk(&["--json"]));
    assert_eq!(best["rows"][0]["against"]["verdict"], found["verdict"], "{best}");
    let text = String::from_utf8(topk(&[]).stdout).unwrap();
    assert!(text.starts_with(&format!("{SMALL} on H200\n")), "{text}");
    assert!(text.contains("the model (predicted)") && text.contains("FASTER over #1"), "{text}");
    assert!(text.contains("over the plan of the comparison") && !text.contains("short timing"), "{text}");
    let more = ["--device", "h200", "--problem", "1,1,32,16,f16", "--candidates", "2", "--ledger", &ledger];
    assert_eq!(run(&more).status.code(), Some(0));
    let refused = topk(&[]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(
        said.contains("missing --problem: the ledger has several; add one of:\n")
            && said.contains(&format!("    --problem {SMALL}\n    --problem 1,1,32,16,f16\n")),
        "{said}"
    );
}

/// A run that ends before it has evaluated a candidate does not report that no kernel works.
#[test]
fn a_run_without_time_says_so() {
    let folder = Folder::new("short");
    let ledger = folder.file("l.ledger");
    let found = run(&[
        "--device",
        "h200",
        "--problem",
        SMALL,
        "--minutes",
        "0.00001",
        "--jobs",
        "1",
        "--ledger",
        &ledger,
    ]);
    let said = String::from_utf8_lossy(&found.stdout);
    assert!(said.contains("random sampling: there was no time to evaluate a candidate\n"), "{found:?}");
    assert!(said.contains("control (the baseline against itself): not compared\n"), "{found:?}");
}

/// A measured run on this machine's CPU: a few plans of a small problem, with every step of a longer run.
#[test]
fn a_short_run_on_this_processor() {
    let folder = Folder::new("cpu");
    let ledger = folder.file("l.ledger");
    let found = json(&run(&[
        "--device",
        "cpu",
        "--problem",
        "1,2,64,32,f32",
        "--candidates",
        "8",
        "--ledger",
        &ledger,
        "--json",
    ]));
    assert_eq!((&found["kind"], &found["candidates"]["total"]), (&"measured".into(), &8.into()));
    assert!(found["baseline"]["us"].as_f64() > Some(0.0) && found["best"]["candidate"]["cpu"].is_object());
    assert!(found["control"]["race"]["ratio"].as_f64().is_some(), "{}", found["control"]);
}

/// A run that is killed repeatedly and resumed ends as an undisturbed run does, with no outcome lost or
/// recorded twice.
#[test]
fn a_run_that_is_killed_loses_nothing() {
    let folder = Folder::new("killed");
    let ledger = folder.file("l.ledger");
    let begin = [
        "--device",
        "h200",
        "--problem",
        SMALL,
        "--held-out",
        "1,1,64,64,f16",
        "--candidates",
        "8",
        "--jobs",
        "1",
        "--json",
    ];
    let start = |args: &[&str]| -> Child {
        command(args)
            .args(["--ledger", &ledger])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut child = start(&begin);
    let mut kills = 0;
    let mut wait = 60;
    let last = loop {
        std::thread::sleep(Duration::from_millis(wait));
        if child.try_wait().unwrap().is_some() {
            let output = child.wait_with_output().unwrap();
            if output.status.success() {
                break Some(output);
            }
            // The process was killed before the run or the ledger existed, or when the run was finished.
            let said = String::from_utf8_lossy(&output.stderr);
            let begun = ["no run that can be continued", "there is no ledger", "is empty"];
            assert!(begun.iter().any(|part| said.contains(part)), "{said}");
            let finished = |read: &Ledger| {
                let events = read.events(RunId(1)).unwrap_or_default();
                events.last().is_some_and(|event| event.1 == RunEvent::Finished)
            };
            if Ledger::read(ledger.as_ref()).is_ok_and(|read| finished(&read)) {
                break None;
            }
            child = start(&begin);
            continue;
        }
        if kills < 12 {
            // On Unix `kill` sends SIGKILL.
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            wait = 60 + wait * 5 / 4;
            child = start(&["--resume", "--json"]);
        } else {
            break Some(child.wait_with_output().unwrap());
        }
    };
    assert!(kills > 2, "{kills}");
    if let Some(last) = last {
        let found = json(&last);
        assert_eq!(found["candidates"]["total"], 8, "{found}");
    }
    let ledger = Ledger::read(ledger.as_ref()).unwrap();
    let known = ledger.resume(RunId(1)).unwrap();
    let counted =
        known.candidates.iter().filter(|c| matches!(c.new.arm, Arm::Evolution | Arm::Random)).count();
    assert_eq!(counted, 8);
    let mut tasks: Vec<String> =
        known.outcomes.iter().map(|o| format!("{:?} {:?} {:?}", o.candidate, o.stage, o.problem)).collect();
    let all = tasks.len();
    tasks.sort();
    tasks.dedup();
    assert_eq!(tasks.len(), all);
    assert_eq!(ledger.events(RunId(1)).unwrap().last().unwrap().1, RunEvent::Finished);
    assert_eq!(ledger.runs().unwrap().len(), 1);
}

/// Starts a search, waits for its first line of progress, presses Ctrl-C `presses` times, and returns the
/// exit code and the text on standard error.
#[cfg(unix)]
fn interrupted(presses: u32, ledger: &str) -> (Option<i32>, String) {
    use std::io::{BufRead as _, BufReader, Read as _};
    let problem = "4,16,4096,128,bf16,causal";
    let args =
        ["--device", "h200", "--problem", problem, "--minutes", "5", "--jobs", "1", "--ledger", ledger];
    let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("under way") {
        assert!(stderr.read_line(&mut said).unwrap() > 0, "{said}");
    }
    for press in 0..presses {
        if press > 0 {
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    }
    stderr.read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code(), said)
}

/// Ctrl-C once: the run ends after the tasks under way, and prints how to resume it.
#[cfg(unix)]
#[test]
fn an_interrupted_run_says_how_to_go_on() {
    let folder = Folder::new("interrupted");
    // A signal between two tasks ends the run with no task to wait for. The test then tries again.
    for attempt in 0..5 {
        let ledger = folder.file(&format!("{attempt}.ledger"));
        let (code, said) = interrupted(1, &ledger);
        assert_eq!(code, Some(0), "{said}");
        assert!(
            said.contains("stopped; resume the run with `flashcore evolve --resume 1 --ledger"),
            "{said}"
        );
        let events = Ledger::read(ledger.as_ref()).unwrap().events(RunId(1)).unwrap();
        assert_eq!(events.last().unwrap().1, RunEvent::Stopped);
        if said.contains("then stops; press Ctrl-C again to stop at once") {
            return;
        }
    }
    panic!("no task was under way, each time");
}

/// Ctrl-C twice: the run ends during a task, and also prints how to resume it.
#[cfg(unix)]
#[test]
fn a_run_that_is_ended_at_once_says_how_to_go_on() {
    let folder = Folder::new("at-once");
    // The tasks may end between the two signals. The test then tries again.
    for attempt in 0..5 {
        let (code, said) = interrupted(2, &folder.file(&format!("{attempt}.ledger")));
        if code == Some(130) {
            let resume = "stopped at once; resume the run with `flashcore evolve --resume 1 --ledger";
            assert!(said.contains(resume), "{said}");
            return;
        }
    }
    panic!("it stopped in time, each time");
}

#[test]
fn bad_usage_is_told() {
    let folder = Folder::new("usage");
    let ledger = folder.file("l.ledger");
    let text = folder.file("text");
    std::fs::write(&text, "not a ledger, and longer than a page's head").unwrap();
    let place = folder.0.display().to_string();
    for (args, part) in [
        (vec!["--device", "h2000"], "expected cpu, cuda"),
        (vec!["--minutes", "-1"], "--minutes"),
        (vec!["--candidates", "0"], "invalid value '0' for --candidates"),
        (vec!["--configuration", "best"], "free, guided, full"),
        (vec!["--family", "wmma"], "mma, wgmma, small"),
        (vec!["--random-share", "2"], "above 0, at most 0.9"),
        (vec!["--random-share", "0"], "above 0, at most 0.9"),
        (vec!["--problem", "1,8"], "BATCH,HEADS,SEQ,DIM"),
        (vec!["--price", "-1"], "--price"),
        (vec!["--device", "cpu", "--promote", &text], "no --promote with --device cpu"),
        (vec!["--device", "h200", "--no-keep"], "--no-keep needs --device cpu"),
        (vec!["--resume"], "there is no ledger"),
        (vec!["--resume", "1", "--candidates", "3"], "cannot be used with"),
        (vec!["--device", "h200", "--seed-plan", &text], "one plan as JSON"),
        (
            vec!["--device", "h200", "--held-out", "1,1,64,600,f16"],
            "invalid value '1,1,64,600,f16' for --held-out",
        ),
        (vec!["--device", "l4", "--family", "wgmma"], "invalid value 'wgmma' for --family: expected mma"),
        (
            vec!["--device", "cpu", "--family", "mma"],
            "invalid value 'mma' for --family: expected no --family with --device cpu",
        ),
        (
            vec!["--device", "cpu", "--problem", "1,1,16,16,f32,backward"],
            "'1,1,16,16,f32,backward' for --problem: expected a forward pass with device cpu",
        ),
        (vec!["--held-out", "1,8"], "invalid value '1,8' for --held-out"),
        (vec!["--jobs", "100000"], "invalid value '100000' for --jobs: expected 1 to 256"),
        (vec!["--proposer", " "], "invalid value ' ' for --proposer"),
        (vec!["--proposer", "no-such-program x"], "the shell finds; it finds no no-such-program"),
        (
            vec!["--problem", "1,8,99999999999,64,f16"],
            "invalid value '1,8,99999999999,64,f16' for --problem: expected tensors of at most",
        ),
        (
            vec!["--problem", "1,8,9999999,64,f16", "--device", "h200"],
            "invalid value '1,8,9999999,64,f16' for --problem",
        ),
        (
            vec!["--held-out", "1,8,99999999999,64,f16"],
            "invalid value '1,8,99999999999,64,f16' for --held-out: expected tensors of at most",
        ),
        (vec!["--device", "h200", "--promote", "/proc/rows.jsonl"], "cannot write /proc/rows.jsonl"),
        (vec!["--device", "h200", "--promote", &place], "it is a folder"),
        (vec!["--evidence", &place], "it is a folder"),
    ] {
        let found = run(&[&args[..], &["--ledger", &ledger]].concat());
        let said = String::from_utf8_lossy(&found.stderr).into_owned();
        assert_eq!(found.status.code(), Some(3), "{args:?}: {said}");
        assert!(said.contains(part), "{args:?}: {said}");
        assert!(!PathBuf::from(&ledger).exists(), "{args:?} began a ledger");
    }
    let found = run(&["--ledger", &text]);
    assert!(String::from_utf8_lossy(&found.stderr).contains("not a FlashCore ledger"), "{found:?}");
    drop(Ledger::open(ledger.as_ref()).unwrap());
    let found = run(&["--resume", "--ledger", &ledger]);
    assert!(String::from_utf8_lossy(&found.stderr).contains("no run that can be continued"), "{found:?}");
    let found = run(&["--resume", "99", "--ledger", &ledger]);
    assert!(String::from_utf8_lossy(&found.stderr).contains("invalid value '99' for --resume"), "{found:?}");
    assert!(String::from_utf8_lossy(&found.stderr).contains("none: it has no run yet"), "{found:?}");
    std::fs::write(&ledger, "").unwrap();
    let found = run(&["--resume", "--ledger", &ledger]);
    assert!(String::from_utf8_lossy(&found.stderr).contains("is empty"), "{found:?}");
    assert_eq!(std::fs::metadata(&ledger).unwrap().len(), 0);
}

/// A run that was begun on a machine with more memory, or by a version that did not check its size.
#[test]
fn a_run_that_this_machine_cannot_hold_is_not_gone_on_with() {
    let folder = Folder::new("memory");
    let path = folder.file("l.ledger");
    let problem = Shape::of(&Problem::new(1, 8, 64, 64, DType::F16));
    let wanted = Wanted {
        problems: vec![problem],
        held_out: Some(Vec::new()),
        only: None,
        candidates: Some(2),
        minutes: None,
        seed: 1,
        configuration: Configuration::Full,
        random_share: 0.5,
        families: Vec::new(),
        proposer: None,
        early_stop: true,
        peer_us: None,
    };
    let mut config = setup::config(None, Target::Cpu, "any", None, wanted).unwrap();
    config.cases[0].problem = Shape { seq_q: 99_999_999_999, ..problem };
    let ledger = Ledger::open(path.as_ref()).unwrap();
    let environment = Environment::default();
    let config = serde_json::to_value(config).unwrap();
    ledger.begin_run(&Run { device: "any".into(), config, environment, price_per_hour: None }).unwrap();
    drop(ledger);
    let found = run(&["--resume", "--ledger", &path]);
    let said = String::from_utf8_lossy(&found.stderr);
    assert_eq!(found.status.code(), Some(3), "{said}");
    assert!(said.contains("99999999999") && said.contains("expected tensors of at most "), "{said}");
    let found = run(&["--resume", "7", "--ledger", &path]);
    let said = String::from_utf8_lossy(&found.stderr);
    assert!(
        said.contains("invalid value '7' for --resume: expected a run of") && said.contains(", 1"),
        "{said}"
    );
}

/// Reading the forecasts of a missing ledger, or adding an invalid forecast, creates no ledger.
#[test]
fn a_forecast_that_cannot_be_kept_begins_no_ledger() {
    let folder = Folder::new("forecast");
    let ledger = folder.file("l.ledger");
    let forecast = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.arg("forecast").args(args).args(["--ledger", &ledger]).output().unwrap()
    };
    let add = ["add", "an idea", "--author", "ada"];
    for (args, part) in [
        (vec!["outcome", "5", "--us", "3"], "there is no ledger"),
        (vec!["recalibrate", "--device", "x"], "there is no ledger"),
        ([&add[..], &["--us", "3", "--candidate", "1"]].concat(), "there is no ledger"),
        ([&add[..], &["--us", "0", "--device", "L4"]].concat(), "a positive number"),
        ([&add[..], &["--us", "3", "--candidate", "1", "--device", "L4"]].concat(), "cannot be used with"),
        ([&add[..], &["--us", "3"]].concat(), "--device"),
        (
            [&add[..], &["--us", "-3", "--device", "L4"]].concat(),
            "invalid value '-3' for --us: expected a positive number",
        ),
        ([&add[..], &["--us", "3", "--device", " "]].concat(), "invalid value ' ' for --device"),
        (
            [&add[..], &["--us", "3", "--device", "L5"]].concat(),
            "invalid value 'L5' for --device: expected cpu",
        ),
        ([&add[..], &["--us", "3", "--device", "cpu1"]].concat(), "invalid value 'cpu1' for --device"),
        ([&add[..], &["--us", "3", "--device", "cuda:x"]].concat(), "invalid value 'cuda:x' for --device"),
        (vec!["add", " ", "--author", "ada", "--us", "3", "--device", "L4"], "the idea, in words"),
        (vec!["add", "an idea", "--author", "", "--us", "3", "--device", "L4"], "a person's name"),
        (vec!["add", "an idea", "--author", "proposer", "--us", "3", "--device", "L4"], "a person's name"),
        (vec!["add", "an idea", "--author", "model:x", "--us", "3", "--device", "L4"], "a person's name"),
        (vec!["list", "-n", "0"], "invalid value '0' for -n"),
    ] {
        let found = forecast(&args);
        let said = String::from_utf8_lossy(&found.stderr).into_owned();
        assert_eq!(found.status.code(), Some(3), "{args:?}: {said}");
        assert!(said.contains(part), "{args:?}: {said}");
        assert!(!PathBuf::from(&ledger).exists(), "{args:?} began a ledger");
    }
    let found = forecast(&[&add[..], &["--us", "3", "--device", "L4"]].concat());
    assert_eq!(String::from_utf8_lossy(&found.stdout).trim(), "1", "{found:?}");
    // All spellings of the device are one device, and the outcome is shown.
    let found = json(&forecast(&[&add[..], &["--us", "3", "--device", "l4", "--json"]].concat()));
    assert_eq!((&found["id"], &found["forecast"]["device"]), (&2.into(), &"L4".into()));
    let found = json(&forecast(&[&add[..], &["--us", "3", "--device", "h200", "--json"]].concat()));
    assert_eq!(found["forecast"]["device"], "H200");
    let found = json(&forecast(&["outcome", "2", "--us", "3.05", "--json"]));
    assert_eq!((&found["id"], found["measured_us"].as_f64()), (&2.into(), Some(3.05)));
    let found = forecast(&["outcome", "1", "--us", "4"]);
    assert!(String::from_utf8_lossy(&found.stdout).contains("4.00 (above)"), "{found:?}");
    for (args, part) in [
        (vec!["outcome", "2", "--us", "3"], "forecast 2 of"),
        (vec!["outcome", "2", "--us", "3"], "already has an outcome, 3.05 µs"),
        (vec!["outcome", "3", "--us", "-1"], "invalid value '-1' for --us"),
        (vec!["recalibrate", "--device", "a100"], "its devices: L4; H200"),
        (
            [&add[..], &["--us", "3", "--device", "L5"]].concat(),
            "invalid value 'L5' for --device: expected cpu",
        ),
    ] {
        let found = forecast(&args);
        let said = String::from_utf8_lossy(&found.stderr).into_owned();
        assert!(found.status.code() == Some(3) && said.contains(part), "{args:?}: {said}");
    }
    let found = forecast(&["recalibrate", "--device", "h200"]);
    assert!(String::from_utf8_lossy(&found.stdout).contains("too few"), "{found:?}");
}

/// A command that only reads does not turn an empty file into a ledger.
#[test]
fn an_empty_file_is_no_ledger_to_read() {
    let folder = Folder::new("empty");
    let ledger = folder.file("l.ledger");
    std::fs::write(&ledger, "").unwrap();
    let topk: &[&str] = &["topk", "--problem", SMALL, "--device", "h200"];
    let export = folder.file("facts.jsonl");
    for args in [
        topk,
        &["ledger", "runs"],
        &["ledger", "check"],
        &["ledger", "export", &export],
        &["report"],
        &["forecast", "score"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        let found = command.args(args).args(["--ledger", &ledger]).current_dir(&folder.0).output().unwrap();
        let said = String::from_utf8_lossy(&found.stderr).into_owned();
        assert!(found.status.code() == Some(3) && said.contains("is empty"), "{args:?}: {said}");
    }
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "something lies beside it");
    drop(Ledger::open(ledger.as_ref()).unwrap());
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.args(args).args(["--ledger", &ledger]).output().unwrap()
    };
    let found = run(&[topk, &["-k", "0"]].concat());
    assert!(String::from_utf8_lossy(&found.stderr).contains("invalid value '0' for -k"), "{found:?}");
    let found = json(&run(&["ledger", "export", &export, "--json"]));
    assert!(found["rows"].as_array().is_some_and(|tables| tables[0]["table"] == "problem"), "{found}");
}

/// A ledger that `ledger check` finds damaged begins no run, and none of its runs goes on.
#[test]
fn a_damaged_ledger_is_refused() {
    let folder = Folder::new("damaged");
    let ledger = folder.file("l.ledger");
    let args =
        ["--device", "h200", "--problem", SMALL, "--candidates", "4", "--jobs", "1", "--ledger", &ledger];
    assert_eq!(run(&args).status.code(), Some(0));
    assert!(!PathBuf::from(format!("{ledger}.run-1.lock")).exists());
    let mut bytes = std::fs::read(&ledger).unwrap();
    let word = b"random_share";
    let at = bytes.windows(word.len()).position(|part| part == word).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&ledger, &bytes).unwrap();
    for args in [&args[..], &["--resume", "--ledger", &ledger], &["--resume", "1", "--ledger", &ledger]] {
        let said = run(args);
        let complaint = String::from_utf8_lossy(&said.stderr);
        let parts = ["is damaged: altered since it was written: run: id 1", "Restore it", "ledger export"];
        assert_eq!(said.status.code(), Some(3), "{args:?}: {complaint}");
        assert!(parts.iter().all(|part| complaint.contains(part)), "{args:?}: {complaint}");
    }
    assert_eq!(std::fs::read(&ledger).unwrap(), bytes);
}

/// While one process drives a run, no other process can resume it. A process that resumes it later evaluates
/// the proposer's kernels in separate processes, as the run was begun, although the command line does not
/// name the proposer.
#[cfg(target_os = "linux")]
#[test]
fn a_run_with_a_proposer_is_one_process_and_its_sandbox() {
    let folder = Folder::new("driven");
    let ledger = folder.file("l.ledger");
    let args = ["--device", "h200", "--problem", SMALL, "--minutes", "5", "--jobs", "1", "--ledger", &ledger];
    let spawn = |args: &[&str]| -> Child {
        command(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let kill = |signal: &str, child: &Child| {
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
    };
    let lock = PathBuf::from(format!("{ledger}.run-1.lock"));
    let mut first = spawn(&[&args[..], &["--proposer", "cat"]].concat());
    assert!(has_workers(&first), "begun");
    let second = run(&["--resume", "--ledger", &ledger]);
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(3), "{said}");
    assert!(said.contains("is driven by another process") && said.contains(".run-1.lock"), "{said}");
    kill("-KILL", &first);
    first.wait().unwrap();
    assert!(lock.exists(), "a process that is killed leaves its lock file");
    let mut resumed = spawn(&["--resume", "--jobs", "1", "--ledger", &ledger]);
    assert!(has_workers(&resumed), "resumed");
    // The process may see two interrupts as one. It then ends by itself.
    kill("-INT", &resumed);
    kill("-INT", &resumed);
    resumed.wait().unwrap();
    assert!(!lock.exists(), "the lock file stays");
}

/// Whether a command starts workers in separate processes.
#[cfg(target_os = "linux")]
fn has_workers(child: &Child) -> bool {
    let parent = format!(" {} ", child.id());
    let is_worker = |process: std::fs::DirEntry| {
        let read = |name: &str| std::fs::read_to_string(process.path().join(name)).unwrap_or_default();
        // In `/proc/PID/stat` the state and the parent follow the name in parentheses.
        let stat = read("stat");
        let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        rest.get(1..).is_some_and(|rest| rest.starts_with(&parent)) && read("cmdline").contains("worker")
    };
    (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        std::fs::read_dir("/proc").unwrap().flatten().any(is_worker)
    })
}

/// Data written to a deleted file is lost when the process ends, so the run must end with an error.
#[cfg(unix)]
#[test]
fn a_run_whose_ledger_is_deleted_ends_with_an_error() {
    let folder = Folder::new("deleted");
    let ledger = folder.file("l.ledger");
    let args =
        ["--device", "h200", "--problem", SMALL, "--minutes", "10", "--no-early-stop", "--ledger", &ledger];
    let child = command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let candidates = || {
        let ledger = Ledger::read(ledger.as_ref()).ok()?;
        Some(ledger.candidates(RunId(1), ledger::CandidateId(0), 10).ok()?.len())
    };
    while candidates().unwrap_or(0) < 5 {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::fs::remove_file(&ledger).unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(3), "{said}");
    assert!(said.contains("l.ledger was deleted while") && said.contains("l.ledger-wal"), "{said}");
}
