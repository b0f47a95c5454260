//! Proposers in a sandbox: forbidden resources are refused, and needed ones work. If the kernel offers no
//! sandbox, a run that asks for one does not begin.

#![cfg(target_os = "linux")]

use ledger::Reason;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

use evolve::proposer::{LIMITS, Proposer, Sandbox};
use host::store::Scratch;
use serde_json::json;

const FLASHCORE: &str = env!("CARGO_BIN_EXE_flashcore");
const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/proposer.py");
const SECRET: &str = "FLASHCORE_TEST_SECRET";

/// Whether the system's kernel supports the sandbox.
fn can_be_had() -> bool {
    let said = sandboxed(Path::new("/"), &[], ":");
    let complaint = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.success() || complaint.contains("cannot set up the sandbox"), "{complaint}");
    if !said.status.success() {
        filetest::not_run(complaint.trim());
    }
    said.status.success()
}

/// Runs a shell command in a sandbox with two variables set. Neither is visible unless `allowed` names it.
fn sandboxed(folder: &Path, allowed: &[&str], line: &str) -> Output {
    let mut command = Command::new(FLASHCORE);
    command.arg("sandboxed").arg("--folder").arg(folder).args(allowed).args(["--", line]);
    command.env(SECRET, "a secret").env("FLASHCORE_TEST_TOKEN", "a token").output().unwrap()
}

/// Runs a Python program that prints `reached` if `deed` succeeds.
fn python(folder: &Path, allowed: &[&str], deed: &str) -> Output {
    let line = format!("exec python3 -c '{deed}\nprint(\"reached\")'");
    sandboxed(folder, allowed, &line)
}

#[track_caller]
fn is_refused(folder: &Path, deed: &str) {
    let said = python(folder, &[], deed);
    let complaint = String::from_utf8_lossy(&said.stderr);
    assert!(!said.status.success() && said.stdout.is_empty(), "{deed}: {said:?}");
    assert!(complaint.contains("PermissionError") || complaint.contains("KeyError"), "{deed}: {complaint}");
}

#[track_caller]
fn is_allowed(folder: &Path, allowed: &[&str], deed: &str) {
    let said = python(folder, allowed, deed);
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "reached", "{deed}: {said:?}");
}

#[test]
fn what_is_outside_is_refused() {
    if !can_be_had() {
        return;
    }
    let (own, outside) = (Scratch::new().unwrap(), Scratch::new().unwrap());
    let (folder, secret) = (own.path(""), outside.path("secret"));
    std::fs::write(&secret, "a secret").unwrap();
    let (secret, new) = (secret.display(), outside.path("new"));
    for deed in [
        format!("open(\"{secret}\").read()"),
        format!("open(\"{secret}\", \"a\").write(\"more\")"),
        format!("import os; os.truncate(\"{secret}\", 0)"),
        format!("import os; os.unlink(\"{secret}\")"),
        format!("open(\"{}\", \"w\")", new.display()),
        format!("import os; os.listdir(\"{}\")", outside.path("").display()),
        "open(\"/etc/passwd\").read()".to_owned(),
        "import os; os.listdir(\"/home\")".to_owned(),
        "import os; os.listdir(\"/proc\")".to_owned(),
        "import os; open(f\"/proc/{os.getppid()}/environ\").read()".to_owned(),
        "open(\"/usr/flashcore-test\", \"w\")".to_owned(),
    ] {
        is_refused(&folder, &deed);
    }
    assert_eq!(std::fs::read_to_string(outside.path("secret")).unwrap(), "a secret");
    assert!(!new.exists());
}

#[test]
fn no_network_is_reached() {
    if !can_be_had() {
        return;
    }
    let own = Scratch::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    for deed in [
        format!("import socket; socket.create_connection((\"127.0.0.1\", {port}), 5)"),
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)".to_owned(),
        "import socket; socket.socket(socket.AF_UNIX)".to_owned(),
    ] {
        is_refused(&own.path(""), &deed);
    }
    assert!(listener.accept().is_err(), "a connection came");
}

#[test]
fn variables_are_seen_where_they_are_allowed() {
    if !can_be_had() {
        return;
    }
    let own = Scratch::new().unwrap();
    let folder = own.path("");
    is_refused(&folder, &format!("import os; os.environ[\"{SECRET}\"]"));
    is_allowed(
        &folder,
        &["--env", SECRET],
        &format!("import os; assert os.environ[\"{SECRET}\"] == \"a secret\""),
    );
    is_allowed(
        &folder,
        &["--env", SECRET],
        "import os; assert \"FLASHCORE_TEST_TOKEN\" not in os.environ and \"PATH\" in os.environ",
    );
}

#[test]
fn what_a_program_needs_works() {
    if !can_be_had() {
        return;
    }
    let (own, given) = (Scratch::new().unwrap(), Scratch::new().unwrap());
    std::fs::write(given.path("data"), "some data").unwrap();
    let (folder, data) = (own.path(""), given.path("data").display().to_string());
    for deed in [
        "import os; open(os.path.join(os.environ[\"TMPDIR\"], \"a\"), \"w\").write(\"mine\")",
        "import os; assert os.path.samefile(os.environ[\"HOME\"], os.environ[\"TMPDIR\"])",
        "import json, ssl, decimal, random, tempfile; tempfile.TemporaryFile().write(b\"mine\")",
        "import subprocess; assert subprocess.check_output([\"echo\", \"a\"]) == b\"a\\n\"",
        "open(\"/dev/null\", \"w\").write(\"nothing\"); open(\"/dev/urandom\", \"rb\").read(8)",
    ] {
        is_allowed(&folder, &[], deed);
    }
    is_refused(&folder, &format!("open(\"{data}\").read()"));
    is_allowed(&folder, &["--read", &data], &format!("assert open(\"{data}\").read() == \"some data\""));
    let part = ["--read", &given.path("").display().to_string()].map(str::to_owned);
    is_allowed(&folder, &[&part[0], &part[1]], &format!("open(\"{data}\").read()"));
    // The exit code of the command is passed on.
    assert_eq!(sandboxed(&folder, &[], "exit 7").status.code(), Some(7));
    let nowhere = sandboxed(&folder, &["--read", "/no/such/place"], ":");
    let complaint = String::from_utf8_lossy(&nowhere.stderr).into_owned();
    assert!(nowhere.status.code() == Some(3) && complaint.contains("/no/such/place"), "{complaint}");
}

/// The file that the command names may be read without `--proposer-read`.
#[test]
fn the_example_proposes_in_a_sandbox() {
    if !can_be_had() {
        return;
    }
    let line = format!("python3 '{EXAMPLE}'");
    let sandbox = Sandbox::for_line(&line, &[], &[]);
    assert_eq!(sandbox.read, [Path::new(EXAMPLE)]);
    let proposer = Proposer::new(&line, LIMITS).sandboxed(FLASHCORE.into(), sandbox);
    let plan = kernels::Family::Mma.default_for(&problem::Problem::mission(), &kernels::Arch::SM_90).unwrap();
    let brief =
        json!({ "incumbent": { "candidate": { "gpu": plan }, "us": 4.0, "source": "" }, "history": [] });
    let proposal = proposer.propose(&brief).unwrap();
    assert_eq!(proposal.predicted_us, Some(4.0), "{proposal:?}");
}

#[test]
fn a_run_asks_its_proposer_in_the_sandbox_or_does_not_begin() {
    let folder = Scratch::new().unwrap();
    let (ledger, report) = (folder.path("l.ledger"), folder.path("reached"));
    let line = format!("cp /etc/passwd '{}'; exec python3 '{EXAMPLE}'", report.display());
    let mut command = Command::new(FLASHCORE);
    command.args([
        "evolve",
        "--device",
        "h200",
        "--problem",
        "1,1,128,64,f16",
        "--candidates",
        "40",
        "--json",
    ]);
    command.arg("--ledger").arg(&ledger).args(["--proposer", &line, "--proposer-sandbox"]);
    let run = command.output().unwrap();
    let complaint = String::from_utf8_lossy(&run.stderr).into_owned();
    if !can_be_had() {
        assert!(run.status.code() == Some(3) && complaint.contains("sandbox"), "{complaint}");
        assert!(!ledger.exists(), "a run began without its sandbox");
        return;
    }
    assert_eq!(run.status.code(), Some(0), "{complaint}");
    assert!(!report.exists(), "the proposer wrote outside its folder");
    let ledger = ledger::Ledger::read(&ledger).unwrap();
    let all = ledger.candidates(ledger::RunId(1), ledger::CandidateId(0), 1000).unwrap();
    let proposed: Vec<_> = all.iter().filter(|known| known.new.operator.to_string() == "proposer").collect();
    assert!(!proposed.is_empty(), "the proposer was never asked");
    for known in proposed {
        let rejections = ledger.candidate(known.id).unwrap().rejections;
        assert!(rejections.iter().all(|found| found.reason != Reason::Proposer), "{rejections:?}");
    }
}
