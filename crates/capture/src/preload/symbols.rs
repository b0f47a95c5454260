//! `dlsym`, which returns the wrappers for the driver's functions.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::hooks;

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// `RTLD_NEXT` and `RTLD_DEFAULT` of glibc.
const NEXT: usize = usize::MAX;
const DEFAULT: usize = 0;

/// The versions of glibc's `dlsym`: from 2.34 on, and before.
#[cfg(target_arch = "x86_64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
#[cfg(target_arch = "aarch64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.17"];

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The address of glibc's `dlsym`.
fn real() -> usize {
    static REAL: AtomicUsize = AtomicUsize::new(0);
    let known = REAL.load(Relaxed);
    if known != 0 {
        return known;
    }
    let found = VERSIONS.iter().map(|version| {
        // SAFETY: both texts end with NUL, and glibc's dlvsym may be called at any time.
        unsafe { dlvsym(NEXT as *mut c_void, c"dlsym".as_ptr(), version.as_ptr()) as usize }
    });
    let found = found.into_iter().find(|&address| address != 0).unwrap_or(0);
    REAL.store(found, Relaxed);
    found
}

/// The end of a call of `dlsym`: returns `wrapper`, or jumps to `real` if there is none.
#[repr(C)]
struct Choice {
    wrapper: usize,
    real: usize,
}

/// Chooses for a call of `dlsym`.
///
/// # Safety
/// The arguments must be those of a call of `dlsym`.
unsafe extern "C" fn choose(handle: *mut c_void, name: *const c_char) -> Choice {
    let none = Choice { wrapper: 0, real: real() };
    if name.is_null() || matches!(handle as usize, NEXT | DEFAULT) || none.real == 0 {
        return none;
    }
    // SAFETY: `dlsym` takes a text that ends with NUL.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let Some(hook) = hooks::named(name) else { return none };
    // SAFETY: the address is that of glibc's function of this type; the arguments are the caller's.
    let found =
        unsafe { std::mem::transmute::<usize, Dlsym>(none.real)(handle, name.as_ptr().cast()) } as usize;
    // A handle without the function gets glibc's own answer. A handle that holds this library finds the
    // wrapper.
    if found == 0 || found == hook.wrapper as usize {
        return none;
    }
    hook.real.store(found, Relaxed);
    Choice { wrapper: hook.wrapper as usize, real: none.real }
}

/// The `dlsym` of the program and of its libraries. It jumps to glibc's with the caller's return address, by
/// which glibc finds what `RTLD_NEXT` means.
///
/// # Safety
/// As for glibc's `dlsym`.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "push rdi", "push rsi", "sub rsp, 8",
        "call {choose}",
        "add rsp, 8", "pop rsi", "pop rdi",
        "test rax, rax", "jne 2f",
        "jmp rdx",
        "2: ret",
        choose = sym choose,
    )
}

/// As above.
///
/// # Safety
/// As for glibc's `dlsym`.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "stp x29, x30, [sp, #-32]!", "mov x29, sp", "stp x0, x1, [sp, #16]",
        "bl {choose}",
        "mov x2, x0", "mov x16, x1",
        "ldp x0, x1, [sp, #16]", "ldp x29, x30, [sp], #32",
        "cbnz x2, 2f",
        "br x16",
        "2: mov x0, x2", "ret",
        choose = sym choose,
    )
}
