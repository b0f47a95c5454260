//! Progress of long work: a bar on a terminal, plain lines where standard error is a file or a pipe.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use check::gate::{CheckReport, GateError, Settings, Watch, check_watched};
use check::launchfile::Bound;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::bar;
use crate::terminal::{aside, is_quiet, one_line};

/// Time between two frames of a progress bar.
const FRAME: Duration = Duration::from_millis(200);
/// Time before the first plain line.
const FIRST_LINE: Duration = Duration::from_secs(1);
/// Shortest time between two plain lines.
const LINE: Duration = Duration::from_secs(10);

/// Runs the gate on a kernel with a time limit, and shows the progress; with `--json` only on a terminal.
pub fn watched(
    bound: &Bound,
    settings: &Settings,
    limit: Duration,
    json: bool,
) -> Result<CheckReport, GateError> {
    let watch = Watch::start(limit);
    Progress::after_a_second(json).during(|| watch.to_string(), || check_watched(bound, settings, &watch))
}

/// The progress of one piece of work, on standard error.
pub struct Progress(Shown);

enum Shown {
    Bar(ProgressBar),
    /// A bar that is not shown yet, and when it is to be shown.
    Later(ProgressBar, Instant, Once),
    /// When the next line may be printed.
    Lines(Mutex<Instant>),
    Nothing,
}

impl Progress {
    /// Starts a progress display. `None` if the number of steps is not known.
    pub fn new(steps: Option<u64>) -> Progress {
        if is_quiet() {
            return Progress::silent();
        }
        if !std::io::stderr().is_terminal() {
            return Progress(Shown::Lines(Mutex::new(Instant::now() + FIRST_LINE)));
        }
        let bar = styled(steps);
        bar.enable_steady_tick(FRAME);
        bar::show(Some(&bar));
        Progress(Shown::Bar(bar))
    }

    /// Starts a display of work that is often short: it appears after a second. With `json` set, it appears
    /// on a terminal only.
    pub fn after_a_second(json: bool) -> Progress {
        if is_quiet() || json && !std::io::stderr().is_terminal() {
            return Progress::silent();
        }
        if !std::io::stderr().is_terminal() {
            return Progress::new(None);
        }
        let bar = styled(None);
        bar.set_draw_target(ProgressDrawTarget::hidden());
        bar::show(Some(&bar));
        Progress(Shown::Later(bar, Instant::now() + FIRST_LINE, Once::new()))
    }

    /// A display that shows nothing, for output that programs read.
    pub fn silent() -> Progress {
        Progress(Shown::Nothing)
    }

    /// Shows the current step.
    pub fn at(&self, step: u64, words: &str) {
        match &self.0 {
            Shown::Bar(bar) => {
                bar.set_position(step);
                bar.set_message(one_line(words).into_owned());
            }
            Shown::Later(bar, from, shown) => {
                bar.set_message(one_line(words).into_owned());
                if Instant::now() >= *from {
                    shown.call_once(|| {
                        bar.set_draw_target(ProgressDrawTarget::stderr());
                        bar.enable_steady_tick(FRAME);
                    });
                }
            }
            Shown::Lines(next) => {
                let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
                if Instant::now() >= *next {
                    *next = Instant::now() + LINE;
                    aside(format_args!("flashcore: {}", one_line(words)));
                }
            }
            Shown::Nothing => {}
        }
    }

    /// Prints a line that the bar does not overwrite.
    pub fn say(&self, line: &str) {
        match &self.0 {
            Shown::Bar(_) | Shown::Later(..) | Shown::Lines(_) => aside(line),
            Shown::Nothing => {}
        }
    }

    /// Runs `work` while another thread updates the display with `words`.
    pub fn during<T>(&self, words: impl Fn() -> String + Sync, work: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            // The receiver notices that the sender is dropped, also when `work` panics.
            let (end, ended) = channel::<()>();
            let words = &words;
            scope.spawn(move || {
                while ended.recv_timeout(FRAME) == Err(RecvTimeoutError::Timeout) {
                    self.at(0, &words());
                }
            });
            let _end = end;
            work()
        })
    }
}

fn styled(steps: Option<u64>) -> ProgressBar {
    let (bar, template) = match steps {
        Some(steps) => (ProgressBar::new(steps), "{elapsed_precise} {bar:24} {pos}/{len} {wide_msg}"),
        None => (ProgressBar::new_spinner(), "{elapsed_precise} {spinner} {wide_msg}"),
    };
    // The template is a constant. If it were invalid, the bar would keep its default style.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(bar) | Shown::Later(bar, ..) = &self.0 {
            bar.finish_and_clear();
            bar::show(None);
        }
    }
}
