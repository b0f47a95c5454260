use super::Chunk;

/// Local memory of a warp, interleaved as the hardware does: word `w` of lane `l` at `[w][l]`.
#[derive(Debug, Default)]
pub(crate) struct LocalMemory {
    words: Vec<[u32; 32]>,
    /// Per word and byte, the lanes that have written it.
    written: Vec<[u32; 4]>,
}

impl LocalMemory {
    /// Bytes per lane.
    pub fn bytes(&self) -> usize {
        4 * self.words.len()
    }

    /// Makes room for `bytes` per lane.
    pub fn grow(&mut self, bytes: usize) {
        let words = bytes.div_ceil(4).max(self.words.len());
        self.words.resize(words, [0; 32]);
        self.written.resize(words, [0; 4]);
    }

    pub fn load(&self, lane: usize, offset: usize, bytes: usize) -> Chunk {
        let mut chunk = [0; 8];
        let at = offset / 4;
        if bytes < 4 {
            chunk[0] = self.words[at][lane] >> (8 * (offset % 4)) & (u32::MAX >> (32 - 8 * bytes));
        } else {
            (0..bytes / 4).for_each(|i| chunk[i] = self.words[at + i][lane]);
        }
        chunk
    }

    pub fn store(&mut self, lane: usize, offset: usize, bytes: usize, chunk: &Chunk) {
        let at = offset / 4;
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
        (offset..offset + bytes).all(|b| self.written[b / 4][b % 4] >> lane & 1 == 1)
    }

    /// A new frame: what it holds is undefined again.
    pub fn forget(&mut self, lanes: u32, offset: usize, bytes: usize) {
        for byte in offset..(offset + bytes).min(self.bytes()) {
            self.written[byte / 4][byte % 4] &= !lanes;
        }
    }
}
