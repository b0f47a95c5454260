//! Proposers in a sandbox: forbidden resources are refused, and needed ones work. If the kernel offers no
//! sandbox, a run that asks for one does not begin.

#![cfg(target_os = "linux")]

use ledger::Reason;
use std::ffi::OsStr;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use evolve::proposer::{LIMITS, Proposer, Sandbox};
use host::store::Scratch;
use serde_json::json;

const FLASHCORE: &str = env!("CARGO_BIN_EXE_flashcore");
const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/proposer.py");
const SECRET: &str = "FLASHCORE_TEST_SECRET";

/// Whether the system's kernel supports the sandbox. If it does not, the test says so and passes; with
/// `FLASHCORE_REQUIRE_SANDBOX` set, it fails.
pub fn can_be_had() -> bool {
    let said = sandboxed(Path::new("/"), &[], ":");
    let complaint = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.success() || complaint.contains("cannot set up the sandbox"), "{complaint}");
    if !said.status.success() {
        assert!(std::env::var_os("FLASHCORE_REQUIRE_SANDBOX").is_none(), "{complaint}");
        filetest::not_run(complaint.trim());
    }
    said.status.success()
}

/// Runs a shell command in a sandbox with two variables set. Neither is visible unless `allowed` names it.
pub fn sandboxed(folder: &Path, allowed: &[&str], line: &str) -> Output {
    confined(FLASHCORE, folder, allowed, line).output().unwrap()
}

fn confined(program: impl AsRef<OsStr>, folder: &Path, allowed: &[&str], line: &str) -> Command {
    let mut command = Command::new(program);
    command.arg("sandboxed").arg("--folder").arg(folder).args(allowed).args(["--", line]);
    command.env(SECRET, "a secret").env("FLASHCORE_TEST_TOKEN", "a token");
    command
}

/// Runs a shell command without a sandbox.
pub fn unrestricted(line: &str) -> Output {
    Command::new("sh").args(["-c", line]).output().unwrap()
}

/// Runs a Python program in its own folder. It prints `reached` if `deed` succeeds.
fn python(folder: &Path, allowed: &[&str], deed: &str) -> Output {
    let line = format!("cd \"$TMPDIR\" && exec python3 -c '{deed}\nprint(\"reached\")'");
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
        format!("import os; os.rename(\"{secret}\", \"mine\")"),
        format!("import os; open(\"mine\", \"w\"); os.rename(\"mine\", \"{secret}\")"),
        format!("import os; os.mkdir(\"{}\")", new.display()),
        format!("import os; os.symlink(\"mine\", \"{}\")", new.display()),
        format!("import os; os.mkfifo(\"{}\")", new.display()),
        format!("import os; os.rename(os.getcwd(), \"{}\")", new.display()),
        format!("import os; place = os.open(\"{secret}\", os.O_PATH); open(f\"/proc/self/fd/{{place}}\")"),
        "open(\"/dev/tty\")".to_owned(),
        "open(\"/dev/shm/flashcore-test\", \"w\")".to_owned(),
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

/// An ordinary user. Root may do what the kernel forbids to others, so as root the tests become another user.
struct User {
    home: Scratch,
    /// The user's number, if it is not this process's.
    number: Option<u32>,
    flashcore: PathBuf,
}

impl User {
    fn new() -> User {
        const NOBODY: u32 = 65534;
        let home = Scratch::new().unwrap();
        let is_root = std::fs::metadata(home.path("")).unwrap().uid() == 0;
        let number = is_root.then_some(NOBODY);
        let flashcore = if is_root { home.path("flashcore") } else { FLASHCORE.into() };
        if is_root {
            // The folder of the program may be closed to others.
            std::fs::copy(FLASHCORE, &flashcore).unwrap();
        }
        let user = User { home, number, flashcore };
        for folder in ["", "own"] {
            let folder = user.home.path(folder);
            std::fs::create_dir_all(&folder).unwrap();
            user.owns(&folder);
        }
        user
    }

    fn owns(&self, path: &Path) {
        if self.number.is_some() {
            chown(path, self.number, self.number).unwrap();
        }
    }

    fn start(&self, command: &mut Command) -> Output {
        self.becomes(command).output().unwrap()
    }

    fn becomes<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        if let Some(number) = self.number {
            command.uid(number).gid(number);
        }
        command.current_dir(self.home.path("own"))
    }

    /// A file of the user, and a process that waits.
    fn victims(&self) -> (PathBuf, Victim) {
        let file = self.home.path("run.ledger");
        std::fs::write(&file, "a ledger").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        self.owns(&file);
        let mut command = Command::new("sleep");
        (file, Victim(self.becomes(command.arg("600")).spawn().unwrap()))
    }
}

struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Python expressions of a faulty or hostile proposer that change a `file` or a `process` of the user. Each
/// succeeds without a sandbox.
const DEEDS: [&str; 20] = [
    "os.chmod(file, 0o666)",
    "os.chmod(os.path.dirname(file), 0o777)",
    "os.chmod(os.path.basename(file), 0o666, dir_fd=os.open(os.path.dirname(file), os.O_PATH))",
    "os.chown(file, os.getuid(), os.getgid())",
    "os.chown(file, os.getuid(), os.getgid(), follow_symlinks=False)",
    "os.utime(file, (1, 1))",
    "os.utime(file, (1, 1), follow_symlinks=False)",
    // The file may be read, but no more.
    "os.fchmod(os.open(file, os.O_RDONLY), 0o666)",
    "os.fchown(os.open(file, os.O_RDONLY), os.getuid(), os.getgid())",
    "os.utime(os.open(file, os.O_RDONLY), (1, 1))",
    "fcntl.fcntl(os.open(file, os.O_RDONLY), 1024, fcntl.F_RDLCK)",
    "os.symlink(file, \"link\"); os.chmod(\"link\", 0o666)",
    "resource.prlimit(process, resource.RLIMIT_CPU, (1, 1))",
    "resource.prlimit(process, resource.RLIMIT_NOFILE, (3, 3))",
    "os.sched_setaffinity(process, {min(os.sched_getaffinity(0))})",
    "os.setpriority(os.PRIO_PROCESS, process, 19)",
    "os.sched_setscheduler(process, os.SCHED_BATCH, os.sched_param(0))",
    "os.pidfd_open(process)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b\"a\", file + \".socket\")",
    "call(251 if os.uname().machine == \"x86_64\" else 30, 1, process, 3 << 13)",
];

#[test]
fn an_ordinary_user_is_safe_from_a_proposer() {
    if !can_be_had() {
        return;
    }
    let user = User::new();
    let (file, _) = user.victims();
    let socket = UnixDatagram::bind(format!("{}.socket", file.display())).unwrap();
    socket.set_nonblocking(true).unwrap();
    user.owns(&user.home.path("run.ledger.socket"));
    let own = user.home.path("own");
    for deed in DEEDS {
        let (file, victim) = user.victims();
        let process = victim.0.id();
        let line = format!(
            "exec python3 -c 'import ctypes, fcntl, os, resource, socket\n\
             def call(*arguments):\n \
               assert ctypes.CDLL(None, use_errno=True).syscall(*arguments) == 0, \"PermissionError\"\n\
             file, process = \"{}\", {process}\n\
             {deed}\n\
             print(\"reached\")'",
            file.display()
        );
        let state = || {
            let found = [&file, &user.home.path("")].map(|path| std::fs::metadata(path).unwrap());
            let found = found.map(|found| (found.mode(), found.uid(), found.mtime(), found.ctime_nsec()));
            let limits = std::fs::read_to_string(format!("/proc/{process}/limits")).unwrap();
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
            // Priority and nice value, and the policy.
            let stat: Vec<&str> = stat.split_whitespace().collect();
            let stat = [stat[17], stat[18], stat[40]].map(str::to_owned);
            (found, limits, stat, socket.recv(&mut [0; 8]).is_ok())
        };
        let before = state();
        let read = file.display().to_string();
        let said = user.start(&mut confined(&user.flashcore, &own, &["--read", &read], &line));
        let complaint = String::from_utf8_lossy(&said.stderr);
        assert!(said.stdout.is_empty() && complaint.contains("PermissionError"), "{deed}: {said:?}");
        assert_eq!(state(), before, "{deed}");
        // Without a sandbox the deed succeeds, so that it is the sandbox that refuses it.
        let _ = std::fs::remove_file(own.join("link"));
        let said = user.start(Command::new("sh").args(["-c", &line]));
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "reached", "{deed}: {said:?}");
        let _ = std::fs::remove_file(own.join("link"));
        while socket.recv(&mut [0; 8]).is_ok() {}
        std::fs::set_permissions(user.home.path(""), PermissionsExt::from_mode(0o700)).unwrap();
    }
}

/// Signals to processes outside the sandbox are refused from Linux 6.12 on.
#[test]
fn no_signal_reaches_another_process() {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    if (parts.next(), parts.next()) < (Some(6), Some(12)) {
        return filetest::not_run("Linux before 6.12 does not restrict signals");
    }
    if !can_be_had() {
        return;
    }
    let user = User::new();
    let own = user.home.path("own");
    let (_, mut victim) = user.victims();
    let process = victim.0.id();
    for deed in [
        format!("os.kill({process}, 9)"),
        format!("os.kill({process}, 0)"),
        "os.kill(os.getppid(), 9)".to_owned(),
        format!("fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {process})"),
    ] {
        let line = format!("exec python3 -c 'import fcntl, os\n{deed}\nprint(\"reached\")'");
        let said = user.start(&mut confined(&user.flashcore, &own, &[], &line));
        let complaint = String::from_utf8_lossy(&said.stderr);
        assert!(said.stdout.is_empty() && complaint.contains("PermissionError"), "{deed}: {said:?}");
    }
    assert!(victim.0.try_wait().unwrap().is_none(), "it was ended");
}

/// As root, a device node would be a way to the disk, and an attribute of a file is data.
#[test]
fn devices_and_attributes_are_refused() {
    if !can_be_had() {
        return;
    }
    let (own, outside) = (Scratch::new().unwrap(), Scratch::new().unwrap());
    let file = outside.path("file");
    std::fs::write(&file, "").unwrap();
    for kind in ["S_IFBLK", "S_IFCHR"] {
        is_refused(
            &own.path(""),
            &format!("import os, stat; os.mknod(\"node\", 0o600 | stat.{kind}, os.makedev(1, 3))"),
        );
    }
    let file = file.display();
    for deed in [format!("os.getxattr(\"{file}\", \"user.a\")"), format!("os.listxattr(\"{file}\")")] {
        let said = python(&own.path(""), &[], &format!("import os\n{deed}"));
        assert!(
            said.stdout.is_empty() && String::from_utf8_lossy(&said.stderr).contains("[Errno 95]"),
            "{said:?}"
        );
    }
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
        "import threading; t = threading.Thread(target=print, args=[\"\"], kwargs={\"end\": \"\"}); t.start(); t.join()",
        "import asyncio; asyncio.run(asyncio.create_subprocess_exec(\"true\"))",
        "import socket; a, b = socket.socketpair(); a.send(b\"a\"); assert b.recv(1) == b\"a\"",
        "import os; os.mkfifo(\"fifo\"); os.rename(\"fifo\", \"other\"); os.unlink(\"other\")",
        "import shutil; open(\"a\", \"w\"); shutil.copyfile(\"a\", \"b\"); __import__(\"os\").mkdir(\"d\"); shutil.rmtree(\"d\")",
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); resource.getrlimit(resource.RLIMIT_AS)",
        "import os; os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))",
        "import signal; p = __import__(\"subprocess\").Popen([\"sleep\", \"600\"]); p.kill(); p.wait()",
        "import subprocess; assert subprocess.check_output(\"ls -l; timeout 60 cp a c; cat c\", shell=True)",
        "import sqlite3; c = sqlite3.connect(\"d\"); c.execute(\"CREATE TABLE t (x)\"); c.commit()",
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

/// Neither a process without the variable nor one that tries to leave the process group outlives an answer.
#[test]
fn no_process_outlives_an_answer() {
    if !can_be_had() {
        return;
    }
    // Durations that no other test uses identify the processes.
    let line = "env -i sleep 61235.125 & setsid env -i sleep 61235.25 & sleep 0.2; echo";
    let proposer = Proposer::new(line, LIMITS).sandboxed(FLASHCORE.into(), Sandbox::default());
    let said = proposer.run(Vec::new()).unwrap();
    assert!(said.stderr.contains("setsid"), "{said:?}");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    let ours: Vec<_> = lines.filter(|line| line.starts_with(b"sleep\x0061235.")).collect();
    assert!(ours.is_empty(), "{ours:?}");
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
