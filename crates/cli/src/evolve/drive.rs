//! The loop between the engine and its workers: hands out tasks, takes in outcomes, shows progress, and stops
//! on request.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use evolve::children::ProcessLimits;
use evolve::proposer::{LIMITS, Proposal, Proposer};
use evolve::workers::WorkerPool;
use evolve::{Ask, Evolution, Question, RunProgress};
use ledger::Rejection;

use super::setup;
use crate::args::Evolve;
use crate::error::CliError;
use crate::progress::Progress as Bar;
use crate::terminal::tell;

/// How this part of a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The run is complete.
    Done,
    /// The run was interrupted and can be resumed.
    Stopped,
}

/// Time between two checks for an interruption.
const LOOK: Duration = Duration::from_millis(100);
/// The exit code that shells give to a program that was interrupted.
const INTERRUPTED: i32 = 130;

type Answer = (Question, Result<Proposal, Rejection>);

/// The proposer, an external program. Each question runs on its own thread.
struct Asked {
    proposer: Option<Proposer>,
    tell: Sender<Answer>,
    answers: Receiver<Answer>,
}

impl Asked {
    fn new(proposer: Option<Proposer>) -> Asked {
        let (tell, answers) = channel();
        Asked { proposer, tell, answers }
    }

    fn ask(&self, question: Question) {
        let Some(proposer) = self.proposer.clone() else { return };
        let left = question.seconds.and_then(|left| Duration::try_from_secs_f64(left).ok());
        let wall = left.map_or(LIMITS.wall, |left| left.min(LIMITS.wall));
        let proposer = proposer.within(ProcessLimits { wall, ..LIMITS });
        let tell = self.tell.clone();
        std::thread::spawn(move || {
            let answer = proposer.propose(&question.brief);
            // `send` fails if the run has ended. The answer is then not needed.
            let _ = tell.send((question, answer));
        });
    }
}

/// Runs until the run is complete or the user interrupts it.
pub fn drive(
    mut evolution: Evolution,
    pool: WorkerPool,
    args: &Evolve,
) -> Result<(Evolution, Ended), CliError> {
    let presses = interruptions(how_to_go_on(&evolution), evolution.ledger().lock_files());
    let asked = Asked::new(setup::proposer(evolution.config())?);
    let bar = if args.json { Bar::silent() } else { bar(&evolution) };
    let began = Instant::now();
    let (mut stopping, mut under_way) = (false, 0_usize);
    let ended = loop {
        if !stopping && presses.load(Ordering::Relaxed) > 0 {
            stopping = true;
            let tasks = if under_way == 1 { "task" } else { "tasks" };
            if under_way > 0 {
                tell(format_args!(
                    "waits for {under_way} running {tasks}, then stops; press Ctrl-C again to stop at once"
                ));
            }
        }
        if stopping && under_way == 0 {
            evolution.stop()?;
            break Ended::Stopped;
        }
        let ask = if stopping { Ask::Wait } else { evolution.ask(began.elapsed().as_secs_f64())? };
        match ask {
            Ask::Task(task) => {
                pool.submit(*task);
                under_way += 1;
            }
            Ask::Propose(question) => asked.ask(*question),
            Ask::Done => break Ended::Done,
            Ask::Wait => {
                if let Some(outcome) = pool.outcome(LOOK) {
                    evolution.at(began.elapsed().as_secs_f64());
                    evolution.tell(&outcome)?;
                    under_way -= 1;
                }
                while let Ok((question, answer)) = asked.answers.try_recv() {
                    evolution.answer(&question, answer)?;
                }
                show(&bar, &evolution.progress(), began.elapsed());
            }
        }
    };
    drop(bar);
    Ok((evolution, ended))
}

/// Says with which command the run is resumed.
pub fn how_to_go_on(evolution: &Evolution) -> String {
    let ledger = evolution.ledger().path().display();
    format!("resume the run with `flashcore evolve --resume {} --ledger {ledger}`", evolution.run().0)
}

/// Counts Ctrl-C. The second one ends the program at once: the ledger is consistent, and the run can be
/// resumed.
fn interruptions(how_to_go_on: String, locks: Vec<PathBuf>) -> Arc<AtomicU32> {
    let presses = Arc::new(AtomicU32::new(0));
    let counted = presses.clone();
    // If no handler can be set, the first Ctrl-C ends the program at once.
    let _ = ctrlc::set_handler(move || {
        if counted.fetch_add(1, Ordering::Relaxed) > 0 {
            tell(format_args!("stopped at once; {how_to_go_on}"));
            // The process holds the locks until it ends. A file that cannot be deleted harms no one.
            locks.iter().for_each(|lock| drop(std::fs::remove_file(lock)));
            std::process::exit(INTERRUPTED);
        }
    });
    presses
}

fn bar(evolution: &Evolution) -> Bar {
    let config = evolution.config();
    let candidates = config.candidates.map(|candidates| candidates as u64);
    Bar::new(candidates.or(config.seconds.map(|seconds| seconds as u64)))
}

fn show(bar: &Bar, progress: &RunProgress, elapsed: Duration) {
    let step = if progress.budget.is_some() { progress.candidates as u64 } else { elapsed.as_secs() };
    let times = |found: Option<(f64, f64)>| {
        found.map_or("none yet".to_owned(), |(us, speedup)| format!("{us:.2} µs ({speedup:.3}×)"))
    };
    let words = format!(
        "{} candidates, {} rejected, {} under way; best {}; best random sample {}",
        progress.candidates,
        progress.rejected,
        progress.under_way,
        times(progress.best),
        times(progress.random),
    );
    bar.at(step, &words);
}
