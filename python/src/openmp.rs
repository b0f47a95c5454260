//! Runs work on PyTorch's own threads. After a PyTorch operation, the workers of its OpenMP runtime spin for
//! a while, each on its own core. Other threads that start between two such operations compete with them for
//! the cores. The runtime's own team finds its workers awake.
#![allow(unsafe_code, reason = "functions of a runtime that another library has loaded")]

use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;

use cpu::Executor;

/// PyTorch's library. Its dependencies include the OpenMP runtime of PyTorch's operations: GNU's, LLVM's or
/// Intel's.
const TORCH: &CStr = c"libtorch_cpu.so";

type Region = unsafe extern "C" fn(*mut c_void);

/// The functions of an OpenMP runtime that are called here. All three runtimes export these names.
struct Runtime {
    /// `GOMP_parallel(region, data, num_threads, flags)`: calls `region(data)` on each thread of the calling
    /// thread's team.
    parallel: unsafe extern "C" fn(Region, *mut c_void, c_uint, c_uint),
    /// `omp_in_parallel()`: whether the calling thread is inside a parallel region.
    in_parallel: unsafe extern "C" fn() -> c_int,
}

impl Runtime {
    /// The runtime of the PyTorch that this process has loaded, if there is one. The interpreter must be
    /// held: then no other thread can fork during the search.
    fn of_torch() -> Option<&'static Runtime> {
        static FOUND: OnceLock<Option<Runtime>> = OnceLock::new();
        FOUND.get_or_init(Runtime::find).as_ref()
    }

    fn find() -> Option<Runtime> {
        // SAFETY: the name is a C string. RTLD_NOLOAD loads nothing, so no initialiser runs. The handle is
        // never closed, so the library and its dependencies stay loaded.
        let torch = unsafe { libc::dlopen(TORCH.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        if torch.is_null() {
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is open and the name is a C string.
            let address = unsafe { libc::dlsym(torch, name.as_ptr()) };
            (!address.is_null()).then_some(address)
        };
        let (parallel, in_parallel) = (symbol(c"GOMP_parallel")?, symbol(c"omp_in_parallel")?);
        // SAFETY: the runtimes document these functions with these signatures.
        Some(unsafe {
            Runtime {
                parallel: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(Region, *mut c_void, c_uint, c_uint),
                >(parallel),
                in_parallel: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(in_parallel),
            }
        })
    }
}

/// The OpenMP team of the calling thread. Each region uses the whole team, as PyTorch's regions do. For a
/// smaller region GNU's runtime would end the other workers and start new ones for PyTorch's next operation.
pub struct Team {
    runtime: &'static Runtime,
    threads: usize,
}

impl Team {
    /// A team of `threads` threads. `None` if a team is not possible:
    /// - PyTorch has no OpenMP runtime, or the system cannot start the threads, in which case the runtime
    ///   would end the process;
    /// - the process was made by `fork`: GNU's runtime would wait for the parent's workers, which the child
    ///   lacks;
    /// - the calling thread is inside a parallel region.
    ///
    /// The interpreter must be held.
    pub fn of_caller(threads: usize) -> Option<Team> {
        let runtime = Runtime::of_torch().filter(|_| !is_forked())?;
        // SAFETY: the function takes no arguments and may be called from any thread.
        let nested = unsafe { (runtime.in_parallel)() } != 0;
        (!nested && has_threads(threads)).then_some(Team { runtime, threads })
    }
}

impl Executor for Team {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, threads: usize, work: &(dyn Fn() + Sync)) {
        let others = AtomicUsize::new(threads.saturating_sub(1));
        let call = Call { work, caller: std::thread::current().id(), others, panic: Mutex::new(None) };
        let threads = self.threads.try_into().unwrap_or(c_uint::MAX);
        // SAFETY: `region` takes a pointer to a `Call`. The function returns after every thread has left the
        // region, so the call outlives all uses. `region` does not unwind.
        unsafe { (self.runtime.parallel)(region, (&raw const call).cast_mut().cast(), threads, 0) };
        if let Some(panic) = call.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

/// Work for a team, and the first panic of one of its threads.
struct Call<'a> {
    work: &'a (dyn Fn() + Sync),
    caller: ThreadId,
    /// Number of threads besides the caller that may still begin.
    others: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Call<'_> {
    /// Whether the calling thread of the team works: the caller does, and of the others as many as were asked
    /// for.
    fn is_wanted(&self) -> bool {
        let take = |left: usize| left.checked_sub(1);
        std::thread::current().id() == self.caller
            || self.others.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// The function that each thread of a team runs. A panic must not unwind into the runtime, which is C.
///
/// # Safety
/// `call` points to a [`Call`] that lives until this returns.
unsafe extern "C" fn region(call: *mut c_void) {
    // SAFETY: the caller promises it. The threads share the call, which is `Sync`.
    let call = unsafe { &*call.cast_const().cast::<Call<'_>>() };
    let work = || {
        if call.is_wanted() {
            (call.work)();
        }
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
        call.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
    }
}

/// Whether this process was made by `fork` and has not executed a program since. If the system does not say,
/// the answer is yes.
pub fn is_forked() -> bool {
    /// The id of the process that asked last, and in bit 0 its answer.
    static KNOWN: AtomicU64 = AtomicU64::new(0);
    let process = u64::from(std::process::id());
    let known = KNOWN.load(Ordering::Relaxed);
    if known >> 1 == process {
        return known & 1 == 1;
    }
    // If this process asks for the first time but its parent has asked, the process was forked.
    let forked = known != 0 || stat_flags().is_none_or(|flags| flags & PF_FORKNOEXEC != 0);
    KNOWN.store(process << 1 | u64::from(forked), Ordering::Relaxed);
    forked
}

/// Linux's flag for a process that has forked and not executed a program (include/linux/sched.h).
const PF_FORKNOEXEC: u64 = 0x40;

/// The ninth field of /proc/self/stat (proc_pid_stat(5)). The second field, a name in parentheses, may hold
/// spaces.
fn stat_flags() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse().ok()
}

/// Stack size of a thread that does nothing, bytes.
const SMALL_STACK: usize = 1 << 16;

/// Whether the system can start the threads of such a team; if it cannot, the OpenMP runtime ends the
/// process. Tried once for each calling thread and number, before the runtime makes its team.
fn has_threads(threads: usize) -> bool {
    thread_local! {
        static MOST: Cell<usize> = const { Cell::new(1) };
    }
    if threads <= MOST.get() {
        return true;
    }
    let gate = Mutex::new(());
    let had = std::thread::scope(|scope| {
        // The threads wait for each other, so all of them exist at the same time.
        let _closed = gate.lock();
        let wait = || drop(gate.lock());
        let spawn = |_| std::thread::Builder::new().stack_size(SMALL_STACK).spawn_scoped(scope, wait).is_ok();
        (1..threads).all(spawn)
    });
    if had {
        MOST.set(threads);
    }
    had
}
