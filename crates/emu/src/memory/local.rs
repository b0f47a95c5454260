//! The local memory of a warp.

use super::Chunk;

/// Local memory of a warp, interleaved as in the hardware: word `w` of lane `l` is stored at `[w][l]`. Host
/// memory is allocated when words are written, so that a kernel that declares much local memory and uses none
/// costs nothing.
#[derive(Debug, Default)]
pub(crate) struct LocalMemory {
    /// Words per lane.
    size: usize,
    /// The allocated words, at least up to the last word written.
    words: Vec<[u32; 32]>,
    /// Per word and byte, the lanes that have written it.
    written: Vec<[u32; 4]>,
}

impl LocalMemory {
    /// Bytes per lane.
    pub fn bytes(&self) -> usize {
        4 * self.size
    }

    /// Makes room for `bytes` per lane.
    pub fn grow(&mut self, bytes: usize) {
        self.size = self.size.max(bytes.div_ceil(4));
    }

    /// Allocates at least the first `words` words, and doubles the size to make later growth rare.
    fn reach(&mut self, words: usize) {
        if words > self.words.len() {
            let room = (2 * words).min(self.size);
            self.words.resize(room, [0; 32]);
            self.written.resize(room, [0; 4]);
        }
    }

    fn word(&self, at: usize, lane: usize) -> u32 {
        self.words.get(at).map_or(0, |word| word[lane])
    }

    pub fn load(&self, lane: usize, offset: usize, bytes: usize) -> Chunk {
        let mut chunk = [0; 8];
        let at = offset / 4;
        if bytes < 4 {
            chunk[0] = self.word(at, lane) >> (8 * (offset % 4)) & (u32::MAX >> (32 - 8 * bytes));
        } else {
            (0..bytes / 4).for_each(|i| chunk[i] = self.word(at + i, lane));
        }
        chunk
    }

    pub fn store(&mut self, lane: usize, offset: usize, bytes: usize, chunk: &Chunk) {
        let at = offset / 4;
        self.reach((offset + bytes).div_ceil(4));
        if bytes < 4 {
            let shift = 8 * (offset % 4);
            let mask = (u32::MAX >> (32 - 8 * bytes)) << shift;
            let word = &mut self.words[at][lane];
            *word = *word & !mask | chunk[0] << shift & mask;
        } else {
            (0..bytes / 4).for_each(|i| self.words[at + i][lane] = chunk[i]);
        }
        for byte in offset..offset + bytes {
            self.written[byte / 4][byte % 4] |= 1 << lane;
        }
    }

    /// Whether the lane has written all these bytes.
    pub fn is_written(&self, lane: usize, offset: usize, bytes: usize) -> bool {
        let lanes = |b: usize| self.written.get(b / 4).map_or(0, |word| word[b % 4]);
        (offset..offset + bytes).all(|b| lanes(b) >> lane & 1 == 1)
    }

    /// Makes the bytes of a new frame undefined again.
    pub fn forget(&mut self, lanes: u32, offset: usize, bytes: usize) {
        for byte in offset..(offset + bytes).min(4 * self.written.len()) {
            self.written[byte / 4][byte % 4] &= !lanes;
        }
    }
}
