//! How far long work is: one bar on a terminal, plain lines where standard error is a file or a pipe.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::{aside, one_line};

/// Time between two frames of a bar.
const FRAME: Duration = Duration::from_millis(200);
/// Least time between two plain lines.
const LINE: Duration = Duration::from_secs(10);

/// The progress of one piece of work, on standard error.
pub struct Progress(Shown);

/// The bar on the terminal, which other lines must not run into.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Writes to standard error while no bar is there.
pub fn beside(write: impl FnOnce()) {
    let bar = BAR.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

enum Shown {
    Bar(ProgressBar),
    Lines(Mutex<Instant>),
    Nothing,
}

impl Progress {
    /// Begins. Where the number of steps is not known, give none.
    pub fn new(steps: Option<u64>) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress(Shown::Lines(Mutex::new(Instant::now())));
        }
        let (bar, template) = match steps {
            Some(steps) => (ProgressBar::new(steps), "{elapsed_precise} {bar:24} {pos}/{len} {wide_msg}"),
            None => (ProgressBar::new_spinner(), "{elapsed_precise} {spinner} {wide_msg}"),
        };
        // The template is a constant; should it ever be wrong, the bar's own style will do.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(FRAME);
        *BAR.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
        Progress(Shown::Bar(bar))
    }

    /// Shows nothing: what is printed is for programs.
    pub fn silent() -> Progress {
        Progress(Shown::Nothing)
    }

    /// Where the work is.
    pub fn at(&self, step: u64, words: &str) {
        match &self.0 {
            Shown::Bar(bar) => {
                bar.set_position(step);
                bar.set_message(one_line(words).into_owned());
            }
            Shown::Lines(last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.elapsed() >= LINE {
                    *last = Instant::now();
                    aside(format_args!("flashcore: {}", one_line(words)));
                }
            }
            Shown::Nothing => {}
        }
    }

    /// Prints a line that stays.
    pub fn say(&self, line: &str) {
        match &self.0 {
            Shown::Bar(_) | Shown::Lines(_) => aside(line),
            Shown::Nothing => {}
        }
    }

    /// Does the work while another thread shows where it is.
    pub fn during<T>(&self, words: impl Fn() -> String + Sync, work: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            // The receiver sees the sender's end, also when the work panics.
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

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.0 {
            bar.finish_and_clear();
            *BAR.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}
