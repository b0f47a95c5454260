#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use std::collections::HashMap;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use ptx::Target;

use crate::DriverError;
use crate::module::Loaded;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The marketing name.
    pub name: String,
    /// Compute capability: (9, 0) for sm_90.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Device memory in bytes.
    pub memory: usize,
    /// L2 cache in bytes.
    pub l2: usize,
    /// Version of CUDA that the driver supports: 13000 for 13.0.
    pub driver: i32,
}

/// A GPU with its primary context current on this thread.
pub struct Gpu {
    pub(crate) info: DeviceInfo,
    pub(crate) loaded: HashMap<String, Loaded>,
    device: sys::CUdevice,
}

impl Gpu {
    /// Opens a device; 0 is the first.
    ///
    /// # Errors
    /// [`DriverError::NoDriver`] and [`DriverError::NoDevice`] where there is nothing to open.
    pub fn open(ordinal: i32) -> Result<Gpu, DriverError> {
        // SAFETY: only asks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverError::NoDriver);
        }
        result::init().map_err(DriverError::call("cuInit"))?;
        let count = result::device::get_count().map_err(DriverError::call("cuDeviceGetCount"))?;
        if !(0..count).contains(&ordinal) {
            return Err(DriverError::NoDevice { ordinal, count });
        }
        let device = result::device::get(ordinal).map_err(DriverError::call("cuDeviceGet"))?;
        let info = describe(device)?;
        // SAFETY: `device` came from cuDeviceGet; the context is retained until `Drop` releases it.
        unsafe {
            let context =
                result::primary_ctx::retain(device).map_err(DriverError::call("cuDevicePrimaryCtxRetain"))?;
            result::ctx::set_current(context).map_err(DriverError::call("cuCtxSetCurrent"))?;
        }
        Ok(Gpu { info, loaded: HashMap::new(), device })
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The target that uses all of the device's features.
    pub fn target(&self) -> Target {
        let (major, minor) = self.info.capability;
        Target::sm(major * 10 + minor)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.loaded.clear();
        // SAFETY: pairs with the retain in `open`. A failure here has no one left to tell.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

fn describe(device: sys::CUdevice) -> Result<DeviceInfo, DriverError> {
    // SAFETY: `device` came from cuDeviceGet.
    let attribute = |which| unsafe {
        result::device::get_attribute(device, which).map_err(DriverError::call("cuDeviceGetAttribute"))
    };
    let mut driver = 0;
    // SAFETY: the pointer is to a live i32.
    unsafe { sys::cuDriverGetVersion(&mut driver) }
        .result()
        .map_err(DriverError::call("cuDriverGetVersion"))?;
    Ok(DeviceInfo {
        name: result::device::get_name(device).map_err(DriverError::call("cuDeviceGetName"))?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        ),
        sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device) }
            .map_err(DriverError::call("cuDeviceTotalMem"))?,
        l2: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        driver,
    })
}
