//! The interface of a machine that runs kernels.

use crate::Kernel;

/// A machine that runs kernels: the emulator or a GPU. A kernel that runs on one runs unchanged on the other.
pub trait Machine {
    /// A handle to device memory.
    type Buffer;
    /// The errors of the machine.
    type Error: std::error::Error;

    /// Allocates `bytes` of uninitialised device memory.
    ///
    /// # Errors
    /// When the device has too little free memory.
    fn allocate(&mut self, bytes: usize) -> Result<Self::Buffer, Self::Error>;

    /// Copies `data` to the start of `buffer`.
    ///
    /// # Errors
    /// When `data` is longer than the buffer.
    fn upload(&mut self, buffer: &mut Self::Buffer, data: &[u8]) -> Result<(), Self::Error>;

    /// Runs the kernel to completion, with one buffer for each of [`Kernel::buffers`].
    ///
    /// # Errors
    /// When the contract does not match the entry or the buffers, or the kernel fails.
    fn launch(&mut self, kernel: &Kernel, buffers: &mut [&mut Self::Buffer]) -> Result<(), Self::Error>;

    /// Copies the start of `buffer` to `data`.
    ///
    /// # Errors
    /// When `data` is longer than the buffer.
    fn download(&mut self, buffer: &Self::Buffer, data: &mut [u8]) -> Result<(), Self::Error>;
}
