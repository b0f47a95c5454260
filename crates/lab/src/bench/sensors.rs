//! Clock, power, temperature and throttle state, read beside each sample.

use serde::Serialize;

/// What the device said; `None` for what it does not tell.
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
    /// Why the clock is below its highest: a set of `nvmlClocksEventReasons` bits (NVML API Reference, "Clocks Event
    /// Reasons").
    pub throttle: Option<u64>,
}

/// Reasons that are no throttling: the device has nothing to do, or someone set its clocks.
const HARMLESS: u64 = GPU_IDLE | APPLICATIONS_CLOCKS_SETTING | DISPLAY_CLOCK_SETTING;
const GPU_IDLE: u64 = 0x1;
const APPLICATIONS_CLOCKS_SETTING: u64 = 0x2;
const DISPLAY_CLOCK_SETTING: u64 = 0x100;

/// Names of the bits, as NVML has them.
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
    /// Whether something held the clock down that was not asked for.
    pub fn throttled(&self) -> bool {
        self.throttle.is_some_and(|reasons| reasons & !HARMLESS != 0)
    }
}

/// The reasons in words.
pub fn reasons(bits: u64) -> Vec<&'static str> {
    REASONS.iter().filter(|(bit, _)| bits & bit != 0).map(|&(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idling_is_no_throttling() {
        let with = |bits| Reading { throttle: Some(bits), ..Reading::default() };
        assert!(!with(0).throttled() && !with(0x103).throttled() && !Reading::default().throttled());
        assert!(with(0x4).throttled() && with(0x41).throttled());
        assert_eq!(reasons(0x45), ["idle", "power cap", "hardware thermal slowdown"]);
    }
}
