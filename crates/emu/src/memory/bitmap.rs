//! A bitmap with one bit per byte of a buffer.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One bit per byte of a buffer. Several CTAs may set bits concurrently.
#[derive(Debug, Default)]
pub(crate) struct Bitmap {
    words: Vec<AtomicU64>,
    bytes: usize,
}

impl Bitmap {
    /// All bits clear.
    pub fn new(bytes: usize) -> Bitmap {
        Bitmap { words: bytemuck::zeroed_vec(bytes.div_ceil(64)), bytes }
    }

    /// Sets the bits of an aligned access of up to 64 bytes.
    #[inline(always)]
    pub fn set(&self, offset: usize, bytes: usize) {
        let bits = mask(offset, bytes);
        let word = &self.words[offset / 64];
        if word.load(Relaxed) & bits != bits {
            word.fetch_or(bits, Relaxed);
        }
    }

    /// Whether all bits of an aligned access of up to 64 bytes are set.
    #[inline(always)]
    pub fn all(&self, offset: usize, bytes: usize) -> bool {
        let bits = mask(offset, bytes);
        self.words[offset / 64].load(Relaxed) & bits == bits
    }

    /// Whether some bit of an aligned access of up to 64 bytes is set.
    pub fn any(&self, offset: usize, bytes: usize) -> bool {
        self.words[offset / 64].load(Relaxed) & mask(offset, bytes) != 0
    }

    /// Sets the bits of a range.
    pub fn set_range(&mut self, range: std::ops::Range<usize>) {
        let end = range.end.min(self.bytes);
        let mut from = range.start;
        while from < end {
            let to = end.min((from / 64 + 1) * 64);
            *self.words[from / 64].get_mut() |= mask(from, to - from);
            from = to;
        }
    }

    /// Sets the bits that are set in another map. Words without such bits are not written, so that they use
    /// no memory in a new map.
    pub fn union(&mut self, other: &Bitmap) {
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            let theirs = theirs.load(Relaxed);
            if theirs != 0 {
                *mine.get_mut() |= theirs;
            }
        }
    }

    /// The blocks of 64 bytes, the last one shorter, in which some bit is set.
    pub fn blocks(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let set = self.words.iter().enumerate().filter(|(_, word)| word.load(Relaxed) != 0);
        set.map(|(i, _)| 64 * i..self.bytes.min(64 * (i + 1)))
    }

    /// The first byte of the range whose bit is clear, and the number of bytes in the range whose bit is
    /// clear.
    pub fn missing(&self, range: std::ops::Range<usize>) -> Option<(usize, usize)> {
        let is_clear = |o: &usize| self.words[o / 64].load(Relaxed) >> (o % 64) & 1 == 0;
        let mut clear = (range.start..range.end.min(self.bytes)).filter(is_clear);
        let first = clear.next()?;
        Some((first, 1 + clear.count()))
    }

    /// Whether every byte is set.
    pub fn is_full(&self) -> bool {
        let (whole, rest) = (self.bytes / 64, self.bytes % 64);
        self.words[..whole].iter().all(|w| w.load(Relaxed) == !0) && (rest == 0 || self.all(whole * 64, rest))
    }
}

#[inline(always)]
fn mask(offset: usize, bytes: usize) -> u64 {
    (!0 >> (64 - bytes)) << (offset % 64)
}
