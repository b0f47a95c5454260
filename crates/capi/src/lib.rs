//! Attention for other languages and frameworks, by three interfaces of one shared library: C
//! (`include/flashcore.h` describes it), TVM-FFI (`tvm`) and XLA's foreign functions (`xla`).
//!
//! Each function reads its arguments, makes operands and options of them and passes these to
//! [`flashcore::raw`]. Nothing is kept between calls but the kernels and plans that `flashcore` keeps itself,
//! parsed texts, and a few calls of each thread ([`keep_call`]). No panic leaves the library.
#![allow(unsafe_code, reason = "the addresses of a C interface")]

mod abi;
mod arrays;
mod call;
mod errors;
mod spec;
mod tvm;
mod xla;

use std::ffi::{CStr, c_char};

use flashcore::AttentionError;
use flashcore::raw::{Ready, keep_call, launch_again};

pub use abi::{CCall, COperand, numbers};
use arrays::{AttentionCall, guarded};
use call::PlainCall;
pub use tvm::{__tvm_ffi_attention, __tvm_ffi_prepare, __tvm_ffi_workspace_size, TvmAny};
pub use xla::{XlaCallFrame, flashcore_xla_cuda, flashcore_xla_host};

/// `flashcore_prepare`.
///
/// # Safety
/// `call` is null or the address of a `flashcore_call` of `size` bytes, whose addresses are null or those of
/// arrays of the stated lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_prepare(call: *const CCall) -> i32 {
    // SAFETY: this function's own contract.
    unsafe { reported(call, |call| with_ready(call, |_| Ok(()))) }
}

/// `flashcore_attention`.
///
/// # Safety
/// As [`flashcore_prepare`], and each operand lies in memory as its entry says, as [`Ready::enqueue`]
/// demands.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_attention(call: *const CCall) -> i32 {
    let run = |call: &CCall| {
        // SAFETY: this function's own contract.
        let plain = unsafe { PlainCall::of(call) };
        if let Some(plain) = &plain
            // SAFETY: as above.
            && let Some(launched) = unsafe { launch_again(plain, call.stream) }
        {
            return launched;
        }
        let enqueue = |ready: &Ready<'_>| {
            // SAFETY: as above.
            unsafe { ready.enqueue()? };
            if let Some(plain) = &plain {
                keep_call(plain, plain.passed(), ready);
            }
            Ok(())
        };
        // SAFETY: as above.
        unsafe { with_ready(call, enqueue) }
    };
    // SAFETY: as above.
    unsafe { reported(call, run) }
}

/// `flashcore_workspace_size`.
///
/// # Safety
/// As [`flashcore_prepare`], and `bytes` is null or the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_workspace_size(call: *const CCall, bytes: *mut u64) -> i32 {
    let write = |ready: &Ready<'_>| {
        if bytes.is_null() || !bytes.is_aligned() {
            return Err(errors::invalid("bytes", "address", format!("{bytes:p}"), "that of a uint64_t"));
        }
        // SAFETY: this function's own contract.
        unsafe { bytes.write(ready.workspace_size() as u64) };
        Ok(())
    };
    // SAFETY: this function's own contract.
    unsafe { reported(call, |call| with_ready(call, write)) }
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

/// Prepares a call and passes it on.
///
/// # Safety
/// As [`flashcore_prepare`], for a copy of the call.
unsafe fn with_ready(
    call: &CCall,
    then: impl FnOnce(&Ready<'_>) -> Result<(), AttentionError>,
) -> Result<(), AttentionError> {
    // SAFETY: this function's own contract.
    let (arrays, options) = unsafe {
        let arrays = call::arrays(call)?;
        let options = call::options(call, &arrays)?;
        (arrays, options)
    };
    let interleaved = call.flags & abi::INTERLEAVED != 0;
    let (place, writes_slots) = (call::place(call)?, call.pass == abi::WRITE_SLOTS);
    AttentionCall { place, arrays, options: &options, interleaved, writes_slots }.with_ready(then)
}

/// Reads a call and passes it on. Returns the code of the error, whose text goes into the call's buffer.
///
/// # Safety
/// As [`flashcore_prepare`].
unsafe fn reported(address: *const CCall, run: impl FnOnce(&CCall) -> Result<(), AttentionError>) -> i32 {
    // SAFETY: this function's own contract.
    let called = guarded(|| run(&unsafe { call::read(address)? }));
    let Err((code, text)) = called else { return abi::OK };
    // SAFETY: as above.
    unsafe { call::error_buffer(address).write(&text) };
    code
}
