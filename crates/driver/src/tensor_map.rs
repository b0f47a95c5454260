//! Tensor maps: the description of a tensor for the bulk tensor copies of sm_90 and later. The kernel
//! provides everything ([`TensorMapSpec`]) except the addresses.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::sync::{Mutex, PoisonError};

use ptx::{Element, L2Promotion, Swizzle, TensorMapError, TensorMapSpec};
use smallvec::SmallVec;

use crate::library::{check, ready};
use crate::{Context, DeviceSlice, DriverError, sys};

/// An encoded tensor map: 128 opaque bytes that only the hardware reads, passed to a kernel by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct TensorMap(pub(crate) [u8; 128]);

impl TensorMap {
    /// Size in bytes of the kernel parameter that takes a map.
    pub const BYTES: u32 = TensorMapSpec::BYTES;

    /// Encodes a map of the buffer that `spec` names. The rules are those of `cuTensorMapEncodeTiled` (CUDA
    /// Driver API, "Tensor Map Object Management"). [`TensorMapSpec::check`] checks the shape. This function
    /// checks the memory. A context must be current on the calling thread, as after [`Context::bind`].
    ///
    /// # Errors
    /// [`DriverError::TensorMap`] with the field, its value and what is accepted.
    pub fn encode(spec: &TensorMapSpec, buffer: DeviceSlice<'_>) -> Result<TensorMap, DriverError> {
        spec.check().map_err(DriverError::TensorMap)?;
        let address = place(spec, buffer)?;
        ready()?;
        let ones = [1u32; 5];
        let mut map = TensorMap([0; 128]);
        // SAFETY: the map is 128 bytes at a multiple of 128; each array has one entry per dimension (strides
        // one fewer, as `check` has verified) and outlives the call; the address is only encoded, not
        // accessed.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                element(spec.element),
                spec.extents.len() as u32,
                address as usize as *mut _,
                spec.extents.as_ptr(),
                spec.strides.as_ptr(),
                spec.box_extents.as_ptr(),
                ones.as_ptr(),
                sys::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle(spec.swizzle),
                promotion(spec.l2_promotion),
                sys::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", result)?;
        Ok(map)
    }
}

/// Checks the map against the memory and returns the address of element (0, 0, …).
fn place(spec: &TensorMapSpec, buffer: DeviceSlice<'_>) -> Result<u64, DriverError> {
    let address = buffer.address().wrapping_add(spec.offset);
    let fits = buffer.address() != 0 && address.is_multiple_of(16);
    accept("address", format!("{address:#x}"), fits, "multiples of 16 that are not 0")?;
    let (reach, have) = (u128::from(spec.offset) + spec.reach(), buffer.bytes() as u128);
    accept("memory in bytes", have, reach <= have, &format!("at least {reach}, which the extents reach"))?;
    Ok(address)
}

fn accept(field: &'static str, value: impl ToString, fits: bool, accepted: &str) -> Result<(), DriverError> {
    if fits {
        return Ok(());
    }
    let (value, accepted) = (value.to_string(), accepted.to_owned());
    Err(DriverError::TensorMap(TensorMapError { buffer: None, field, value, accepted }))
}

const fn element(element: Element) -> u32 {
    match element {
        Element::U8 => sys::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        Element::U16 => sys::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        Element::U32 => sys::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        Element::I32 => sys::CU_TENSOR_MAP_DATA_TYPE_INT32,
        Element::U64 => sys::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        Element::I64 => sys::CU_TENSOR_MAP_DATA_TYPE_INT64,
        Element::F16 => sys::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Element::Bf16 => sys::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Element::F32 => sys::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Element::F64 => sys::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
    }
}

const fn swizzle(swizzle: Swizzle) -> u32 {
    match swizzle {
        Swizzle::None => sys::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::Bytes32 => sys::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::Bytes64 => sys::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::Bytes128 => sys::CU_TENSOR_MAP_SWIZZLE_128B,
    }
}

const fn promotion(promotion: L2Promotion) -> u32 {
    match promotion {
        L2Promotion::None => sys::CU_TENSOR_MAP_L2_PROMOTION_NONE,
        L2Promotion::Bytes64 => sys::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        L2Promotion::Bytes128 => sys::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        L2Promotion::Bytes256 => sys::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }
}

/// The maps of a kernel's launches. Encoding a map takes a fraction of a microsecond, so the maps of earlier
/// buffers are kept.
#[derive(Debug)]
pub(crate) struct TensorMaps {
    specs: Vec<TensorMapSpec>,
    /// Names of the buffers that the maps refer to, if known.
    names: Vec<String>,
    /// For each map, those that were encoded before.
    known: Mutex<Vec<KnownMaps>>,
}

/// The maps of a launch.
pub(crate) type LaunchMaps = SmallVec<[TensorMap; 6]>;

/// Encoded maps of one kind, each at the place that the address of its buffer decides. The number of places
/// is a power of two.
#[derive(Debug, Default)]
struct KnownMaps {
    /// Address and size in bytes of each map's buffer.
    from: Vec<(u64, usize)>,
    maps: Vec<TensorMap>,
}

impl KnownMaps {
    /// Places at first, and at most: layers of a model have keys and values of their own.
    const PLACES: (usize, usize) = (4, 64);

    fn place(&self, address: u64) -> usize {
        // The golden ratio spreads multiples of a power of two.
        let spread = address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        spread as usize & (self.from.len().max(1) - 1)
    }

    fn get(&self, slice: DeviceSlice<'_>) -> Option<&TensorMap> {
        let place = self.place(slice.address());
        (self.from.get(place) == Some(&place_of(slice))).then(|| &self.maps[place])
    }

    fn insert(&mut self, from: (u64, usize), map: TensorMap) {
        const NONE: (u64, usize) = (0, 0);
        let (first, most) = KnownMaps::PLACES;
        let count = self.from.len();
        if count < most && self.from.get(self.place(from.0)).is_none_or(|&known| known != NONE) {
            let places = (2 * count).max(first);
            let grown = KnownMaps { from: vec![NONE; places], maps: vec![TensorMap([0; 128]); places] };
            let before = std::mem::replace(self, grown);
            for (from, map) in before.from.into_iter().zip(before.maps).filter(|(from, _)| *from != NONE) {
                self.put(from, map);
            }
        }
        self.put(from, map);
    }

    fn put(&mut self, from: (u64, usize), map: TensorMap) {
        let place = self.place(from.0);
        (self.from[place], self.maps[place]) = (from, map);
    }
}

fn place_of(slice: DeviceSlice<'_>) -> (u64, usize) {
    (slice.address(), slice.bytes())
}

impl TensorMaps {
    pub(crate) fn new(specs: Vec<TensorMapSpec>, names: Vec<String>) -> TensorMaps {
        let known = specs.iter().map(|_| KnownMaps::default()).collect();
        TensorMaps { specs, names, known: Mutex::new(known) }
    }

    fn encode(&self, spec: &TensorMapSpec, buffer: DeviceSlice<'_>) -> Result<TensorMap, DriverError> {
        TensorMap::encode(spec, buffer).map_err(|error| match (error, self.names.get(spec.buffer)) {
            (DriverError::TensorMap(error), Some(name)) => DriverError::TensorMap(error.of(name)),
            (error, _) => error,
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Checks that the driver accepts the maps for any buffers at multiples of 16 bytes.
    pub(crate) fn check(&self, context: &Context) -> Result<(), DriverError> {
        let _entered = context.enter()?;
        // Encoding accesses no memory, so any address serves.
        let anywhere = DeviceSlice::nowhere(1 << 32, usize::MAX);
        self.specs.iter().try_for_each(|spec| self.encode(spec, anywhere).map(drop))
    }

    /// Adds the maps for these buffers. `missing` makes the error for a buffer that is not in `slices`.
    pub(crate) fn for_slices(
        &self,
        context: &Context,
        slices: &[DeviceSlice<'_>],
        maps: &mut LaunchMaps,
        missing: impl Fn(usize) -> DriverError,
    ) -> Result<(), DriverError> {
        if self.specs.is_empty() {
            return Ok(());
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for (spec, known) in self.specs.iter().zip(known.iter_mut()) {
            let slice = slices.get(spec.buffer).copied().ok_or_else(|| missing(spec.buffer))?;
            if let Some(map) = known.get(slice) {
                maps.push(*map);
                continue;
            }
            // The driver encodes no map on a thread without a context.
            let _entered = context.enter()?;
            let map = self.encode(spec, slice)?;
            known.insert(place_of(slice), map);
            maps.push(map);
        }
        Ok(())
    }
}
