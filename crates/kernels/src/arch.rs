use serde::{Deserialize, Serialize};

/// What a generator and a plan's check must know of a GPU (CUDA C++ Programming Guide, "Compute
/// Capabilities").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Arch {
    /// Compute capability times ten.
    pub sm: u32,
    /// Streaming multiprocessors: decides how small tiles must be to occupy them all.
    pub multiprocessors: u32,
    /// Shared memory that one CTA may ask for, in bytes.
    pub shared_per_cta: u32,
    /// Shared memory of a multiprocessor, in bytes; each resident CTA also takes [`Arch::SHARED_RESERVED`].
    pub shared_per_sm: u32,
}

impl Arch {
    /// Shared memory that the system takes of each CTA, in bytes.
    pub const SHARED_RESERVED: u32 = 1024;
    /// Largest extent in y and z of a grid.
    pub const GRID_YZ: u64 = 65_535;
    /// Registers of a multiprocessor.
    pub const REGISTERS_PER_SM: u32 = 65_536;
    /// Registers of a thread that instructions can name.
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

    /// The architectures that kernels are made for.
    pub const ALL: [Arch; 5] = [Arch::SM_80, Arch::SM_86, Arch::SM_89, Arch::SM_90, Arch::SM_120];

    const fn new(sm: u32, multiprocessors: u32, shared_kib: u32) -> Arch {
        let shared_per_sm = shared_kib * 1024;
        let shared_per_cta = shared_per_sm - Arch::SHARED_RESERVED;
        Arch { sm, multiprocessors, shared_per_cta, shared_per_sm }
    }

    /// The architecture of that compute capability times ten, with the multiprocessors of its usual device.
    pub fn of(sm: u32) -> Option<Arch> {
        Arch::ALL.into_iter().find(|arch| arch.sm == sm)
    }

    /// The PTX target.
    pub const fn target(&self) -> ptx::Target {
        ptx::Target::sm(self.sm)
    }
}
