//! A bitmap with one bit per byte of a buffer.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One bit per byte of a buffer. Several CTAs may set bits concurrently.
#[derive(Debug, Default)]
pub(crate) struct Bitmap {
    words: Vec<AtomicU64>,
    /// One bit per word that is not zero. Maps of sparse buffers have tens of millions of words.
    used: Vec<AtomicU64>,
    bytes: usize,
}

impl Bitmap {
    /// All bits clear.
    pub fn new(bytes: usize) -> Bitmap {
        let words: Vec<AtomicU64> = bytemuck::zeroed_vec(bytes.div_ceil(64));
        Bitmap { used: bytemuck::zeroed_vec(words.len().div_ceil(64)), words, bytes }
    }

    /// Sets the bits of an aligned access of up to 64 bytes.
    #[inline(always)]
    pub fn set(&self, offset: usize, bytes: usize) {
        let bits = mask(offset, bytes);
        let word = &self.words[offset / 64];
        if word.load(Relaxed) & bits != bits && word.fetch_or(bits, Relaxed) == 0 {
            self.used[offset / 4096].fetch_or(1 << (offset / 64 % 64), Relaxed);
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
            *self.used[from / 4096].get_mut() |= 1 << (from / 64 % 64);
            from = to;
        }
    }

    /// Sets the bits that are set in another map. Words without such bits are not written, so that they use
    /// no memory in a new map.
    pub fn union(&mut self, other: &Bitmap) {
        for word in other.used_words() {
            *self.words[word].get_mut() |= other.words[word].load(Relaxed);
            *self.used[word / 64].get_mut() |= 1 << (word % 64);
        }
    }

    /// The blocks of 64 bytes, the last one shorter, in which some bit is set.
    pub fn blocks(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.used_words().map(|i| 64 * i..self.bytes.min(64 * (i + 1)))
    }

    /// The indices of the words that are not zero.
    fn used_words(&self) -> impl Iterator<Item = usize> {
        self.used.iter().enumerate().flat_map(|(group, bits)| {
            let mut bits = bits.load(Relaxed);
            std::iter::from_fn(move || {
                let bit = bits.trailing_zeros() as usize;
                bits &= bits.wrapping_sub(1);
                (bit < 64).then_some(64 * group + bit)
            })
        })
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
