//! Runs evaluations in child processes, so that a kernel that hangs, breaks its context or crashes its
//! process ends only a worker. The candidate is rejected, another worker starts, and the run continues.
//!
//! A worker reads one [`Task`] per line and writes one [`Outcome`] per line, in the same order. Before an
//! outcome it may write `{"allow": 8.0}`: this requests 8 seconds, after which the worker counts as hanging.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::children::{Group, OUTPUT_GRACE, machine_memory};
use super::evaluate::{Evaluator, Look, TaskFault};
use super::faults::is_lost;
use super::task::{Finding, Outcome, Task};
use ledger::{Environment, Reason, Rejection};

/// A line of a worker that is not an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Allowance {
    /// Seconds from now on.
    allow: f64,
}

/// Why a worker ends before its input does.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("cannot read standard input: {0}")]
    Input(std::io::Error),
    #[error("invalid task in line {line} of standard input ({error}): expected one task per line, as JSON")]
    Task {
        /// Line number, from 1.
        line: usize,
        error: serde_json::Error,
    },
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(std::io::Error),
    #[error("{0}")]
    Device(#[from] TaskFault),
}

/// The worker's side: serves tasks until the input ends.
///
/// # Errors
/// When a line is not a task, the output is closed, or the evaluator fails.
pub fn serve(
    input: impl BufRead,
    mut output: impl Write,
    mut evaluate: impl FnMut(&Task) -> Result<Outcome, TaskFault>,
) -> Result<(), ServeError> {
    for (line, text) in (1..).zip(input.lines()) {
        let text = text.map_err(ServeError::Input)?;
        let task = serde_json::from_str(&text).map_err(|error| ServeError::Task { line, error })?;
        let outcome = serde_json::json!(evaluate(&task)?);
        writeln!(output, "{outcome}").and_then(|()| output.flush()).map_err(ServeError::Output)?;
    }
    Ok(())
}

/// Ends this process after its parent has ended. Otherwise a hanging kernel would keep the process alive
/// forever.
pub fn end_with_parent() {
    let parent = parent();
    std::thread::spawn(move || {
        while self::parent() == parent {
            std::thread::sleep(LOOK);
        }
        // A regular exit would wait for the hung kernel's resources.
        std::process::abort();
    });
}

#[cfg(unix)]
fn parent() -> u32 {
    std::os::unix::process::parent_id()
}

#[cfg(not(unix))]
fn parent() -> u32 {
    0
}

/// Announces the time limit of the next outcome to the supervisor.
pub fn allow(output: &mut impl Write, time: Duration) {
    let line = serde_json::json!(Allowance { allow: time.as_secs_f64() });
    // A write error means that there is no supervisor.
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

/// A worker's program.
#[derive(Clone, Debug)]
pub struct WorkerProgram {
    pub file: PathBuf,
    pub args: Vec<OsString>,
    /// Time limit for an outcome, unless the worker asks for another one.
    pub patience: Duration,
    /// Memory limit of the worker and its descendants, bytes.
    pub memory: u64,
}

impl WorkerProgram {
    /// This program as a supervised worker with further arguments.
    ///
    /// # Errors
    /// When the system does not name this program's file.
    pub fn of_this(args: &[&str]) -> std::io::Result<WorkerProgram> {
        let args = ["worker", "--watched"].iter().chain(args).copied().map(OsString::from).collect();
        let (patience, memory) = (Duration::from_secs(180), evaluation_memory());
        Ok(WorkerProgram { file: std::env::current_exe()?, args, patience, memory })
    }
}

/// The memory that an evaluation may hold, bytes: half of this machine's memory. A worker that holds more is
/// ended, and the setup of a run refuses problems whose evaluation needs more.
pub(super) fn evaluation_memory() -> u64 {
    machine_memory() / 2
}

/// A child process as an evaluator. It starts with its first task, and again after it is lost.
pub struct Worker {
    program: WorkerProgram,
    environment: Environment,
    running: Option<Running>,
    /// Number of processes started.
    started: u32,
}

struct Running {
    group: Group,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// The last lines of its standard error.
    stderr: Arc<Mutex<VecDeque<String>>>,
    /// The thread that reads standard error.
    listener: JoinHandle<()>,
}

/// Number of lines of standard error that are kept.
const STDERR_LINES: usize = 8;
/// Interval between two checks of a worker's memory.
const LOOK: Duration = Duration::from_millis(200);
/// Interval between two checks of a worker whose output ended.
const PAUSE: Duration = Duration::from_millis(5);

impl Worker {
    /// A worker of a program; `environment` describes the origin of its figures.
    pub fn new(program: WorkerProgram, environment: Environment) -> Worker {
        Worker { program, environment, running: None, started: 0 }
    }

    /// Number of processes started so far: one more than were lost.
    pub const fn started(&self) -> u32 {
        self.started
    }

    fn start(&mut self) -> std::io::Result<Running> {
        let mut command = Command::new(&self.program.file);
        command.args(&self.program.args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = Group::start(&mut command)?;
        let missing = || std::io::Error::other("the worker has no pipes");
        let child = group.child();
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else { return Err(missing()) };
        let (tell, lines) = channel();
        // Both threads end with the worker, whose pipes close.
        std::thread::spawn(move || {
            let _ = BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| tell.send(line));
        });
        let kept = Arc::new(Mutex::new(VecDeque::new()));
        let shared = kept.clone();
        let listener = std::thread::spawn(move || keep(stderr, &shared));
        self.started += 1;
        Ok(Running { group, stdin, lines, stderr: kept, listener })
    }

    /// Sends the task to a running worker and returns the outcome.
    fn ask(&mut self, task: &Task) -> Result<Outcome, TaskFault> {
        let line = serde_json::to_string(task).map_err(|error| TaskFault::new(Reason::Crashed, error))?;
        // A worker that ended while idle is replaced without a rejection.
        let idle = self.running.take();
        let mut running = match idle.and_then(Running::still_runs) {
            Some(running) => running,
            None => self.start().map_err(|error| {
                let program = self.program.file.display();
                TaskFault::new(Reason::Crashed, format!("the worker {program} cannot be started: {error}"))
            })?,
        };
        // A failed write is noticed when the outcome does not arrive.
        let _ = writeln!(running.stdin, "{line}").and_then(|()| running.stdin.flush());
        let answer = running.answer(task, &self.program);
        let is_sound = answer.as_ref().is_ok_and(|outcome| !is_lost(outcome));
        if is_sound {
            self.running = Some(running);
        }
        answer
    }
}

impl Running {
    /// This worker, unless it has ended.
    fn still_runs(mut self) -> Option<Running> {
        matches!(self.group.ended(), Ok(None)).then_some(self)
    }

    fn answer(&mut self, task: &Task, program: &WorkerProgram) -> Result<Outcome, TaskFault> {
        let mut given = program.patience;
        let mut since = Instant::now();
        loop {
            let left = given.saturating_sub(since.elapsed());
            match self.lines.recv_timeout(left.min(LOOK)) {
                Ok(line) => {
                    if let Ok(Allowance { allow }) = serde_json::from_str(&line) {
                        (given, since) =
                            (Duration::try_from_secs_f64(allow).unwrap_or(given), Instant::now());
                        continue;
                    }
                    let outcome: Outcome = serde_json::from_str(&line).map_err(|error| {
                        let begin: String = line.chars().take(80).collect();
                        TaskFault::new(
                            Reason::Crashed,
                            format!(
                                "invalid line {begin:?} from the worker: expected an outcome as JSON ({error})"
                            ),
                        )
                    })?;
                    if (outcome.candidate, outcome.stage) != (task.candidate, task.stage) {
                        return Err(TaskFault::new(Reason::Crashed, "the worker answered another task"));
                    }
                    return Ok(outcome);
                }
                Err(RecvTimeoutError::Timeout) if since.elapsed() >= given => {
                    return Err(TaskFault::new(
                        Reason::Hangs,
                        format!("the worker sent no outcome within {:.1} s", given.as_secs_f64()),
                    ));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let held = self.group.memory();
                    if held > program.memory {
                        let (held, most) = (held >> 20, program.memory >> 20);
                        return Err(TaskFault::new(
                            Reason::Memory,
                            format!("the worker holds {held} MB of memory: at most {most} MB are allowed"),
                        ));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.how_it_ended()),
            }
        }
    }

    /// The fault of a worker whose standard output ended. Its process may still run.
    fn how_it_ended(&mut self) -> TaskFault {
        let closed = Instant::now();
        let status = loop {
            match self.group.ended() {
                Ok(None) if closed.elapsed() < OUTPUT_GRACE => std::thread::sleep(PAUSE),
                Ok(None) => {
                    let seconds = OUTPUT_GRACE.as_secs_f64();
                    let detail =
                        format!("the worker closed its output and did not end within {seconds:.1} s");
                    return TaskFault::new(Reason::Hangs, detail);
                }
                Ok(Some(status)) => break status.to_string(),
                Err(error) => break error.to_string(),
            }
        };
        // Remaining output may still arrive; a process that left the group may hold the pipe open.
        let ended = Instant::now();
        while !self.listener.is_finished() && ended.elapsed() < OUTPUT_GRACE {
            std::thread::sleep(PAUSE);
        }
        let stderr = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        let words: Vec<&str> = stderr.iter().map(String::as_str).collect();
        TaskFault::new(Reason::Crashed, format!("its worker ended ({status}): {}", words.join(" | ")))
    }
}

/// Keeps the last lines of a stream.
fn keep(stream: impl Read, kept: &Mutex<VecDeque<String>>) {
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back(line);
        if kept.len() > STDERR_LINES {
            kept.pop_front();
        }
    }
}

impl Evaluator for Worker {
    fn look(&mut self, task: &Task) -> Result<Look, Rejection> {
        let began = Instant::now();
        match self.ask(task) {
            Ok(Outcome { finding, device_seconds, .. }) => Ok(Look { finding, device_seconds }),
            Err(fault) => {
                // The lost worker cannot report the device time, so all of the elapsed time counts.
                let device_seconds =
                    if task.stage.is_of_device() { began.elapsed().as_secs_f64() } else { 0.0 };
                Ok(Look { finding: Finding::Rejected(fault.at(task.stage)), device_seconds })
            }
        }
    }

    fn environment(&self) -> Environment {
        self.environment.clone()
    }
}

/// Evaluators that work in parallel, each on its own thread: some compile and check, others measure. A task
/// for the device waits only for other tasks of the device, so that the device is not idle while there is
/// work.
pub struct WorkerPool {
    queues: Arc<Queues>,
    outcomes: Receiver<Outcome>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

#[derive(Default)]
struct Queues {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Default)]
struct State {
    host: VecDeque<Task>,
    device: VecDeque<Task>,
    closed: bool,
}

impl Queues {
    /// The next task of a kind; `None` after the pool is closed.
    fn next(&self, device: bool) -> Option<Task> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let queue = if device { &mut state.device } else { &mut state.host };
            if let Some(task) = queue.pop_front() {
                return Some(task);
            }
            if state.closed {
                return None;
            }
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl WorkerPool {
    /// Starts evaluators: `host` for stages without a device, `device` for the others.
    pub fn start(host: Vec<Box<dyn Evaluator>>, device: Vec<Box<dyn Evaluator>>) -> WorkerPool {
        let (tell, outcomes) = channel();
        let queues = Arc::new(Queues::default());
        let all = host.into_iter().map(|evaluator| (evaluator, false));
        let all = all.chain(device.into_iter().map(|evaluator| (evaluator, true)));
        let threads = all.map(|(evaluator, device)| {
            let (queues, tell) = (queues.clone(), tell.clone());
            std::thread::spawn(move || work(evaluator, &queues, device, &tell))
        });
        WorkerPool { threads: threads.collect(), queues, outcomes }
    }

    /// Queues a task.
    pub fn submit(&self, task: Task) {
        let mut state = self.queues.state.lock().unwrap_or_else(PoisonError::into_inner);
        if task.stage.is_of_device() {
            state.device.push_back(task)
        } else {
            state.host.push_back(task)
        }
        drop(state);
        self.queues.news.notify_all();
    }

    /// The next outcome; `None` when none arrives in time.
    pub fn outcome(&self, within: Duration) -> Option<Outcome> {
        self.outcomes.recv_timeout(within).ok()
    }

    /// Number of queued tasks of the host and of the device.
    pub fn waiting(&self) -> (usize, usize) {
        let state = self.queues.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.host.len(), state.device.len())
    }
}

fn work(mut evaluator: Box<dyn Evaluator>, queues: &Queues, device: bool, tell: &Sender<Outcome>) {
    while let Some(task) = queues.next(device) {
        if tell.send(evaluator.evaluate(&task)).is_err() {
            return;
        }
    }
}

/// Drops queued tasks and lets running ones finish.
impl Drop for WorkerPool {
    fn drop(&mut self) {
        let mut state = self.queues.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.host, state.device, state.closed) = (VecDeque::new(), VecDeque::new(), true);
        drop(state);
        self.queues.news.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
