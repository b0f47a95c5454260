//! Tensor maps: what the bulk tensor copies of sm_90 and later know of a tensor.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use cudarc::driver::sys;
use ptx::{Element, L2Promotion, Swizzle, TensorMapError, TensorMapSpec};

use crate::library::{check, ready};
use crate::{DeviceSlice, DriverError};

const fn element(element: Element) -> sys::CUtensorMapDataType {
    use sys::CUtensorMapDataType as Type;
    match element {
        Element::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        Element::U16 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        Element::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        Element::I32 => Type::CU_TENSOR_MAP_DATA_TYPE_INT32,
        Element::U64 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        Element::I64 => Type::CU_TENSOR_MAP_DATA_TYPE_INT64,
        Element::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Element::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Element::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Element::F64 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
    }
}

const fn swizzle(swizzle: Swizzle) -> sys::CUtensorMapSwizzle {
    use sys::CUtensorMapSwizzle as Code;
    match swizzle {
        Swizzle::None => Code::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::Bytes32 => Code::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::Bytes64 => Code::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::Bytes128 => Code::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}

const fn promotion(promotion: L2Promotion) -> sys::CUtensorMapL2promotion {
    use sys::CUtensorMapL2promotion as Code;
    match promotion {
        L2Promotion::None => Code::CU_TENSOR_MAP_L2_PROMOTION_NONE,
        L2Promotion::Bytes64 => Code::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        L2Promotion::Bytes128 => Code::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        L2Promotion::Bytes256 => Code::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }
}

/// An encoded tensor map: 128 bytes that only the hardware reads, passed to a kernel by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct TensorMap(pub(crate) [u8; 128]);

impl TensorMap {
    /// Size in bytes of the parameter that takes it.
    pub const BYTES: u32 = TensorMapSpec::BYTES;

    /// Encodes the map of a tensor in `memory`, which is the buffer that the specification names. The rules are those of `cuTensorMapEncodeTiled` (CUDA Driver API, "Tensor Map Object Management").
    ///
    /// # Errors
    /// [`DriverError::TensorMap`] names the field, its value and what is accepted.
    pub fn encode(spec: &TensorMapSpec, memory: DeviceSlice) -> Result<TensorMap, DriverError> {
        let address = validate(spec, memory)?;
        ready()?;
        let rank = spec.extents.len();
        let ones = [1u32; 5];
        let mut map = TensorMap([0; 128]);
        // SAFETY: the map is 128 bytes at a multiple of 128; each array has the rank's entries (strides one fewer) and
        // outlives the call; the address is only encoded.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                std::ptr::from_mut(&mut map).cast(),
                element(spec.element),
                rank as u32,
                address as usize as *mut _,
                spec.extents.as_ptr(),
                spec.strides.as_ptr(),
                spec.box_extents.as_ptr(),
                ones.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle(spec.swizzle),
                promotion(spec.l2_promotion),
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", result)?;
        Ok(map)
    }
}

/// The address of the tensor's first element.
fn validate(spec: &TensorMapSpec, memory: DeviceSlice) -> Result<u64, DriverError> {
    spec.check().map_err(DriverError::TensorMap)?;
    let bytes = u128::from(spec.offset) + spec.reach();
    let have = memory.bytes() as u128;
    accept("memory in bytes", have, bytes <= have, &format!("at least {bytes}, which the extents reach"))?;
    let address = memory.address() + spec.offset;
    accept("address", address, address.is_multiple_of(16) && address != 0, "multiples of 16 that are not 0")?;
    Ok(address)
}

fn accept(field: &'static str, value: impl ToString, fits: bool, accepted: &str) -> Result<(), DriverError> {
    if fits {
        return Ok(());
    }
    let (value, accepted) = (value.to_string(), accepted.to_owned());
    Err(DriverError::TensorMap(TensorMapError { field, value, accepted }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_the_field() {
        let spec = TensorMapSpec {
            buffer: 0,
            offset: 64,
            element: Element::F16,
            extents: vec![64, 512],
            strides: vec![128],
            box_extents: vec![64, 128],
            swizzle: Swizzle::Bytes128,
            l2_promotion: L2Promotion::default(),
        };
        assert_eq!(validate(&spec, DeviceSlice::new(4096, 64 + 512 * 128)), Ok(4160));
        let cases = [
            (spec.clone(), DeviceSlice::new(4104, 1 << 20), "address = 4168"),
            (
                spec.clone(),
                DeviceSlice::new(4096, 512 * 128),
                "memory in bytes = 65536; accepted: at least 65600",
            ),
            (
                TensorMapSpec { strides: vec![24], ..spec },
                DeviceSlice::new(4096, 1 << 20),
                "stride in bytes = 24",
            ),
        ];
        for (spec, memory, expected) in cases {
            let error = validate(&spec, memory).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
