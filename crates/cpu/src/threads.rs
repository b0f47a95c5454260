//! Executors: the threads that compute a call.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use crate::plan::MAX_THREADS;

/// Runs the work of a call on several threads.
pub trait Executor: Sync {
    /// Number of threads that can share a call, including the calling thread.
    fn threads(&self) -> usize;

    /// Calls `work` on the calling thread, and at the same time on at most `threads - 1` other threads.
    /// Returns when all of these calls have returned. A panic in one of them is passed on to the caller.
    fn run(&self, threads: usize, work: &(dyn Fn() + Sync));

    /// Whether the call should end before its outputs are complete. Every thread calls this between parts of
    /// its work, each of which takes about a millisecond; the call then fails with
    /// [`CpuError::Stopped`](crate::CpuError::Stopped).
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Only the calling thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallingThread;

impl Executor for CallingThread {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, _threads: usize, work: &(dyn Fn() + Sync)) {
        work();
    }
}

/// The calling thread and a rayon pool of helpers, which sleep between calls.
#[derive(Debug)]
pub struct Pool {
    helpers: ThreadPool,
}

impl Pool {
    /// A pool for calls on `threads` threads, including the caller's.
    ///
    /// # Errors
    /// When the operating system cannot start the threads.
    pub fn new(threads: usize) -> Result<Pool, ThreadPoolBuildError> {
        let helpers = threads.clamp(2, MAX_THREADS) - 1;
        let named = |index| format!("flashcore-{index}");
        // rayon's threads share a collector of freed memory. The first thread that looks for work would
        // create it inside a `Once`. A child process forked at that moment would wait for the `Once` forever,
        // because the creating thread does not exist in the child. Therefore the collector is created here,
        // before the threads.
        drop(crossbeam_epoch::pin());
        Ok(Pool { helpers: ThreadPoolBuilder::new().num_threads(helpers).thread_name(named).build()? })
    }

    /// The pool that all calls of this process share; `None` if one thread is enough ([`threads`]), or if the
    /// operating system cannot start more. A child made by `fork` has a copy of its parent's pool without the
    /// threads, so it gets a new pool.
    pub fn shared() -> Option<Arc<Pool>> {
        static SHARED: Mutex<Option<(u32, Arc<Pool>)>> = Mutex::new(None);
        let process = std::process::id();
        // A pool is created without holding the lock, so that a thread that forks at that moment does not
        // leave its child a locked lock.
        let lock = || SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let of_process = |shared: &Option<(u32, Arc<Pool>)>| {
            shared.as_ref().filter(|(owner, _)| *owner == process).map(|(_, pool)| pool.clone())
        };
        if let Some(pool) = of_process(&lock()) {
            return Some(pool);
        }
        let threads = default_threads();
        let own = if threads > 1 { Arc::new(Pool::new(threads).ok()?) } else { return None };
        let mut shared = lock();
        if let Some(earlier) = of_process(&shared) {
            return Some(earlier);
        }
        // The parent's pool must not be dropped: it would wait for threads that this process does not have.
        std::mem::forget(shared.replace((process, own.clone())));
        Some(own)
    }
}

impl Executor for Pool {
    fn threads(&self) -> usize {
        self.helpers.current_num_threads() + 1
    }

    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        self.helpers.in_place_scope(|scope| {
            for _ in 1..threads.min(self.threads()) {
                scope.spawn(|_| work());
            }
            work();
        });
    }
}

/// The rayon pool of which the calling thread is a worker.
struct OwnPool;

impl Executor for OwnPool {
    fn threads(&self) -> usize {
        rayon::current_num_threads()
    }

    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        rayon::scope(|scope| {
            for _ in 1..threads.min(self.threads()) {
                scope.spawn(|_| work());
            }
            work();
        });
    }
}

/// Calls `work` with the executor for a caller that names none: the rayon pool of which this thread is a
/// worker, else [`Pool::shared`], else the calling thread. This never starts or waits for rayon's global
/// pool.
pub(crate) fn with_default<R>(work: impl FnOnce(&dyn Executor) -> R) -> R {
    if rayon::current_thread_index().is_some() {
        return work(&OwnPool);
    }
    match Pool::shared() {
        Some(pool) => work(&*pool),
        None => work(&CallingThread),
    }
}

/// Number of threads for a call without an executor: those of the rayon pool of which this thread is a
/// worker, else `RAYON_NUM_THREADS`, else one for each core that this process may use. No thread is started.
pub fn threads() -> usize {
    let threads = match rayon::current_thread_index() {
        Some(_) => rayon::current_num_threads(),
        None => default_threads(),
    };
    threads.clamp(1, MAX_THREADS)
}

/// Default number of threads of a pool, cached between calls because asking the operating system takes tens
/// of microseconds. Two threads may ask at the same time and find the same number; a lock is not used,
/// because it could stay locked in a child made by `fork`.
fn default_threads() -> usize {
    static KNOWN: AtomicUsize = AtomicUsize::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let wanted = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok());
            let cores = || std::thread::available_parallelism().map_or(1, usize::from);
            let threads = wanted.filter(|&threads| threads > 0).unwrap_or_else(cores);
            KNOWN.store(threads, Ordering::Relaxed);
            threads
        }
        known => known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_calls_work_on_as_many_threads_as_asked_for() {
        let pool = Pool::new(4).unwrap();
        assert_eq!(pool.threads(), 4);
        for (asked, called) in [(1, 1), (3, 3), (4, 4), (9, 4)] {
            let calls = AtomicUsize::new(0);
            pool.run(asked, &|| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(calls.into_inner(), called, "{asked}");
        }
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let panics = |executor: &dyn Executor| {
            let work = || executor.run(2, &|| panic!("work"));
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err()
        };
        let pool = Pool::new(2).unwrap();
        assert!(panics(&pool) && panics(&CallingThread));
        pool.run(2, &|| ());
    }

    #[test]
    fn the_default_is_the_pool_around_the_caller() {
        let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let of = |executor: &dyn Executor| executor.threads();
        assert_eq!(pool.install(|| (threads(), with_default(of))), (3, 3));
        assert_eq!(with_default(of), threads());
    }
}
