//! Matrix descriptors of wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout") and of
//! tcgen05 ("Shared memory descriptor"): computes the addresses of an operand's 16-byte chunks.

use ptx::Swizzle;

use super::tensor_map::swizzled;

/// Addresses in a descriptor have 18 bits.
const ADDRESS_MASK: u64 = 0x3ffff;

/// An operand in shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    start: u64,
    /// Leading-dimension and stride-dimension byte offset.
    leading: u64,
    stride: u64,
    base_offset: u64,
    swizzle: Swizzle,
    /// Whether chunks hold consecutive elements along M or N instead of K.
    transposed: bool,
    /// Whether the pattern moves pairs of chunks ("128-Byte with 32B atomic swizzling").
    pairs: bool,
}

impl Descriptor {
    /// Decodes the fields: address in bits 0–13, leading offset in 16–29, stride offset in 32–45, each
    /// divided by 16; base offset in 49–51; swizzle mode in 62–63.
    pub fn new(bits: u64, transposed: bool) -> Descriptor {
        let field = |at: u32| (bits >> at & 0x3fff) << 4;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        let base_offset = bits >> 49 & 7;
        Descriptor {
            start: field(0),
            leading: field(16),
            stride: field(32),
            base_offset,
            swizzle,
            transposed,
            pairs: false,
        }
    }

    /// Decodes the fields of a descriptor of tcgen05, which differ from those of wgmma in a version in bits
    /// 46 to 48, the mode of the leading offset in bit 52, and three bits for the swizzle. `Err` says what
    /// is wrong.
    pub fn blackwell(bits: u64, transposed: bool) -> Result<Descriptor, String> {
        let (version, absolute, swizzle) = (bits >> 46 & 7, bits >> 52 & 1 == 1, bits >> 61);
        if version != 1 {
            return Err(format!("bits 46 to 48 of a matrix descriptor are {version}: expected 1"));
        }
        if absolute {
            return Err("a matrix descriptor with an absolute leading address is one of sm_103".into());
        }
        if !matches!(swizzle, 0 | 1 | 2 | 4 | 6) || swizzle == 1 && !transposed {
            return Err(format!("a matrix descriptor has no swizzle mode {swizzle} here"));
        }
        let plain = Descriptor::new(bits, transposed);
        let pairs = swizzle == 1;
        let swizzle = if pairs { Swizzle::Bytes128 } else { plain.swizzle };
        Ok(Descriptor { swizzle, pairs, ..plain })
    }

    /// The number of chunks in a row of the swizzle pattern.
    fn chunks(&self) -> u64 {
        u64::from(self.swizzle.span().unwrap_or(16) / 16)
    }

    /// Address of a chunk. K-major: row `major` of M or N, chunk `minor` of K; an instruction has two chunks
    /// along K. MN-major: chunk `major` of M or N, row `minor` of K; an instruction has 16 rows.
    pub fn chunk(&self, major: u64, minor: u64) -> u64 {
        let width = self.chunks();
        if self.pairs {
            // Rows of 128 bytes, four to a pattern, whose pairs of chunks are xored with the row.
            let place =
                16 * (major % 8 + 8 * (minor % 4)) + self.leading * (major / 8) + self.stride * (minor / 4);
            let address = self.start + place;
            return (address ^ address >> 2 & 0x60) & ADDRESS_MASK;
        }
        let offset = match (self.transposed, self.swizzle) {
            (false, Swizzle::None) => 16 * (major % 8) + self.stride * (major / 8) + self.leading * minor,
            (false, _) => 16 * (width * (major % 8) + minor) + self.stride * (major / 8),
            (true, Swizzle::None) => self.stride * major + 16 * (minor % 8) + self.leading * (minor / 8),
            (true, _) => {
                16 * (major % width + width * (minor % 8))
                    + self.leading * (major / width)
                    + self.stride * (minor / 8)
            }
        };
        let address = self.start + offset;
        // The base offset gives the start of the pattern when the pattern is not aligned to its size.
        let pattern = address.wrapping_sub(self.base_offset << 7);
        (address ^ pattern ^ swizzled(self.swizzle, pattern)) & ADDRESS_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The canonical layouts, in 16-byte units, as in CUTLASS (mma_sm90_desc.hpp): strides of rows and
    /// chunks.
    #[test]
    fn chunks_lie_where_the_canonical_layouts_say() {
        let bits = |mode: u64, leading: u64, stride: u64| {
            (mode << 62) + ((stride / 16) << 32) + ((leading / 16) << 16) + 1024 / 16
        };
        let at =
            |bits, transposed, major, minor| Descriptor::new(bits, transposed).chunk(major, minor) - 1024;
        // K-major, 128 bytes: rows of 128 bytes, groups of 8 rows 1024 bytes apart, chunks xored with the
        // row.
        assert_eq!(at(bits(1, 0, 1024), false, 11, 1), 1024 + 3 * 128 + 16 * (1 ^ 3));
        assert_eq!(at(bits(2, 0, 512), false, 5, 1), 5 * 64 + 16 * (1 ^ 2));
        assert_eq!(at(bits(3, 0, 256), false, 5, 1), 5 * 32);
        assert_eq!(at(bits(0, 128, 256), false, 9, 1), 256 + 16 + 128);
        // MN-major: a row of the pattern is one k.
        assert_eq!(at(bits(1, 8192, 1024), true, 9, 10), 8192 + 1024 + 2 * 128 + 16 * (1 ^ 2));
        assert_eq!(at(bits(2, 4096, 512), true, 6, 3), 4096 + 3 * 64 + 16 * (2 ^ 1));
        assert_eq!(at(bits(0, 512, 128), true, 3, 12), 3 * 128 + 512 + 4 * 16);
    }

    #[test]
    fn a_pattern_may_start_elsewhere() {
        let bits = |start: u64, base: u64| (1 << 62) + (64 << 32) + (base << 49) + start / 16;
        let shifted = Descriptor::new(bits(2048 + 256, 2), false);
        let aligned = Descriptor::new(bits(2048, 0), false);
        for (row, chunk) in [(0, 0), (3, 1), (7, 0)] {
            assert_eq!(shifted.chunk(row, chunk) - 256, aligned.chunk(row, chunk));
        }
    }
}
