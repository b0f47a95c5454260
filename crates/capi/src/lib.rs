//! The C interface: `include/flashcore.h` describes it.
//!
//! Each function reads a `flashcore_call`, makes operands and options of it and passes them to
//! [`flashcore::raw`]. Nothing is kept between calls but the kernels and plans that `flashcore` keeps itself.
//! No panic leaves the library.
#![allow(unsafe_code, reason = "the addresses of a C interface")]

mod abi;
mod call;

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use flashcore::AttentionError;
use flashcore::gpu::Gpu;
use flashcore::raw::{self, Queue, Ready};

pub use abi::{CCall, COperand, numbers};

/// `flashcore_prepare`.
///
/// # Safety
/// `call` is null or the address of a `flashcore_call` of `size` bytes, whose addresses are null or those of
/// arrays of the stated lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_prepare(call: *const CCall) -> i32 {
    // SAFETY: this function's own contract.
    unsafe { with_ready(call, |_| Ok(())) }
}

/// `flashcore_attention`.
///
/// # Safety
/// As [`flashcore_prepare`], and each operand lies in memory as its entry says, as [`Ready::enqueue`]
/// demands.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_attention(call: *const CCall) -> i32 {
    // SAFETY: this function's own contract.
    unsafe { with_ready(call, |ready| ready.enqueue()) }
}

/// `flashcore_workspace_size`.
///
/// # Safety
/// As [`flashcore_prepare`], and `bytes` is null or the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_workspace_size(call: *const CCall, bytes: *mut u64) -> i32 {
    let write = |ready: &Ready<'_>| {
        if bytes.is_null() || !bytes.is_aligned() {
            return Err(call::invalid("bytes", "address", format!("{bytes:p}"), "that of a uint64_t"));
        }
        // SAFETY: this function's own contract.
        unsafe { bytes.write(ready.workspace_size() as u64) };
        Ok(())
    };
    // SAFETY: this function's own contract.
    unsafe { with_ready(call, write) }
}

/// `flashcore_version`.
#[unsafe(no_mangle)]
pub extern "C" fn flashcore_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

/// Prepares a call and passes it on. Returns the code of the error, whose text goes into the call's buffer.
///
/// # Safety
/// As [`flashcore_prepare`].
unsafe fn with_ready(
    address: *const CCall,
    then: impl FnOnce(&Ready<'_>) -> Result<(), AttentionError>,
) -> i32 {
    // SAFETY: this function's own contract.
    let buffer = unsafe { call::error_buffer(address) };
    let run = AssertUnwindSafe(|| {
        // SAFETY: as above.
        let (call, operands, options) = unsafe {
            let call = call::read(address)?;
            let operands = call::operands(&call)?;
            let options = call::options(&call, &operands)?;
            (call, operands, options)
        };
        let gpu = gpu(&call)?;
        let queue = match &gpu {
            Some(gpu) => Queue::Stream { gpu, handle: call.stream },
            None => match (Queue::host(), call.threads) {
                (Queue::Host { executor, .. }, 1..) => {
                    Queue::Host { executor, threads: usize::try_from(call.threads).unwrap_or(usize::MAX) }
                }
                (host, _) => host,
            },
        };
        then(&raw::prepare(queue, &operands, &options)?)
    });
    let (code, text) = match catch_unwind(run) {
        Ok(Ok(())) => return abi::OK,
        Ok(Err(error)) => (code_of(&error), error.to_string()),
        Err(_) => (abi::INTERNAL, "a defect of FlashCore: its message was printed to stderr".to_owned()),
    };
    // SAFETY: this function's own contract.
    unsafe { buffer.write(&text) };
    code
}

/// The GPU of a call; `None` for the host.
fn gpu(call: &CCall) -> Result<Option<Arc<Gpu>>, AttentionError> {
    match call.device_type {
        abi::CPU => Ok(None),
        abi::CUDA => Gpu::open(call.device).map(Some),
        other => Err(call::invalid(
            "call",
            "field 'device_type'",
            other,
            "FLASHCORE_CPU (1) or FLASHCORE_CUDA (2)",
        )),
    }
}

fn code_of(error: &AttentionError) -> i32 {
    match error {
        AttentionError::Driver(_) => abi::DEVICE,
        AttentionError::Unsupported { .. } | AttentionError::Kernel(_) => abi::UNSUPPORTED,
        _ => abi::INVALID,
    }
}
