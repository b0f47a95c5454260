//! Attention for other languages and frameworks, by three interfaces of one shared library: C
//! (`include/flashcore.h` describes it), TVM-FFI (`tvm`) and XLA's foreign functions (`xla`).
//!
//! Each function reads its arguments, makes operands and options of them and passes these to
//! [`flashcore::raw`]. Nothing is kept between calls but the kernels and plans that `flashcore` keeps itself,
//! and parsed texts. No panic leaves the library.
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
use flashcore::raw::Ready;

pub use abi::{CCall, COperand, numbers};
use arrays::{AttentionCall, guarded};
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
            return Err(errors::invalid("bytes", "address", format!("{bytes:p}"), "that of a uint64_t"));
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
    let called = guarded(|| {
        // SAFETY: as above.
        let (call, arrays, options) = unsafe {
            let call = call::read(address)?;
            let arrays = call::arrays(&call)?;
            let options = call::options(&call, &arrays)?;
            (call, arrays, options)
        };
        let interleaved = call.flags & abi::INTERLEAVED != 0;
        let (place, writes_slots) = (call::place(&call)?, call.pass == abi::WRITE_SLOTS);
        AttentionCall { place, arrays, options: &options, interleaved, writes_slots }.with_ready(then)
    });
    let Err((code, text)) = called else { return abi::OK };
    // SAFETY: this function's own contract.
    unsafe { buffer.write(&text) };
    code
}
