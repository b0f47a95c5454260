//! A kernel in which each warp loads three matrices by `wmma.load`, multiplies them, and stores the result.

use emu::numerics::tensor::wmma::{FragmentLayout, Matrix, WmmaKind, wmma, wmma_f64};
use emu::numerics::tensor::{self, Accumulator, Distribution, TensorRules};
use ptx::{
    Builder, Global, Imm, MatrixOrder, MmaShape, Module, Op, Operand, Pointer, R32, R64, Space, SpecialReg,
    Target, Type, Value, Wmma, WmmaAccess, WmmaMatrix,
};

use super::kernel::{ENTRY, in_memory, input, registers_of};
use super::{Operands, WARPS_PER_CTA};

/// A `wmma` product with the memory order of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    kind: WmmaKind,
    /// The orders of A, of B, and of C and D.
    orders: [MatrixOrder; 3],
}

impl Matrices {
    /// The two variants in which each matrix has either order.
    pub fn orders(kind: WmmaKind) -> [Matrices; 2] {
        use MatrixOrder::{Col, Row};
        [Matrices { kind, orders: [Row, Col, Row] }, Matrices { kind, orders: [Col, Row, Col] }]
    }

    fn accesses(self) -> [WmmaAccess; 3] {
        let tile = self.kind.tile();
        let sum = match tile.accumulator() {
            Accumulator::F16 => Type::F16,
            Accumulator::F32 => Type::F32,
            Accumulator::F64 => Type::F64,
            Accumulator::S32 { .. } => Type::S32,
        };
        let shape = self.kind.shape();
        let shape = MmaShape { m: shape.m as u16, n: shape.n as u16, k: shape.k as u16 };
        let access = |matrix, order, ty| WmmaAccess { matrix, order, shape, space: Space::Global, ty };
        let [a, b, c] = self.orders;
        [
            access(WmmaMatrix::A, a, input(tile.a())),
            access(WmmaMatrix::B, b, input(tile.b())),
            access(WmmaMatrix::Accumulator, c, sum),
        ]
    }

    fn operation(self) -> Wmma {
        let [a, b, c] = self.accesses();
        Wmma {
            a_order: a.order,
            b_order: b.order,
            shape: c.shape,
            rounding: None,
            d: c.ty,
            a: a.ty,
            b: b.ty,
            c: c.ty,
            satfinite: self.kind.tile().accumulator() == Accumulator::S32 { saturate: true },
            bits: None,
        }
    }

    pub(super) fn module(self, target: Target) -> (Module, String) {
        let module = match self.kind.tile().accumulator() {
            Accumulator::F64 => self.build::<R64>(target),
            Accumulator::F16 | Accumulator::F32 | Accumulator::S32 { .. } => self.build::<R32>(target),
        };
        (module, Op::Wmma(self.operation()).to_string())
    }

    fn build<V: Value>(self, target: Target) -> Module {
        let mut k = Builder::kernel(ENTRY);
        let pointers = ["a", "b", "c", "d"].map(|name| k.param_pointer(name));
        let (cta, thread) = (k.special(SpecialReg::CtaidX), k.special(SpecialReg::TidX));
        let warp_in_cta = k.shr_u(thread, 5);
        let warp = k.mad(cta, WARPS_PER_CTA as u32, warp_in_cta);
        let bytes = self.bytes();
        let places = [0, 1, 2, 3].map(|i| k.index(pointers[i], warp, bytes[i] as u32));
        let accesses = self.accesses();
        let stride = |access: WmmaAccess| Operand::Imm(Imm::Int(access.default_stride().into()));
        let address = |at: Global| Operand::Address(at.address());
        let fragments = [0, 1, 2].map(|i| {
            let access: WmmaAccess = accesses[i];
            let fragment = registers_of((0..access.registers()).map(|_| k.reg::<V>()).collect());
            k.op(Op::WmmaLoad(access), [fragment.clone(), address(places[i]), stride(access)]);
            fragment
        });
        let [a, b, c] = fragments;
        k.op(Op::Wmma(self.operation()), [c.clone(), a, b, c.clone()]);
        k.op(Op::WmmaStore(accesses[2]), [address(places[3]), c, stride(accesses[2])]);
        k.into_module(target)
    }

    pub(super) fn bytes(self) -> [usize; 4] {
        let [a, b, c] = self.accesses().map(|access| {
            let (rows, columns) = access.extent();
            usize::from(rows) * usize::from(columns) * access.ty.bytes() as usize
        });
        [a, b, c, c]
    }

    pub(super) fn width(self) -> usize {
        self.accesses()[2].ty.bytes() as usize
    }

    /// Random matrices and their product.
    pub(super) fn draw(
        self,
        rules: TensorRules,
        distribution: Distribution,
        seed: u64,
    ) -> Result<Operands, tensor::MmaError> {
        let [a, b, c] = self.random(distribution, seed);
        let registers = [(0, &a), (1, &b), (2, &c)].map(|(i, matrix)| self.registers(i, matrix));
        let narrow =
            |i: usize| registers[i].iter().map(|r: &[u64; 32]| r.map(|x| x as u32)).collect::<Vec<_>>();
        let sums = if self.kind.tile().accumulator() == Accumulator::F64 {
            let mut sums = registers[2].clone();
            wmma_f64(self.kind, rules, &registers[0], &registers[1], &mut sums)?;
            sums
        } else {
            let mut sums = narrow(2);
            wmma(self.kind, rules, &narrow(0), &narrow(1), &mut sums)?;
            sums.iter().map(|r| r.map(u64::from)).collect()
        };
        let mut d = vec![0; c.len()];
        let width = self.width();
        self.each(2, |register, lane, shift, at| {
            d[at * width..][..width].copy_from_slice(&(sums[register][lane] >> shift).to_le_bytes()[..width]);
        });
        Ok([a, b, c, d])
    }

    /// Random bytes for A, B and C, drawn as many fragments of the tile as the matrices hold.
    fn random(self, distribution: Distribution, seed: u64) -> [Vec<u8>; 3] {
        let tile = self.kind.tile();
        let bytes = self.bytes();
        let mut matrices = [0, 1, 2].map(|i| Vec::with_capacity(bytes[i]));
        for part in 0.. {
            let seed = seed.wrapping_mul(8) + part;
            let parts = if tile.accumulator() == Accumulator::F64 {
                let f = tensor::random_fragment_f64(tile, distribution, seed);
                [f.a, f.b, f.c].map(|lanes| in_memory(lanes.as_flattened(), u64::to_le_bytes))
            } else {
                let f = tensor::random_fragment(tile, distribution, seed);
                [f.a, f.b, f.c].map(|lanes| in_memory(lanes.as_flattened(), u32::to_le_bytes))
            };
            let mut complete = true;
            for ((matrix, part), bytes) in matrices.iter_mut().zip(parts).zip(bytes) {
                matrix.extend(part.into_iter().take(bytes - matrix.len()));
                complete &= matrix.len() == bytes;
            }
            if complete {
                break;
            }
        }
        matrices
    }

    /// Calls `f` with register, lane, shift and memory offset of every element of A, B or C.
    fn each(self, i: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
        let access = self.accesses()[i];
        let shape = self.kind.shape();
        let matrix = [Matrix::A, Matrix::B, Matrix::Accumulator][i];
        let layout = FragmentLayout::new(matrix, shape, access.ty.bits() as usize, access.registers());
        let stride = usize::from(access.default_stride());
        let along = (access.order == MatrixOrder::Row) == layout.lines_are_rows;
        layout.each(|register, lane, line, place, shift| {
            f(register, lane, shift, if along { line * stride + place } else { place * stride + line });
        });
    }

    /// The fragment registers of A, B or C.
    fn registers(self, i: usize, matrix: &[u8]) -> Vec<[u64; 32]> {
        let access = self.accesses()[i];
        let width = access.ty.bytes() as usize;
        let mut registers = vec![[0u64; 32]; access.registers()];
        self.each(i, |register, lane, shift, at| {
            let mut word = [0; 8];
            word[..width].copy_from_slice(&matrix[at * width..][..width]);
            registers[register][lane] |= u64::from_le_bytes(word) << shift;
        });
        registers
    }
}
