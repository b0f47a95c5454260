//! Turns PTX into a loaded module, using the cache of cubins.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::ffi::{CString, c_void};
use std::sync::Arc;

use ptx::{Target, TargetSuffix};

use crate::cache::Key;
use crate::context::Relaxed;
use crate::{Context, DriverError, sys};

/// A loaded module in a context. Unloaded when dropped.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
}

// SAFETY: a handle; the driver's functions on it may be called from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

const LOG_BYTES: usize = 16 * 1024;

impl Module {
    /// Loads PTX text: its cubin from the cache, or else the result of the driver's compiler.
    pub(crate) fn load(context: &Arc<Context>, text: &str, target: Target) -> Result<Module, DriverError> {
        let _entered = context.enter()?;
        // A module may be loaded while a stream is captured; the capture is not affected.
        let _relaxed = Relaxed::new()?;
        let name = target.to_string();
        let (cache, info) = (context.cache(), context.info());
        let key = Key::new(text, info.sm(), &info.compiler());
        if let Some(cubin) = cache.get(&key) {
            match Module::of_image(context, &cubin, &name) {
                Err(DriverError::Compile { .. }) => cache.reject(&key),
                other => return other,
            }
        }
        let text = terminated(text, &name)?;
        match link(context, &text, target) {
            Ok(cubin) => {
                cache.put(&key, &cubin);
                Module::of_image(context, &cubin, &name)
            }
            Err(error @ (DriverError::Poisoned { .. } | DriverError::OutOfMemory { .. })) => Err(error),
            // If the linker fails, the loader may succeed. If both fail, the loader's log is returned.
            Err(_) => Module::of_image(context, text.as_bytes_with_nul(), &name),
        }
    }

    /// Loads PTX text as one whole program, without the linker and our cache. An author's own compiler would
    /// have assembled the text in this way. For the linker, static shared arrays are symbols without an
    /// address, so ptxas joins no loads from them beyond their declared alignment. The driver caches what it
    /// loads this way itself.
    pub(crate) fn load_whole(
        context: &Arc<Context>,
        text: &str,
        target: Target,
    ) -> Result<Module, DriverError> {
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let name = target.to_string();
        Module::of_image(context, terminated(text, &name)?.as_bytes_with_nul(), &name)
    }

    /// Loads a cubin, or PTX that ends in NUL.
    fn of_image(context: &Arc<Context>, image: &[u8], target: &str) -> Result<Module, DriverError> {
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [sys::CU_JIT_ERROR_LOG_BUFFER, sys::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver takes small integers in place of pointers.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
        let mut raw = std::ptr::null_mut();
        // SAFETY: `image` is a complete cubin or NUL-terminated text, the log buffer has LOG_BYTES bytes,
        // both arrays have two entries, and all of them outlive the call.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &mut raw,
                image.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        match context.check("cuModuleLoadDataEx", result) {
            Ok(()) => Ok(Module { context: context.clone(), raw }),
            Err(DriverError::Call { message, .. }) if is_rejection(result) => {
                let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
                let log = format!("{message}: {}", String::from_utf8_lossy(&log[..end]).trim());
                Err(DriverError::Compile { target: target.to_owned(), log })
            }
            Err(other) => Err(other),
        }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The function with this name.
    pub(crate) fn function(&self, entry: &str) -> Result<sys::CUfunction, DriverError> {
        let name = CString::new(entry).map_err(|_| DriverError::Contract {
            entry: entry.to_owned(),
            reason: "the name holds a NUL byte".to_owned(),
        })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded; the name ends in NUL; the pointer is to a live handle.
        let result = unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()) };
        self.context.check("cuModuleGetFunction", result)?;
        Ok(raw)
    }
}

/// Whether the compiler or the loader rejected the code itself. Other errors, such as a system that is not
/// ready, may pass.
fn is_rejection(result: sys::CUresult) -> bool {
    matches!(
        result,
        sys::CUDA_ERROR_INVALID_IMAGE
            | sys::CUDA_ERROR_NO_BINARY_FOR_GPU
            | sys::CUDA_ERROR_INVALID_PTX
            | sys::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | sys::CUDA_ERROR_INVALID_SOURCE
    )
}

impl Drop for Module {
    fn drop(&mut self) {
        let Some(_entered) = self.context.enter_to_drop() else { return };
        let _relaxed = Relaxed::new();
        // SAFETY: loaded by us, unloaded once. Functions and graphs keep their modules alive.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// The text as a C string.
fn terminated(text: &str, target: &str) -> Result<CString, DriverError> {
    CString::new(text).map_err(|_| DriverError::Compile {
        target: target.to_owned(),
        log: "the text holds a NUL byte".to_owned(),
    })
}

/// The driver's linker. Unlike the loader, it returns the cubin.
struct Linker(sys::CUlinkState);

impl Drop for Linker {
    fn drop(&mut self) {
        // SAFETY: made by cuLinkCreate, destroyed once. A failure here cannot be reported.
        let _ = unsafe { sys::cuLinkDestroy(self.0) };
    }
}

/// The `CUjit_target` of a target whose code runs on one architecture alone, or on one family alone (cuda.h,
/// `CU_COMPUTE_ACCELERATED_TARGET_BASE` and `CU_COMPUTE_FAMILY_TARGET_BASE`). `None` for other targets.
fn jit_target(target: Target) -> Option<u32> {
    match target.suffix {
        TargetSuffix::None => None,
        TargetSuffix::ArchSpecific => Some(0x1_0000 + target.sm),
        TargetSuffix::Family => Some(0x2_0000 + target.sm),
    }
}

/// Compiles the text to a cubin for the current context's device.
fn link(context: &Context, text: &CString, target: Target) -> Result<Vec<u8>, DriverError> {
    let mut state = std::ptr::null_mut();
    let mut options = [sys::CU_JIT_TARGET];
    // The driver takes small integers in place of pointers. Without this option, the target is the device's
    // portable architecture.
    let specific = jit_target(target);
    let mut values = [specific.unwrap_or(0) as usize as *mut c_void];
    // SAFETY: both arrays have at least as many entries as the count says; the pointer is to a live handle.
    let result = unsafe {
        sys::cuLinkCreate_v2(specific.is_some().into(), options.as_mut_ptr(), values.as_mut_ptr(), &mut state)
    };
    context.check("cuLinkCreate", result)?;
    let linker = Linker(state);
    let bytes = text.as_bytes_with_nul();
    // SAFETY: the text ends in NUL, which its length includes, and is only read; the name may be null; there
    // are no options.
    let result = unsafe {
        sys::cuLinkAddData_v2(
            linker.0,
            sys::CU_JIT_INPUT_PTX,
            bytes.as_ptr().cast_mut().cast(),
            bytes.len(),
            c"flashcore".as_ptr(),
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
    context.check("cuLinkAddData", result)?;
    let (mut cubin, mut length) = (std::ptr::null_mut(), 0);
    // SAFETY: the pointers are to live values.
    let result = unsafe { sys::cuLinkComplete(linker.0, &mut cubin, &mut length) };
    context.check("cuLinkComplete", result)?;
    // SAFETY: the linker owns `length` bytes at `cubin` until it is destroyed, after this copy.
    Ok(unsafe { std::slice::from_raw_parts(cubin.cast::<u8>(), length) }.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_of_one_architecture_are_named_to_the_linker() {
        assert_eq!(jit_target(Target::sm(90)), None);
        let accelerated = jit_target(Target { sm: 90, suffix: TargetSuffix::ArchSpecific });
        // `CU_TARGET_COMPUTE_90A`.
        assert_eq!(accelerated, Some(65_626));
    }
}
