//! Clock, power, temperature and throttle state, read after each sample.

use std::sync::OnceLock;

use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};
use serde::Serialize;

/// The sensor values. A value is `None` when the device does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Reading {
    /// Clock of the SMs (of the cores, on a CPU), MHz.
    pub clock_mhz: Option<u32>,
    /// Clock of the memory, MHz.
    pub memory_mhz: Option<u32>,
    /// Power drawn, W.
    pub watts: Option<f64>,
    /// Temperature, °C.
    pub celsius: Option<u32>,
    /// Why the clock is below its maximum: a set of `nvmlClocksEventReasons` bits (NVML API Reference,
    /// "Clocks Event Reasons").
    pub throttle: Option<u64>,
}

/// Reasons that do not count as throttling: the device is idle, or a user set its clocks.
const HARMLESS: u64 = GPU_IDLE | APPLICATIONS_CLOCKS_SETTING | DISPLAY_CLOCK_SETTING;
const GPU_IDLE: u64 = 0x1;
const APPLICATIONS_CLOCKS_SETTING: u64 = 0x2;
const DISPLAY_CLOCK_SETTING: u64 = 0x100;

/// NVML's names of the bits.
const REASONS: [(u64, &str); 9] = [
    (GPU_IDLE, "idle"),
    (APPLICATIONS_CLOCKS_SETTING, "application clocks"),
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
    (DISPLAY_CLOCK_SETTING, "display clocks"),
];

impl Reading {
    /// Whether the clock was reduced for a reason other than idleness or a user's setting.
    pub fn throttled(&self) -> bool {
        self.throttle.is_some_and(|reasons| reasons & !HARMLESS != 0)
    }
}

/// A GPU's sensors through NVML, which is loaded at run time.
pub struct Sensors(Result<Device<'static>, String>);

impl Sensors {
    /// Opens the sensors of the device with this UUID (`GPU-…`, as the driver reports it). Without NVML
    /// nothing is read.
    pub fn of(uuid: &str) -> Sensors {
        static NVML: OnceLock<Result<Nvml, String>> = OnceLock::new();
        let nvml = NVML.get_or_init(|| Nvml::init().map_err(|error| error.to_string()));
        let device = nvml.as_ref().map_err(Clone::clone);
        Sensors(device.and_then(|nvml| nvml.device_by_uuid(uuid).map_err(|error| error.to_string())))
    }

    /// Why no sensor can be read.
    pub fn missing(&self) -> Option<&str> {
        self.0.as_ref().err().map(String::as_str)
    }

    /// Reads all sensors.
    pub fn read(&self) -> Reading {
        let Ok(device) = &self.0 else { return Reading::default() };
        Reading {
            clock_mhz: device.clock_info(Clock::SM).ok(),
            memory_mhz: device.clock_info(Clock::Memory).ok(),
            watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1000.0),
            celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            throttle: device.current_throttle_reasons().ok().map(|reasons| reasons.bits()),
        }
    }
}

/// The throttle reasons in words.
pub fn reasons(bits: u64) -> Vec<&'static str> {
    REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|&(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_nvml_nothing_is_read_and_that_is_said() {
        let sensors = Sensors::of("GPU-00000000-0000-0000-0000-000000000000");
        assert!(sensors.missing().is_some_and(|why| !why.is_empty()));
        assert_eq!(sensors.read(), Reading::default());
    }

    #[test]
    fn idling_is_no_throttling() {
        let with = |bits| Reading { throttle: Some(bits), ..Reading::default() };
        assert!(!with(0).throttled() && !with(0x103).throttled() && !Reading::default().throttled());
        assert!(with(0x4).throttled() && with(0x41).throttled());
        assert_eq!(reasons(0x45), ["idle", "power cap", "hardware thermal slowdown"]);
    }
}
