//! Ctrl-C during a long call. Python's handler of a signal only makes a note; its functions run when the main thread asks for them,
//! which it does not while it computes here.
#![allow(unsafe_code, reason = "the numbers that the system gives threads")]

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{Thread, ThreadId};
use std::time::{Duration, Instant};

use cpu::Executor;
use pyo3::prelude::*;

/// Time between two looks for signals.
const INTERVAL: Duration = Duration::from_millis(50);

/// Computes on the threads of an executor, and meanwhile runs Python's signal handlers if the caller is Python's main thread. An
/// exception of a handler ends the call.
pub struct Interruptible<'a> {
    threads: &'a dyn Executor,
    caller: ThreadId,
    start: Instant,
    /// When to look next, in microseconds from the start.
    next: AtomicU64,
    stopped: AtomicBool,
    exception: Mutex<Option<PyErr>>,
}

impl<'a> Interruptible<'a> {
    /// For a call by this thread.
    pub fn new(threads: &'a dyn Executor) -> Interruptible<'a> {
        Interruptible {
            threads,
            caller: std::thread::current().id(),
            start: Instant::now(),
            next: AtomicU64::new(INTERVAL.as_micros() as u64),
            stopped: AtomicBool::new(false),
            exception: Mutex::new(None),
        }
    }

    /// The exception that ended the call.
    pub fn exception(self) -> Option<PyErr> {
        self.exception.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks for signals if it is time to. Of the calling thread only.
    fn look(&self) {
        if (self.start.elapsed().as_micros() as u64) < self.next.load(Ordering::Relaxed) {
            return;
        }
        if !is_main_thread() {
            // Signal handlers run on no other thread, and to ask for the interpreter may take long, or for ever at exit.
            return self.next.store(u64::MAX, Ordering::Relaxed);
        }
        if let Err(exception) = Python::attach(|py| py.check_signals()) {
            *self.exception.lock().unwrap_or_else(PoisonError::into_inner) = Some(exception);
            self.stopped.store(true, Ordering::Relaxed);
        }
        let next = self.start.elapsed() + INTERVAL;
        self.next.store(next.as_micros() as u64, Ordering::Relaxed);
    }
}

/// Whether this is the process's first thread, which is Python's main thread unless another program has embedded Python.
fn is_main_thread() -> bool {
    // SAFETY: the functions take nothing and cannot fail.
    unsafe { libc::gettid() == libc::getpid() }
}

impl Executor for Interruptible<'_> {
    fn threads(&self) -> usize {
        self.threads.threads()
    }

    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        let (caller, others) = (std::thread::current(), AtomicUsize::new(0));
        self.threads.run(threads, &|| {
            if std::thread::current().id() != self.caller {
                let _present = Present::new(&others, &caller);
                return work();
            }
            work();
            // Of a short call the executor itself awaits the end. Of a long one the others may have much left to do.
            while self.start.elapsed() >= INTERVAL && others.load(Ordering::Acquire) > 0 {
                self.look();
                std::thread::park_timeout(INTERVAL);
            }
        });
    }

    fn is_stopped(&self) -> bool {
        if !self.stopped.load(Ordering::Relaxed) && std::thread::current().id() == self.caller {
            self.look();
        }
        self.stopped.load(Ordering::Relaxed)
    }
}

/// Counts a thread that works, and wakes the caller when the last one has ended.
struct Present<'a> {
    count: &'a AtomicUsize,
    caller: &'a Thread,
}

impl<'a> Present<'a> {
    fn new(count: &'a AtomicUsize, caller: &'a Thread) -> Present<'a> {
        count.fetch_add(1, Ordering::Relaxed);
        Present { count, caller }
    }
}

impl Drop for Present<'_> {
    fn drop(&mut self) {
        if self.count.fetch_sub(1, Ordering::Release) == 1 {
            self.caller.unpark();
        }
    }
}
