//! Handles Ctrl-C during a long call. Python's own signal handler only sets a flag. The handlers written in
//! Python run when the main thread asks for them, which it does not do while it computes here.
#![allow(unsafe_code, reason = "the numbers that the system gives threads")]

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{Thread, ThreadId};
use std::time::{Duration, Instant};

use cpu::Executor;
use pyo3::prelude::*;

/// Time between two checks for signals.
const INTERVAL: Duration = Duration::from_millis(50);

/// Runs work on the threads of an executor. If the caller is Python's main thread, it also runs Python's
/// signal handlers meanwhile. An exception of a handler ends the call.
pub struct Interruptible<'a> {
    threads: &'a dyn Executor,
    caller: ThreadId,
    start: Instant,
    /// Time of the next check, in microseconds from the start.
    next: AtomicU64,
    stopped: AtomicBool,
    exception: Mutex<Option<PyErr>>,
}

impl<'a> Interruptible<'a> {
    /// An executor for a call by the current thread.
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

    /// Checks for signals if the interval has passed. Only the calling thread may do this.
    fn look(&self) {
        if (self.start.elapsed().as_micros() as u64) < self.next.load(Ordering::Relaxed) {
            return;
        }
        if !is_main_thread() {
            // Python runs signal handlers on the main thread only. Other threads must not wait for the
            // interpreter here, which may take long, or forever while Python exits.
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

/// Whether this is the first thread of the process. It is Python's main thread, unless another program embeds
/// Python.
fn is_main_thread() -> bool {
    // SAFETY: the functions take no arguments and cannot fail.
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
            // In a short call the executor waits for the other threads. In a long call they may still have
            // much to do, so this thread checks for signals until they end.
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

/// Counts a working thread while it exists. The last one to be dropped wakes the caller.
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
