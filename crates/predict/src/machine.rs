//! The table of machines for which times can be predicted, built from public constants.
//!
//! Sources, with the letter that marks a figure in this file:
//! - **D** data sheets and architecture white papers (A100, H100, H200, L4, Ada GPU architecture).
//! - **G** CUDA C++ Programming Guide, "Arithmetic Instructions" (results per clock and SM) and "Compute
//!   Capabilities".
//! - **P** the stall counts that ptxas 13 writes into the control fields of the code it emits for sm_80,
//!   sm_89, sm_90: the compiler's own statement of fixed latencies.
//! - **L** Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (arXiv 2402.13499):
//!   memory latencies and mma rates of A100, RTX 4090 and H100.
//! - **S** Sun et al., "Dissecting Tensor Cores via Microbenchmarks" (TPDS 2022): mma and ldmatrix latencies,
//!   cost of bank conflicts.
//! - **A** Abdelkhalik et al., "Demystifying the Nvidia Ampere Architecture through Microbenchmarking and
//!   Instruction-level Analysis" (HPEC 2022): latencies of special functions and shuffles.
//! - **Z** Zhang et al., "A Study of Single and Multi-device Synchronization Methods in Nvidia GPUs" (IPDPS
//!   2020): barriers and launches.
//! - **M** measured by this project: `evidence/model.jsonl`, suite `model`, each probe with the model's
//!   earlier value.
//! - **C** Chips and Cheese, microbenchmarks of RTX 4090, H100 and L4-class parts: L2 bandwidth.

use serde::{Deserialize, Serialize};

use super::kept::{List, Name, kept_list, kept_name};

/// Arithmetic rates of one SM, in lanes per clock.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// f32 add, multiply, fma.
    pub fma: u32,
    /// Integer multiply-add, which shares the f32 pipe.
    pub imad: u32,
    /// Integer add, logic, shifts, comparisons, selection, and min and max (also of floats).
    pub alu: u32,
    /// f16x2 and bf16x2 arithmetic, and conversions between f16 and f32.
    pub half2: u32,
    /// f64.
    pub double: u32,
    /// ex2, lg2, rcp, rsqrt, sin, cos, tanh, and conversions between integers and floats.
    pub mufu: u32,
}

/// Dense mma.sync rates of one SM, in FLOP (or integer operations) per clock. A multiply-add counts as two.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRates {
    /// f16 or bf16 inputs, f32 accumulators.
    pub f16_f32: u32,
    /// f16 accumulators.
    pub f16_f16: u32,
    /// tf32.
    pub tf32: u32,
    /// e4m3 and e5m2; 0 where mma.sync does not support them.
    pub fp8: u32,
    /// s8 and u8.
    pub int8: u32,
    /// f64.
    pub f64: u32,
}

/// Latencies in clocks, from issue to the earliest dependent issue.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latencies {
    /// f32 and integer arithmetic.
    pub alu: u32,
    /// f16x2 arithmetic.
    pub half2: u32,
    /// From a comparison to the instruction that its predicate guards.
    pub predicate: u32,
    /// From a branch to the next instruction of the warp.
    pub branch: u32,
    /// One special-function operation.
    pub mufu: u32,
    /// f64 arithmetic.
    pub double: u32,
    /// Warp shuffles, votes, matches.
    pub shuffle: u32,
    /// Barrier: from the last arrival to the next instruction, without the part per warp.
    pub barrier: u32,
    /// Barrier: additional clocks for each warp that participates.
    pub barrier_warp: u32,
    /// Shared-memory load without bank conflicts.
    pub shared: u32,
    /// Added for each further pass over the banks: the time for which one pass holds the port of a
    /// sub-partition.
    pub shared_pass: u32,
    /// Load that hits L1.
    pub l1: u32,
    /// Load that hits L2.
    pub l2: u32,
    /// Load from DRAM.
    pub dram: u32,
    /// mma with 256 bits per row of A (f16 m16n8k8 and similar).
    pub mma_k8: u32,
    /// mma with 512 bits per row of A (f16 m16n8k16).
    pub mma_k16: u32,
}

/// The asynchronous units of sm_90a.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AsyncUnits {
    /// Dense wgmma rates of one SM.
    pub wgmma: TensorRates,
    /// Clocks from the last product of a group to the next instruction of a warp that waits for it.
    pub wgmma_latency: u32,
    /// Clocks from the issue of a bulk copy until its first bytes are in shared memory and its mbarrier is
    /// signalled.
    pub bulk_latency: u32,
    /// Latency in clocks to the shared memory of another SM of the cluster.
    pub cluster_latency: u32,
    /// Bytes per clock from one SM to others of its cluster.
    pub cluster_bandwidth: u32,
    /// Time in µs that a programmatic dependent launch saves.
    pub overlap_us: f64,
}

/// Sizes and bandwidths of the memories.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memories {
    /// Unified L1 and shared memory of an SM, in bytes.
    pub l1_bytes: u32,
    /// Possible sizes of the shared-memory part in KB, ascending (G, "Shared Memory" of each compute
    /// capability).
    #[serde(deserialize_with = "kept_list")]
    pub carveouts: List,
    /// Largest shared memory of all CTAs of an SM together, in bytes.
    pub shared_bytes: u32,
    /// Largest shared memory of one CTA, in bytes.
    pub shared_per_cta: u32,
    /// Shared memory that the system reserves for each CTA, in bytes (CUDA 11 and later, sm_80 and later).
    pub shared_reserved: u32,
    /// Bandwidth of L1 and shared memory of an SM, in bytes per clock.
    pub l1_bandwidth: u32,
    /// Load-store units of an SM: the number of threads whose addresses it processes in a clock.
    pub lsu_lanes: u32,
    /// Size of L2 in bytes.
    pub l2_bytes: u64,
    /// L2 bandwidth of the device, in bytes per clock.
    pub l2_bandwidth: u32,
    /// L2 bandwidth that one SM can use, in bytes per clock.
    pub l2_port: u32,
    /// DRAM bandwidth, GB/s.
    pub dram_gbps: f64,
}

impl Memories {
    /// Bytes left for L1 when the CTAs of an SM use `shared` bytes of shared memory together.
    pub fn l1_beside(&self, shared: u64) -> u64 {
        let sizes = self.carveouts.iter().map(|kilobytes| u64::from(*kilobytes) << 10);
        let carved = sizes.clone().find(|size| *size >= shared).or(sizes.max()).unwrap_or(0);
        u64::from(self.l1_bytes).saturating_sub(carved)
    }
}

/// Capacity limits of an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Warps.
    pub warps: u32,
    /// CTAs.
    pub ctas: u32,
    /// 32-bit registers.
    pub registers: u32,
    /// Threads of one CTA.
    pub threads_per_cta: u32,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name, as given to `--machine`.
    #[serde(deserialize_with = "kept_name")]
    pub name: Name,
    /// Compute capability times ten.
    pub sm: u32,
    /// SMs.
    pub sms: u32,
    /// Boost clock in MHz: the clock of a kernel that does not reach the power limit.
    pub clock_mhz: f64,
    /// Clock with saturated tensor cores in MHz. The power limit determines it.
    pub loaded_clock_mhz: f64,
    /// Sub-partitions of an SM. Each issues one instruction per clock.
    pub schedulers: u32,
    /// Arithmetic rates.
    pub rates: Rates,
    /// Tensor-core rates.
    pub tensor: TensorRates,
    /// Latencies.
    pub latency: Latencies,
    /// Sizes and bandwidths of the memories.
    pub memory: Memories,
    /// Capacity limits for occupancy.
    pub limits: Limits,
    /// The asynchronous units, if the GPU has them.
    pub units: Option<AsyncUnits>,
    /// Time of an empty kernel in µs, launched back to back (Z: 1.1 to 2.5 µs on V100 and P100; D of CUDA
    /// graphs).
    pub launch_us: f64,
}

/// Fixed latencies from P: FFMA, IADD3 and IMAD 4; HFMA2 5; ISETP to a guard or branch 13. A branch holds its
/// warp for 5 clocks; a taken branch also refills the instruction buffer, assumed as another 5. A: MUFU 18 to
/// 23, SHFL 23. Z: a barrier takes 20 to 22 for a few warps and about two clocks for each further warp. S:
/// shared 23, each further pass 2 for one warp; several sub-partitions together get one pass per clock. M: on
/// an H200, FFMA, IMAD, barriers and shared memory agree to the clock.
const COMMON: Latencies = Latencies {
    alu: 4,
    half2: 5,
    predicate: 13,
    branch: 10,
    mufu: 18,
    double: 8,
    shuffle: 23,
    barrier: 12,
    barrier_warp: 2,
    shared: 23,
    shared_pass: 2,
    l1: 38,
    l2: 262,
    dram: 466,
    mma_k8: 18,
    mma_k16: 25,
};

/// G: 128 f32, 64 integer multiply-adds, 64 integer operations, 64 half2, 2 doubles, 16 special functions.
const ADA_RATES: Rates = Rates { fma: 128, imad: 64, alu: 64, half2: 64, double: 2, mufu: 16 };
/// L: L1 43, L2 273, DRAM 541 clocks; S (GA10x and later with full-rate accumulation): mma 18 and 25.
const ADA_LATENCY: Latencies = Latencies { l1: 43, l2: 273, dram: 541, double: 40, ..COMMON };
/// G: 48 warps and 24 CTAs.
const ADA_LIMITS: Limits = Limits { warps: 48, ctas: 24, registers: 65536, threads_per_cta: 1024 };
/// G: 128 KB of L1 and shared memory, 100 KB of it shared, 99 KB per CTA. D: four load-store units per
/// sub-partition; GA100 and GH100 have eight.
const ADA_MEMORY: Memories = Memories {
    l1_bytes: 128 << 10,
    carveouts: &[0, 8, 16, 32, 64, 100],
    shared_bytes: 100 << 10,
    shared_per_cta: 99 << 10,
    shared_reserved: 1024,
    l1_bandwidth: 128,
    lsu_lanes: 16,
    l2_bytes: 48 << 20,
    l2_bandwidth: 1024,
    l2_port: 64,
    dram_gbps: 300.0,
};

/// G: 128 f32, 64 half-rate integer, 256 f16 as half2 (128 lanes), 64 doubles.
const HOPPER_RATES: Rates = Rates { fma: 128, imad: 64, alu: 64, half2: 128, double: 64, mufu: 16 };
/// M: special functions 17, shuffles 24, L1 34, L2 283 over a thousand lines, DRAM 674 including the TLB; mma
/// k8 17, k16 24.
const HOPPER_LATENCY: Latencies =
    Latencies { mufu: 17, shuffle: 24, l1: 34, l2: 283, dram: 674, mma_k8: 17, mma_k16: 24, ..COMMON };
/// M: an m16n8k16 takes 1.5 clocks of the SM, 2731 FLOP per clock. This is two thirds of the dense peak of
/// 4096, which only wgmma reaches (L: 62 %). The other types follow L's ratios; fp8 as f16.
const HOPPER_MMA_SYNC: TensorRates =
    TensorRates { f16_f32: 2731, f16_f16: 2731, tf32: 1365, fp8: 2731, int8: 5461, f64: 256 };
/// D: 989 TFLOP/s of f16 at 1830 MHz are 4096 FLOP per clock and SM. L: another SM of the cluster is 180
/// clocks away; 3.3 TB/s between the 132 SMs; m64n8k16 takes 18 clocks, for 4 of which the tensor core works.
/// An experiment of this project: a bulk copy takes 0.34 µs in addition to its bytes, and a programmatic
/// dependent launch saves 0.6 µs.
const HOPPER_UNITS: AsyncUnits = AsyncUnits {
    wgmma: TensorRates { f16_f32: 4096, f16_f16: 4096, tf32: 2048, fp8: 8192, int8: 8192, f64: 256 },
    wgmma_latency: 14,
    bulk_latency: 650,
    cluster_latency: 180,
    cluster_bandwidth: 14,
    overlap_us: 0.6,
};
/// G: 64 warps, 32 CTAs.
const DATACENTRE_LIMITS: Limits = Limits { warps: 64, ctas: 32, registers: 65536, threads_per_cta: 1024 };
/// D: 256 KB of L1 and shared memory, 228 KB of it shared; 50 MB L2. M: 36.6 bytes per clock from L2 for each
/// of 132 SMs, 84 for a single SM.
const H100_MEMORY: Memories = Memories {
    l1_bytes: 256 << 10,
    carveouts: &[0, 8, 16, 32, 64, 100, 132, 164, 196, 228],
    shared_bytes: 228 << 10,
    shared_per_cta: 227 << 10,
    shared_reserved: 1024,
    l1_bandwidth: 128,
    lsu_lanes: 32,
    l2_bytes: 50 << 20,
    l2_bandwidth: 4827,
    l2_port: 84,
    dram_gbps: 3350.0,
};

/// NVIDIA H100 SXM5. D: 132 SMs, 1980 MHz; 989 TFLOP/s are stated at 1830 MHz.
pub const H100: Gpu = Gpu {
    name: "H100",
    sm: 90,
    sms: 132,
    clock_mhz: 1980.0,
    // Dense f16 at the 700 W limit runs at 1.4 to 1.6 GHz: cuBLAS reaches about 760 of 989 TFLOP/s.
    loaded_clock_mhz: 1500.0,
    schedulers: 4,
    rates: HOPPER_RATES,
    tensor: HOPPER_MMA_SYNC,
    latency: HOPPER_LATENCY,
    memory: H100_MEMORY,
    limits: DATACENTRE_LIMITS,
    units: Some(HOPPER_UNITS),
    launch_us: 1.2,
};

/// NVIDIA H200 SXM. D: an H100 with 4.8 TB/s of HBM3e.
pub const H200: Gpu = Gpu { name: "H200", memory: Memories { dram_gbps: 4800.0, ..H100_MEMORY }, ..H100 };

/// NVIDIA A100 SXM4 80 GB. D: 108 SMs, 1410 MHz, 2039 GB/s, 312 TFLOP/s = 2048 FLOP per clock and SM, 40 MB
/// L2 with 5120 bytes per clock, of which about 2/3 is reached (L).
pub const A100: Gpu = Gpu {
    name: "A100",
    sm: 80,
    sms: 108,
    clock_mhz: 1410.0,
    loaded_clock_mhz: 1280.0,
    schedulers: 4,
    // G: 64 f32, 64 integer, 256 f16 as half2, 32 doubles.
    rates: Rates { fma: 64, imad: 64, alu: 64, half2: 128, double: 32, mufu: 16 },
    tensor: TensorRates { f16_f32: 2048, f16_f16: 2048, tf32: 1024, fp8: 0, int8: 4096, f64: 128 },
    latency: COMMON,
    memory: Memories {
        l1_bytes: 192 << 10,
        carveouts: &[0, 8, 16, 32, 64, 100, 132, 164],
        shared_bytes: 164 << 10,
        shared_per_cta: 163 << 10,
        shared_reserved: 1024,
        l1_bandwidth: 128,
        lsu_lanes: 32,
        l2_bytes: 40 << 20,
        l2_bandwidth: 3400,
        l2_port: 64,
        dram_gbps: 2039.0,
    },
    limits: DATACENTRE_LIMITS,
    units: None,
    launch_us: 1.5,
};

/// NVIDIA L4. D: AD104, 58 SMs, boost 2040 MHz, base 795 MHz, 72 W, 300 GB/s; 121 TFLOP/s f16 with f32
/// accumulation = 1024 FLOP per clock and SM (full rate, unlike GeForce), 242 fp8 and int8.
pub const L4: Gpu = Gpu {
    name: "L4",
    sm: 89,
    sms: 58,
    clock_mhz: 2040.0,
    // 72 W do not sustain 2040 MHz with busy tensor cores. The data sheet guarantees only the base clock of
    // 795 MHz. The mean of base and boost is assumed for a saturated f16 mma, which gives 85 of 121 TFLOP/s.
    loaded_clock_mhz: 1417.0,
    schedulers: 4,
    rates: ADA_RATES,
    tensor: TensorRates { f16_f32: 1024, f16_f16: 1024, tf32: 512, fp8: 2048, int8: 2048, f64: 4 },
    latency: ADA_LATENCY,
    memory: ADA_MEMORY,
    limits: ADA_LIMITS,
    units: None,
    launch_us: 2.0,
};

/// NVIDIA GeForce RTX 4090. D: AD102, 128 SMs, 2520 MHz, 1008 GB/s, 72 MB L2. GeForce accumulates f16
/// products in f32 at half rate: 165 TFLOP/s, and 330 with f16 accumulators. C: about 5 TB/s from L2.
pub const RTX_4090: Gpu = Gpu {
    name: "RTX 4090",
    sm: 89,
    sms: 128,
    clock_mhz: 2520.0,
    loaded_clock_mhz: 2520.0,
    schedulers: 4,
    rates: ADA_RATES,
    tensor: TensorRates { f16_f32: 512, f16_f16: 1024, tf32: 256, fp8: 1024, int8: 2048, f64: 4 },
    // S, L: 19 and 33 clocks with f32 accumulators at half rate.
    latency: Latencies { mma_k8: 19, mma_k16: 33, ..ADA_LATENCY },
    memory: Memories { l2_bytes: 72 << 20, l2_bandwidth: 2048, dram_gbps: 1008.0, ..ADA_MEMORY },
    limits: ADA_LIMITS,
    units: None,
    launch_us: 1.8,
};

/// Fraction of the data sheet's DRAM bandwidth that streaming kernels reach (BabelStream on A100, H100: 0.88
/// to 0.92).
pub const DRAM_EFFICIENCY: f64 = 0.90;

/// Every machine of the table.
pub const MACHINES: [&Gpu; 5] = [&H200, &H100, &A100, &L4, &RTX_4090];

impl Gpu {
    /// The machine with this name. Case, spaces, dashes and underscores are ignored.
    pub fn named(name: &str) -> Option<&'static Gpu> {
        let plain = |s: &str| s.to_lowercase().replace([' ', '-', '_'], "");
        let wanted = plain(name);
        MACHINES
            .into_iter()
            .find(|gpu| plain(gpu.name) == wanted || plain(gpu.name) == format!("rtx{wanted}"))
    }

    /// The machine of the table for a driver's device name, such as `NVIDIA H200` or `NVIDIA A100-SXM4-80GB`.
    pub fn of_device(name: &str) -> Option<&'static Gpu> {
        let words: Vec<&str> = name.split([' ', '-']).collect();
        MACHINES.into_iter().find(|gpu| gpu.name.split(' ').all(|part| words.contains(&part)))
    }

    /// Achievable DRAM bytes per clock at the boost clock.
    pub fn dram_bytes_per_clock(&self) -> f64 {
        DRAM_EFFICIENCY * self.memory.dram_gbps * 1e3 / self.clock_mhz
    }

    /// L2 bytes per clock available to each of `sms` active SMs.
    pub fn l2_bytes_per_clock(&self, sms: u32) -> f64 {
        let share = f64::from(self.memory.l2_bandwidth) / f64::from(sms.max(1));
        share.min(f64::from(self.memory.l2_port))
    }

    /// Dense f16 mma.sync rate of the whole device at the boost clock, in TFLOP/s.
    pub fn tensor_tflops(&self) -> f64 {
        f64::from(self.tensor.f16_f32) * f64::from(self.sms) * self.clock_mhz * 1e-6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_agrees_with_the_data_sheets() {
        let close =
            |value: f64, sheet: f64| assert!((value / sheet - 1.0).abs() < 0.02, "{value} vs {sheet}");
        close(A100.tensor_tflops(), 312.0);
        close(L4.tensor_tflops(), 121.0);
        close(RTX_4090.tensor_tflops(), 165.2);
        close(f64::from(L4.rates.fma * 2 * L4.sms) * L4.clock_mhz * 1e-6, 30.3);
        close(f64::from(A100.rates.fma * 2 * A100.sms) * A100.clock_mhz * 1e-6, 19.5);
        close(HOPPER_MMA_SYNC.f16_f32 as f64 / 4096.0, 2.0 / 3.0);
    }

    #[test]
    fn names_are_found_however_they_are_written() {
        assert_eq!(Gpu::named("rtx-4090").map(|g| g.name), Some("RTX 4090"));
        assert_eq!(Gpu::named("4090").map(|g| g.name), Some("RTX 4090"));
        assert_eq!(Gpu::named("l4").map(|g| g.name), Some("L4"));
        assert_eq!(Gpu::named("B200"), None);
        assert_eq!(Gpu::of_device("NVIDIA A100-SXM4-80GB"), Some(&A100));
        assert_eq!(Gpu::of_device("NVIDIA GeForce RTX 4090"), Some(&RTX_4090));
        assert_eq!(Gpu::of_device("NVIDIA B200"), None);
    }
}
