//! Global memory: the buffers and module variables of a launch, with the accesses of independent clusters.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use ptx::Access;

use super::{Bitmap, Chunk};

/// log2 of the bytes of address space that each buffer occupies.
const SLOT_BITS: u32 = 36;

/// The origin of a region. It determines what the kernel may do with the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionAccess {
    /// A buffer of the contract.
    Contract(Access),
    /// A module-scope variable.
    Variable,
}

/// A buffer or module variable as the kernel sees it.
#[derive(Debug)]
pub(crate) struct Region<'a> {
    pub name: String,
    pub bytes: usize,
    pub access: RegionAccess,
    words: &'a [AtomicU32],
    /// The bytes that have been written; `None` if all bytes were written before the launch.
    pub written: Option<&'a Bitmap>,
    /// The bytes that the launch stored and, for each granule, the index plus one of the instruction of a
    /// `.nc` load that read it. Present only for a kernel with such loads.
    incoherent: Option<(Bitmap, Box<[AtomicU32]>)>,
    /// The last CTA that accessed each granule, if clusters run independently.
    writers: OnceLock<Box<[AtomicU64]>>,
    readers: OnceLock<Box<[AtomicU64]>>,
    /// Whether the launch is expected not to store to the region, so that reads are not recorded.
    quiet: bool,
    /// Whether the launch stored to the region.
    stored: AtomicBool,
}

/// Marks a granule that several CTAs have read.
const MANY: u32 = u32::MAX;

/// An unordered access by another CTA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForeignAccess {
    /// The CTA; `None` when several CTAs read.
    pub cta: Option<u32>,
    pub pc: u32,
}

impl<'a> Region<'a> {
    pub fn new(
        name: String,
        bytes: usize,
        access: RegionAccess,
        words: &'a [AtomicU32],
        written: Option<&'a Bitmap>,
    ) -> Region<'a> {
        let (writers, readers) = (OnceLock::new(), OnceLock::new());
        let (quiet, stored) = (false, AtomicBool::new(false));
        Region { name, bytes, access, words, written, incoherent: None, writers, readers, quiet, stored }
    }

    /// Declares that the launch does not store to the region.
    pub fn expect_no_store(&mut self) {
        self.quiet = true;
    }

    /// Whether the launch stored to a quiet region. Its findings are then incomplete.
    fn is_broken(&self) -> bool {
        self.quiet && self.is_stored()
    }

    /// Whether the launch stored to the region.
    pub fn is_stored(&self) -> bool {
        self.stored.load(Relaxed)
    }

    /// Whether reads within bounds need no check and no record: no store of the launch is expected, all bytes
    /// were written before the launch, and no `.nc` load is watched.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        !self.watched() && self.written.is_none() && self.incoherent.is_none()
    }

    /// Whether reads must be recorded, because the launch may store to the region.
    #[inline(always)]
    pub fn watched(&self) -> bool {
        self.writable() && !self.quiet
    }

    /// Records `.nc` loads, to find those of memory that the launch writes.
    pub fn watch_incoherent(&mut self, granule: usize) {
        let cells = (0..self.bytes.div_ceil(granule)).map(|_| AtomicU32::new(0)).collect();
        self.incoherent = Some((Bitmap::new(self.bytes), cells));
    }

    /// Records a `.nc` load.
    pub fn note_incoherent(&self, offset: usize, bytes: usize, granule: usize, pc: u32) {
        if let Some((_, cells)) = &self.incoherent {
            for cell in &cells[offset / granule..(offset + bytes).div_ceil(granule)] {
                cell.store(pc + 1, Relaxed);
            }
        }
    }

    /// After the run: the granules that a `.nc` load read and the launch stored to, once for each such
    /// instruction.
    pub fn incoherent_reads(&self, granule: usize) -> Vec<(usize, u32)> {
        let Some((stored, cells)) = &self.incoherent else { return Vec::new() };
        let mut found: Vec<(usize, u32)> = Vec::new();
        for (g, cell) in cells.iter().enumerate() {
            let Some(pc) = cell.load(Relaxed).checked_sub(1) else { continue };
            let bytes = granule.min(self.bytes - g * granule);
            if stored.any(g * granule, bytes) && found.iter().all(|(_, known)| *known != pc) {
                found.push((g, pc));
            }
        }
        found
    }

    /// Whether the kernel may store to the region.
    pub fn writable(&self) -> bool {
        self.access != RegionAccess::Contract(Access::Read)
    }

    /// The four bytes at an offset that is a multiple of four.
    #[inline(always)]
    pub fn word(&self, offset: usize) -> u32 {
        self.words[offset / 4].load(Relaxed)
    }

    #[inline(always)]
    pub fn load(&self, offset: usize, bytes: usize) -> Chunk {
        let mut chunk = [0; 8];
        let at = offset / 4;
        if bytes < 4 {
            let word = self.words[at].load(Relaxed);
            chunk[0] = word >> (8 * (offset % 4)) & (u32::MAX >> (32 - 8 * bytes));
        } else {
            for (word, source) in chunk.iter_mut().zip(&self.words[at..at + bytes / 4]) {
                *word = source.load(Relaxed);
            }
        }
        chunk
    }

    #[inline(always)]
    pub fn store(&self, offset: usize, bytes: usize, chunk: &Chunk) {
        if !self.is_stored() {
            self.stored.store(true, Relaxed);
        }
        let at = offset / 4;
        if bytes < 4 {
            let shift = 8 * (offset % 4);
            let mask = (u32::MAX >> (32 - 8 * bytes)) << shift;
            let word = &self.words[at];
            let mut old = word.load(Relaxed);
            while let Err(now) =
                word.compare_exchange_weak(old, old & !mask | chunk[0] << shift & mask, Relaxed, Relaxed)
            {
                old = now;
            }
        } else {
            for (word, target) in chunk.iter().zip(&self.words[at..at + bytes / 4]) {
                target.store(*word, Relaxed);
            }
        }
        if let Some(written) = self.written {
            written.set(offset, bytes);
        }
        if let Some((stored, _)) = &self.incoherent {
            stored.set(offset, bytes);
        }
    }

    fn table<'t>(&self, table: &'t OnceLock<Box<[AtomicU64]>>, granule: usize) -> &'t [AtomicU64] {
        table.get_or_init(|| bytemuck::zeroed_slice_box(self.bytes.div_ceil(granule)))
    }

    /// Records a write by a CTA that is not ordered with other CTAs. Returns an access of another CTA that
    /// races with the write.
    pub fn note_write(
        &self,
        bytes: Range<usize>,
        granule: usize,
        cta: u32,
        pc: u32,
    ) -> Option<ForeignAccess> {
        let mine = u64::from(cta + 1) << 32 | u64::from(pc);
        let mut found = None;
        let writers = self.table(&self.writers, granule);
        for g in bytes.start / granule..bytes.end.div_ceil(granule) {
            if writers[g].load(Relaxed) != mine {
                found = found.or(other_cta(writers[g].swap(mine, Relaxed), cta));
            }
            if let Some(readers) = self.readers.get() {
                found = found.or(other_cta(readers[g].load(Relaxed), cta));
            }
        }
        found
    }

    /// Records a read by a CTA that is not ordered with other CTAs. Returns a write of another CTA that races
    /// with the read.
    pub fn note_read(&self, bytes: Range<usize>, granule: usize, cta: u32, pc: u32) -> Option<ForeignAccess> {
        let mine = u64::from(cta + 1) << 32 | u64::from(pc);
        let mut found = None;
        let readers = self.table(&self.readers, granule);
        for g in bytes.start / granule..bytes.end.div_ceil(granule) {
            let mut old = readers[g].load(Relaxed);
            while old >> 32 != u64::from(cta + 1) && old >> 32 != u64::from(MANY) {
                let new = if old == 0 { mine } else { u64::from(MANY) << 32 | u64::from(pc) };
                match readers[g].compare_exchange_weak(old, new, Relaxed, Relaxed) {
                    Ok(_) => break,
                    Err(now) => old = now,
                }
            }
            if let Some(writers) = self.writers.get() {
                found = found.or(other_cta(writers[g].load(Relaxed), cta));
            }
        }
        found
    }

    /// After the run: pairs of clusters that wrote last to neighbouring granules of a line of 128 bytes, if
    /// they differ.
    pub fn shared_lines(&self, granule: usize, mut note: impl FnMut(u32, u32)) {
        let Some(writers) = self.writers.get() else { return };
        for line in writers.chunks((128 / granule).max(1)) {
            let mut before = None;
            for writer in line.iter().filter_map(|entry| other_cta(entry.load(Relaxed), MANY - 1)) {
                if let (Some(a), Some(b)) = (before, writer.cta)
                    && a != b
                {
                    note(a, b);
                }
                before = writer.cta.or(before);
            }
        }
    }

    /// After the run: finds the first granule that one CTA wrote and another CTA read, whichever ran first.
    pub fn read_and_written(&self) -> Option<(usize, ForeignAccess, ForeignAccess)> {
        let (writers, readers) = (self.writers.get()?, self.readers.get()?);
        writers.iter().zip(readers).enumerate().find_map(|(g, (w, r))| {
            let (w, r) = (w.load(Relaxed), r.load(Relaxed));
            let writer = (w >> 32) as u32;
            let reader = if writer == 0 { None } else { other_cta(r, writer - 1) };
            Some((g, other_cta(w, MANY - 1)?, reader?))
        })
    }
}

fn other_cta(entry: u64, cta: u32) -> Option<ForeignAccess> {
    let owner = (entry >> 32) as u32;
    let pc = entry as u32;
    match owner {
        0 => None,
        MANY => Some(ForeignAccess { cta: None, pc }),
        _ => (owner != cta + 1).then(|| ForeignAccess { cta: Some(owner - 1), pc }),
    }
}

/// All buffers and module variables of a launch.
#[derive(Debug)]
pub(crate) struct GlobalMemory<'a> {
    pub regions: Vec<Region<'a>>,
}

impl GlobalMemory<'_> {
    /// Whether the launch stored to a quiet region.
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(Region::is_broken)
    }

    /// Address of a region's first byte. It lies in the middle of the region's slot, so that small negative
    /// offsets stay in the slot.
    pub const fn base(index: usize) -> u64 {
        ((index as u64 + 1) << SLOT_BITS) + (1 << (SLOT_BITS - 1))
    }

    /// The index of the region that an address belongs to.
    pub fn index(address: u64) -> Option<usize> {
        ((address >> SLOT_BITS) as usize).checked_sub(1)
    }

    /// The 128 bytes at an address that is a multiple of 64; `None` if no region contains all of them.
    pub fn image(&self, address: u64) -> Option<[u8; 128]> {
        let (region, offset) = self.find(address)?;
        let offset = usize::try_from(offset).ok().filter(|at| at % 64 == 0 && at + 128 <= region.bytes)?;
        let mut image = [0; 128];
        for (at, part) in image.chunks_exact_mut(4).enumerate() {
            part.copy_from_slice(&region.load(offset + 4 * at, 4)[0].to_le_bytes());
        }
        Some(image)
    }

    /// The region that an address belongs to, and the offset from the region's start, which may be out of
    /// bounds.
    #[inline(always)]
    pub fn find(&self, address: u64) -> Option<(&Region<'_>, i64)> {
        let index = (address >> SLOT_BITS) as usize;
        let region = self.regions.get(index.wrapping_sub(1))?;
        Some((region, address.wrapping_sub(GlobalMemory::base(index - 1)) as i64))
    }
}
