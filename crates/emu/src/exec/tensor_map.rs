//! Boxes of tensors (PTX ISA, "Tensors"): maps the bytes of shared memory to bytes of global memory in a bulk
//! tensor copy.

use ptx::{Swizzle, TensorMapSpec};

/// 16 bytes of shared memory and their location in global memory. If a tensor ends within them, only some of
/// the bytes lie inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset in bytes from the start of the box in shared memory.
    pub shared: u32,
    /// Offset in bytes of the first of the 16 bytes from the start of the buffer.
    pub global: u64,
    /// The range of the 16 bytes that lies inside the tensor.
    pub inside: (u8, u8),
}

impl Piece {
    /// The offset and size of the accesses to the bytes inside the tensor: one access if they are aligned,
    /// otherwise one per byte.
    pub fn spans(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (from, to) = (u64::from(self.inside.0), u64::from(self.inside.1));
        let first = self.global.wrapping_add(from);
        let step = if to - from == 16 && first.is_multiple_of(16) { 16 } else { 1 };
        (0..to - from).step_by(step as usize).map(move |at| (first + at, step))
    }
}

/// The pieces of the box at these coordinates, row by row. `start` is the address of the box in shared
/// memory; the swizzle uses its bits. An address that is not a multiple of 128 is rounded down here, and the
/// copy is rejected by another check.
pub(super) fn pieces(spec: &TensorMapSpec, coordinates: &[i32], start: u64) -> Vec<Piece> {
    let start = start & !127;
    let element = i64::from(spec.element.bytes());
    let row_bytes = i64::from(spec.box_extents[0]) * element;
    let rows: u64 = spec.box_extents[1..].iter().map(|n| u64::from(*n)).product();
    // In bytes of the innermost dimension.
    let (first, end) = (i64::from(coordinates[0]) * element, spec.extents[0] as i64 * element);
    let mut pieces = Vec::with_capacity((rows as usize) * (row_bytes as usize / 16));
    for row in 0..rows {
        let place = place_of(spec, &coordinates[1..], row);
        for at in (0..row_bytes).step_by(16) {
            let linear = row * row_bytes as u64 + at as u64;
            let shared = swizzled(spec.swizzle, start + linear) - start;
            let inner = first + at;
            let (from, to) = ((-inner).clamp(0, 16), (end - inner).clamp(0, 16));
            let inside = match place {
                Some(_) if from < to => (from as u8, to as u8),
                _ => (0, 0),
            };
            let global = spec.offset.wrapping_add(place.unwrap_or(0)).wrapping_add_signed(inner);
            pieces.push(Piece { shared: shared as u32, global, inside });
        }
    }
    pieces
}

/// Offset in bytes from the tensor's start to a row of the box, modulo 2^64; `None` if the row is outside the
/// tensor.
fn place_of(spec: &TensorMapSpec, coordinates: &[i32], row: u64) -> Option<u64> {
    let mut rest = row;
    let mut place = 0u64;
    for (dimension, coordinate) in coordinates.iter().enumerate() {
        let size = u64::from(spec.box_extents[dimension + 1]);
        let index = i64::from(*coordinate) + (rest % size) as i64;
        rest /= size;
        if index < 0 || index as u64 >= spec.extents[dimension + 1] {
            return None;
        }
        place = place.wrapping_add((index as u64).wrapping_mul(spec.strides[dimension]));
    }
    Some(place)
}

/// An address after the permutation of 16-byte chunks (PTX ISA, "Swizzling Modes"): bits 4 to 6 are xored
/// with bits 7 to 9, and fewer of them for narrower modes.
pub(super) fn swizzled(mode: Swizzle, address: u64) -> u64 {
    let mask = match mode {
        Swizzle::None => 0,
        Swizzle::Bytes32 => 1,
        Swizzle::Bytes64 => 3,
        Swizzle::Bytes128 => 7,
    };
    address ^ (address >> 7 & mask) << 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use ptx::{Element, L2Promotion};

    fn spec(extents: &[u64], boxes: &[u32], swizzle: Swizzle) -> TensorMapSpec {
        let mut strides = Vec::new();
        let mut stride = extents[0].next_multiple_of(8) * 2;
        for extent in &extents[1..] {
            strides.push(stride);
            stride *= extent;
        }
        TensorMapSpec {
            buffer: 0,
            offset: 32,
            element: Element::F16,
            extents: extents.to_vec(),
            strides,
            box_extents: boxes.to_vec(),
            swizzle,
            l2_promotion: L2Promotion::None,
            wraps: false,
        }
    }

    #[test]
    fn rows_are_permuted_by_their_number() {
        let spec = spec(&[64, 32], &[64, 16], Swizzle::Bytes128);
        let pieces = pieces(&spec, &[0, 8], 4096);
        assert_eq!(pieces.len(), 16 * 8);
        let third = pieces[3 * 8 + 5];
        assert_eq!(
            third,
            Piece { shared: 3 * 128 + (5 ^ 3) * 16, global: 32 + 11 * 128 + 80, inside: (0, 16) }
        );
    }

    #[test]
    fn coordinates_that_wrap_shift_the_rows() {
        // Rows 3 and 4 of a tensor of 32-byte rows, as a sequence of two rows from row 3 on.
        let spec = TensorMapSpec {
            extents: vec![16, 1 << 30, 1 << 31, 1 << 31],
            strides: vec![32, 32, (1 << 34) - 32],
            wraps: true,
            ..spec(&[16, 4], &[16, 4, 1, 1], Swizzle::None)
        };
        assert_eq!(spec.check(), Ok(()));
        // This map names the same rows by an address before the buffer.
        let shifted = TensorMapSpec {
            offset: 32u64.wrapping_sub(32 << 30),
            extents: vec![16, 1 << 30, 1 << 31],
            strides: vec![32, 32],
            box_extents: vec![16, 4, 1],
            ..spec.clone()
        };
        let by_stride = pieces(&spec, &[0, (1 << 30) - 2, 3 + 2, 1 << 30], 1024);
        let by_address = pieces(&shifted, &[0, (1 << 30) - 2, 3 + 2], 1024);
        for pieces in [by_stride, by_address] {
            let rows: Vec<_> = pieces.iter().step_by(2).map(|p| (p.global, p.inside)).collect();
            assert_eq!(rows[..2], [(32 + 3 * 32, (0, 16)), (32 + 4 * 32, (0, 16))]);
            assert!(rows[2..].iter().all(|(_, inside)| *inside == (0, 0)));
        }
    }

    #[test]
    fn what_lies_outside_is_not_inside() {
        let spec = spec(&[20, 4], &[16, 2], Swizzle::None);
        let at = |x, y| pieces(&spec, &[x, y], 1024).iter().map(|p| p.inside).collect::<Vec<_>>();
        assert_eq!(at(8, 3), [(0, 16), (0, 8), (0, 0), (0, 0)]);
        assert_eq!(at(-4, 0), [(8, 16), (0, 16), (8, 16), (0, 16)]);
        assert_eq!(at(0, -1), [(0, 0), (0, 0), (0, 16), (0, 16)]);
    }
}
