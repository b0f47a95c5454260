//! The GPU architectures for which kernels are emitted.

use serde::{Deserialize, Serialize};

/// Properties of a GPU that generators and plan checks use (CUDA C++ Programming Guide, "Compute
/// Capabilities").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Arch {
    /// Compute capability times ten.
    pub sm: u32,
    /// Number of SMs. Tiles must be small enough to occupy all of them.
    pub multiprocessors: u32,
    /// Largest shared memory of one CTA, in bytes.
    pub shared_per_cta: u32,
    /// Shared memory of an SM, in bytes. Each resident CTA also takes [`Arch::SHARED_RESERVED`].
    pub shared_per_sm: u32,
}

impl Arch {
    /// Shared memory that the system reserves per CTA, in bytes.
    pub const SHARED_RESERVED: u32 = 1024;
    /// Threads that fit an SM.
    pub const THREADS_PER_SM: u32 = 2048;
    /// Largest grid extent in y and z.
    pub const GRID_YZ: u64 = 65_535;
    /// Registers of an SM.
    pub const REGISTERS_PER_SM: u32 = 65_536;
    /// Largest number of registers that a thread can address.
    pub const REGISTERS_PER_THREAD: u32 = 255;

    /// A100.
    pub const SM_80: Arch = Arch::new(80, 108, 164);
    /// RTX 3090.
    pub const SM_86: Arch = Arch::new(86, 82, 100);
    /// L4.
    pub const SM_89: Arch = Arch::new(89, 58, 100);
    /// H100 and H200.
    pub const SM_90: Arch = Arch::new(90, 132, 228);
    /// RTX 5090.
    pub const SM_120: Arch = Arch::new(120, 170, 100);

    /// The architectures for which kernels are emitted.
    pub const ALL: [Arch; 5] = [Arch::SM_80, Arch::SM_86, Arch::SM_89, Arch::SM_90, Arch::SM_120];

    const fn new(sm: u32, multiprocessors: u32, shared_kib: u32) -> Arch {
        let shared_per_sm = shared_kib * 1024;
        let shared_per_cta = shared_per_sm - Arch::SHARED_RESERVED;
        Arch { sm, multiprocessors, shared_per_cta, shared_per_sm }
    }

    /// The architecture of compute capability `sm` (times ten), with the SM count of its usual device.
    pub fn of(sm: u32) -> Option<Arch> {
        Arch::ALL.into_iter().find(|arch| arch.sm == sm)
    }

    /// Whether tensor cores multiply 8-bit floats: sm_89 and later.
    pub const fn multiplies_fp8(&self) -> bool {
        self.sm >= 89
    }

    /// Whether tensor cores take products of a warpgroup from shared memory (`wgmma`): sm_90 alone.
    pub const fn has_warpgroup_products(&self) -> bool {
        self.sm == 90
    }

    /// The PTX target of kernels that later architectures run, too.
    pub const fn target(&self) -> ptx::Target {
        ptx::Target::sm(self.sm)
    }

    /// The PTX target of kernels that use all features of this architecture.
    pub const fn full_target(&self) -> ptx::Target {
        ptx::Target::of_device(self.sm)
    }
}
