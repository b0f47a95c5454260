//! Maps the 32 addresses of an access to the banks of shared memory and the sectors of the caches.

use ptx::WmmaAccess;

use super::reuse::{Distance, ReuseStack};
use crate::semantics::Fragment;

/// Banks of shared memory, each 4 bytes wide, on every architecture since sm_50.
const BANKS: usize = 32;
/// Bytes that a warp moves in one pass over the banks.
const PASS_BYTES: u32 = 128;
/// Bytes of a sector, the unit of traffic between L1, L2 and DRAM.
const SECTOR: u64 = 32;

/// Wavefronts of a shared-memory access of `bytes` per lane.
///
/// Accesses wider than 4 bytes are split into groups of consecutive lanes that together move 128 bytes: two
/// half-warps for 8 bytes, four quarters for 16 (CUDA C++ Programming Guide, "Shared Memory"). Within a
/// group, each bank delivers one word per pass. Lanes that read the same word share it.
pub fn shared_passes(lanes: u32, addresses: &[u64; 32], bytes: u32) -> u32 {
    let words = bytes.div_ceil(4).max(1);
    let group = (PASS_BYTES / (4 * words)).clamp(1, 32) as usize;
    let mut passes = 0;
    for first in (0..32).step_by(group) {
        let mut distinct: Vec<u64> = lanes_in(lanes, first..first + group)
            .flat_map(|lane| (0..u64::from(words)).map(move |w| addresses[lane] / 4 + w))
            .collect();
        distinct.sort_unstable();
        distinct.dedup();
        passes += fullest_bank(&distinct);
    }
    passes.max(1)
}

/// Wavefronts of a shared-memory atomic. Lanes that access the same word are served one after another.
pub fn atomic_passes(lanes: u32, addresses: &[u64; 32], bytes: u32) -> u32 {
    let words: Vec<u64> = lanes_in(lanes, 0..32).map(|lane| addresses[lane] / 4).collect();
    (fullest_bank(&words) * bytes.div_ceil(4)).max(1)
}

/// The number of accesses of a lane in a `wmma.load` or `wmma.store`, and the number of 8×8 transpositions in
/// registers. `None` for elements smaller than a byte, and for shapes that PTX does not have.
pub fn fragment_accesses(access: WmmaAccess) -> Option<(u32, u32)> {
    let fragment = Fragment::new(access)?;
    Some((fragment.accesses.len() as u32, fragment.transposes() as u32))
}

fn lanes_in(lanes: u32, range: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
    range.filter(move |lane| lanes >> lane & 1 == 1)
}

fn fullest_bank(words: &[u64]) -> u32 {
    let mut load = [0; BANKS];
    words.iter().for_each(|word| load[*word as usize % BANKS] += 1);
    load.into_iter().max().unwrap_or(0)
}

/// The requests that one access makes to the cache hierarchy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheFootprint {
    /// Distinct 32-byte sectors.
    pub sectors: u8,
    /// Distinct 128-byte lines: tag look-ups of L1, one per clock.
    pub lines: u8,
    /// Sectors that this CTA had not touched before.
    pub fresh: u8,
    /// Largest reuse distance of the other sectors: this CTA touched at most 2^reuse sectors in between.
    pub reuse: u8,
}

impl CacheFootprint {
    /// The footprint of an access of `bytes` at each lane's address.
    pub(super) fn of(
        lanes: u32,
        addresses: &[u64; 32],
        bytes: u32,
        stack: &mut ReuseStack,
    ) -> CacheFootprint {
        let span = u64::from(bytes.max(1) - 1);
        let sectors = lanes_in(lanes, 0..32)
            .flat_map(|lane| addresses[lane] / SECTOR..=addresses[lane].saturating_add(span) / SECTOR);
        CacheFootprint::touch(sectors.collect(), stack)
    }

    /// The footprint of two accesses, one after the other.
    pub(super) fn and(self, next: CacheFootprint) -> CacheFootprint {
        CacheFootprint {
            sectors: self.sectors.saturating_add(next.sectors),
            lines: self.lines.saturating_add(next.lines),
            fresh: self.fresh.saturating_add(next.fresh),
            reuse: self.reuse.max(next.reuse),
        }
    }

    /// The footprint of an access to local memory. Word `w` of lane `l` lies at `128·w + 4·l` of the warp's
    /// own window. The windows lie at the top of the address space, where there are no buffers.
    pub(super) fn of_local(
        warp: usize,
        lanes: u32,
        offsets: &[u64; 32],
        bytes: u32,
        stack: &mut ReuseStack,
    ) -> CacheFootprint {
        let window = (1 << 63) | (warp as u64) << 40;
        let sectors = lanes_in(lanes, 0..32).flat_map(|lane| {
            let first = offsets[lane] / 4;
            let words = first..first + u64::from(bytes.div_ceil(4).max(1));
            words
                .map(move |w| window.wrapping_add(w.wrapping_mul(128)).wrapping_add(4 * lane as u64) / SECTOR)
        });
        CacheFootprint::touch(sectors.collect(), stack)
    }

    fn touch(mut sectors: Vec<u64>, stack: &mut ReuseStack) -> CacheFootprint {
        sectors.sort_unstable();
        sectors.dedup();
        let mut footprint = CacheFootprint { sectors: sectors.len().min(255) as u8, ..Default::default() };
        let mut line = None;
        let (mut lines, mut fresh) = (0u32, 0u32);
        for sector in sectors {
            if line.replace(sector / 4) != Some(sector / 4) {
                lines += 1;
            }
            match stack.touch(sector) {
                Distance::First => fresh += 1,
                Distance::Sectors(n) => {
                    footprint.reuse = footprint.reuse.max(n.next_power_of_two().ilog2() as u8);
                }
            }
        }
        footprint.lines = lines.min(255) as u8;
        footprint.fresh = fresh.min(255) as u8;
        footprint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(bytes: u64) -> [u64; 32] {
        std::array::from_fn(|lane| lane as u64 * bytes)
    }

    /// Addresses beyond local memory are rejected elsewhere, but are recorded here first.
    #[test]
    fn local_offsets_beyond_all_memory_are_counted() {
        let footprint = CacheFootprint::of_local(0, 1, &[u64::MAX; 32], 16, &mut ReuseStack::default());
        assert_eq!((footprint.lines, footprint.sectors), (4, 4));
    }

    #[test]
    fn banks_serialise_what_they_must() {
        assert_eq!(shared_passes(!0, &strided(4), 4), 1);
        assert_eq!(shared_passes(!0, &strided(0), 4), 1, "a broadcast is one pass");
        assert_eq!(shared_passes(!0, &strided(2), 2), 1, "halves of one word share it");
        assert_eq!(shared_passes(!0, &strided(8), 4), 2);
        assert_eq!(shared_passes(!0, &strided(128), 4), 32);
        assert_eq!(shared_passes(1, &strided(128), 4), 1);
        assert_eq!(shared_passes(!0, &strided(16), 16), 4, "512 bytes need four passes");
        assert_eq!(
            shared_passes(!0, &strided(128), 16),
            32,
            "unswizzled rows of 64 halves: 8-way in each quarter"
        );
        assert_eq!(shared_passes(0xff, &strided(16), 16), 1, "ldmatrix.x1");
        assert_eq!(shared_passes(0, &strided(4), 4), 1);
    }

    #[test]
    fn atomics_on_one_word_are_serial() {
        assert_eq!(atomic_passes(!0, &strided(0), 4), 32);
        assert_eq!(atomic_passes(!0, &strided(4), 4), 1);
    }

    #[test]
    fn sectors_and_lines() {
        let mut stack = ReuseStack::default();
        let f = CacheFootprint::of(!0, &strided(4), 4, &mut stack);
        assert_eq!((f.sectors, f.lines, f.fresh), (4, 1, 4));
        let f = CacheFootprint::of(!0, &strided(4), 4, &mut stack);
        assert_eq!((f.sectors, f.fresh, f.reuse), (4, 0, 2), "four sectors back");
        let f = CacheFootprint::of(!0, &strided(128), 2, &mut stack);
        assert_eq!((f.sectors, f.lines, f.fresh), (32, 32, 31));
    }

    #[test]
    fn local_memory_is_interleaved() {
        let mut stack = ReuseStack::default();
        let f = CacheFootprint::of_local(0, !0, &strided(0), 4, &mut stack);
        assert_eq!((f.sectors, f.lines, f.fresh), (4, 1, 4));
        let f = CacheFootprint::of_local(1, !0, &strided(0), 4, &mut stack);
        assert_eq!(f.fresh, 4, "each warp has its own window");
    }
}
