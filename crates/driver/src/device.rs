//! Properties of devices.
#![allow(unsafe_code, reason = "calls of the CUDA driver's C interface")]

use ptx::Target;

use crate::DriverError;
use crate::library::{check, ready};
use crate::sys;

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's ordinal in the driver; 0 is the first device.
    pub ordinal: i32,
    /// The marketing name.
    pub name: String,
    /// The UUID as NVML and `nvidia-smi` write it: `GPU-` and 32 hexadecimal digits in five groups.
    pub uuid: String,
    /// Compute capability: (9, 0) for sm_90.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub sms: u32,
    /// Device memory in bytes.
    pub memory: usize,
    /// L2 cache in bytes.
    pub l2: usize,
    /// Maximum shared memory that one CTA may request, in bytes.
    pub shared_per_cta: u32,
    /// Shared memory of an SM, in bytes.
    pub shared_per_sm: u32,
    /// Whether the device supports stream-ordered allocation (memory pools).
    pub pools: bool,
    /// The CUDA version that the driver supports: 13000 for 13.0.
    pub driver: i32,
    /// The version of the driver itself (for example 580.159.04), if the system reports it.
    pub driver_build: Option<String>,
}

impl DeviceInfo {
    /// Compute capability times ten.
    pub fn sm(&self) -> u32 {
        self.capability.0 * 10 + self.capability.1
    }

    /// The device's portable target: `sm_90`, not `sm_90a`.
    pub fn target(&self) -> Target {
        Target::sm(self.sm())
    }

    /// The compiler of PTX on this device: the CUDA version of the driver and, if known, the version of the
    /// driver itself.
    pub fn compiler(&self) -> String {
        format!("{} {}", self.driver, self.driver_build.as_deref().unwrap_or("-"))
    }
}

/// The devices that the driver sees. No context is created, so the call is cheap.
///
/// # Errors
/// The errors of [`Context::open`](crate::Context::open) that concern the driver.
pub fn devices() -> Result<Vec<DeviceInfo>, DriverError> {
    (0..count()?).map(|ordinal| describe(handle(ordinal)?, ordinal)).collect()
}

fn count() -> Result<i32, DriverError> {
    ready()?;
    let mut count = 0;
    // SAFETY: the pointer is to a live i32.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(count)
}

/// The driver's handle of a device.
pub(crate) fn handle(ordinal: i32) -> Result<sys::CUdevice, DriverError> {
    let count = count()?;
    if !(0..count).contains(&ordinal) {
        return Err(DriverError::NoDevice { ordinal, count });
    }
    let mut device = 0;
    // SAFETY: the pointer is to a live handle.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
    Ok(device)
}

pub(crate) fn describe(device: sys::CUdevice, ordinal: i32) -> Result<DeviceInfo, DriverError> {
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: `device` came from cuDeviceGet; the pointer is to a live i32.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok(value as u32)
    };
    let mut memory = 0;
    // SAFETY: as above; the pointer is to a live usize.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, device) })?;
    Ok(DeviceInfo {
        ordinal,
        name: name(device)?,
        uuid: uuid(device)?,
        capability: (
            attribute(sys::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(sys::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sms: attribute(sys::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory,
        l2: attribute(sys::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        shared_per_cta: attribute(sys::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_per_sm: attribute(sys::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        pools: attribute(sys::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
        driver: ready()?,
        driver_build: driver_build(),
    })
}

fn name(device: sys::CUdevice) -> Result<String, DriverError> {
    let mut bytes = [0u8; 256];
    // SAFETY: the driver writes at most `bytes.len()` bytes, with a NUL at the end.
    let result = unsafe { sys::cuDeviceGetName(bytes.as_mut_ptr().cast(), bytes.len() as i32, device) };
    check("cuDeviceGetName", result)?;
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

fn uuid(device: sys::CUdevice) -> Result<String, DriverError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the pointer is to a live CUuuid.
    check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) })?;
    let mut text = "GPU".to_owned();
    for (i, byte) in uuid.bytes.into_iter().enumerate() {
        let dash = if matches!(i, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        text += &format!("{dash}{byte:02x}");
    }
    Ok(text)
}

/// The version of the kernel module on Linux, which equals the version of the driver's library.
fn driver_build() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    build_of(&text)
}

/// The first word of the first line that has the form of a version: `580.159.04`.
fn build_of(text: &str) -> Option<String> {
    let looks =
        |word: &&str| word.matches('.').count() >= 1 && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(looks).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_version_is_found_in_the_systems_words() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC 12";
        assert_eq!(build_of(closed).as_deref(), Some("535.104.05"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build";
        assert_eq!(build_of(open).as_deref(), Some("580.159.04"));
        assert_eq!(build_of("NVRM version: none"), None);
    }
}
