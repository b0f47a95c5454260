use super::{BitOp, MatrixOrder, MmaShape, Rounding};
use crate::{Space, Type};

/// Which matrix of `D = A·B + C` a fragment of `wmma` is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WmmaMatrix {
    /// A, M×K.
    A,
    /// B, K×N.
    B,
    /// C and D, M×N: `wmma.load.c` and `wmma.store.d`.
    Accumulator,
}

/// `wmma.load.{a,b,c}.sync.aligned.<order>.<shape>{.space}.<type>` and `wmma.store.d…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WmmaAccess {
    /// Which matrix.
    pub matrix: WmmaMatrix,
    /// Whether its rows or its columns are contiguous in memory.
    pub order: MatrixOrder,
    /// Shape of the product.
    pub shape: MmaShape,
    /// `Global`, `Shared`, or `Generic` when no space is written.
    pub space: Space,
    /// Type of the elements.
    pub ty: Type,
}

impl WmmaAccess {
    /// Rows and columns of the matrix.
    pub const fn extent(&self) -> (u16, u16) {
        let MmaShape { m, n, k } = self.shape;
        match self.matrix {
            WmmaMatrix::A => (m, k),
            WmmaMatrix::B => (k, n),
            WmmaMatrix::Accumulator => (m, n),
        }
    }

    /// Elements from one row (or column) to the next when the instruction names no stride.
    pub const fn default_stride(&self) -> u16 {
        let (rows, columns) = self.extent();
        match self.order {
            MatrixOrder::Row => columns,
            MatrixOrder::Col => rows,
        }
    }

    /// Registers per thread: 32-bit registers, or 64-bit ones for f64.
    pub fn registers(&self) -> usize {
        fragment(self.matrix, self.shape, self.ty)
    }

    /// Bytes of a thread's fragment.
    fn fragment_bytes(&self) -> u32 {
        self.ty.bytes().clamp(4, 8) * self.registers() as u32
    }

    /// Bytes that the address must be a multiple of: the size of a thread's fragment (PTX ISA, "Matrix storage for WMMA"),
    /// but no more than the 32 of the CUDA C++ Programming Guide ("Warp Matrix Functions").
    pub fn address_alignment(&self) -> u32 {
        self.fragment_bytes().min(32)
    }

    /// Bytes that the stride must be a multiple of: the same, but no more than the guide's 16.
    pub fn stride_alignment(&self) -> u32 {
        self.fragment_bytes().min(16)
    }
}

/// `wmma.mma.sync.aligned.<a order>.<b order>.<shape>…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wmma {
    /// Order of A in memory, as its load says.
    pub a_order: MatrixOrder,
    /// Order of B in memory.
    pub b_order: MatrixOrder,
    /// Shape.
    pub shape: MmaShape,
    /// Rounding, which f64 alone may name.
    pub rounding: Option<Rounding>,
    /// Type of D.
    pub d: Type,
    /// Type of A; the text does not name f16.
    pub a: Type,
    /// Type of B.
    pub b: Type,
    /// Type of C.
    pub c: Type,
    /// `.satfinite` (integers).
    pub satfinite: bool,
    /// `.xor.popc` or `.and.popc` (b1).
    pub bits: Option<BitOp>,
}

impl Wmma {
    /// Registers per thread of (A, B, C, D).
    pub fn registers(&self) -> [usize; 4] {
        let of = |matrix, ty| fragment(matrix, self.shape, ty);
        [
            of(WmmaMatrix::A, self.a),
            of(WmmaMatrix::B, self.b),
            of(WmmaMatrix::Accumulator, self.c),
            of(WmmaMatrix::Accumulator, self.d),
        ]
    }
}

/// PTX ISA, "Matrix fragments for WMMA". A and B of f16 have eight registers in every shape, as on Volta, where every
/// element was held twice.
fn fragment(matrix: WmmaMatrix, shape: MmaShape, ty: Type) -> usize {
    let MmaShape { m, n, k } = shape;
    let (rows, columns) = match matrix {
        WmmaMatrix::A | WmmaMatrix::B if ty == Type::F16 => return 8,
        WmmaMatrix::A => (m, k),
        WmmaMatrix::B => (k, n),
        WmmaMatrix::Accumulator => (m, n),
    };
    let bits = u32::from(rows) * u32::from(columns) * ty.bits();
    (bits / 32 / ty.bits().max(32)).max(1) as usize
}
