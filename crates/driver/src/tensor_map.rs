//! Tensor maps: what the bulk tensor copies of sm_90 and later know of a tensor.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use cudarc::driver::sys;

use crate::library::{check, ready};
use crate::{DeviceSlice, DriverError};

/// Element types of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "self-evident")]
pub enum Element {
    U8,
    U16,
    U32,
    F16,
    Bf16,
    F32,
}

impl Element {
    const fn bytes(self) -> u64 {
        match self {
            Element::U8 => 1,
            Element::U16 | Element::F16 | Element::Bf16 => 2,
            Element::U32 | Element::F32 => 4,
        }
    }

    const fn code(self) -> sys::CUtensorMapDataType {
        use sys::CUtensorMapDataType as Type;
        match self {
            Element::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            Element::U16 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            Element::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            Element::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Element::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        }
    }
}

/// How 16-byte chunks of a box are permuted in shared memory, by the bytes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "self-evident")]
pub enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// The longest row of a box.
    const fn span(self) -> Option<u64> {
        match self {
            Swizzle::None => None,
            Swizzle::Bytes32 => Some(32),
            Swizzle::Bytes64 => Some(64),
            Swizzle::Bytes128 => Some(128),
        }
    }

    const fn code(self) -> sys::CUtensorMapSwizzle {
        use sys::CUtensorMapSwizzle as Code;
        match self {
            Swizzle::None => Code::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => Code::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => Code::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => Code::CU_TENSOR_MAP_SWIZZLE_128B,
        }
    }
}

/// A tensor and the box of it that one instruction copies. Dimensions come innermost first. What lies outside the
/// tensor reads as zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapSpec {
    /// Type of an element.
    pub element: Element,
    /// The memory; element (0, 0, …) is at its start.
    pub memory: DeviceSlice,
    /// Elements along each of 1 to 5 dimensions.
    pub extents: Vec<u64>,
    /// Bytes between neighbours along each dimension but the innermost, which is contiguous.
    pub strides: Vec<u64>,
    /// Elements of the box along each dimension.
    pub box_extents: Vec<u32>,
    /// How the box lies in shared memory.
    pub swizzle: Swizzle,
}

/// An encoded tensor map: 128 bytes that only the hardware reads, passed to a kernel by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct TensorMap(pub(crate) [u8; 128]);

impl TensorMap {
    /// Size in bytes of the parameter that takes it.
    pub const BYTES: u32 = 128;

    /// Encodes a map. The rules are those of `cuTensorMapEncodeTiled` (CUDA Driver API, "Tensor Map Object Management").
    ///
    /// # Errors
    /// [`DriverError::TensorMap`] names the field, its value and what is accepted.
    pub fn encode(spec: &TensorMapSpec) -> Result<TensorMap, DriverError> {
        validate(spec)?;
        ready()?;
        let rank = spec.extents.len();
        let ones = [1u32; 5];
        let mut map = TensorMap([0; 128]);
        // SAFETY: the map is 128 bytes at a multiple of 128; each array has the rank's entries (strides one fewer) and
        // outlives the call; the address is only encoded.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                std::ptr::from_mut(&mut map).cast(),
                spec.element.code(),
                rank as u32,
                spec.memory.address() as usize as *mut _,
                spec.extents.as_ptr(),
                spec.strides.as_ptr(),
                spec.box_extents.as_ptr(),
                ones.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                spec.swizzle.code(),
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", result)?;
        Ok(map)
    }
}

fn validate(spec: &TensorMapSpec) -> Result<(), DriverError> {
    let rank = spec.extents.len();
    accept("rank", rank, (1..=5).contains(&rank), "1 to 5 dimensions")?;
    accept("strides", spec.strides.len(), spec.strides.len() + 1 == rank, "one fewer than dimensions")?;
    accept("box_extents", spec.box_extents.len(), spec.box_extents.len() == rank, "one per dimension")?;
    let address = spec.memory.address();
    accept("address", address, address.is_multiple_of(16) && address != 0, "multiples of 16 that are not 0")?;
    for &extent in &spec.extents {
        accept("extent", extent, (1..=1 << 32).contains(&extent), "1 to 2^32")?;
    }
    for &stride in &spec.strides {
        let fits = stride.is_multiple_of(16) && stride < 1 << 40;
        accept("stride in bytes", stride, fits, "multiples of 16 below 2^40")?;
    }
    for &extent in &spec.box_extents {
        accept("box extent", extent, (1..=256).contains(&extent), "1 to 256")?;
    }
    let row = u64::from(spec.box_extents[0]) * spec.element.bytes();
    accept("box row in bytes", row, row.is_multiple_of(16), "multiples of 16")?;
    if let Some(span) = spec.swizzle.span() {
        accept("box row in bytes", row, row <= span, &format!("up to {span} with this swizzle"))?;
    }
    let bytes = reach(spec);
    let have = spec.memory.bytes() as u128;
    accept("memory in bytes", have, bytes <= have, &format!("at least {bytes}, which the extents reach"))
}

/// Bytes from the first to the last that the tensor touches.
fn reach(spec: &TensorMapSpec) -> u128 {
    let inner = u128::from(spec.extents[0]) * u128::from(spec.element.bytes());
    let outer = spec.extents[1..].iter().zip(&spec.strides);
    outer.fold(inner, |sum, (&extent, &stride)| sum + (u128::from(extent) - 1) * u128::from(stride))
}

fn accept(field: &'static str, value: impl ToString, fits: bool, accepted: &str) -> Result<(), DriverError> {
    if fits {
        return Ok(());
    }
    Err(DriverError::TensorMap { field, value: value.to_string(), accepted: accepted.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> TensorMapSpec {
        TensorMapSpec {
            element: Element::F16,
            memory: DeviceSlice::new(4096, 512 * 128),
            extents: vec![64, 512],
            strides: vec![128],
            box_extents: vec![64, 128],
            swizzle: Swizzle::Bytes128,
        }
    }

    #[test]
    fn refusals_name_the_field() {
        assert_eq!(validate(&spec()), Ok(()));
        type Change = fn(&mut TensorMapSpec);
        let cases: [(Change, &str); 9] = [
            (|s| s.extents.clear(), "rank = 0"),
            (|s| s.strides.push(16), "strides = 2"),
            (|s| s.box_extents.truncate(1), "box_extents = 1"),
            (|s| s.memory = DeviceSlice::new(4104, 1 << 20), "address = 4104"),
            (|s| s.extents[1] = 0, "extent = 0"),
            (|s| s.strides[0] = 24, "stride in bytes = 24"),
            (|s| s.box_extents[1] = 257, "box extent = 257"),
            (|s| s.swizzle = Swizzle::Bytes64, "box row in bytes = 128; accepted: up to 64"),
            (|s| s.extents[1] = 513, "memory in bytes = 65536; accepted: at least 65664"),
        ];
        for (change, expected) in cases {
            let mut spec = spec();
            change(&mut spec);
            let error = validate(&spec).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
