//! Buffers of the emulator's device memory.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::Bitmap;

/// Device memory of the emulator. A new buffer is uninitialised: reading a byte that was neither uploaded nor
/// stored is a finding.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) words: Vec<AtomicU32>,
    pub(crate) bytes: usize,
    pub(crate) initialised: Bitmap,
    /// Whether words without an initialised byte are zero and use memory only after a write.
    sparse: bool,
}

impl Buffer {
    /// `bytes` of uninitialised memory, filled with ones (a NaN in every float format).
    pub fn uninitialised(bytes: usize) -> Buffer {
        let words = (0..bytes.div_ceil(4)).map(|_| AtomicU32::new(!0)).collect();
        Buffer { words, bytes, initialised: Bitmap::new(bytes), sparse: false }
    }

    /// `bytes` of uninitialised memory, filled with zeros. The operating system provides memory only for
    /// pages that are written, so a buffer may be larger than the memory of the machine.
    pub fn sparse(bytes: usize) -> Buffer {
        let words = bytemuck::zeroed_vec(bytes.div_ceil(4));
        Buffer { words, bytes, initialised: Bitmap::new(bytes), sparse: true }
    }

    /// A buffer of `bytes` zeros.
    pub fn zeroed(bytes: usize) -> Buffer {
        let words = (0..bytes.div_ceil(4)).map(|_| AtomicU32::new(0)).collect();
        let mut initialised = Bitmap::new(bytes);
        initialised.set_range(0..bytes);
        Buffer { words, bytes, initialised, sparse: false }
    }

    /// A buffer with these contents.
    pub fn from_bytes(data: &[u8]) -> Buffer {
        let mut buffer = Buffer::uninitialised(data.len());
        buffer.write(data);
        buffer
    }

    /// Another buffer with the same contents.
    pub(crate) fn copy(&self) -> Buffer {
        let words = if self.sparse {
            let mut words: Vec<AtomicU32> = bytemuck::zeroed_vec(self.words.len());
            for range in self.initialised.blocks() {
                let range = range.start / 4..range.end.div_ceil(4);
                for (copy, word) in words[range.clone()].iter_mut().zip(&self.words[range]) {
                    *copy.get_mut() = word.load(Relaxed);
                }
            }
            words
        } else {
            self.words.iter().map(|word| AtomicU32::new(word.load(Relaxed))).collect()
        };
        let mut initialised = Bitmap::new(self.bytes);
        initialised.union(&self.initialised);
        Buffer { words, bytes: self.bytes, initialised, sparse: self.sparse }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether no byte was ever uploaded or stored.
    pub fn is_uninitialised(&self) -> bool {
        self.initialised.missing(0..self.bytes).is_some_and(|(_, count)| count == self.bytes)
    }

    /// The first byte of a range that was neither uploaded nor stored, and the number of such bytes in the
    /// range.
    pub fn missing(&self, range: std::ops::Range<usize>) -> Option<(usize, usize)> {
        self.initialised.missing(range)
    }

    /// Overwrites the start of the buffer. Data beyond its end is ignored.
    pub(crate) fn write(&mut self, data: &[u8]) {
        self.write_at(0, data);
    }

    /// Overwrites the buffer from byte `at` on, a multiple of 4. Data beyond its end is ignored.
    pub fn write_at(&mut self, at: usize, data: &[u8]) {
        let data = &data[..data.len().min(self.bytes.saturating_sub(at))];
        for (word, four) in self.words.iter_mut().skip(at / 4).zip(data.chunks(4)) {
            let mut bytes = word.get_mut().to_le_bytes();
            bytes[..four.len()].copy_from_slice(four);
            *word.get_mut() = u32::from_le_bytes(bytes);
        }
        self.initialised.set_range(at..at + data.len());
    }

    /// The bytes of a range that begins at a multiple of 4 and ends within the buffer.
    pub fn read_at(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        let words = &self.words[range.start / 4..range.end.div_ceil(4)];
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(range.len());
        bytes
    }

    /// The contents.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(self.bytes);
        bytes
    }
}
