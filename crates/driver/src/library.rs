//! The driver's library: found at run time, checked before its first use.
//!
//! cudarc resolves a function when it is first called and panics when the library lacks it. So every function that this
//! crate calls stands in [`NEEDED`] or [`LATER`] and is looked for before any is called.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUresult};

use crate::DriverError;

/// The least version that has all of [`NEEDED`]: tensor maps came with 12.0.
pub(crate) const MINIMUM: i32 = 12_000;

/// What the crate calls.
const NEEDED: [&str; 66] = [
    "cuCtxGetCurrent",
    "cuCtxResetPersistingL2Cache",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuLinkAddData_v2",
    "cuLinkComplete",
    "cuLinkCreate_v2",
    "cuLinkDestroy",
    "cuMemAllocFromPoolAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD32Async",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v2",
    "cuStreamGetId",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
    "cuThreadExchangeStreamCaptureMode",
];

/// What the crate calls only where it is there: `cuFuncLoad` came with 12.4.
const LATER: [&str; 1] = ["cuFuncLoad"];

/// Loads and initialises the driver, once, and gives its version. Which library there is does not change while the process
/// lives; what kept it from starting may, so that is asked again.
pub(crate) fn ready() -> Result<i32, DriverError> {
    static LIBRARY: OnceLock<Result<i32, DriverError>> = OnceLock::new();
    static STARTED: OnceLock<()> = OnceLock::new();
    let version = LIBRARY.get_or_init(load).clone()?;
    if STARTED.get().is_none() {
        start()?;
        STARTED.get_or_init(|| ());
    }
    Ok(version)
}

/// The library's version, if it has all that is called.
fn load() -> Result<i32, DriverError> {
    // SAFETY: only asks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverError::NoDriver);
    }
    // Of these even the oldest driver has to have both; without them its version cannot be asked.
    for name in ["cuDriverGetVersion", "cuInit", "cuGetErrorName", "cuGetErrorString"] {
        if !has(name) {
            return Err(DriverError::MissingSymbol { name, version: 0 });
        }
    }
    let mut version = 0;
    // SAFETY: the pointer is to a live i32; the call needs no initialisation.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    if version < MINIMUM {
        return Err(DriverError::DriverTooOld { found: version, needed: MINIMUM });
    }
    if let Some(name) = NEEDED.into_iter().find(|name| !has(name)) {
        return Err(DriverError::MissingSymbol { name, version });
    }
    Ok(version)
}

fn start() -> Result<(), DriverError> {
    // SAFETY: takes no memory of ours.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_ERROR_NO_DEVICE => {
            Err(forbidden().unwrap_or(DriverError::NoDevice { ordinal: 0, count: 0 }))
        }
        result => check("cuInit", result).map_err(|error| forbidden().unwrap_or(error)),
    }
}

/// On Linux the driver says "no device" when its device file may not be opened.
fn forbidden() -> Option<DriverError> {
    let path = "/dev/nvidiactl";
    let error = std::fs::OpenOptions::new().read(true).write(true).open(path).err()?;
    (error.kind() == std::io::ErrorKind::PermissionDenied)
        .then(|| DriverError::NoPermission { what: format!("opening {path}"), message: error.to_string() })
}

/// Whether the library, which is there, has a function.
fn has(name: &str) -> bool {
    // SAFETY: the symbol is only looked for; its address is not used.
    unsafe { sys::culib().get::<*const ()>(name.as_bytes()).is_ok() }
}

/// Whether the driver has `cuFuncLoad`. Call after [`ready`].
pub(crate) fn has_func_load() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| has(LATER[0]))
}

/// The typed error of a call that failed.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DriverError::OutOfMemory { what: call.to_owned() }),
        CUresult::CUDA_ERROR_NOT_PERMITTED => {
            Err(DriverError::NoPermission { what: call.to_owned(), message: describe(result) })
        }
        result if is_sticky(result) => Err(DriverError::Poisoned { call, cause: describe(result) }),
        result => Err(DriverError::Call { call, message: describe(result) }),
    }
}

/// Errors after which, says the driver's documentation, "the context cannot be used" or "the process must be terminated".
pub(crate) fn is_sticky(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
    )
}

/// The driver's name and text of an error.
pub(crate) fn describe(result: CUresult) -> String {
    type Ask = unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult;
    let text = |ask: Ask| {
        let mut text = std::ptr::null();
        // SAFETY: the driver sets the pointer to a static string, or leaves it null for a code that it does not know.
        unsafe {
            let _ = ask(result, &mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(meaning)) => format!("{name} ({meaning})"),
        _ => format!("CUDA error {}", result as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every source file of the crate that calls the driver.
    const SOURCES: [&str; 12] = [
        include_str!("context.rs"),
        include_str!("device.rs"),
        include_str!("event.rs"),
        include_str!("function.rs"),
        include_str!("graph.rs"),
        include_str!("library.rs"),
        include_str!("memory.rs"),
        include_str!("module.rs"),
        include_str!("pinned.rs"),
        include_str!("pool.rs"),
        include_str!("stream.rs"),
        include_str!("tensor_map.rs"),
    ];

    #[test]
    fn every_function_that_is_called_is_looked_for() {
        let mut called = std::collections::BTreeSet::new();
        for source in SOURCES {
            for (at, _) in source.match_indices("sys::cu") {
                let name: String =
                    source[at + 5..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if name.starts_with("cu") && name.as_bytes().get(2).is_some_and(u8::is_ascii_uppercase) {
                    called.insert(name);
                }
            }
        }
        assert!(called.len() > 40, "{called:?}");
        let listed: std::collections::BTreeSet<String> =
            NEEDED.into_iter().chain(LATER).map(str::to_owned).collect();
        assert_eq!(
            called.difference(&listed).collect::<Vec<_>>(),
            Vec::<&String>::new(),
            "called, not listed"
        );
        assert_eq!(
            listed.difference(&called).collect::<Vec<_>>(),
            Vec::<&String>::new(),
            "listed, not called"
        );
    }
}
