//! The 128 bytes of a tensor map as the emulator writes them: the index of a map of the launch, and the
//! fields that the kernel has changed (PTX ISA, "tensormap.replace"). A tensor map is opaque to a kernel.

use ptx::{Element, Swizzle, TensorMapField, TensorMapSpec};

/// First bytes of an image.
const MAGIC: [u8; 12] = *b"tensor map #";

/// Bytes of an image.
pub(super) const BYTES: usize = TensorMapSpec::BYTES as usize;

/// Offset of a word whose bits say which fields are changed.
const CHANGED: usize = 16;

/// The 128 bytes that a kernel receives for the tensor map with this index.
pub(crate) fn map_image(index: usize) -> [u8; BYTES] {
    let mut image = [0; BYTES];
    image[..12].copy_from_slice(&MAGIC);
    image[12..16].copy_from_slice(&(index as u32).to_le_bytes());
    image
}

/// The index of the tensor map whose image these bytes are.
pub(super) fn map_index(image: &[u8]) -> Option<usize> {
    let number = image.strip_prefix(&MAGIC)?.first_chunk()?;
    Some(u32::from_le_bytes(*number) as usize)
}

/// Whether a kernel has changed a field of an image.
pub(super) fn is_changed(image: &[u8; BYTES]) -> bool {
    image[CHANGED..CHANGED + 4] != [0; 4]
}

/// The bit of a field in [`CHANGED`] and the offset of its value of 8 bytes; `None` for fields of which the
/// emulator knows one value only.
fn place(field: TensorMapField, dimension: usize) -> Option<(usize, usize)> {
    use TensorMapField as F;
    // In words of 4 bytes behind the bits.
    let (bit, word) = match field {
        F::GlobalAddress => (0, 0),
        F::Rank => (1, 2),
        F::Elemtype => (2, 3),
        F::SwizzleMode => (3, 4),
        F::BoxDim => (4 + dimension, 5 + dimension),
        F::GlobalDim => (9 + dimension, 10 + dimension),
        F::GlobalStride => (14 + dimension, 15 + 2 * dimension),
        F::ElementStride | F::InterleaveLayout | F::FillMode | F::SwizzleAtomicity => return None,
    };
    Some((bit, CHANGED + 4 + 4 * word))
}

const fn bytes(field: TensorMapField) -> usize {
    field.ty().bytes() as usize
}

/// Changes a field. Returns whether the emulator knows the new value.
pub(super) fn replace(image: &mut [u8; BYTES], field: TensorMapField, dimension: usize, value: u64) -> bool {
    let Some((bit, at)) = place(field, dimension).filter(|(_, at)| at + bytes(field) <= BYTES) else {
        return value == u64::from(field == TensorMapField::ElementStride);
    };
    image[at..at + bytes(field)].copy_from_slice(&value.to_le_bytes()[..bytes(field)]);
    image[CHANGED + bit / 8] |= 1 << (bit % 8);
    true
}

fn changed(image: &[u8; BYTES], field: TensorMapField, dimension: usize) -> Option<u64> {
    let (bit, at) = place(field, dimension)?;
    let bytes = image.get(at..at + bytes(field))?;
    let value = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    (image[CHANGED + bit / 8] >> (bit % 8) & 1 == 1).then_some(value)
}

/// The tensor map of an image. `locate` gives the buffer of an address, and the offset there.
pub(super) fn spec_of(
    image: &[u8; BYTES],
    original: &TensorMapSpec,
    locate: impl Fn(u64) -> Option<(usize, u64)>,
) -> Result<TensorMapSpec, String> {
    use TensorMapField as F;
    let mut spec = original.clone();
    if let Some(address) = changed(image, F::GlobalAddress, 0) {
        (spec.buffer, spec.offset) =
            locate(address).ok_or_else(|| format!("the address {address:#x} is in no buffer"))?;
    }
    if let Some(number) = changed(image, F::Elemtype, 0) {
        spec.element = element(number).ok_or_else(|| format!("elements of the type {number}"))?;
    }
    if let Some(number) = changed(image, F::SwizzleMode, 0) {
        let modes = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
        spec.swizzle = *modes.get(number as usize).ok_or("a swizzle that does not exist")?;
    }
    if let Some(last) = changed(image, F::Rank, 0) {
        let rank = 1 + last.min(5) as usize;
        spec.extents.resize(rank, 1);
        spec.box_extents.resize(rank, 1);
        spec.strides.resize(rank - 1, 16);
    }
    let extents = spec.extents.iter_mut().enumerate();
    extents.for_each(|(d, extent)| *extent = changed(image, F::GlobalDim, d).unwrap_or(*extent));
    let boxes = spec.box_extents.iter_mut().enumerate();
    boxes.for_each(|(d, size)| *size = changed(image, F::BoxDim, d).map_or(*size, |size| size as u32));
    let strides = spec.strides.iter_mut().enumerate();
    strides.for_each(|(d, stride)| *stride = changed(image, F::GlobalStride, d).unwrap_or(*stride));
    spec.check().map_err(|error| error.to_string())?;
    Ok(spec)
}

/// The element type with this number (PTX ISA, "tensormap.replace", values of `.elemtype`).
fn element(number: u64) -> Option<Element> {
    use Element as E;
    let known = [E::U8, E::U16, E::U32, E::I32, E::U64, E::I64, E::F16, E::F32, E::F32, E::F64, E::Bf16];
    known.get(number as usize).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ptx::L2Promotion;

    #[test]
    fn images_name_their_map() {
        assert_eq!(map_index(&map_image(3)), Some(3));
        assert_eq!(map_index(&[0; BYTES]), None);
    }

    #[test]
    fn fields_are_changed_one_by_one() {
        use TensorMapField as F;
        let original = TensorMapSpec {
            buffer: 0,
            offset: 0,
            element: Element::F16,
            extents: vec![64],
            strides: vec![],
            box_extents: vec![64],
            swizzle: Swizzle::Bytes128,
            l2_promotion: L2Promotion::None,
            wraps: false,
        };
        let mut image = map_image(1);
        let locate = |address: u64| (address >= 4096).then(|| (2, address - 4096));
        assert!(!is_changed(&image));
        let changes = [
            (F::GlobalAddress, 0, 4096 + 32),
            (F::Rank, 0, 4),
            (F::Elemtype, 0, 7),
            (F::SwizzleMode, 0, 1),
            (F::BoxDim, 0, 8),
            (F::BoxDim, 4, 3),
            (F::GlobalDim, 1, 5),
            (F::GlobalDim, 4, 7),
            (F::GlobalStride, 0, 256),
            (F::GlobalStride, 3, 1 << 33),
            (F::ElementStride, 2, 1),
        ];
        assert!(
            changes.iter().all(|(field, dimension, value)| replace(&mut image, *field, *dimension, *value))
        );
        assert!(is_changed(&image) && map_index(&image) == Some(1));
        let expected = TensorMapSpec {
            buffer: 2,
            offset: 32,
            element: Element::F32,
            extents: vec![64, 5, 1, 1, 7],
            strides: vec![256, 16, 16, 1 << 33],
            box_extents: vec![8, 1, 1, 1, 3],
            swizzle: Swizzle::Bytes32,
            ..original.clone()
        };
        assert_eq!(spec_of(&image, &original, locate), Ok(expected));
        assert!(!replace(&mut image, F::FillMode, 0, 1));
        assert!(replace(&mut image, F::GlobalAddress, 0, 16));
        assert!(spec_of(&image, &original, locate).is_err());
    }
}
