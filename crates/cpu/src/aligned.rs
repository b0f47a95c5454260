//! Buffers that are aligned to cache lines.

/// A growing buffer of f32 that starts at a multiple of 64 bytes, so that no vector load straddles two cache
/// lines.
#[derive(Default)]
pub(crate) struct Aligned {
    data: Vec<f32>,
    start: usize,
    len: usize,
}

/// Bytes of a cache line, which is also the size of the widest vector.
const LINE: usize = 64;

impl Aligned {
    /// Sets the length to `len`. The contents are unspecified.
    pub(crate) fn resize(&mut self, len: usize) -> &mut [f32] {
        if self.start + len > self.data.len() {
            self.data = vec![0.0; len + LINE / size_of::<f32>()];
            // If no offset can be computed, the buffer stays unaligned: slower, but correct.
            self.start = self.data.as_ptr().align_offset(LINE).min(LINE / size_of::<f32>());
        }
        self.len = len;
        self
    }
}

impl std::ops::Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.data[self.start..][..self.len]
    }
}

impl std::ops::DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..][..self.len]
    }
}
