#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use cudarc::driver::{result, sys};

use crate::DriverError;

/// Device memory, freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) address: sys::CUdeviceptr,
    pub(crate) bytes: usize,
}

impl Buffer {
    pub(crate) fn allocate(bytes: usize) -> Result<Buffer, DriverError> {
        // SAFETY: a plain allocation; zero bytes are refused by the driver, so at least one is asked for.
        let address =
            unsafe { result::malloc_sync(bytes.max(1)) }.map_err(DriverError::call("cuMemAlloc"))?;
        Ok(Buffer { address, bytes })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn upload(&mut self, data: &[u8]) -> Result<(), DriverError> {
        self.fits(data.len())?;
        // SAFETY: the destination holds at least `data.len()` bytes, and the copy is synchronous.
        unsafe { result::memcpy_htod_sync(self.address, data) }.map_err(DriverError::call("cuMemcpyHtoD"))
    }

    pub(crate) fn download(&self, data: &mut [u8]) -> Result<(), DriverError> {
        self.fits(data.len())?;
        // SAFETY: the source holds at least `data.len()` bytes, and the copy is synchronous.
        unsafe { result::memcpy_dtoh_sync(data, self.address) }.map_err(DriverError::call("cuMemcpyDtoH"))
    }

    fn fits(&self, bytes: usize) -> Result<(), DriverError> {
        if bytes <= self.bytes { Ok(()) } else { Err(DriverError::Copy { bytes, room: self.bytes }) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the address came from cuMemAlloc and is freed once. After a context is gone the call fails
        // harmlessly.
        let _ = unsafe { result::free_sync(self.address) };
    }
}
