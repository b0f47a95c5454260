//! What each launch of a kernel needs besides its function and its buffers.

use ptx::{Arg, Kernel, Launch};

use crate::DriverError;
use crate::tensor_map::TensorMaps;

/// A kernel's launch contract without its module: grid and arguments, and the tensor maps as they were last encoded. Any thread
/// may launch with it.
#[derive(Debug)]
pub struct Call {
    launch: Launch,
    args: Vec<Arg>,
    maps: TensorMaps,
}

impl Call {
    /// The contract of a kernel.
    pub fn of(kernel: &Kernel) -> Call {
        Call::new(kernel.launch, kernel.args.clone(), kernel.tensor_maps.clone())
    }

    /// A contract by its parts; tensor maps are what [`Arg::TensorMap`] names.
    pub fn new(launch: Launch, args: Vec<Arg>, maps: Vec<ptx::TensorMapSpec>) -> Call {
        Call { launch, args, maps: TensorMaps::new(maps) }
    }

    /// Whether the driver takes the tensor maps, wherever the buffers may lie (at multiples of 16 bytes).
    ///
    /// # Errors
    /// [`DriverError::TensorMap`], or what the driver says.
    pub fn check(&self) -> Result<(), DriverError> {
        self.maps.check()
    }

    /// Whether there are tensor maps, which take buffers at multiples of 16 bytes only.
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
