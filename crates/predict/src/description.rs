//! Machines that a file describes by their microbenchmarks, instead of machines of the table.

use super::kept::Name;
use super::machine::Gpu;

/// An impossible value in a machine description.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("machine {machine}: invalid value '{value}' for {field}: expected {expected}")]
pub struct MachineError {
    /// The machine's name.
    pub machine: Name,
    /// Path of the field in the description.
    pub field: &'static str,
    /// The value of the field.
    pub value: f64,
    /// The values that the field may have.
    pub expected: &'static str,
}

impl Gpu {
    /// Checks that the fields listed here are finite numbers above 0, and that the reserved shared memory of
    /// a CTA fits on an SM. Prediction requires a description without errors. Other fields, such as `units`
    /// and `latency.half2`, are not checked.
    ///
    /// # Errors
    /// A checked value is outside its range.
    pub fn check(&self) -> Result<(), MachineError> {
        let above_zero: [(&'static str, f64); 30] = [
            ("sms", self.sms.into()),
            ("clock_mhz", self.clock_mhz),
            ("loaded_clock_mhz", self.loaded_clock_mhz),
            ("schedulers", self.schedulers.into()),
            ("rates.fma", self.rates.fma.into()),
            ("rates.imad", self.rates.imad.into()),
            ("rates.alu", self.rates.alu.into()),
            ("rates.half2", self.rates.half2.into()),
            ("rates.double", self.rates.double.into()),
            ("rates.mufu", self.rates.mufu.into()),
            ("tensor.f16_f32", self.tensor.f16_f32.into()),
            ("latency.alu", self.latency.alu.into()),
            ("latency.shuffle", self.latency.shuffle.into()),
            ("latency.mufu", self.latency.mufu.into()),
            ("latency.shared", self.latency.shared.into()),
            ("latency.l1", self.latency.l1.into()),
            ("latency.l2", self.latency.l2.into()),
            ("latency.dram", self.latency.dram.into()),
            ("memory.l1_bytes", self.memory.l1_bytes.into()),
            ("memory.shared_bytes", self.memory.shared_bytes.into()),
            ("memory.l1_bandwidth", self.memory.l1_bandwidth.into()),
            ("memory.lsu_lanes", self.memory.lsu_lanes.into()),
            ("memory.l2_bandwidth", self.memory.l2_bandwidth.into()),
            ("memory.l2_port", self.memory.l2_port.into()),
            ("memory.dram_gbps", self.memory.dram_gbps),
            ("limits.warps", self.limits.warps.into()),
            ("limits.ctas", self.limits.ctas.into()),
            ("limits.registers", self.limits.registers.into()),
            ("limits.threads_per_cta", self.limits.threads_per_cta.into()),
            ("launch_us", self.launch_us),
        ];
        let fault = above_zero.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0));
        let error = |field, value, expected| Err(MachineError { machine: self.name, field, value, expected });
        match (fault, self.memory.shared_reserved) {
            (Some((field, value)), _) => error(field, value, "a finite number above 0"),
            (None, reserved) if reserved > self.memory.shared_bytes => {
                error("memory.shared_reserved", reserved.into(), "at most memory.shared_bytes")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{L4, MACHINES, Memories};

    #[test]
    fn descriptions_are_read_as_they_are_written() {
        for gpu in MACHINES {
            assert_eq!(gpu.check(), Ok(()));
            let text = serde_json::to_string(gpu).unwrap();
            let read: Gpu = serde_json::from_str(&text).unwrap();
            assert_eq!(read, *gpu);
            // Each name and list is kept once, however often it is read.
            let again: Gpu = serde_json::from_str(&text).unwrap();
            assert!(std::ptr::eq(read.name, again.name));
            assert!(std::ptr::eq(read.memory.carveouts, again.memory.carveouts));
            assert!(serde_json::from_str::<Gpu>(&text.replace("\"sms\"", "\"sm_count\"")).is_err());
        }
        let none = Gpu { memory: Memories { dram_gbps: 0.0, ..L4.memory }, ..L4 };
        let error = none.check().unwrap_err().to_string();
        assert_eq!(
            error,
            "machine L4: invalid value '0' for memory.dram_gbps: expected a finite number above 0"
        );
        let reserving = |shared_reserved| Gpu { memory: Memories { shared_reserved, ..L4.memory }, ..L4 };
        assert_eq!(reserving(0).check(), Ok(()));
        let error = reserving(u32::MAX).check().unwrap_err().to_string();
        assert_eq!(
            error,
            "machine L4: invalid value '4294967295' for memory.shared_reserved: expected at most memory.shared_bytes"
        );
    }
}
