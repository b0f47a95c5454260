//! The primary context of a device: one per process and device, shared with whatever else in the process uses it.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::cache::CubinCache;
use crate::device::{describe, handle};
use crate::graph::Captures;
use crate::library::check;
use crate::sys::{self, CUresult};
use crate::{DeviceInfo, DriverError, process};

/// A device's primary context. It is retained once per process and device and kept until the process ends: PyTorch and
/// the CUDA runtime use the same one, and making it anew costs a third of a second.
///
/// All methods, and those of everything made from it, may be called from any thread.
pub struct Context {
    raw: sys::CUcontext,
    info: DeviceInfo,
    /// The first error that made it unusable.
    poison: OnceLock<DriverError>,
    cache: CubinCache,
    pub(crate) captures: Captures,
}

// SAFETY: a context is a handle; the driver's functions on it may be called from any thread (CUDA Driver API, "Context
// Management").
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of a device; 0 is the first. The same one each time.
    ///
    /// # Errors
    /// [`DriverError::NoDriver`], [`DriverError::DriverTooOld`], [`DriverError::NoDevice`] and
    /// [`DriverError::NoPermission`] where there is nothing to open; [`DriverError::Forked`] in a child of a
    /// process that used CUDA. A library that is missing or too old stays so; anything else a later call
    /// tries again.
    pub fn open(ordinal: i32) -> Result<Arc<Context>, DriverError> {
        static OPEN: Mutex<BTreeMap<i32, Arc<Context>>> = Mutex::new(BTreeMap::new());
        // Before the lock, which another thread of the parent may have held.
        process::check()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = open.get(&ordinal) {
            return Ok(context.clone());
        }
        let device = handle(ordinal)?;
        let info = describe(device, ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `device` came from cuDeviceGet; the context is never released, so the handle stays good.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })?;
        let (poison, cache, captures) = (OnceLock::new(), CubinCache::of_environment(), Captures::default());
        let context = Arc::new(Context { raw, info, poison, cache, captures });
        open.insert(ordinal, context.clone());
        Ok(context)
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The folder where compiled kernels are kept.
    pub fn cache(&self) -> &CubinCache {
        &self.cache
    }

    /// Makes the context current on the calling thread, and leaves it so. The methods of this crate need no such call: they
    /// make it current for their own time.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: the context is alive.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Waits until everything on the device's streams of this process is done.
    ///
    /// # Errors
    /// [`DriverError::Poisoned`] when a kernel failed.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        self.check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Takes back from L2 whatever was asked to persist there.
    ///
    /// # Errors
    /// When the driver refuses, as it does on devices before sm_80.
    pub fn reset_persisting_l2(&self) -> Result<(), DriverError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        self.check("cuCtxResetPersistingL2Cache", unsafe { sys::cuCtxResetPersistingL2Cache() })
    }

    /// Device memory that is free, and all of it, in bytes.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn free_memory(&self) -> Result<(usize, usize), DriverError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; the pointers are to live integers.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// The error that made the context unusable, if one did.
    pub fn poisoned(&self) -> Option<&DriverError> {
        self.poison.get()
    }

    /// Makes the context unusable from here on; the error that says so.
    pub(crate) fn poison(&self, call: &'static str, cause: String) -> DriverError {
        // The first cause is the one to tell.
        self.poison.get_or_init(|| DriverError::Poisoned { call, cause }).clone()
    }

    /// Makes the context current for as long as the guard lives.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, DriverError> {
        if let Some(error) = self.poison.get() {
            return Err(error.clone());
        }
        process::check()?;
        let mut previous = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        self.check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut previous) })?;
        if previous == self.raw {
            return Ok(Entered { previous: None, _thread: PhantomData });
        }
        self.bind()?;
        // A thread that had none keeps ours: no one is there to miss the old state.
        let previous = (!previous.is_null()).then_some(previous);
        Ok(Entered { previous, _thread: PhantomData })
    }

    /// The same, for destructors. `None` when the context is unusable: then there is nothing to give back, and a call might wait for
    /// a kernel that never ends.
    pub(crate) fn enter_to_drop(&self) -> Option<Entered<'_>> {
        self.enter().ok()
    }

    /// The typed error of a call in this context that failed; remembers one that makes the context unusable.
    pub(crate) fn check(&self, call: &'static str, result: CUresult) -> Result<(), DriverError> {
        check(call, result).inspect_err(|error| {
            if matches!(error, DriverError::Poisoned { .. }) {
                // The first cause is the one to tell.
                let _ = self.poison.set(error.clone());
            }
        })
    }

    /// Refuses what belongs to another context.
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

/// Puts the thread's former context back when dropped. Stays on its thread.
pub(crate) struct Entered<'a> {
    previous: Option<sys::CUcontext>,
    _thread: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: the context was current on this thread before. A failure here has no one left to tell.
            let _ = unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}

/// Lets the calling thread load modules and allocate while a stream is being captured, for as long as it lives: neither
/// does anything to the stream (CUDA Driver API, `cuThreadExchangeStreamCaptureMode`).
pub(crate) struct Relaxed {
    previous: u32,
    _thread: PhantomData<*const ()>,
}

impl Relaxed {
    pub(crate) fn new() -> Result<Relaxed, DriverError> {
        let mut mode = sys::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a live mode, which the call exchanges for the thread's.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        })?;
        Ok(Relaxed { previous: mode, _thread: PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `new`. A failure here has no one left to tell.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.previous) };
    }
}
