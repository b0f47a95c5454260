use super::MmaShape;
use crate::Type;

/// Where A of a `wgmma` lies; B is always in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WgmmaSource {
    /// Four 32-bit registers a thread.
    Registers,
    /// Shared memory, told by a matrix descriptor.
    Shared,
}

/// `wgmma.mma_async.sync.aligned`: D = A·B, or D + A·B, by four warps (PTX ISA, "Asynchronous Warpgroup Level Matrix
/// Instructions").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wgmma {
    /// m64nNkK.
    pub shape: MmaShape,
    /// Type of D: f32, f16 or s32.
    pub d: Type,
    /// Type of A.
    pub a: Type,
    /// Type of B.
    pub b: Type,
    /// Where A lies. The text shows it by the operand alone.
    pub a_source: WgmmaSource,
    /// `.satfinite` (integers).
    pub satfinite: bool,
}

impl Wgmma {
    /// Rows of D.
    pub const ROWS: u16 = 64;
    /// 32-bit registers a thread of A.
    pub const A_REGISTERS: usize = 4;

    /// `m64n<columns>kK` with K of the inputs' type, 32 bytes.
    pub const fn new(columns: u16, d: Type, ab: Type, a_source: WgmmaSource) -> Wgmma {
        let shape = MmaShape { m: Wgmma::ROWS, n: columns, k: (256 / ab.bits()) as u16 };
        // An element of tf32 takes 32 bits, which `bits` already says.
        Wgmma { shape, d, a: ab, b: ab, a_source, satfinite: false }
    }

    /// 32-bit registers a thread of D, which an f16 shares with its neighbour.
    pub const fn d_registers(&self) -> usize {
        let elements = self.shape.n as usize / 2;
        if self.d.bits() == 16 { elements / 2 } else { elements }
    }

    /// Whether it takes `imm-scale-a` and `imm-scale-b`: all floating-point forms.
    pub const fn has_scales(&self) -> bool {
        self.a.is_float()
    }

    /// Whether B, and A in shared memory, may be MN-major (`imm-trans-a`, `imm-trans-b`): 16-bit inputs.
    pub const fn has_transpose(&self) -> bool {
        self.a.is_float() && self.a.bits() == 16
    }
}
