//! The part of a launch that is the same for every launch: configuration, arguments and tensor maps.

use ptx::{Arg, Kernel, Launch, TensorMapSpec};

use crate::tensor_map::TensorMaps;
use crate::{Context, DriverError};

/// A kernel's launch contract without its module: grid and arguments, and the tensor maps as they were last
/// encoded. Any thread may launch with it.
#[derive(Debug)]
pub struct Call {
    launch: Launch,
    args: Vec<Arg>,
    maps: TensorMaps,
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
        Call { launch, args, maps: TensorMaps::new(maps, names) }
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

    pub(crate) fn maps(&self) -> &TensorMaps {
        &self.maps
    }
}
