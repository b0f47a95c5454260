//! The wrappers.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::driver::{self, Handle, NOT_FOUND, Status};
use crate::image::Image;
use crate::launch::{Config, Launch, launched};
use crate::state::{TensorMap, note};

/// A wrapped function.
pub struct Hook {
    pub wrapper: *const c_void,
    /// The address of the driver's function; 0 until it is known.
    pub real: &'static AtomicUsize,
}

/// The driver's function of a hook.
fn real(name: &CStr, known: &AtomicUsize) -> Option<usize> {
    if known.load(Relaxed) == 0 {
        // Stores the address, by way of `crate::symbols`.
        driver::find(name);
    }
    Some(known.load(Relaxed)).filter(|&address| address != 0)
}

macro_rules! hooks {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) as $real:ident => $body:expr;)*) => {
        #[allow(non_upper_case_globals, reason = "the names are the driver's")]
        mod known {
            use super::AtomicUsize;
            $(pub static $name: AtomicUsize = AtomicUsize::new(0);)*
        }

        $(
            /// # Safety
            /// As for the driver's function.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[allow(non_snake_case, reason = "the name is the driver's")]
            unsafe extern "C" fn $name($($arg: $type),*) -> Status {
                type Real = unsafe extern "C" fn($($type),*) -> Status;
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name of a function has no NUL"),
                };
                let Some(found) = real(NAME, &known::$name) else { return NOT_FOUND };
                // SAFETY: the driver's function has this type.
                let function = unsafe { std::mem::transmute::<usize, Real>(found) };
                // SAFETY: the arguments are the caller's own.
                let $real = || unsafe { function($($arg),*) };
                $body
            }
        )*

        /// The hook of a function of the driver.
        pub fn named(name: &[u8]) -> Option<Hook> {
            if !name.starts_with(b"cu") {
                return None;
            }
            $(
                if name == stringify!($name).as_bytes() {
                    return Some(Hook { wrapper: $name as *const c_void, real: &known::$name });
                }
            )*
            None
        }
    };
}

/// Calls the driver, and notes what the call made if it succeeds.
fn noted<T>(call: impl FnOnce() -> Status, what: impl FnOnce() -> T) -> Status {
    let status = call();
    if status == 0 {
        what();
    }
    status
}

/// The text at an address.
///
/// # Safety
/// The address must be 0 or that of a text that ends with NUL.
unsafe fn text(address: *const c_char) -> String {
    if address.is_null() {
        return String::new();
    }
    // SAFETY: as the caller guarantees.
    unsafe { CStr::from_ptr(address) }.to_string_lossy().into_owned()
}

// SAFETY of the blocks in the bodies: a call that succeeds has stored a handle at the caller's address, and
// has read the caller's image, name or arrays. They are read again before the wrapper returns.
hooks! {
    cuModuleLoad(module: *mut Handle, file: *const c_char) as load =>
        noted(load, || note(|s| unsafe { s.loaded(*module, Image::of_file(&text(file))) }));
    cuModuleLoadData(module: *mut Handle, image: *const u8) as load =>
        noted(load, || note(|s| unsafe { s.loaded(*module, Image::at(image)) }));
    cuModuleLoadDataEx(
        module: *mut Handle, image: *const u8, count: u32, options: *mut c_void, values: *mut c_void,
    ) as load => noted(load, || note(|s| unsafe { s.loaded(*module, Image::at(image)) }));
    cuModuleLoadFatBinary(module: *mut Handle, image: *const u8) as load =>
        noted(load, || note(|s| unsafe { s.loaded(*module, Image::at(image)) }));
    cuLibraryLoadData(
        library: *mut Handle, image: *const u8, jit: *mut c_void, jit_values: *mut *mut c_void, jit_count: u32,
        options: *mut c_void, values: *mut *mut c_void, count: u32,
    ) as load => noted(load, || note(|s| unsafe { s.loaded(*library, Image::at(image)) }));
    cuLibraryLoadFromFile(
        library: *mut Handle, file: *const c_char, jit: *mut c_void, jit_values: *mut *mut c_void, jit_count: u32,
        options: *mut c_void, values: *mut *mut c_void, count: u32,
    ) as load => noted(load, || note(|s| unsafe { s.loaded(*library, Image::of_file(&text(file))) }));
    cuLibraryGetModule(module: *mut Handle, library: Handle) as get =>
        noted(get, || note(|s| unsafe { s.same_image(*module, library) }));

    cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) as get =>
        noted(get, || note(|s| unsafe { s.got(*function, module, text(name), false) }));
    cuLibraryGetKernel(kernel: *mut Handle, library: Handle, name: *const c_char) as get =>
        noted(get, || note(|s| unsafe { s.got(*kernel, library, text(name), true) }));
    cuKernelGetFunction(function: *mut Handle, kernel: Handle) as get =>
        noted(get, || note(|s| unsafe { s.function_of(*function, kernel) }));

    cuTensorMapEncodeTiled(
        map: *mut [u8; 128], element: u32, rank: u32, address: u64, dims: *const u64, strides: *const u64,
        extents: *const u32, steps: *const u32, interleave: u32, swizzle: u32, promotion: u32, fill: u32,
    ) as encode => noted(encode, || note(|s| unsafe {
        let made = TensorMap { element, address, interleave, swizzle, fill, ..TensorMap::default() };
        s.encoded(*map, made.with_shape(rank, dims, strides, Some(extents), steps));
    }));
    cuTensorMapEncodeIm2col(
        map: *mut [u8; 128], element: u32, rank: u32, address: u64, dims: *const u64, strides: *const u64,
        lower: *const i32, upper: *const i32, channels: u32, pixels: u32, steps: *const u32, interleave: u32,
        swizzle: u32, promotion: u32, fill: u32,
    ) as encode => noted(encode, || note(|s| unsafe {
        let made = TensorMap { element, address, interleave, swizzle, fill, im2col: true, ..TensorMap::default() };
        s.encoded(*map, made.with_shape(rank, dims, strides, None, steps));
    }));
    cuTensorMapReplaceAddress(map: *mut [u8; 128], address: u64) as replace => {
        // SAFETY: the caller's map, which the driver reads, too.
        let before = unsafe { *map };
        noted(replace, || note(|s| unsafe { s.moved(&before, *map, address) }))
    };

    cuLaunchKernel(
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        params: *const *const u8, extra: *const *const c_void,
    ) as call => {
        let made = Launch::of(function, [gx, gy, gz], [bx, by, bz], shared, stream, params, extra);
        launched(made, call)
    };
    cuLaunchKernel_ptsz(
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        params: *const *const u8, extra: *const *const c_void,
    ) as call => {
        let made = Launch::of(function, [gx, gy, gz], [bx, by, bz], shared, stream, params, extra);
        launched(made, call)
    };
    cuLaunchKernelEx(
        config: *const Config, function: Handle, params: *const *const u8, extra: *const *const c_void,
    ) as call => launched(unsafe { Launch::of_config(config, function, params, extra) }, call);
    cuLaunchKernelEx_ptsz(
        config: *const Config, function: Handle, params: *const *const u8, extra: *const *const c_void,
    ) as call => launched(unsafe { Launch::of_config(config, function, params, extra) }, call);
    cuLaunchCooperativeKernel(
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        params: *const *const u8,
    ) as call => {
        let made = Launch::of(function, [gx, gy, gz], [bx, by, bz], shared, stream, params, std::ptr::null());
        launched(made.cooperative(), call)
    };
    cuLaunchCooperativeKernel_ptsz(
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: Handle,
        params: *const *const u8,
    ) as call => {
        let made = Launch::of(function, [gx, gy, gz], [bx, by, bz], shared, stream, params, std::ptr::null());
        launched(made.cooperative(), call)
    };

    cuGetProcAddress(symbol: *const c_char, found: *mut usize, version: i32, flags: u64) as get =>
        noted(get, || unsafe { replace(symbol, found, version, flags) });
    cuGetProcAddress_v2(
        symbol: *const c_char, found: *mut usize, version: i32, flags: u64, status: *mut u32,
    ) as get => noted(get, || unsafe { replace(symbol, found, version, flags) });
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;

/// Replaces the address that `cuGetProcAddress` found by that of the wrapper.
///
/// # Safety
/// The arguments must be those of a call that succeeded.
unsafe fn replace(symbol: *const c_char, found: *mut usize, version: i32, flags: u64) {
    // SAFETY: as the caller guarantees.
    let (symbol, real) = unsafe { (text(symbol), *found) };
    let name = match symbol.as_str() {
        "cuGetProcAddress" if version >= 12_000 => "cuGetProcAddress_v2".to_owned(),
        _ => symbol,
    };
    let of_thread = (flags & PER_THREAD != 0).then(|| named(format!("{name}_ptsz").as_bytes())).flatten();
    let Some(hook) = of_thread.or_else(|| named(name.as_bytes())) else { return };
    if real != 0 && real != hook.wrapper as usize {
        hook.real.store(real, Relaxed);
        // SAFETY: the address of the caller's variable.
        unsafe { *found = hook.wrapper as usize };
    }
}
