//! The driver's library: found at run time and checked before its first use.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use crate::sys::{self, CUresult};
use crate::{DriverError, process};

/// The minimum CUDA version of the driver. 12.0 added tensor maps, the latest function that this crate needs.
pub(crate) const MINIMUM: i32 = 12_000;

/// Loads and initialises the driver once and returns its version. A missing or old library is an error for
/// the life of the process. If only the initialisation failed, the next call tries it again.
pub(crate) fn ready() -> Result<i32, DriverError> {
    static LIBRARY: OnceLock<Result<i32, DriverError>> = OnceLock::new();
    static STARTED: OnceLock<()> = OnceLock::new();
    process::check()?;
    let version = LIBRARY.get_or_init(load).clone()?;
    if STARTED.get().is_none() {
        start()?;
        process::watch();
        STARTED.get_or_init(|| ());
    }
    Ok(version)
}

/// Loads the library and returns its version, if it has all required functions.
fn load() -> Result<i32, DriverError> {
    let library = sys::library().ok_or(DriverError::NoDriver)?;
    let name = "cuDriverGetVersion";
    // SAFETY: the function's type in cuda.h.
    let ask = unsafe { sys::symbol_of::<unsafe extern "C" fn(*mut i32) -> CUresult>(library, name) };
    let ask = ask.ok_or(DriverError::MissingSymbol { name, version: 0 })?;
    let mut version = 0;
    // SAFETY: the pointer is to a live i32; the call needs no initialisation.
    check(name, unsafe { ask(&mut version) })?;
    if version < MINIMUM {
        return Err(DriverError::DriverTooOld { found: version, needed: MINIMUM });
    }
    // SAFETY: the library is a driver of at least that version.
    unsafe { sys::link(library) }.map_err(|name| DriverError::MissingSymbol { name, version })?;
    Ok(version)
}

fn start() -> Result<(), DriverError> {
    // SAFETY: the call takes no memory of ours.
    match unsafe { sys::cuInit(0) } {
        sys::CUDA_ERROR_NO_DEVICE => {
            Err(forbidden().unwrap_or(DriverError::NoDevice { ordinal: 0, count: 0 }))
        }
        result => check("cuInit", result).map_err(|error| forbidden().unwrap_or(error)),
    }
}

/// On Linux, the driver reports "no device" when its device file may not be opened. Returns the reason in
/// that case.
fn forbidden() -> Option<DriverError> {
    let path = "/dev/nvidiactl";
    let error = std::fs::OpenOptions::new().read(true).write(true).open(path).err()?;
    (error.kind() == std::io::ErrorKind::PermissionDenied)
        .then(|| DriverError::NoPermission { what: format!("opening {path}"), message: error.to_string() })
}

/// An error if the call failed.
#[inline]
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == sys::CUDA_SUCCESS { Ok(()) } else { Err(error_of(call, result)) }
}

/// The typed error of a failed call.
#[cold]
pub(crate) fn error_of(call: &'static str, result: CUresult) -> DriverError {
    match result {
        sys::CUDA_ERROR_OUT_OF_MEMORY => DriverError::OutOfMemory { what: call.to_owned() },
        sys::CUDA_ERROR_NOT_PERMITTED => {
            DriverError::NoPermission { what: call.to_owned(), message: describe(result) }
        }
        result if is_sticky(result) => DriverError::Poisoned { call, cause: describe(result) },
        result => DriverError::Call { call, message: describe(result) },
    }
}

/// Errors after which, by the driver's documentation, "the context cannot be used" or "the process must be
/// terminated".
pub(crate) fn is_sticky(result: CUresult) -> bool {
    matches!(
        result,
        sys::CUDA_ERROR_ECC_UNCORRECTABLE
            | sys::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | sys::CUDA_ERROR_CONTAINED
            | sys::CUDA_ERROR_ILLEGAL_ADDRESS
            | sys::CUDA_ERROR_LAUNCH_TIMEOUT
            | sys::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | sys::CUDA_ERROR_ASSERT
            | sys::CUDA_ERROR_HARDWARE_STACK_ERROR
            | sys::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | sys::CUDA_ERROR_MISALIGNED_ADDRESS
            | sys::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | sys::CUDA_ERROR_INVALID_PC
            | sys::CUDA_ERROR_LAUNCH_FAILED
            | sys::CUDA_ERROR_TENSOR_MEMORY_LEAK
    )
}

/// The driver's name and text of an error, or its number if the driver does not know it.
pub(crate) fn describe(result: CUresult) -> String {
    type Ask = unsafe extern "C" fn(CUresult, *mut *const c_char) -> CUresult;
    let text = |name| {
        let mut text = std::ptr::null();
        // SAFETY: the type of both functions in cuda.h. The driver sets the pointer to a static string, or
        // leaves it null for an unknown code.
        unsafe {
            let ask = sys::symbol_of::<Ask>(sys::library()?, name)?;
            let _ = ask(result, &mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    match (text("cuGetErrorName"), text("cuGetErrorString")) {
        (Some(name), Some(meaning)) => format!("{name} ({meaning})"),
        _ => format!("CUDA error {result}"),
    }
}
