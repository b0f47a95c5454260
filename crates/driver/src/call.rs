//! The part of a launch that is the same for every launch: configuration, arguments and tensor maps.

use ptx::{Arg, Kernel, Launch, TensorMapSpec};

use crate::tensor_map::TensorMaps;
use crate::{Context, DriverError, TensorMap, sys};

/// A kernel's launch contract without its module: grid and arguments, and the tensor maps as they were last
/// encoded. Any thread may launch with it.
#[derive(Debug)]
pub struct Call {
    launch: Launch,
    args: Vec<Arg>,
    maps: TensorMaps,
    params: ParamBlock,
}

/// The parameters of a launch, and which of them each launch replaces.
#[derive(Debug, Default)]
pub(crate) struct ParamBlock {
    /// The low bytes of each value: all hosts that the driver supports are little-endian. 0 for a value that
    /// each launch replaces.
    pub bits: Vec<u64>,
    /// Size in bytes of each parameter.
    pub sizes: Vec<u32>,
    /// The parameters that are addresses.
    pub addresses: Vec<AddressParam>,
    /// The parameters that are tensor maps, with the index of the map.
    pub maps: Vec<(usize, usize)>,
    /// Whether an argument is a struct by value, which a call does not pass.
    pub has_struct: bool,
    /// The attributes of the launch.
    pub attributes: Vec<sys::CUlaunchAttribute>,
}

/// A parameter that is an address inside a buffer.
#[derive(Debug)]
pub(crate) struct AddressParam {
    pub param: usize,
    pub buffer: usize,
    pub offset: u64,
}

impl ParamBlock {
    fn of(launch: &Launch, args: &[Arg]) -> ParamBlock {
        let mut params = ParamBlock { attributes: attributes(launch), ..ParamBlock::default() };
        for (param, arg) in args.iter().enumerate() {
            let (bits, size) = match *arg {
                Arg::Buffer { index: buffer, offset } => {
                    params.addresses.push(AddressParam { param, buffer, offset });
                    (0, 8)
                }
                Arg::TensorMap { index } => {
                    params.maps.push((param, index));
                    (0, TensorMap::BYTES)
                }
                Arg::Struct(_) => {
                    params.has_struct = true;
                    (0, 0)
                }
                Arg::Null => (0, 8),
                Arg::U32(v) => (v.into(), 4),
                Arg::I32(v) => (u64::from(v as u32), 4),
                Arg::F32(v) => (v.to_bits().into(), 4),
                Arg::U64(v) => (v, 8),
                Arg::I64(v) => (v as u64, 8),
                Arg::F64(v) => (v.to_bits(), 8),
                Arg::U16(bits) => (bits.into(), 2),
                Arg::U8(bits) => (bits.into(), 1),
            };
            params.bits.push(bits);
            params.sizes.push(size);
        }
        params
    }
}

impl Call {
    /// The launch contract of a kernel.
    pub fn of(kernel: &Kernel) -> Call {
        let names = kernel.buffers.iter().map(|buffer| buffer.name.clone()).collect();
        Call::with_maps(kernel.launch, kernel.args.clone(), kernel.tensor_maps.clone(), names)
    }

    /// A launch contract without tensor maps.
    pub fn new(launch: Launch, args: Vec<Arg>) -> Call {
        Call::with_maps(launch, args, Vec::new(), Vec::new())
    }

    /// A launch contract with tensor maps of some of the buffers, which have these names.
    pub fn with_maps(launch: Launch, args: Vec<Arg>, maps: Vec<TensorMapSpec>, names: Vec<String>) -> Call {
        let params = ParamBlock::of(&launch, &args);
        Call { launch, args, maps: TensorMaps::new(maps, names), params }
    }

    /// Whether the driver accepts the tensor maps, for any buffers at multiples of 16 bytes.
    ///
    /// # Errors
    /// [`DriverError::TensorMap`], or the driver's error.
    pub fn check(&self, context: &Context) -> Result<(), DriverError> {
        self.maps.check(context)
    }

    /// Whether there are tensor maps. They need buffers at multiples of 16 bytes.
    pub fn has_tensor_maps(&self) -> bool {
        !self.maps.is_empty()
    }

    /// Grid, cluster, block and dynamic shared memory.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// One value per parameter.
    pub fn args(&self) -> &[Arg] {
        &self.args
    }

    pub(crate) fn params(&self) -> &ParamBlock {
        &self.params
    }

    pub(crate) fn maps(&self) -> &TensorMaps {
        &self.maps
    }
}

fn attributes(launch: &Launch) -> Vec<sys::CUlaunchAttribute> {
    let mut attributes = Vec::new();
    let mut add = |id, values: &[u32]| {
        let mut attribute = sys::CUlaunchAttribute { id, ..sys::CUlaunchAttribute::default() };
        attribute.value[..values.len()].copy_from_slice(values);
        attributes.push(attribute);
    };
    if launch.cluster.count() > 1 {
        let values = [launch.cluster.0, launch.cluster.1, launch.cluster.2];
        add(sys::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &values);
    }
    if launch.overlapping {
        // The kernel may start once the previous kernel allows it (`griddepcontrol.launch_dependents`). Under
        // capture, this becomes a programmatic edge of the graph (CUDA C++ Programming Guide, "Programmatic
        // Dependent Launch and Synchronization").
        add(sys::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, &[1]);
    }
    attributes
}

#[cfg(test)]
mod tests {
    use ptx::Dim3;

    use super::*;

    #[test]
    fn attributes_are_only_those_asked_for() {
        let one = Dim3(1, 1, 1);
        let launch = Launch { cluster: one, ..Launch::new(one, one) };
        assert!(attributes(&launch).is_empty());
        let both = attributes(&Launch { cluster: Dim3(2, 1, 1), overlapping: true, ..launch });
        assert_eq!(both.len(), 2);
        assert_eq!(both[0].id, sys::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
        assert_eq!(both[1].id, sys::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
    }
}
