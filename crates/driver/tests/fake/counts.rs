//! The counters of the fake driver that this process has loaded.

#![allow(unsafe_code, reason = "functions of the fake")]

use std::ffi::{CStr, c_char, c_void};

/// A function of the fake driver.
///
/// # Safety
/// `F` must be the function's type, and the driver must be loaded.
pub unsafe fn fake<F: Copy>(name: &CStr) -> F {
    unsafe extern "C" {
        fn dlopen(file: *const c_char, flags: i32) -> *mut c_void;
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    // SAFETY: the library is loaded, so that nothing is initialised; the texts end with a NUL.
    let found = unsafe { dlsym(dlopen(c"libcuda.so.1".as_ptr(), 1), name.as_ptr()) };
    assert!(!found.is_null() && size_of::<F>() == size_of::<*mut c_void>(), "{name:?}");
    // SAFETY: as the caller guarantees; a function's address is a pointer.
    unsafe { std::mem::transmute_copy(&found) }
}

/// The number of calls of the driver that `work` makes.
pub fn calls_of(work: impl FnOnce()) -> u64 {
    // SAFETY: the function's type; a test that counts calls has a device.
    let count = unsafe { fake::<extern "C" fn() -> u64>(c"fake_calls") };
    let before = count();
    work();
    count() - before
}
