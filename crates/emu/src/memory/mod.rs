//! Address spaces. Each space has a window of the generic address space. Each buffer has a slot of 64 GB and
//! lies in the middle of the slot, so that an address out of bounds still identifies its buffer.

mod bitmap;
mod buffer;
mod global;
mod local;

pub(crate) use bitmap::Bitmap;
pub use buffer::Buffer;
pub(crate) use global::{ForeignAccess, GlobalMemory, Region, RegionAccess};
pub(crate) use local::LocalMemory;

use ptx::Space;

const WINDOW_BITS: u32 = 40;
/// Offset of shared memory in its window. Address 0 is thus invalid, and the base is aligned for every
/// swizzle.
pub(crate) const SHARED_BASE: u64 = 1024;
/// The bit of an address in shared memory at which the CTA's rank in its cluster begins.
pub(crate) const RANK_SHIFT: u32 = 24;
/// Offset of local memory in its window.
pub(crate) const LOCAL_BASE: u64 = 1024;
/// Offset of constant variables in their window.
pub(crate) const CONST_BASE: u64 = 1024;

/// First generic address of a space's window; 0 for global memory, whose addresses are generic.
pub(crate) const fn window(space: Space) -> u64 {
    match space {
        Space::Generic | Space::Global => 0,
        Space::Shared | Space::SharedCluster => 0x7c << WINDOW_BITS,
        Space::Local => 0x7d << WINDOW_BITS,
        Space::Const => 0x7e << WINDOW_BITS,
        Space::Param => 0x7f << WINDOW_BITS,
    }
}

/// The space to which a generic address belongs, and the address in that space.
#[inline(always)]
pub(crate) fn resolve(address: u64) -> (Space, u64) {
    let inside = address & ((1 << WINDOW_BITS) - 1);
    match address >> WINDOW_BITS {
        0x7c => (Space::Shared, inside),
        0x7d => (Space::Local, inside),
        0x7e => (Space::Const, inside),
        0x7f => (Space::Param, inside),
        _ => (Space::Global, address),
    }
}

/// Up to 32 bytes in little-endian words: the data that one lane moves.
pub(crate) type Chunk = [u32; 8];

#[inline(always)]
pub(crate) fn load_bytes(memory: &[u8], offset: usize, bytes: usize) -> Chunk {
    let mut chunk = [0; 8];
    match bytes {
        1 => chunk[0] = u32::from(memory[offset]),
        2 => chunk[0] = u32::from(u16::from_le_bytes([memory[offset], memory[offset + 1]])),
        _ => {
            for (word, four) in chunk.iter_mut().zip(memory[offset..offset + bytes].chunks_exact(4)) {
                *word = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            }
        }
    }
    chunk
}

#[inline(always)]
pub(crate) fn store_bytes(memory: &mut [u8], offset: usize, bytes: usize, chunk: &Chunk) {
    match bytes {
        1 => memory[offset] = chunk[0] as u8,
        2 => memory[offset..offset + 2].copy_from_slice(&(chunk[0] as u16).to_le_bytes()),
        _ => {
            for (word, four) in chunk.iter().zip(memory[offset..offset + bytes].chunks_exact_mut(4)) {
                four.copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}
