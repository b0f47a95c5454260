//! Runs untrusted child processes. Each one leads its own process group and has a mark in its environment.
//! All processes that it started end with it, and their total memory is limited. This protects against
//! accidents, not against malice: a process that clears the mark and leaves the group escapes. In a sandbox,
//! no process can leave the group.
//!
//! `sh` sets limits, and `/proc` reports memory. Without `/proc`, memory is limited by `ulimit -v` alone. No
//! process is started to send a signal: a program that starts processes without end leaves no room for one.

use std::ffi::OsString;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The environment variable that marks a process and its descendants.
const MARK: &str = "FLASHCORE_CONFINED";

/// Number of searches for processes that left the group.
const ROUNDS: u32 = 20;

/// A process with all its descendants. Dropping it ends all of them.
#[derive(Debug)]
pub struct Group {
    child: Child,
    mark: String,
    has_ended: bool,
}

impl Group {
    /// Starts a process as the leader of a new group.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn start(command: &mut Command) -> std::io::Result<Group> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mark = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        lead_a_group(command);
        Ok(Group { child: command.env(MARK, &mark).spawn()?, mark, has_ended: false })
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The exit status of the group's leader, if it has ended. The rest of the group then ends too.
    ///
    /// # Errors
    /// When the system cannot report the status.
    pub fn ended(&mut self) -> std::io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        if status.is_some() {
            self.end();
        }
        Ok(status)
    }

    /// Total resident memory of the group, bytes; 0 where the system does not report it.
    pub fn memory(&self) -> u64 {
        members(&self.mark, self.child.id()).into_iter().map(resident).sum()
    }

    /// Kills all processes of the group and waits for the leader. Only the first call sends signals: after
    /// the group has ended, the system may give its number to other processes.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let leader = self.child.id();
        kill(-i64::from(leader));
        // The leader is killed directly as well, on systems without groups. It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for round in 0..ROUNDS {
            let others = members(&self.mark, leader);
            if others.is_empty() {
                return;
            }
            others.into_iter().for_each(|process| kill(process.into()));
            std::thread::sleep(Duration::from_millis(u64::from(round)));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(unix)]
fn lead_a_group(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(not(unix))]
fn lead_a_group(_: &mut Command) {}

/// Kills a process by its number, or a group by its number with a minus sign. A process that has ended is
/// ignored.
#[cfg(unix)]
fn kill(target: i64) {
    use nix::sys::signal::{Signal, kill};
    // 0 and -1 would be other processes than those of a group.
    if let Ok(target @ (..=-2 | 1..)) = i32::try_from(target) {
        let _ = kill(nix::unistd::Pid::from_raw(target), Signal::SIGKILL);
    }
}

#[cfg(not(unix))]
fn kill(_: i64) {}

/// Running processes that belong to a group or have the mark. Zombies use no memory and do not count.
fn members(mark: &str, leader: u32) -> Vec<u32> {
    let mark = format!("{MARK}={mark}").into_bytes();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers
        .filter(|&process| {
            // The name in parentheses is followed by state, parent and group (proc(5)).
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
            let mut fields = rest.split_whitespace();
            let (state, group) = (fields.next(), fields.nth(1));
            let lives = !matches!(state, None | Some("Z" | "X"));
            let of_group = group.and_then(|group| group.parse().ok()) == Some(leader);
            lives && (of_group || is_marked(process, &mark))
        })
        .collect()
}

fn is_marked(process: u32, mark: &[u8]) -> bool {
    let environment = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    environment.split(|&byte| byte == 0).any(|variable| variable == mark)
}

/// Resident memory of a process, bytes.
fn resident(process: u32) -> u64 {
    proc_bytes(&format!("/proc/{process}/status"), "VmRSS:").unwrap_or(0)
}

/// This machine's memory, bytes; a small default if the system does not report it.
pub(super) fn machine_memory() -> u64 {
    const SMALL: u64 = 16 << 30;
    proc_bytes("/proc/meminfo", "MemTotal:").unwrap_or(SMALL)
}

/// A size from a file of `/proc` with lines such as `VmRSS:  1234 kB`, bytes.
fn proc_bytes(file: &str, key: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(rest.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Limits of a program that is run to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessLimits {
    /// Elapsed time.
    pub wall: Duration,
    /// Processor time of each of its processes, s.
    pub cpu_seconds: u64,
    /// Memory, bytes: the address space of each of its processes, and the resident memory of all together.
    pub memory: u64,
    pub output: usize,
}

/// The result of a program that stayed within its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramOutput {
    pub status: ExitStatus,
    pub output: Vec<u8>,
    /// The end of its standard error.
    pub stderr: String,
}

/// Why a program was killed or did not start.
#[derive(Debug, thiserror::Error)]
pub enum Confinement {
    #[error("the program cannot be started: {0}")]
    Start(std::io::Error),
    /// The system does not report whether the program has ended.
    #[error("cannot read the status of the program: {0}")]
    Status(std::io::Error),
    /// The program exceeded its time limit.
    #[error("the program did not end within {0} s")]
    Time(f64),
    /// The program and its children exceeded the memory limit.
    #[error("the program and its children hold {held} MB of memory: at most {limit} MB are allowed")]
    Memory {
        /// Memory that they held, MB.
        held: u64,
        limit: u64,
    },
    /// The program exceeded its output limit.
    #[error("the program wrote more than {0} bytes")]
    Output(usize),
}

/// Bytes of standard error that are kept.
const STDERR_BYTES: usize = 4096;
/// Interval between two checks of a program.
const LOOK: Duration = Duration::from_millis(5);
/// Checks of the program per check of its memory, which is more expensive: one every half second.
const MEMORY_EVERY: u32 = 100;
/// How long to wait for remaining output after a program has ended.
pub(super) const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// Runs a shell command line to its end, through [`run_command`].
///
/// # Errors
/// When the program cannot be started or exceeds a limit.
pub fn run(line: &str, input: Vec<u8>, limits: &ProcessLimits) -> Result<ProgramOutput, Confinement> {
    run_command(&["sh".into(), "-c".into(), line.into()], input, limits)
}

/// Runs a program with its arguments to its end, with `input` on its standard input. The program and
/// everything that it started have ended when this returns. The exception is a process that cleared the mark
/// and left the group: the run does not wait for such a process, even if it holds the pipes open.
///
/// # Errors
/// When the program cannot be started or exceeds a limit.
pub fn run_command(
    words: &[OsString],
    input: Vec<u8>,
    limits: &ProcessLimits,
) -> Result<ProgramOutput, Confinement> {
    // The watching loop belongs to the group: if this process disappears, the loop kills the group.
    const SCRIPT: &str = "ulimit -c 0
        (while kill -s 0 \"$3\"; do sleep 1; done; kill -s KILL -- -$$) </dev/null >/dev/null 2>&1 &
        ulimit -v \"$1\" && ulimit -t \"$2\" && shift 3 && exec \"$@\"";
    let mut command = Command::new("sh");
    let kilobytes = limits.memory / 1024;
    command.args(["-c", SCRIPT, "sh", &kilobytes.to_string(), &limits.cpu_seconds.to_string()]);
    command.arg(std::process::id().to_string()).args(words);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let began = Instant::now();
    let mut group = Group::start(&mut command).map_err(Confinement::Start)?;
    let child = group.child();
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    // The program may end without reading its input.
    if let Some(mut stdin) = stdin {
        std::thread::spawn(move || {
            let _ = std::io::Write::write_all(&mut stdin, &input);
        });
    }
    let (cap, overflows) = (limits.output, Arc::new(AtomicBool::new(false)));
    let tells = overflows.clone();
    let output =
        stdout.map(|stdout| Reader::start(stdout, move |kept, part| capped(kept, part, cap, &tells)));
    let stderr = stderr.map(|stderr| Reader::start(stderr, tail));
    let ended = attend(&mut group, limits, began, &overflows);
    // When the last process ends, the pipes close and the reader threads end.
    group.end();
    let wait_until = Instant::now() + OUTPUT_GRACE;
    let output = output.map(|reader| reader.read(wait_until)).unwrap_or_default();
    let stderr = stderr.map(|reader| reader.read(wait_until)).unwrap_or_default();
    let stderr = String::from_utf8_lossy(&stderr).trim().to_owned();
    let status = ended?;
    // The program may have ended before the overflow was noticed.
    if output.len() > cap {
        Err(Confinement::Output(cap))
    } else {
        Ok(ProgramOutput { status, output, stderr })
    }
}

/// A stream that is read on its own thread. If a process holds the stream open, the thread is abandoned.
struct Reader {
    kept: Arc<Mutex<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Reader {
    /// Reads to the end. `keep` stores each part and returns whether to continue.
    fn start(
        mut stream: impl Read + Send + 'static,
        mut keep: impl FnMut(&mut Vec<u8>, &[u8]) -> bool + Send + 'static,
    ) -> Reader {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let shared = kept.clone();
        let thread = std::thread::spawn(move || {
            let mut part = vec![0; 64 << 10];
            // A read error is treated like the end of the stream.
            while let Ok(read @ 1..) = stream.read(&mut part) {
                let mut kept = shared.lock().unwrap_or_else(PoisonError::into_inner);
                if !keep(&mut kept, &part[..read]) {
                    break;
                }
            }
        });
        Reader { kept, thread }
    }

    /// The bytes read until the end of the stream or until the deadline.
    fn read(self, until: Instant) -> Vec<u8> {
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Waits until the program ends or exceeds a limit.
fn attend(
    group: &mut Group,
    limits: &ProcessLimits,
    began: Instant,
    overflows: &AtomicBool,
) -> Result<ExitStatus, Confinement> {
    for looks in 0u32.. {
        if let Some(status) = group.ended().map_err(Confinement::Status)? {
            return Ok(status);
        }
        if overflows.load(Ordering::Relaxed) {
            return Err(Confinement::Output(limits.output));
        }
        if began.elapsed() > limits.wall {
            return Err(Confinement::Time(limits.wall.as_secs_f64()));
        }
        if looks.is_multiple_of(MEMORY_EVERY) {
            let held = group.memory();
            if held > limits.memory {
                return Err(Confinement::Memory { held: held >> 20, limit: limits.memory >> 20 });
            }
        }
        std::thread::sleep(LOOK);
    }
    Err(Confinement::Time(limits.wall.as_secs_f64()))
}

/// Keeps a stream up to one byte more than the cap.
fn capped(kept: &mut Vec<u8>, part: &[u8], cap: usize, overflows: &AtomicBool) -> bool {
    let room = cap + 1 - kept.len();
    kept.extend_from_slice(&part[..part.len().min(room)]);
    let is_over = kept.len() > cap;
    overflows.store(is_over, Ordering::Relaxed);
    !is_over
}

/// Keeps the end of a stream.
fn tail(kept: &mut Vec<u8>, part: &[u8]) -> bool {
    kept.extend_from_slice(part);
    let excess = kept.len().saturating_sub(STDERR_BYTES);
    kept.drain(..excess);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ProcessLimits =
        ProcessLimits { wall: Duration::from_secs(20), cpu_seconds: 10, memory: 1 << 30, output: 1 << 20 };

    fn short(line: &str) -> Result<ProgramOutput, Confinement> {
        run(line, b"in".to_vec(), &ProcessLimits { wall: Duration::from_millis(700), ..LIMITS })
    }

    #[test]
    fn who_keeps_the_limits_is_heard() {
        let said = run("cat; echo no >&2; exit 3", b"input".to_vec(), &LIMITS).unwrap();
        assert_eq!((said.status.code(), said.output, said.stderr), (Some(3), b"input".to_vec(), "no".into()));
        // The input exceeds the pipe's buffer, and the program reads nothing.
        let said = run("echo done", vec![b'x'; 1 << 20], &LIMITS).unwrap();
        assert_eq!((said.status.code(), said.output), (Some(0), b"done\n".to_vec()));
        // The program closes its output before it ends.
        assert_eq!(run("exec >&-; sleep 0.1; exit 4", Vec::new(), &LIMITS).unwrap().status.code(), Some(4));
    }

    #[test]
    fn who_hangs_or_burns_is_ended() {
        assert!(matches!(short("sleep 60"), Err(Confinement::Time(_))));
        assert!(matches!(short("trap '' TERM INT; while :; do sleep 60; done"), Err(Confinement::Time(_))));
        let limits = ProcessLimits { cpu_seconds: 1, ..LIMITS };
        let burnt = run("while :; do :; done", Vec::new(), &limits).unwrap();
        assert!(!burnt.status.success());
    }

    #[test]
    fn who_says_too_much_is_cut_short() {
        let began = Instant::now();
        let flood = run("exec head -c 2000000000 /dev/zero", Vec::new(), &LIMITS);
        assert!(matches!(flood, Err(Confinement::Output(_))), "{flood:?}");
        assert!(began.elapsed() < Duration::from_secs(10));
        // Only the end of standard error is kept.
        let said =
            run("head -c 9000000 /dev/zero | tr '\\0' x >&2; echo end >&2", Vec::new(), &LIMITS).unwrap();
        assert!(said.stderr.len() <= STDERR_BYTES && said.stderr.ends_with("xend"), "{}", said.stderr.len());
    }

    #[test]
    fn who_holds_too_much_is_ended() {
        let greedy = "import os; x = b'x' * (3 << 30); print(len(x))";
        let said = run(&format!("exec python3 -c \"{greedy}\""), Vec::new(), &LIMITS);
        // The system refuses the memory, and Python reports that.
        let refused =
            said.as_ref().is_ok_and(|said| !said.status.success() && said.stderr.contains("MemoryError"));
        assert!(refused || matches!(said, Err(Confinement::Memory { .. })), "{said:?}");
        // Each process is within the limit, all together are not.
        let part = "import time; x = b'x' * (300 << 20); time.sleep(60)";
        let several = format!("for i in 1 2 3 4 5; do python3 -c \"{part}\" & done; wait");
        let said = run(&several, Vec::new(), &LIMITS);
        assert!(matches!(said, Err(Confinement::Memory { .. })), "{said:?}");
    }

    /// Whether a running process has the word in its command line.
    fn lives(word: &str) -> bool {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()).any(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(word)
        })
    }

    #[test]
    fn children_end_with_it() {
        // Durations that no other test uses identify the processes.
        let (child, left) = ("61234.125", "61234.25");
        run(&format!("sleep {child} & echo answer"), Vec::new(), &LIMITS).unwrap();
        assert!(!lives(child));
        // `setsid` moves this process out of the process group.
        let line = format!("setsid sleep {left} >/dev/null 2>&1 & sleep 0.2; echo answer");
        let said = run(&line, Vec::new(), &LIMITS).unwrap();
        assert_eq!(said.output, b"answer\n");
        assert!(!lives(left));
    }

    /// The group ends when its leader is found to have ended, since later its number may be another group's.
    #[test]
    fn children_end_with_their_leader() {
        let seconds = "61234.5";
        let mut group = Group::start(Command::new("sh").args(["-c", &format!("sleep {seconds} &")])).unwrap();
        while group.ended().unwrap().is_none() {
            std::thread::sleep(LOOK);
        }
        assert!(!lives(seconds));
    }

    /// A process that cleared the mark and left the group keeps the pipes open. The run does not wait for
    /// this process, and keeps the output so far.
    #[test]
    fn who_gets_away_is_not_waited_for() {
        let began = Instant::now();
        let line = "setsid env -i sleep 9 & sleep 0.2; echo answer; echo why >&2";
        let said = run(line, vec![b'x'; 1 << 20], &LIMITS).unwrap();
        assert_eq!((said.output, said.stderr), (b"answer\n".to_vec(), "why".to_owned()));
        assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
    }

    /// A killed run leaves no child processes behind.
    #[test]
    fn children_end_with_us() {
        let seconds = "61234.375";
        let us = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "children::tests::someone_who_is_killed", "--nocapture"])
            .env("SECONDS_TO_SLEEP", seconds)
            .stdout(Stdio::null())
            .spawn();
        let mut us = us.unwrap();
        let within = |what: &dyn Fn() -> bool| {
            (0..200).any(|_| {
                std::thread::sleep(Duration::from_millis(50));
                what()
            })
        };
        assert!(within(&|| lives(seconds)));
        us.kill().unwrap();
        us.wait().unwrap();
        assert!(within(&|| !lives(seconds)));
    }

    /// The process that the previous test kills; on its own it does nothing.
    #[test]
    fn someone_who_is_killed() {
        if let Ok(seconds) = std::env::var("SECONDS_TO_SLEEP") {
            let _ = run(&format!("exec sleep {seconds}"), Vec::new(), &LIMITS);
        }
    }
}
