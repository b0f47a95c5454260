//! The primary context of a device. There is one per process and device, shared with other users of CUDA in
//! the process.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::cache::CubinCache;
use crate::device::{describe, handle};
use crate::graph::Captures;
use crate::library::{check, error_of};
use crate::sys::{self, CUresult};
use crate::{DeviceInfo, DriverError, process};

/// A device's primary context. It is retained once per process and device and kept until the process ends:
/// PyTorch and the CUDA runtime use the same context, and creating it takes a third of a second.
///
/// Any thread may call all methods, and the methods of everything made from the context.
pub struct Context {
    raw: sys::CUcontext,
    info: DeviceInfo,
    /// The first error that made the context unusable.
    poison: OnceLock<DriverError>,
    cache: CubinCache,
    pub(crate) captures: Captures,
}

// SAFETY: a context is a handle; the driver's functions on it may be called from any thread (CUDA Driver API,
// "Context Management").
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

thread_local! {
    /// The context that this thread had when the driver was asked last.
    static SEEN: Cell<sys::CUcontext> = const { Cell::new(std::ptr::null_mut()) };
}

impl Context {
    /// The context of the device with this ordinal; 0 is the first. Each call returns the same context.
    ///
    /// # Errors
    /// [`DriverError::NoDriver`], [`DriverError::DriverTooOld`], [`DriverError::NoDevice`] and
    /// [`DriverError::NoPermission`] when no device can be opened; [`DriverError::Forked`] in a child of a
    /// process that used CUDA. A missing or old library is an error for the life of the process. After any
    /// other error, a later call tries again.
    pub fn open(ordinal: i32) -> Result<Arc<Context>, DriverError> {
        static OPEN: Mutex<BTreeMap<i32, Arc<Context>>> = Mutex::new(BTreeMap::new());
        // This check precedes the lock: in a forked process, a thread of the parent may hold it.
        process::check()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = open.get(&ordinal) {
            return Ok(context.clone());
        }
        let device = handle(ordinal)?;
        let info = describe(device, ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `device` came from cuDeviceGet; the context is never released, so the handle stays valid.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })?;
        let (poison, cache, captures) = (OnceLock::new(), CubinCache::of_environment(), Captures::default());
        let context = Arc::new(Context { raw, info, poison, cache, captures });
        open.insert(ordinal, context.clone());
        Ok(context)
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The cache of compiled kernels on disk.
    pub fn cache(&self) -> &CubinCache {
        &self.cache
    }

    /// Makes the context current on the calling thread and leaves it current. The methods of this crate do
    /// not need this: each makes the context current for the duration of the call.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is alive.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Waits until all work on the device's streams of this process is done.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        self.check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Resets all persisting lines of the L2 cache to normal.
    ///
    /// # Errors
    /// When the driver returns an error, as it does on devices before sm_80.
    pub fn reset_persisting_l2(&self) -> Result<(), DriverError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        self.check("cuCtxResetPersistingL2Cache", unsafe { sys::cuCtxResetPersistingL2Cache() })
    }

    /// Free and total device memory, in bytes.
    ///
    /// # Errors
    /// When the driver returns an error.
    pub fn free_memory(&self) -> Result<(usize, usize), DriverError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; the pointers are to live integers.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// The error that made the context unusable, if any.
    pub fn poisoned(&self) -> Option<&DriverError> {
        self.poison.get()
    }

    /// Makes the context unusable from now on, and returns the error of later calls.
    pub(crate) fn poison(&self, call: &'static str, cause: String) -> DriverError {
        // Later calls return the first cause.
        self.poison.get_or_init(|| DriverError::Poisoned { call, cause }).clone()
    }

    /// Makes the context current while the guard lives.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, DriverError> {
        self.usable()?;
        let previous = self.current()?;
        if previous == self.raw {
            return Ok(Entered { previous: None, _thread: PhantomData });
        }
        self.bind()?;
        // If the thread had no context, ours stays current: there is no previous state to restore.
        let previous = (!previous.is_null()).then_some(previous);
        Ok(Entered { previous, _thread: PhantomData })
    }

    /// Makes a call of the driver on a function or a stream of the context, which needs the context. If the
    /// thread had it when the driver was asked last, the call is tried without asking again: the driver
    /// refuses it if it needs the thread to have the context and the thread has another one by now.
    #[inline]
    pub(crate) fn call_within(
        &self,
        call: &'static str,
        mut run: impl FnMut() -> CUresult,
    ) -> Result<(), DriverError> {
        if SEEN.get() == self.raw {
            self.usable()?;
            match run() {
                sys::CUDA_SUCCESS => return Ok(()),
                result if self.current()? == self.raw => return self.check(call, result),
                _ => {}
            }
        }
        let _entered = self.enter()?;
        self.check(call, run())
    }

    fn usable(&self) -> Result<(), DriverError> {
        match self.poison.get() {
            Some(error) => Err(error.clone()),
            None => process::check(),
        }
    }

    /// The context that the calling thread has.
    fn current(&self) -> Result<sys::CUcontext, DriverError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        self.check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        SEEN.set(current);
        Ok(current)
    }

    /// Like [`Context::enter`], for destructors. `None` when the context is unusable: then there is nothing
    /// to free, and a call might wait for a kernel that never ends.
    pub(crate) fn enter_to_drop(&self) -> Option<Entered<'_>> {
        self.enter().ok()
    }

    /// The typed error of a failed call in this context. Records an error that makes the context unusable.
    #[inline]
    pub(crate) fn check(&self, call: &'static str, result: CUresult) -> Result<(), DriverError> {
        if result == sys::CUDA_SUCCESS { Ok(()) } else { Err(self.failed(call, result)) }
    }

    #[cold]
    fn failed(&self, call: &'static str, result: CUresult) -> DriverError {
        let error = error_of(call, result);
        if matches!(error, DriverError::Poisoned { .. }) {
            // Later calls return the first cause.
            let _ = self.poison.set(error.clone());
        }
        error
    }

    /// Rejects an object of another context; `what` names it in the error.
    pub(crate) fn same(&self, what: &'static str, other: &Context) -> Result<(), DriverError> {
        if std::ptr::eq(self, other) {
            return Ok(());
        }
        Err(DriverError::OtherDevice { what, found: other.info.ordinal, expected: self.info.ordinal })
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({}: {})", self.info.ordinal, self.info.name)
    }
}

/// Restores the thread's previous context when dropped. Stays on its thread.
pub(crate) struct Entered<'a> {
    previous: Option<sys::CUcontext>,
    _thread: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: the context was current on this thread before. A failure here cannot be reported.
            let _ = unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}

/// While this guard lives, the calling thread may load modules and allocate during a stream capture. Neither
/// affects the captured stream (CUDA Driver API, `cuThreadExchangeStreamCaptureMode`).
pub(crate) struct Relaxed {
    previous: u32,
    _thread: PhantomData<*const ()>,
}

impl Relaxed {
    pub(crate) fn new() -> Result<Relaxed, DriverError> {
        let mut mode = sys::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a live mode, which the call exchanges with the thread's mode.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        })?;
        Ok(Relaxed { previous: mode, _thread: PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `new`. A failure here cannot be reported.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.previous) };
    }
}
