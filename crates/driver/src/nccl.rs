//! NCCL: messages between the GPUs of a group. The library is loaded at run time and checked before its first
//! use, like the driver.
#![allow(unsafe_code, reason = "calls of NCCL's C interface")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use libloading::Library;

use crate::context::Relaxed;
use crate::sys::CUstream;
use crate::{Context, DeviceSlice, DriverError, Stream, process, sys};

/// The oldest NCCL with communicators whose calls do not block: 2.14.
const MINIMUM: c_int = 21_400;

/// Results of NCCL's functions, and numbers in `nccl.h`.
const SUCCESS: u32 = 0;
const IN_PROGRESS: u32 = 7;
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;
const CONFIG_MAGIC: u32 = 0xcafe_beef;

/// A pointer to an opaque `ncclComm`.
type RawCommunicator = *mut c_void;

/// `ncclUniqueId`: passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// `ncclConfig_t` of NCCL 2.14. A newer library reads as many bytes as `size` says, and takes its defaults
/// for what `version` did not have.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// Declares the functions of the library.
macro_rules! functions {
    ($($name:ident: $field:ident($($type:ty),* $(,)?);)*) => {
        struct Api {
            $($field: unsafe extern "C" fn($($type),*) -> u32,)*
            /// The text of a result.
            error_string: unsafe extern "C" fn(u32) -> *const c_char,
        }

        impl Api {
            /// The functions of a library, or the name of the first that is missing.
            ///
            /// # Safety
            /// The library must be NCCL of version 2.14 or later.
            unsafe fn of(library: &Library) -> Result<Api, &'static str> {
                // SAFETY: the library's functions with these names have the types declared here.
                unsafe {
                    Ok(Api {
                        $($field: sys::symbol_of(library, stringify!($name)).ok_or(stringify!($name))?,)*
                        error_string:
                            sys::symbol_of(library, "ncclGetErrorString").ok_or("ncclGetErrorString")?,
                    })
                }
            }
        }
    };
}

functions! {
    ncclGetUniqueId: unique_id(*mut UniqueId);
    ncclCommInitRankConfig: init(*mut RawCommunicator, c_int, UniqueId, c_int, *mut Config);
    ncclCommGetAsyncError: state(RawCommunicator, *mut u32);
    ncclCommFinalize: finalize(RawCommunicator);
    ncclCommDestroy: destroy(RawCommunicator);
    ncclCommAbort: abort(RawCommunicator);
    ncclGroupStart: group_start();
    ncclGroupEnd: group_end();
    ncclSend: send(u64, usize, c_int, c_int, RawCommunicator, CUstream);
    ncclRecv: receive(u64, usize, c_int, c_int, RawCommunicator, CUstream);
    ncclAllGather: all_gather(u64, u64, usize, c_int, RawCommunicator, CUstream);
    ncclReduceScatter: reduce_scatter(u64, u64, usize, c_int, c_int, RawCommunicator, CUstream);
}

/// The library's functions. It is loaded once and never unloaded. A missing or old library is an error for
/// the life of the process.
fn api() -> Result<&'static Api, DriverError> {
    static API: OnceLock<Result<Api, DriverError>> = OnceLock::new();
    process::check()?;
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Api, DriverError> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let names = ["libnccl.so.2", "libnccl.so"];
    // SAFETY: loading NCCL runs no code that affects Rust code.
    let library =
        names.iter().find_map(|name| unsafe { Library::new(name) }.ok()).ok_or(DriverError::NoNccl)?;
    let library = LIBRARY.get_or_init(|| library);
    let mut version = 0;
    // SAFETY: the function's type in nccl.h; the pointer is to a live integer.
    let told = unsafe {
        type Ask = unsafe extern "C" fn(*mut c_int) -> u32;
        sys::symbol_of::<Ask>(library, "ncclGetVersion").map(|ask| ask(&mut version))
    };
    if told != Some(SUCCESS) || version < MINIMUM {
        return Err(DriverError::NcclTooOld { found: version, needed: MINIMUM });
    }
    // SAFETY: the library is NCCL of at least that version.
    unsafe { Api::of(library) }.map_err(|name| DriverError::Nccl {
        call: name,
        message: format!("the library of version {version} lacks this function"),
    })
}

impl Api {
    /// The typed error of a failed call. A call that is in progress has not failed.
    fn check(&self, call: &'static str, result: u32) -> Result<(), DriverError> {
        if matches!(result, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: the library returns a static string for every number.
        let text = unsafe { CStr::from_ptr((self.error_string)(result)) };
        Err(DriverError::Nccl { call, message: text.to_string_lossy().into_owned() })
    }
}

/// The name of a group of GPUs. One rank makes it and gives its bytes to the others, by whatever means the
/// program has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GroupId(pub [u8; 128]);

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupId(..)")
    }
}

impl GroupId {
    /// A new name, at which this process listens.
    ///
    /// # Errors
    /// [`DriverError::NoNccl`], [`DriverError::NcclTooOld`], and what the library reports.
    pub fn new() -> Result<GroupId, DriverError> {
        let (api, mut id) = (api()?, UniqueId([0; 128]));
        // SAFETY: the pointer is to a live identifier.
        api.check("ncclGetUniqueId", unsafe { (api.unique_id)(&mut id) })?;
        Ok(GroupId(id.0))
    }
}

/// A rank of a group of GPUs. Calls enqueue work on a stream, as launches do, and all ranks make them in one
/// order. After an error the group can no longer be used.
#[derive(Debug)]
pub struct Communicator {
    context: Arc<Context>,
    /// `None` after an error. The lock orders the calls of threads, and the groups of calls that NCCL keeps
    /// for each thread.
    raw: Mutex<Option<Handle>>,
    rank: usize,
    ranks: usize,
    time_out: Duration,
}

#[derive(Debug)]
struct Handle(RawCommunicator);

// SAFETY: a communicator is a handle that any thread may use; a lock keeps threads apart.
unsafe impl Send for Handle {}

impl Communicator {
    /// Joins a group as rank `rank` of `ranks`, and returns when all have joined.
    ///
    /// # Errors
    /// [`DriverError::NoNccl`], [`DriverError::NcclTooOld`]; [`DriverError::GroupTimedOut`] when another rank
    /// has not joined within `time_out`; what the library reports.
    pub fn join(
        context: &Arc<Context>,
        id: &GroupId,
        rank: usize,
        ranks: usize,
        time_out: Duration,
    ) -> Result<Communicator, DriverError> {
        let api = api()?;
        let invalid = || DriverError::Nccl {
            call: "ncclCommInitRankConfig",
            message: format!("invalid value '{rank}' for rank: expected a number below {ranks}, the ranks"),
        };
        let [of_rank, of_ranks] = [rank, ranks].map(c_int::try_from);
        let (Ok(of_rank), Ok(of_ranks), true) = (of_rank, of_ranks, rank < ranks) else {
            return Err(invalid());
        };
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let mut config =
            Config { size: size_of::<Config>(), magic: CONFIG_MAGIC, version: MINIMUM as u32, blocking: 0 };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; the pointers are to a live handle and a live configuration.
        let result = unsafe { (api.init)(&mut raw, of_ranks, UniqueId(id.0), of_rank, &mut config) };
        api.check("ncclCommInitRankConfig", result)?;
        let raw = Mutex::new(Some(Handle(raw)));
        let group = Communicator { context: context.clone(), raw, rank, ranks, time_out };
        group.with("ncclCommInitRankConfig", |_, _| SUCCESS)?;
        Ok(group)
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Enqueues messages to and from other ranks, all of which travel at once. Messages of two ranks pair in
    /// the order in which both list them, and have one size on both sides.
    ///
    /// # Errors
    /// The error that the library reports; [`DriverError::GroupTimedOut`] when it does not accept the call in
    /// time.
    pub fn exchange(
        &self,
        stream: &Stream,
        sends: &[(usize, DeviceSlice<'_>)],
        receives: &[(usize, DeviceSlice<'_>)],
    ) -> Result<(), DriverError> {
        let slices = || sends.iter().chain(receives).map(|&(_, slice)| slice);
        self.on("ncclGroupEnd", stream, slices, |api, raw| {
            // SAFETY: the communicator is alive, and the memory is device memory of the slices' lengths,
            // which stays alive as for a copy on the stream.
            unsafe {
                let mut result = (api.group_start)();
                for (function, messages) in [(api.send, sends), (api.receive, receives)] {
                    for (peer, slice) in messages {
                        if matches!(result, SUCCESS | IN_PROGRESS) {
                            let peer = *peer as c_int;
                            result =
                                function(slice.address(), slice.bytes(), UINT8, peer, raw, stream.handle());
                        }
                    }
                }
                let ended = (api.group_end)();
                if matches!(result, SUCCESS | IN_PROGRESS) { ended } else { result }
            }
        })
    }

    /// Enqueues the exchange of `from` of all ranks: `to` has them in the order of ranks.
    ///
    /// # Errors
    /// [`DriverError::Copy`] unless `to` has the room of `from` of each rank; as
    /// [`exchange`](Communicator::exchange).
    pub fn all_gather(
        &self,
        stream: &Stream,
        from: DeviceSlice<'_>,
        to: DeviceSlice<'_>,
    ) -> Result<(), DriverError> {
        to.fits(from.bytes().saturating_mul(self.ranks))?;
        self.on(
            "ncclAllGather",
            stream,
            || [from, to].into_iter(),
            |api, raw| {
                // SAFETY: as for `exchange`; `to` has room for all ranks.
                unsafe {
                    (api.all_gather)(from.address(), to.address(), from.bytes(), UINT8, raw, stream.handle())
                }
            },
        )
    }

    /// Enqueues the sum of `from` of all ranks, numbers in f32: `to` has part `rank` of as many parts as
    /// there are ranks.
    ///
    /// # Errors
    /// [`DriverError::Copy`] unless `from` has the numbers of all parts; as
    /// [`exchange`](Communicator::exchange).
    pub fn reduce_scatter(
        &self,
        stream: &Stream,
        from: DeviceSlice<'_>,
        to: DeviceSlice<'_>,
    ) -> Result<(), DriverError> {
        from.fits(to.bytes().saturating_mul(self.ranks))?;
        let numbers = to.bytes() / size_of::<f32>();
        self.on(
            "ncclReduceScatter",
            stream,
            || [from, to].into_iter(),
            |api, raw| {
                let (from, to) = (from.address(), to.address());
                // SAFETY: as for `exchange`; `from` has the numbers of all parts.
                unsafe { (api.reduce_scatter)(from, to, numbers, FLOAT32, SUM, raw, stream.handle()) }
            },
        )
    }

    /// Waits until the work on a stream is done, with the messages of this group. If a rank ended or does not
    /// answer within the time-out, the messages under way are given up.
    ///
    /// # Errors
    /// [`DriverError::GroupTimedOut`], what NCCL reports, and [`DriverError::Poisoned`] when a kernel failed.
    pub fn wait(&self, stream: &Stream) -> Result<(), DriverError> {
        let start = Instant::now();
        while !stream.is_done()? {
            self.with("ncclCommGetAsyncError", |_, _| SUCCESS)?;
            if start.elapsed() > self.time_out {
                return Err(self.give_up(&mut self.lock(), self.timed_out("cuStreamQuery")));
            }
            sleep(POLL);
        }
        Ok(())
    }

    /// Enqueues work on a stream that uses `slices`.
    fn on<'s, I: Iterator<Item = DeviceSlice<'s>>>(
        &self,
        call: &'static str,
        stream: &Stream,
        slices: impl Fn() -> I,
        enqueue: impl FnOnce(&Api, RawCommunicator) -> u32,
    ) -> Result<(), DriverError> {
        let [found, expected] = [stream.context(), &self.context].map(|context| context.info().ordinal);
        if found != expected {
            return Err(DriverError::OtherDevice { what: "the stream", found, expected });
        }
        let _entered = self.context.enter()?; // for the stream
        let _steady = stream.steady_keeping(|| slices().filter_map(DeviceSlice::owner).collect())?;
        self.with(call, enqueue)
    }

    /// Makes a call, and waits until the library has accepted it.
    fn with(
        &self,
        call: &'static str,
        make: impl FnOnce(&Api, RawCommunicator) -> u32,
    ) -> Result<(), DriverError> {
        let (api, mut raw) = (api()?, self.lock());
        let _entered = self.context.enter()?;
        let Some(Handle(handle)) = *raw else {
            let message = "the group had an error before; make a new group".to_owned();
            return Err(DriverError::Nccl { call, message });
        };
        let mut result = make(api, handle);
        let start = Instant::now();
        let mut state = IN_PROGRESS;
        while matches!(result, SUCCESS | IN_PROGRESS) {
            // SAFETY: the communicator is alive; the pointer is to a live number.
            result = unsafe { (api.state)(handle, &mut state) };
            if state != IN_PROGRESS {
                break;
            }
            if start.elapsed() > self.time_out {
                return Err(self.give_up(&mut raw, self.timed_out(call)));
            }
            sleep(POLL);
        }
        let told = api.check(call, result).and_then(|()| api.check(call, state));
        told.map_err(|error| self.give_up(&mut raw, error))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Handle>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timed_out(&self, call: &'static str) -> DriverError {
        DriverError::GroupTimedOut { rank: self.rank, call, time_out: self.time_out }
    }

    /// Ends the messages under way on this rank, and the rank's use of the group.
    fn give_up(&self, raw: &mut Option<Handle>, error: DriverError) -> DriverError {
        if let (Ok(api), Some(Handle(handle))) = (api(), raw.take()) {
            // SAFETY: the handle is used for the last time.
            let _ = unsafe { (api.abort)(handle) };
        }
        error
    }
}

/// The time between two looks at a call in progress.
const POLL: Duration = Duration::from_micros(50);

impl Drop for Communicator {
    fn drop(&mut self) {
        let _entered = self.context.enter_to_drop();
        let of_group = self.raw.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let (Ok(api), Some(Handle(handle))) = (api(), of_group) else { return };
        let (start, mut state) = (Instant::now(), IN_PROGRESS);
        // SAFETY: the communicator is alive until `destroy` or `abort`, each of which is called once. A
        // failure here cannot be reported.
        unsafe {
            let _ = (api.finalize)(handle);
            while state == IN_PROGRESS && start.elapsed() < self.time_out {
                if (api.state)(handle, &mut state) != SUCCESS {
                    break;
                }
                sleep(POLL);
            }
            let _ = if state == SUCCESS { (api.destroy)(handle) } else { (api.abort)(handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// As a C compiler lays out the struct of `nccl.h` on 64-bit machines.
    #[test]
    fn the_configuration_is_laid_out_as_in_c() {
        assert_eq!((size_of::<Config>(), offset_of!(Config, blocking), size_of::<UniqueId>()), (24, 16, 128));
    }
}
