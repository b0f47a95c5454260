use crate::Type;

/// Shape of a matrix product, M×N×K.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "self-evident")]
pub struct MmaShape {
    pub m: u16,
    pub n: u16,
    pub k: u16,
}

impl MmaShape {
    /// m16n8k16.
    pub const M16N8K16: MmaShape = MmaShape { m: 16, n: 8, k: 16 };
    /// m16n16k16.
    pub const M16N16K16: MmaShape = MmaShape { m: 16, n: 16, k: 16 };
    /// m16n8k8.
    pub const M16N8K8: MmaShape = MmaShape { m: 16, n: 8, k: 8 };
    /// m16n8k32.
    pub const M16N8K32: MmaShape = MmaShape { m: 16, n: 8, k: 32 };
}

/// Order of a matrix operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MatrixOrder {
    Row,
    Col,
}

/// How a product of single bits is formed; its ones are then counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum BitOp {
    Xor,
    And,
}

/// `mma.sync.aligned`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mma {
    /// Shape.
    pub shape: MmaShape,
    /// Order of A; row except for m8n8k4 of f16.
    pub a_order: MatrixOrder,
    /// Order of B; col except for m8n8k4 of f16.
    pub b_order: MatrixOrder,
    /// Type of D.
    pub d: Type,
    /// Type of A.
    pub a: Type,
    /// Type of B.
    pub b: Type,
    /// Type of C.
    pub c: Type,
    /// `.satfinite` (integers).
    pub satfinite: bool,
    /// `.kind::f8f6f4` is written (sm_120a).
    pub kind_f8f6f4: bool,
    /// `.xor.popc` or `.and.popc` (b1).
    pub bits: Option<BitOp>,
}

impl Mma {
    /// `mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>`.
    pub const fn new(shape: MmaShape, d: Type, a: Type, b: Type, c: Type) -> Mma {
        Mma {
            shape,
            a_order: MatrixOrder::Row,
            b_order: MatrixOrder::Col,
            d,
            a,
            b,
            c,
            satfinite: false,
            kind_f8f6f4: false,
            bits: None,
        }
    }

    /// Registers per thread of (A, B, C, D): 32-bit registers, or 64-bit ones for f64.
    pub fn registers(&self) -> [usize; 4] {
        let MmaShape { m, n, k } = self.shape;
        let count = |rows: u16, cols: u16, ty: Type| {
            let bits = u32::from(rows) * u32::from(cols) * ty.bits().max(1);
            (bits / 32 / ty.bits().max(32)).max(1) as usize
        };
        // tf32 elements occupy 32-bit registers, which `bits` already says.
        // The Volta shape m8n8k4 of f16 computes four products in one warp: twice the registers of one tile.
        if (m, n, k) == (8, 8, 4) && self.a == Type::F16 {
            let acc = |ty: Type| if ty == Type::F32 { 8 } else { 4 };
            return [2, 2, acc(self.c), acc(self.d)];
        }
        [count(m, k, self.a), count(k, n, self.b), count(m, n, self.c), count(m, n, self.d)]
    }
}

/// Shape of one matrix of `ldmatrix`/`stmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MatrixShape {
    M8N8,
    M16N8,
    M16N16,
    M8N16,
}

/// `ldmatrix.sync.aligned.<shape>.<num>{.trans}{.shared}.<type>` and `stmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixAccess {
    /// Shape of one matrix.
    pub shape: MatrixShape,
    /// `.x1`, `.x2`, `.x4`.
    pub count: u8,
    /// `.trans`.
    pub trans: bool,
    /// `Shared`, or `Generic` when no space is written.
    pub space: crate::Space,
    /// `.b16`, `.b8`.
    pub ty: Type,
}
