#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::collections::HashMap;
use std::ffi::{CString, c_void};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUjit_option as Jit};

use crate::DriverError;

/// What the driver's compiler made of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes: spills and per-thread arrays.
    pub local: u32,
    /// Static shared memory per CTA in bytes.
    pub shared: u32,
}

/// A module in the context, with the functions that were asked for.
#[derive(Debug)]
pub(crate) struct Loaded {
    module: sys::CUmodule,
    functions: HashMap<String, sys::CUfunction>,
}

const LOG_BYTES: usize = 16 * 1024;

impl Loaded {
    /// Compiles PTX text for the device.
    pub(crate) fn compile(text: &str, target: &str) -> Result<Loaded, DriverError> {
        let image = CString::new(text).map_err(|_| DriverError::Compile {
            target: target.to_owned(),
            log: "the text holds a NUL byte".to_owned(),
        })?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [Jit::CU_JIT_ERROR_LOG_BUFFER, Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver takes small integers in the place of pointers.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: `image` is NUL-terminated, the log buffer is LOG_BYTES long, both arrays have two entries, and all
        // outlive the call.
        let status = unsafe {
            sys::cuModuleLoadDataEx(
                &mut module,
                image.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if let Err(error) = status.result() {
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            let log = format!("{error}: {}", String::from_utf8_lossy(&log[..end]).trim());
            return Err(DriverError::Compile { target: target.to_owned(), log });
        }
        Ok(Loaded { module, functions: HashMap::new() })
    }

    /// The entry of that name.
    pub(crate) fn function(&mut self, entry: &str) -> Result<sys::CUfunction, DriverError> {
        if let Some(&function) = self.functions.get(entry) {
            return Ok(function);
        }
        let name = CString::new(entry).map_err(|_| DriverError::Contract {
            entry: entry.to_owned(),
            reason: "the name holds a NUL byte".to_owned(),
        })?;
        // SAFETY: the module is loaded until `self` is dropped.
        let function = unsafe { result::module::get_function(self.module, name) }
            .map_err(DriverError::call("cuModuleGetFunction"))?;
        self.functions.insert(entry.to_owned(), function);
        Ok(function)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded by us, unloaded once.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

pub(crate) fn resources(function: sys::CUfunction) -> Result<Resources, DriverError> {
    // SAFETY: the function belongs to a loaded module.
    let read = |which| unsafe {
        result::function::get_function_attribute(function, which)
            .map(|value| value as u32)
            .map_err(DriverError::call("cuFuncGetAttribute"))
    };
    Ok(Resources {
        registers: read(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        local: read(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        shared: read(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
    })
}
