use crate::Kernel;

/// Something that runs kernels: the emulator or a GPU. Whatever runs on one runs on the other, unchanged.
pub trait Machine {
    /// A handle to device memory.
    type Buffer;
    /// What can go wrong.
    type Error: std::error::Error;

    /// Allocates `bytes` of uninitialised device memory.
    ///
    /// # Errors
    /// When the device has no room.
    fn allocate(&mut self, bytes: usize) -> Result<Self::Buffer, Self::Error>;

    /// Copies `data` to the start of `buffer`.
    ///
    /// # Errors
    /// When `data` is longer than the buffer.
    fn upload(&mut self, buffer: &mut Self::Buffer, data: &[u8]) -> Result<(), Self::Error>;

    /// Runs the kernel to its end, with one buffer for each of [`Kernel::buffers`].
    ///
    /// # Errors
    /// When the contract does not fit the entry or the buffers, or the kernel fails.
    fn launch(&mut self, kernel: &Kernel, buffers: &mut [&mut Self::Buffer]) -> Result<(), Self::Error>;

    /// Copies the start of `buffer` to `data`.
    ///
    /// # Errors
    /// When `data` is longer than the buffer.
    fn download(&mut self, buffer: &Self::Buffer, data: &mut [u8]) -> Result<(), Self::Error>;
}
