//! Copies memory of the device into files.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::driver::{self, Handle};
use crate::protocol::{TABLE, header};

/// Bytes of one copy; at least [`TABLE`].
const PIECE: usize = 16 << 20;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: the copies must not end a capture of another stream.
const RELAXED: u32 = 2;
/// `CU_STREAM_NON_BLOCKING`: the stream waits for no other.
const NON_BLOCKING: u32 = 1;

/// A stream of our own, on which memory is read while the program's streams may be captured.
pub struct Copier {
    stream: Handle,
    mode: u32,
    piece: Vec<u8>,
}

impl Copier {
    pub fn new() -> Result<Copier, String> {
        let mut copier = Copier { stream: 0, mode: RELAXED, piece: Vec::new() };
        // SAFETY: the addresses are those of variables. The mode is exchanged again when the copier is
        // dropped.
        unsafe {
            driver::exchange_mode(&mut copier.mode)?;
            driver::stream_create(&mut copier.stream, NON_BLOCKING)?;
        }
        Ok(copier)
    }

    /// Waits for the work that the program has enqueued.
    pub fn wait(&self) -> Result<(), String> {
        // SAFETY: the program has a current context, since it launches a kernel.
        unsafe { driver::synchronize() }
    }

    /// Writes memory to a `.npy` file of bytes. Returns the words of memory that may be a table of addresses.
    pub fn save(&mut self, address: u64, bytes: usize, file: &Path) -> Result<Vec<u64>, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", file.display());
        let mut out = File::create(file).map_err(failed)?;
        out.write_all(&header("|u1", bytes)).map_err(failed)?;
        let mut done = 0;
        while done < bytes {
            let length = PIECE.min(bytes - done);
            self.piece.resize(length, 0);
            // SAFETY: the memory of the device is one allocation, and the piece has the length of the copy,
            // which has ended before the piece is read.
            unsafe {
                driver::copy_to_host(self.piece.as_mut_ptr(), address + done as u64, length, self.stream)?;
                driver::stream_synchronize(self.stream)?;
            }
            out.write_all(&self.piece).map_err(failed)?;
            done += length;
        }
        if bytes > TABLE {
            return Ok(Vec::new());
        }
        let words = self.piece.chunks_exact(8);
        Ok(words.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect())
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // SAFETY: the stream is ours, and the mode is the program's.
        unsafe {
            if self.stream != 0 {
                let _ = driver::stream_destroy(self.stream);
            }
            let _ = driver::exchange_mode(&mut self.mode);
        }
    }
}
