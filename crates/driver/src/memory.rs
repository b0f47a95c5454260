//! Device memory.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::any::Any;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::context::Relaxed;
use crate::{Context, DriverError, Stream, sys};

/// An object that graphs keep alive: memory that frees itself, a module, or the parts of another graph.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

/// A range of device memory, borrowed from a [`Buffer`] or a [`PoolBuffer`](crate::PoolBuffer). A graph that
/// captures work on the slice keeps the memory alive.
#[derive(Clone, Copy)]
pub struct DeviceSlice<'a> {
    address: u64,
    bytes: usize,
    /// `None` for memory of the caller.
    owner: Option<&'a Kept>,
}

impl<'a> DeviceSlice<'a> {
    /// A slice without memory, for a tensor without elements.
    pub const EMPTY: DeviceSlice<'static> = DeviceSlice { address: 0, bytes: 0, owner: None };

    /// Memory of the caller.
    ///
    /// # Safety
    /// `address` must be device memory of `bytes` bytes in the context in which the slice is used, and not
    /// mapped or managed memory that the host uses at the same time. The memory must stay valid until the
    /// work that uses the slice is done, and as long as a graph exists that captured this work.
    pub const unsafe fn from_raw(address: u64, bytes: usize) -> DeviceSlice<'a> {
        DeviceSlice { address, bytes, owner: None }
    }

    /// A slice without memory, for checks that access no memory.
    pub(crate) const fn nowhere(address: u64, bytes: usize) -> DeviceSlice<'static> {
        DeviceSlice { address, bytes, owner: None }
    }

    pub(crate) const fn of(owner: &'a Kept, address: u64, bytes: usize) -> DeviceSlice<'a> {
        DeviceSlice { address, bytes, owner: Some(owner) }
    }

    /// The device address of the first byte.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub const fn bytes(self) -> usize {
        self.bytes
    }

    /// The part with `bytes` bytes from `offset` on. `None` when the part does not lie inside the slice.
    pub fn part(self, offset: usize, bytes: usize) -> Option<DeviceSlice<'a>> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then(|| DeviceSlice { address: self.address + offset as u64, bytes, ..self })
    }

    /// The memory that a graph must keep alive when it captures work on the slice.
    pub(crate) fn owner(self) -> Option<Kept> {
        self.owner.cloned()
    }

    pub(crate) fn fits(self, bytes: usize) -> Result<(), DriverError> {
        if bytes <= self.bytes { Ok(()) } else { Err(DriverError::Copy { bytes, room: self.bytes }) }
    }
}

impl PartialEq for DeviceSlice<'_> {
    fn eq(&self, other: &Self) -> bool {
        (self.address, self.bytes) == (other.address, other.bytes)
    }
}

impl Eq for DeviceSlice<'_> {}

impl Hash for DeviceSlice<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.address, self.bytes).hash(state);
    }
}

impl fmt::Debug for DeviceSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSlice({:#x}, {} bytes)", self.address, self.bytes)
    }
}

/// Device memory. It is freed when the buffer and all graphs that captured its use are dropped. The driver
/// then waits for the work that was enqueued before.
#[derive(Debug)]
pub struct Buffer {
    context: Arc<Context>,
    /// The memory, an [`Allocation`].
    memory: Kept,
    address: u64,
    bytes: usize,
}

/// An allocation by `cuMemAlloc`.
struct Allocation {
    context: Arc<Context>,
    address: u64,
}

impl Buffer {
    /// `bytes` bytes of uninitialised memory.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`].
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Buffer, DriverError> {
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let mut address = 0;
        // The driver rejects an allocation of 0 bytes.
        // SAFETY: the context is current; the pointer is to a live address.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        context.check("cuMemAlloc", result).map_err(|error| asked_for(error, "device memory", bytes))?;
        let memory = Arc::new(Allocation { context: context.clone(), address });
        Ok(Buffer { context: context.clone(), memory, address, bytes })
    }

    /// `bytes` bytes of zeros, which are written when the call returns. The call is allowed while a stream is
    /// captured and does not affect the capture: the zeros are written on a stream of their own.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`].
    pub fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<Buffer, DriverError> {
        let buffer = Buffer::new(context, bytes)?;
        let _entered = context.enter()?;
        let _relaxed = Relaxed::new()?;
        let stream = Stream::new(context)?;
        stream.fill(buffer.slice(), 0)?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The whole buffer.
    pub fn slice(&self) -> DeviceSlice<'_> {
        DeviceSlice::of(&self.memory, self.address, self.bytes)
    }

    /// The memory without the buffer.
    pub(crate) fn into_memory(self) -> (Kept, u64) {
        (self.memory, self.address)
    }

    /// Copies `data` to the start of the buffer, after the work on the default stream. Waits for the copy.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when `data` is longer than the buffer.
    pub fn upload(&mut self, data: &[u8]) -> Result<(), DriverError> {
        self.slice().fits(data.len())?;
        let _entered = self.context.enter()?;
        // SAFETY: the destination holds at least `data.len()` bytes. When the call returns, the driver has
        // read `data`.
        let result = unsafe { sys::cuMemcpyHtoD_v2(self.address, data.as_ptr().cast(), data.len()) };
        self.context.check("cuMemcpyHtoD", result)?;
        // The call may return before the last bytes are on the device (CUDA Driver API, "API synchronization
        // behavior"), and other streams do not wait for the default stream.
        // SAFETY: null is the default stream.
        let result = unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) };
        self.context.check("cuStreamSynchronize", result)
    }

    /// Copies the start of the buffer to `data`, after the work on the default stream. Waits for the copy.
    ///
    /// # Errors
    /// [`DriverError::Copy`] when `data` is longer than the buffer.
    pub fn download(&self, data: &mut [u8]) -> Result<(), DriverError> {
        self.slice().fits(data.len())?;
        let _entered = self.context.enter()?;
        // SAFETY: the source holds at least `data.len()` bytes, and the copy is synchronous.
        let result = unsafe { sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), self.address, data.len()) };
        self.context.check("cuMemcpyDtoH", result)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Some(_entered) = self.context.enter_to_drop() else { return };
        let _relaxed = Relaxed::new();
        // SAFETY: the address came from cuMemAlloc and is freed once. A failure here cannot be reported.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Adds the kind and the size of the request to an out-of-memory error.
pub(crate) fn asked_for(error: DriverError, kind: &str, bytes: usize) -> DriverError {
    match error {
        DriverError::OutOfMemory { .. } => {
            DriverError::OutOfMemory { what: format!("{bytes} bytes of {kind} were asked for") }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_inside() {
        let slice = DeviceSlice::nowhere(1000, 16);
        assert_eq!(slice.part(4, 12), Some(DeviceSlice::nowhere(1004, 12)));
        assert_eq!(slice.part(16, 0), Some(DeviceSlice::nowhere(1016, 0)));
        for (offset, bytes) in [(4, 13), (17, 0), (usize::MAX, 2)] {
            assert_eq!(slice.part(offset, bytes), None);
        }
        assert_eq!(slice.fits(17), Err(DriverError::Copy { bytes: 17, room: 16 }));
    }

    #[test]
    fn an_error_of_memory_says_how_much() {
        let error = asked_for(DriverError::OutOfMemory { what: "cuMemAlloc".to_owned() }, "pinned memory", 7);
        assert_eq!(error.to_string(), "out of memory: 7 bytes of pinned memory were asked for");
    }
}
