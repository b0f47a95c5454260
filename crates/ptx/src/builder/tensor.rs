//! Instructions of tensor cores and of 16-bit floats.

use super::memory::vector;
use super::{Builder, F32, Pointer, R16, R32, Shared, Src, Value};
use crate::{
    Cvt, CvtRounding, CvtSaturation, MatrixAccess, MatrixOrder, MatrixShape, Mma, MmaShape, Op, Operand,
    Rounding, Space, Type, Wmma, WmmaAccess, WmmaMatrix,
};

/// A 16-bit floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Half {
    /// The PTX type of one element.
    pub const fn ty(self) -> Type {
        match self {
            Half::F16 => Type::F16,
            Half::Bf16 => Type::Bf16,
        }
    }

    /// The PTX type of a pair.
    pub const fn pair(self) -> Type {
        match self {
            Half::F16 => Type::F16x2,
            Half::Bf16 => Type::Bf16x2,
        }
    }
}

/// A 16×16 matrix of a `wmma` with f16 inputs and f32 accumulators.
const fn tile<P: Pointer>(matrix: WmmaMatrix, order: MatrixOrder, ty: Type) -> WmmaAccess {
    WmmaAccess { matrix, order, shape: MmaShape::M16N16K16, space: P::SPACE, ty }
}

const fn matrices(count: usize, trans: bool) -> MatrixAccess {
    MatrixAccess { shape: MatrixShape::M8N8, count: count as u8, trans, space: Space::Shared, ty: Type::B16 }
}

impl Builder {
    /// `c += a · b` with m16n8k16: `a` 16×16 row-major, `b` 16×8 column-major, `c` 16×8 in f32.
    pub fn mma_m16n8k16(&mut self, half: Half, c: [F32; 4], a: [R32; 4], b: [R32; 2]) {
        self.mma(MmaShape::M16N8K16, [half.ty(); 2], c, &a, &b);
    }

    /// `c += a · b` with m16n8k32 of 8-bit floats (sm_89): `a` 16×32 row-major, `b` 32×8 column-major, each
    /// of its own type, `c` 16×8 in f32.
    pub fn mma_m16n8k32(&mut self, types: [Type; 2], c: [F32; 4], a: [R32; 4], b: [R32; 2]) {
        self.mma(MmaShape::M16N8K32, types, c, &a, &b);
    }

    /// `c += a · b` with m16n8k8: `a` 16×8 row-major, `b` 8×8 column-major, `c` 16×8 in f32.
    pub fn mma_m16n8k8(&mut self, half: Half, c: [F32; 4], a: [R32; 2], b: R32) {
        self.mma(MmaShape::M16N8K8, [half.ty(); 2], c, &a, &[b]);
    }

    /// `c += a · b` with m16n8k8 of tf32: `a` 16×8 row-major, `b` 8×8 column-major, `c` 16×8 in f32.
    pub fn mma_tf32(&mut self, c: [F32; 4], a: [R32; 4], b: [R32; 2]) {
        self.mma(MmaShape::M16N8K8, [Type::Tf32; 2], c, &a, &b);
    }

    /// An f32 rounded to tf32, to the nearest, as the bits of an f32.
    pub fn to_tf32(&mut self, a: F32) -> R32 {
        let d = self.reg();
        let to_tf32 = Cvt { to: Type::Tf32, rounding: Some(CvtRounding::Rna), ..round_to(Type::F16) };
        self.compute::<R32>(d, Op::Cvt(to_tf32), [Operand::Reg(a.reg())]);
        d
    }

    fn mma(&mut self, shape: MmaShape, [of_a, of_b]: [Type; 2], c: [F32; 4], a: &[R32], b: &[R32]) {
        let op = Op::Mma(Mma::new(shape, Type::F32, of_a, of_b, Type::F32));
        // PTX writes the B fragment of m16n8k8 as a vector of one element.
        self.op(op, [vector(&c), vector(a), vector(b), vector(&c)]);
    }

    /// Loads `N` = 1, 2 or 4 matrices of 8×8 16-bit elements. Lane `i` provides the address of row `i mod 8`
    /// of matrix `i / 8` (PTX ISA, "ldmatrix").
    pub fn ldmatrix<const N: usize>(&mut self, row: Shared) -> [R32; N] {
        self.load_matrices(row, false)
    }

    /// Like [`Builder::ldmatrix`], with each matrix transposed.
    pub fn ldmatrix_trans<const N: usize>(&mut self, row: Shared) -> [R32; N] {
        self.load_matrices(row, true)
    }

    fn load_matrices<const N: usize>(&mut self, row: Shared, trans: bool) -> [R32; N] {
        const { assert!(N == 1 || N == 2 || N == 4, "ldmatrix loads 1, 2 or 4 matrices") };
        let d: [R32; N] = self.regs();
        self.op(Op::Ldmatrix(matrices(N, trans)), [vector(&d), Operand::Address(row.address())]);
        d
    }

    /// Stores `N` = 1, 2 or 4 matrices of 8×8 16-bit elements (sm_90).
    pub fn stmatrix<const N: usize>(&mut self, row: Shared, matrix: [R32; N]) {
        const { assert!(N == 1 || N == 2 || N == 4, "stmatrix stores 1, 2 or 4 matrices") };
        self.op(Op::Stmatrix(matrices(N, false)), [Operand::Address(row.address()), vector(&matrix)]);
    }

    /// Loads A (16×16 f16) of [`Builder::wmma`]; `stride` counts elements.
    pub fn wmma_load_a<P: Pointer>(&mut self, order: MatrixOrder, at: P, stride: u32) -> [R32; 8] {
        self.wmma_load(tile::<P>(WmmaMatrix::A, order, Type::F16), at, stride)
    }

    /// Loads B (16×16 f16) of [`Builder::wmma`]; `stride` counts elements.
    pub fn wmma_load_b<P: Pointer>(&mut self, order: MatrixOrder, at: P, stride: u32) -> [R32; 8] {
        self.wmma_load(tile::<P>(WmmaMatrix::B, order, Type::F16), at, stride)
    }

    fn wmma_load<P: Pointer>(&mut self, access: WmmaAccess, at: P, stride: u32) -> [R32; 8] {
        let d: [R32; 8] = self.regs();
        self.op(
            Op::WmmaLoad(access),
            [vector(&d), Operand::Address(at.address()), Src::<R32>::from(stride).into()],
        );
        d
    }

    /// `c += a · b` with m16n16k16 of f16. The orders must be those that A and B were loaded with.
    pub fn wmma(&mut self, c: [F32; 8], a: ([R32; 8], MatrixOrder), b: ([R32; 8], MatrixOrder)) {
        let op = Op::Wmma(Wmma::f16(a.1, b.1));
        self.op(op, [vector(&c), vector(&a.0), vector(&b.0), vector(&c)]);
    }

    /// Stores the accumulators of [`Builder::wmma`]; `stride` counts elements.
    pub fn wmma_store<P: Pointer>(&mut self, order: MatrixOrder, at: P, c: [F32; 8], stride: u32) {
        let access = tile::<P>(WmmaMatrix::Accumulator, order, Type::F32);
        self.op(
            Op::WmmaStore(access),
            [Operand::Address(at.address()), vector(&c), Src::<R32>::from(stride).into()],
        );
    }

    /// Two f32 rounded to a 16-bit format and packed, `low` in the lower half.
    pub fn pack(&mut self, half: Half, low: F32, high: F32) -> R32 {
        let d = self.reg();
        self.compute::<R32>(
            d,
            Op::Cvt(round_to(half.pair())),
            [Src::from(high).into(), Src::from(low).into()],
        );
        d
    }

    /// Four f32 rounded to e4m3 and packed, the first in the lowest byte. Numbers beyond ±448 become ±448.
    pub fn pack_e4m3(&mut self, values: [F32; 4]) -> R32 {
        self.pack_fp8(Type::E4m3x2, values)
    }

    /// Four f32 rounded to the 8-bit floats of a pair type (`E4m3x2` or `E5m2x2`) and packed, the first in
    /// the lowest byte. Numbers beyond the largest become the largest.
    pub fn pack_fp8(&mut self, pair: Type, [a, b, c, d]: [F32; 4]) -> R32 {
        let cvt = Cvt { saturation: CvtSaturation::SatFinite, ..round_to(pair) };
        let mut pair = |low: F32, high: F32| {
            let pair: R16 = self.reg();
            self.compute::<R16>(pair, Op::Cvt(cvt), [Src::from(high).into(), Src::from(low).into()]);
            pair
        };
        let [low, high] = [pair(a, b), pair(c, d)];
        self.join16(low, high)
    }

    /// Two 8-bit floats of a pair type (`E4m3x2` or `E5m2x2`) as two f16, exactly.
    pub fn widen_fp8(&mut self, pair: Type, a: R16) -> R32 {
        let cvt = Cvt { to: Type::F16x2, from: pair, ..round_to(Type::F16x2) };
        let d = self.reg();
        self.compute::<R32>(d, Op::Cvt(cvt), [Operand::Reg(a.reg())]);
        d
    }

    /// An f32 rounded to a 16-bit float.
    pub fn from_f32(&mut self, half: Half, a: F32) -> R16 {
        self.cvt(half.ty(), Type::F32, Some(CvtRounding::Float(Rounding::Rn)), a)
    }

    /// A 16-bit float as f32, exactly.
    pub fn to_f32(&mut self, half: Half, a: R16) -> F32 {
        match half {
            Half::F16 => self.cvt(Type::F32, Type::F16, None, a),
            // `cvt.f32.bf16` needs sm_90. A bf16 is the upper half of the f32 with the same value.
            Half::Bf16 => {
                let zero = self.mov::<R16>(0);
                let bits = self.join16(zero, a);
                self.from_bits(bits)
            }
        }
    }

    /// The two 16-bit floats of a pair as f32, the lower half first.
    pub fn unpack(&mut self, half: Half, a: R32) -> [F32; 2] {
        self.split16(a).map(|h| self.to_f32(half, h))
    }
}

fn round_to(to: Type) -> Cvt {
    Cvt {
        to,
        from: Type::F32,
        rounding: Some(CvtRounding::Float(Rounding::Rn)),
        ftz: false,
        saturation: CvtSaturation::None,
        relu: false,
    }
}
