//! Functions of the driver that this library itself calls.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// `CUresult`.
pub type Status = u32;
/// A handle of the driver: a module, a function, a stream.
pub type Handle = usize;

pub const NOT_FOUND: Status = 500;

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_LAZY: c_int = 1;

/// The address of a function of the driver, if there is a driver and the driver has the function.
///
/// The call of `dlsym` leads to [`crate::symbols`], which stores the real address of a wrapped function in
/// its hook and returns the wrapper. Functions that are wrapped are therefore found by [`crate::hooks`].
pub fn find(name: &CStr) -> Option<usize> {
    static DRIVER: OnceLock<usize> = OnceLock::new();
    let driver = *DRIVER.get_or_init(|| {
        // SAFETY: the program uses the driver, so loading the driver has no effect of its own.
        unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_LAZY) as usize }
    });
    if driver == 0 {
        return None;
    }
    // SAFETY: the handle is dlopen's, and the name ends with NUL.
    let found = unsafe { dlsym(driver as *mut c_void, name.as_ptr()) as usize };
    (found != 0).then_some(found)
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:ident($($arg:ident: $type:ty),*);)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As for the driver's function.
            pub unsafe fn $name($($arg: $type),*) -> Result<(), String> {
                type Real = unsafe extern "C" fn($($type),*) -> Status;
                static FOUND: OnceLock<Option<usize>> = OnceLock::new();
                const SYMBOL: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
                    Ok(symbol) => symbol,
                    Err(_) => panic!("a name of a function has no NUL"),
                };
                let Some(found) = *FOUND.get_or_init(|| find(SYMBOL)) else {
                    return Err(concat!("the driver has no ", stringify!($symbol)).to_owned());
                };
                // SAFETY: the driver's function has this type.
                let real = unsafe { std::mem::transmute::<usize, Real>(found) };
                // SAFETY: as the caller guarantees.
                match unsafe { real($($arg),*) } {
                    0 => Ok(()),
                    status => Err(format!(concat!(stringify!($symbol), " failed with error {}"), status)),
                }
            }
        )*
    };
}

functions! {
    /// Waits for all work of the current context.
    synchronize = cuCtxSynchronize();
    context_device = cuCtxGetDevice(device: *mut i32);
    device_attribute = cuDeviceGetAttribute(value: *mut i32, which: u32, device: i32);
    is_capturing = cuStreamIsCapturing(stream: Handle, status: *mut u32);
    exchange_mode = cuThreadExchangeStreamCaptureMode(mode: *mut u32);
    stream_create = cuStreamCreate(stream: *mut Handle, flags: u32);
    stream_synchronize = cuStreamSynchronize(stream: Handle);
    stream_destroy = cuStreamDestroy_v2(stream: Handle);
    pointer_attribute = cuPointerGetAttribute(value: *mut c_void, which: u32, address: u64);
    copy_to_host = cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, stream: Handle);
    /// From CUDA 12.4 on.
    function_parameter = cuFuncGetParamInfo(function: Handle, index: usize, offset: *mut usize, bytes: *mut usize);
    /// From CUDA 12.4 on.
    kernel_parameter = cuKernelGetParamInfo(kernel: Handle, index: usize, offset: *mut usize, bytes: *mut usize);
}

/// The compute capability of the current device times 10; 0 if the driver does not tell it.
pub fn capability() -> u32 {
    let attribute = |which: u32| {
        let (mut device, mut value) = (0, 0);
        // SAFETY: the addresses are those of variables that live through the calls.
        unsafe { context_device(&mut device).and_then(|()| device_attribute(&mut value, which, device)) }
            .ok()?;
        u32::try_from(value).ok()
    };
    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
    attribute(75).zip(attribute(76)).map_or(0, |(major, minor)| 10 * major + minor)
}

/// Start and size of the allocation that holds an address; `None` for a number that is no such address. The
/// driver knows its allocations of every kind, so allocations need no wrappers.
pub fn allocation(address: u64) -> Option<(u64, usize)> {
    let attribute = |which: u32| {
        let mut value = 0u64;
        // SAFETY: both attributes are 64-bit numbers; the driver refuses an address that it does not know.
        unsafe { pointer_attribute((&raw mut value).cast(), which, address) }.ok().map(|()| value)
    };
    // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR and CU_POINTER_ATTRIBUTE_RANGE_SIZE.
    let (start, bytes) = attribute(11).zip(attribute(12))?;
    let holds = address.checked_sub(start).is_some_and(|at| at < bytes);
    holds.then_some((start, bytes as usize))
}
