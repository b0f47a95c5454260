//! The shortest possible time of a call on a device: the arithmetic at peak rate or the traffic at peak
//! bandwidth, whichever takes longer. A shorter measured time is a measurement error.

use predict::Gpu;
use problem::{DType, Problem};
use serde::Serialize;

use super::Mode;

/// Peaks of a device, from its data sheet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peaks {
    /// Dense tensor-core FLOP/s in f16 and bf16 at the highest clock.
    pub flops: f64,
    /// DRAM bandwidth, bytes per second.
    pub bandwidth: f64,
    /// L2, bytes.
    pub l2: f64,
}

/// Dense f16 tensor-core FLOP per SM and clock, by compute capability times ten: the data sheet's TFLOP/s
/// divided by the SMs and the clock for which the sheet states them (A100 312 at 1410 MHz; L4 121 and RTX
/// 4090 330, f16 accumulators, at boost clock; H100 and H200 989 at 1830 MHz). The rate is that of the
/// fastest instruction, which need not be `mma.sync`.
const fn tensor_flops_per_clock(sm: u32) -> Option<f64> {
    match sm {
        80 => Some(2048.0),
        86 | 89 => Some(1024.0),
        90 => Some(4096.0),
        _ => None,
    }
}

impl Peaks {
    /// The peaks of the device with this driver name; `None` when the table of machines lacks the device.
    pub fn of(device: &str) -> Option<Peaks> {
        let machine = Gpu::of_device(device)?;
        let rate = tensor_flops_per_clock(machine.sm)?;
        Some(Peaks {
            flops: rate * f64::from(machine.sms) * machine.clock_mhz * 1e6,
            bandwidth: machine.memory.dram_gbps * 1e9,
            l2: machine.memory.l2_bytes as f64,
        })
    }

    /// The shortest possible time of one call.
    pub fn floor(&self, problem: &Problem, mode: Mode) -> Floor {
        // f32 inputs are computed as tf32 at half the rate, 8-bit ones at twice the rate, each product at its
        // own.
        let time = |dtype: DType, dim: usize| {
            let rate = match dtype {
                DType::F32 => self.flops / 2.0,
                DType::F16 | DType::Bf16 => self.flops,
                DType::E4m3 | DType::E5m2 => self.flops * 2.0,
            };
            let share = dim as f64 / (problem.head_dim + problem.head_dim_v) as f64;
            problem.flops() * share / rate
        };
        let arithmetic =
            time(problem.dtypes.q, problem.head_dim) + time(problem.dtypes.v, problem.head_dim_v);
        let outputs = (problem.batch * problem.heads_q * problem.seq_q * problem.head_dim_v) as f64;
        let inputs = problem.bytes() - outputs * problem.dtypes.out.bytes() as f64;
        // Outputs may still lie in L2 at the end. In warm mode the part of the inputs that fits into L2 needs
        // no traffic.
        let traffic = match mode {
            Mode::Cold => inputs,
            Mode::Warm | Mode::Sustained => (inputs - self.l2).max(0.0),
        };
        Floor { flops_us: arithmetic * 1e6, bytes_us: traffic / self.bandwidth * 1e6 }
    }
}

/// The shortest possible time of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Floor {
    /// Time of the arithmetic at peak, µs.
    pub flops_us: f64,
    /// Time of the DRAM traffic at peak, µs.
    pub bytes_us: f64,
}

impl Floor {
    /// The larger of the two times, µs.
    pub fn us(&self) -> f64 {
        self.flops_us.max(self.bytes_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_the_data_sheets() {
        let h200 = Peaks::of("NVIDIA H200").unwrap();
        // 989 TFLOP/s at 1830 MHz scale to 1070 TFLOP/s at 1980 MHz.
        assert!((h200.flops / 1e12 - 1070.0).abs() < 2.0, "{h200:?}");
        assert_eq!(h200.bandwidth, 4.8e12);
        assert!(
            Peaks::of("NVIDIA GeForce RTX 4090").is_some() && Peaks::of("NVIDIA A100-SXM4-80GB").is_some()
        );
        assert_eq!(Peaks::of("NVIDIA GeForce GTX 1080"), None);
        let mission = h200.floor(&Problem::mission(), Mode::Cold);
        assert!((0.4..0.6).contains(&mission.flops_us), "{mission:?}");
        assert!((0.3..0.4).contains(&mission.bytes_us), "{mission:?}");
        assert_eq!(h200.floor(&Problem::mission(), Mode::Warm).bytes_us, 0.0);
        let wide = Problem::new(1, 8, 4096, 128, DType::F16);
        let of = |types: &str| {
            let problem = wide.clone().with_dtypes(types.parse().unwrap());
            h200.floor(&problem, Mode::Warm).flops_us / h200.floor(&wide, Mode::Warm).flops_us
        };
        assert!((of("e4m3") - 0.5).abs() < 1e-9 && (of("e4m3/e4m3/bf16") - 0.75).abs() < 1e-9);
        let decode = Problem { seq_q: 1, ..Problem::new(16, 32, 8192, 128, DType::F16) };
        let floor = h200.floor(&decode, Mode::Warm);
        assert!(floor.bytes_us > 400.0 && floor.us() == floor.bytes_us, "{floor:?}");
    }
}
