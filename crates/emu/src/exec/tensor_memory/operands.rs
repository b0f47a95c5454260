//! Reads A, B and scales of a `tcgen05.mma`, and the source of a `tcgen05.cp`.

use super::super::Env;
use super::super::descriptor::Descriptor;
use super::access::{Area, Issue};
use crate::memory::{SHARED_BASE, load_bytes};
use crate::order::{Access, ProxySpace, Verdict};
use crate::report::HazardKind;
use crate::semantics::tensor_descriptor::{Storage, as_e4m3};
use ptx::Space;

/// 32 bytes of K of a row of A or a column of B.
pub(super) type Row = [u32; 8];

impl Env<'_> {
    /// `count` rows of A, or columns of B, from the shared memory of the CTA of a rank. Elements have `bits`
    /// bits.
    pub(super) fn shared_rows(
        &mut self,
        issue: &Issue,
        (rank, bits): (usize, usize),
        (descriptor, transposed): (u64, bool),
        count: usize,
    ) -> Option<Vec<Row>> {
        let descriptor = match Descriptor::blackwell(descriptor, transposed) {
            Ok(descriptor) => descriptor,
            Err(message) => {
                self.report(HazardKind::OutOfBounds, issue.inst, issue.warp, issue.lane, None, || message);
                return None;
            }
        };
        let mut rows = vec![[0; 8]; count];
        if !transposed {
            for (row, words) in rows.iter_mut().enumerate() {
                for minor in 0..2 {
                    let chunk = self.shared_chunk(issue, rank, descriptor.chunk(row as u64, minor as u64))?;
                    words[4 * minor..4 * minor + 4].copy_from_slice(&chunk);
                }
            }
            return Some(rows);
        }
        let (per_chunk, per_word) = (128 / bits, 32 / bits);
        for k in 0..256 / bits {
            for block in 0..count.div_ceil(per_chunk) {
                let chunk = self.shared_chunk(issue, rank, descriptor.chunk(block as u64, k as u64))?;
                for (i, words) in rows[block * per_chunk..].iter_mut().take(per_chunk).enumerate() {
                    let element = chunk[i / per_word] >> (bits * (i % per_word));
                    let element = if bits == 32 { element } else { element & ((1 << bits) - 1) };
                    words[k / per_word] |= element << (bits * (k % per_word));
                }
            }
        }
        Some(rows)
    }

    /// 16 bytes of shared memory, which the asynchronous proxy reads.
    pub(super) fn shared_chunk(&mut self, issue: &Issue, rank: usize, address: u64) -> Option<[u32; 4]> {
        let inst = issue.inst;
        let offset = address.wrapping_sub(SHARED_BASE);
        if offset.saturating_add(16) > u64::from(self.facts.context.program.layout.shared_extent) {
            let place = Some((Space::Shared, address));
            self.report(HazardKind::OutOfBounds, inst, issue.warp, issue.lane, place, || {
                format!("a descriptor leads to address {address:#x}, outside of shared memory")
            });
            return None;
        }
        let offset = rank * self.facts.span + offset as usize;
        if self.facts.context.options.checks.races {
            let access = self.tensor_access(issue);
            let access = Access { proxy: Some(ProxySpace::Shared), width: 16, ..access };
            match self.shared.shadow.read(offset, 16, &access) {
                Verdict::Fine => {}
                found => {
                    let address = self.facts.shared_address(offset);
                    self.judge_shared_read(found, inst, issue.warp, issue.lane, address);
                }
            }
        }
        let chunk = load_bytes(&self.shared.bytes, offset, 16);
        Some([chunk[0], chunk[1], chunk[2], chunk[3]])
    }

    /// Rows of A from tensor memory: row `i` is that of lane `lanes[i]`, 8 columns from the address on.
    pub(super) fn tensor_rows(
        &mut self,
        issue: &Issue,
        rank: usize,
        lanes: &[usize],
        column: usize,
    ) -> Option<Vec<Row>> {
        // Cells have 16 lanes, and the lanes of A are whole cells.
        for cell in lanes.chunks(16) {
            let area = Area { rank, lanes: cell[0]..cell[0] + 16, columns: column..column + 8 };
            if !self.touch_area(issue, &area, false) {
                return None;
            }
        }
        let row = |lane: &usize| std::array::from_fn(|i| self.tensors.word(rank, *lane, column + i));
        Some(lanes.iter().map(row).collect())
    }
}

/// Widens padded elements to e4m3 and negates the elements.
pub(super) fn prepare(rows: &mut [Row], storage: Storage, signs: u32) {
    for words in rows.iter_mut() {
        if let Storage::Padded(exponent, fraction) = storage {
            *words = unpadded(words, exponent, fraction);
        }
        words.iter_mut().for_each(|word| *word ^= signs);
    }
}

/// Two groups of 16 bytes, each with 16 elements of 4 or 6 bits at its start, as 32 bytes of e4m3.
fn unpadded(words: &Row, exponent: u32, fraction: u32) -> Row {
    let width = 1 + exponent + fraction;
    let mut bytes = [0u8; 32];
    for (group, out) in words.chunks_exact(4).zip(bytes.chunks_exact_mut(16)) {
        let all = group.iter().rev().fold(0u128, |all, word| all << 32 | u128::from(*word));
        for (i, byte) in out.iter_mut().enumerate() {
            let code = (all >> (width * i as u32)) as u32 & ((1 << width) - 1);
            *byte = as_e4m3(code, exponent, fraction);
        }
    }
    std::array::from_fn(|i| u32::from_le_bytes([0, 1, 2, 3].map(|j| bytes[4 * i + j])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padded_elements_become_bytes() {
        // e2m1: 1.0 is 0b0010, −6.0 is 0b1111. e4m3: 1.0 is 0x38, −6.0 is 0xcc.
        let words = [0xf2f2_f2f2, 0xf2f2_f2f2, 0, 0, 0xf2f2_f2f2, 0xf2f2_f2f2, 0, 0];
        assert_eq!(unpadded(&words, 2, 1), [0xcc38_cc38; 8]);
    }
}
