//! `wmma`: products of a whole warp, composed of `mma`, and the position of every element in the fragments.
//!
//! PTX specifies neither. ptxas 13 generates the same code for sm_80 to sm_90, and this module follows that
//! machine code. A product consists of two `mma` with 16×8 sums, next to each other (m16n16k16) or one below
//! the other (m32n8k16). m8n32k16 is m32n8k16 transposed: Dᵀ = Bᵀ·Aᵀ + Cᵀ. For tf32, each of these `mma` is a
//! chain of two k4 products, even if the target has k8. A fragment therefore consists of the fragments that
//! `layout` describes for `mma`, one tile after the other.

use std::ops::Range;

use super::{Accumulator, Input, MmaError, MmaKind, Shape, TensorRules, mma, mma_f64};
use crate::numerics::{Lanes32, Lanes64};

/// One `wmma.mma` whose C and D have the same type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WmmaKind {
    shape: Shape,
    /// The `mma` that the product consists of.
    tile: MmaKind,
}

impl WmmaKind {
    /// The product of this shape and these types; `None` if PTX does not have it.
    pub fn new(shape: Shape, input: Input, accumulator: Accumulator) -> Option<WmmaKind> {
        let dims = (shape.m, shape.n, shape.k);
        let (m, k) = match (input, dims) {
            (Input::F16 | Input::Bf16 | Input::S8 | Input::U8, (16, 16, 16) | (32, 8, 16) | (8, 32, 16)) => {
                (16, 16)
            }
            (Input::Tf32, (16, 16, 8)) => (16, 4),
            (Input::F64, (8, 8, 4)) => (8, 4),
            _ => return None,
        };
        let tile = MmaKind::new(Shape { m, n: 8, k }, input, input, accumulator).ok()?;
        Some(WmmaKind { shape, tile })
    }

    /// All kinds that exist, for tests.
    pub fn all() -> Vec<WmmaKind> {
        use Input::{Bf16, F16, F64, S8, Tf32, U8};
        let shapes = [(16, 16, 16), (32, 8, 16), (8, 32, 16), (16, 16, 8), (8, 8, 4)];
        let saturating = [false, true].map(|saturate| Accumulator::S32 { saturate });
        let sums = [Accumulator::F16, Accumulator::F32, Accumulator::F64].into_iter().chain(saturating);
        let mut kinds = Vec::new();
        for sum in sums {
            for input in [F16, Bf16, Tf32, F64, S8, U8] {
                kinds.extend(shapes.iter().filter_map(|&(m, n, k)| Self::new(Shape { m, n, k }, input, sum)));
            }
        }
        kinds
    }

    /// The shape M×N×K.
    pub const fn shape(self) -> Shape {
        self.shape
    }

    /// The `mma` that the product consists of. It has the same element types.
    pub const fn tile(self) -> MmaKind {
        self.tile
    }

    /// For each `mma` in order: the tile of its left operand, of its right operand, of C and D, and the step
    /// in k.
    fn steps(self) -> impl Iterator<Item = [usize; 4]> {
        let (m, n) = if is_transposed(self.shape) {
            (self.shape.n, self.shape.m)
        } else {
            (self.shape.m, self.shape.n)
        };
        let tile = self.tile.shape();
        let (rows, columns) = (m / tile.m, n / 8);
        (0..self.shape.k / tile.k)
            .flat_map(move |k| (0..rows * columns).map(move |sum| [sum % rows, sum / rows, sum, k]))
    }

    /// The registers of the left operand, of the right operand and of C that one `mma` uses.
    fn operands<'f>(
        self,
        [row, column, sum, k]: [usize; 4],
        (left, right): (&'f [Lanes32], &'f [Lanes32]),
    ) -> (&'f [Lanes32], &'f [Lanes32], Range<usize>) {
        let [a, b, c] = self.tile.registers();
        let steps = self.shape.k / self.tile.shape().k;
        let left = &left[(row * steps + k) * a..][..a];
        let right = &right[(column * steps + k) * b..][..b];
        (left, right, sum * c..(sum + 1) * c)
    }
}

/// Whether B is the left operand, with rows and columns exchanged.
const fn is_transposed(shape: Shape) -> bool {
    shape.n == 32
}

/// Executes one `wmma.mma` on 32-bit registers. `sums` holds C and receives D.
///
/// # Errors
/// The kind is f64.
pub fn wmma(
    kind: WmmaKind,
    rules: TensorRules,
    a: &[Lanes32],
    b: &[Lanes32],
    sums: &mut [Lanes32],
) -> Result<(), MmaError> {
    for step in kind.steps() {
        let (left, right, range) =
            kind.operands(step, if is_transposed(kind.shape) { (b, a) } else { (a, b) });
        let c = sums[range.clone()].to_vec();
        mma(kind.tile, rules, left, right, &c, &mut sums[range])?;
    }
    Ok(())
}

/// Executes one `wmma.mma` of f64.
///
/// # Errors
/// The kind is not f64.
pub fn wmma_f64(
    kind: WmmaKind,
    rules: TensorRules,
    a: &[Lanes64],
    b: &[Lanes64],
    sums: &mut [Lanes64],
) -> Result<(), MmaError> {
    let c = sums.to_vec();
    mma_f64(kind.tile, rules, a, b, &c, sums)
}

/// The matrix that a fragment belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Matrix {
    /// M×K.
    A,
    /// K×N.
    B,
    /// C or D, M×N.
    Accumulator,
}

/// The positions of a matrix's elements in the registers of a warp. The matrix consists of lines: rows of A
/// and of most accumulators, columns of B. The four lanes of a group hold consecutive parts of one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FragmentLayout {
    /// Whether lines are rows (otherwise columns).
    pub lines_are_rows: bool,
    /// Bits of an element.
    pub bits: usize,
    /// Number of consecutive elements of a line that a lane holds in one block.
    pub run: usize,
    /// The first line of each block, and the start of the block within its lines. A block is eight lines of
    /// four runs.
    pub blocks: Vec<(usize, usize)>,
    /// Registers per lane. A register has 64 bits if the elements have, otherwise 32.
    pub registers: usize,
}

impl FragmentLayout {
    /// The fragment of a `wmma` with this shape and elements of `bits` bits.
    pub fn new(matrix: Matrix, shape: Shape, bits: usize, registers: usize) -> FragmentLayout {
        let Shape { m, n, k } = shape;
        let transposed = is_transposed(shape);
        let (lines, length, run) = match matrix {
            Matrix::A => (m, k, 32usize.div_ceil(bits)),
            Matrix::B => (n, k, 32usize.div_ceil(bits)),
            Matrix::Accumulator if transposed => (n, m, 2),
            Matrix::Accumulator => (m, n, 2),
        };
        let is_left = matches!((matrix, transposed), (Matrix::A, false) | (Matrix::B, true));
        // Lines that one `mma` uses: all lines of an accumulator, 16 or 8 of the left operand, 8 of the right
        // operand.
        let tile = match matrix {
            Matrix::Accumulator => lines,
            _ if is_left => lines.min(16),
            _ => 8,
        };
        let mut blocks = Vec::new();
        for first in (0..lines).step_by(tile) {
            for start in (0..length).step_by(4 * run) {
                blocks.extend((first..first + tile).step_by(8).map(|line| (line, start)));
            }
        }
        let lines_are_rows = matrix == Matrix::A || matrix == Matrix::Accumulator && !transposed;
        FragmentLayout { lines_are_rows, bits, run, blocks, registers }
    }

    /// Registers of one block. Accumulator elements as wide as a register have one register each.
    fn registers_per_block(&self) -> usize {
        (self.run * self.bits).div_ceil(self.bits.max(32))
    }

    /// Line and position of the first element that a lane holds in a block.
    fn at(&self, block: (usize, usize), lane: usize) -> (usize, usize) {
        (block.0 + lane / 4, block.1 + lane % 4 * self.run)
    }

    /// Calls `f` with register, lane, line, position in the line and shift for every element of the fragment.
    /// f16 elements that the fragment holds twice are visited twice.
    pub fn each(&self, mut f: impl FnMut(usize, usize, usize, usize, usize)) {
        let per_block = self.registers_per_block();
        let per_register = self.run / per_block;
        for register in 0..self.registers {
            let block = self.blocks[register / per_block % self.blocks.len()];
            for lane in 0..32 {
                let (line, start) = self.at(block, lane);
                for i in 0..per_register {
                    f(register, lane, line, start + register % per_block * per_register + i, i * self.bits);
                }
            }
        }
    }
}

/// One machine instruction of a `wmma.load` or `wmma.store`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FragmentAccess {
    /// Lanes that give an address.
    pub lanes: u32,
    /// Number of consecutive elements in memory that a lane accesses.
    pub elements: usize,
    /// Line and position of each lane's first element.
    pub at: [(usize, usize); 32],
    /// Whether the whole warp receives what each lane reads (LDSM).
    pub for_all: bool,
}

impl FragmentLayout {
    /// The accesses that ptxas generates for a load or store. `along`: consecutive elements of a line are
    /// consecutive in memory. `rows`: LDSM may load rows of 16 bytes (A and B in shared memory).
    pub fn accesses(&self, along: bool, rows: bool) -> Vec<FragmentAccess> {
        match (along, self.bits) {
            (_, 16) | (true, 8) if rows => self.matrices(along),
            (true, _) => {
                self.blocks.iter().map(|b| self.lane_wise(self.run, |lane| self.at(*b, lane))).collect()
            }
            // Blocks of 8×8 halves are read transposed. MOVM transposes them back.
            (false, 16) => {
                let turned = |block: (usize, usize)| {
                    self.lane_wise(2, move |lane| (block.0 + lane % 4 * 2, block.1 + lane / 4))
                };
                self.blocks.iter().copied().map(turned).collect()
            }
            (false, _) => {
                let single = |block: (usize, usize), i: usize| {
                    self.lane_wise(1, move |lane| {
                        let (line, start) = self.at(block, lane);
                        (line, start + i)
                    })
                };
                self.blocks.iter().flat_map(|b| (0..self.run).map(move |i| single(*b, i))).collect()
            }
        }
    }

    /// The number of MOVMs that accompany [`FragmentLayout::accesses`].
    pub fn transposes(&self, along: bool, rows: bool) -> usize {
        if !along && self.bits == 16 && !rows { self.blocks.len() } else { 0 }
    }

    fn lane_wise(&self, elements: usize, at: impl Fn(usize) -> (usize, usize)) -> FragmentAccess {
        FragmentAccess { lanes: !0, elements, at: std::array::from_fn(at), for_all: false }
    }

    /// LDSM: four matrices of halves or two of bytes at a time. Lane 8·matrix + row gives the address of a
    /// row.
    fn matrices(&self, along: bool) -> Vec<FragmentAccess> {
        let at_once = self.bits / 4;
        let access = |blocks: &[(usize, usize)]| FragmentAccess {
            lanes: u32::MAX >> (32 - 8 * blocks.len()),
            elements: 128 / self.bits,
            at: std::array::from_fn(|lane| {
                let (line, start) = blocks[lane / 8 % blocks.len()];
                if along { (line + lane % 8, start) } else { (line, start + lane % 8) }
            }),
            for_all: true,
        };
        self.blocks.chunks(at_once).map(access).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Matrix::{A, Accumulator as C, B};
    use super::*;

    /// Number of instructions, bytes per lane, and number of MOVMs.
    type Instructions = (usize, usize, usize);

    /// Shape, matrix, bits. Row and column of the first element of each register of lane 0, and of the last
    /// element of lane 29's last register. The machine instructions that load the matrix by rows and by
    /// columns from shared memory, then by rows and by columns from global memory.
    type Row =
        ((usize, usize, usize), Matrix, usize, &'static [(usize, usize)], (usize, usize), [Instructions; 4]);

    /// Read from the code that ptxas 13 generates for sm_80: the addresses of the loads, and the order in
    /// which registers are stored.
    #[rustfmt::skip]
    const SEEN: [Row; 23] = [
    ((16, 16, 16), A, 16, &[(0, 0), (8, 0), (0, 8), (8, 8), (0, 0), (8, 0), (0, 8), (8, 8)], (15, 11), [(1, 16, 0), (1, 16, 0), (4, 4, 0), (4, 4, 4)]),
    ((16, 16, 16), B, 16, &[(0, 0), (8, 0), (0, 8), (8, 8), (0, 0), (8, 0), (0, 8), (8, 8)], (11, 15), [(1, 16, 0), (1, 16, 0), (4, 4, 4), (4, 4, 0)]),
    ((32, 8, 16), A, 16, &[(0, 0), (8, 0), (0, 8), (8, 8), (16, 0), (24, 0), (16, 8), (24, 8)], (31, 11), [(2, 16, 0), (2, 16, 0), (8, 4, 0), (8, 4, 8)]),
    ((32, 8, 16), B, 16, &[(0, 0), (8, 0), (0, 0), (8, 0), (0, 0), (8, 0), (0, 0), (8, 0)], (11, 7), [(1, 16, 0), (1, 16, 0), (2, 4, 2), (2, 4, 0)]),
    ((8, 32, 16), A, 16, &[(0, 0), (0, 8), (0, 0), (0, 8), (0, 0), (0, 8), (0, 0), (0, 8)], (7, 11), [(1, 16, 0), (1, 16, 0), (2, 4, 0), (2, 4, 2)]),
    ((8, 32, 16), B, 16, &[(0, 0), (0, 8), (8, 0), (8, 8), (0, 16), (0, 24), (8, 16), (8, 24)], (11, 31), [(2, 16, 0), (2, 16, 0), (8, 4, 8), (8, 4, 0)]),
    ((16, 16, 16), A, 8, &[(0, 0), (8, 0)], (15, 7), [(1, 16, 0), (8, 1, 0), (2, 4, 0), (8, 1, 0)]),
    ((16, 16, 16), B, 8, &[(0, 0), (0, 8)], (7, 15), [(8, 1, 0), (1, 16, 0), (8, 1, 0), (2, 4, 0)]),
    ((32, 8, 16), A, 8, &[(0, 0), (8, 0), (16, 0), (24, 0)], (31, 7), [(2, 16, 0), (16, 1, 0), (4, 4, 0), (16, 1, 0)]),
    ((32, 8, 16), B, 8, &[(0, 0)], (7, 7), [(4, 1, 0), (1, 16, 0), (4, 1, 0), (1, 4, 0)]),
    ((8, 32, 16), A, 8, &[(0, 0)], (7, 7), [(1, 16, 0), (4, 1, 0), (1, 4, 0), (4, 1, 0)]),
    ((8, 32, 16), B, 8, &[(0, 0), (0, 8), (0, 16), (0, 24)], (7, 31), [(16, 1, 0), (2, 16, 0), (16, 1, 0), (4, 4, 0)]),
    ((16, 16, 8), A, 32, &[(0, 0), (8, 0), (0, 4), (8, 4)], (15, 5), [(4, 4, 0), (4, 4, 0), (4, 4, 0), (4, 4, 0)]),
    ((16, 16, 8), B, 32, &[(0, 0), (4, 0), (0, 8), (4, 8)], (5, 15), [(4, 4, 0), (4, 4, 0), (4, 4, 0), (4, 4, 0)]),
    ((8, 8, 4), A, 64, &[(0, 0)], (7, 1), [(1, 8, 0), (1, 8, 0), (1, 8, 0), (1, 8, 0)]),
    ((8, 8, 4), B, 64, &[(0, 0)], (1, 7), [(1, 8, 0), (1, 8, 0), (1, 8, 0), (1, 8, 0)]),
    ((8, 8, 4), C, 64, &[(0, 0), (0, 1)], (7, 3), [(1, 16, 0), (2, 8, 0), (1, 16, 0), (2, 8, 0)]),
    ((16, 16, 16), C, 16, &[(0, 0), (8, 0), (0, 8), (8, 8)], (15, 11), [(4, 4, 0), (4, 4, 4), (4, 4, 0), (4, 4, 4)]),
    ((32, 8, 16), C, 16, &[(0, 0), (8, 0), (16, 0), (24, 0)], (31, 3), [(4, 4, 0), (4, 4, 4), (4, 4, 0), (4, 4, 4)]),
    ((8, 32, 16), C, 16, &[(0, 0), (0, 8), (0, 16), (0, 24)], (3, 31), [(4, 4, 4), (4, 4, 0), (4, 4, 4), (4, 4, 0)]),
    ((16, 16, 16), C, 32, &[(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)], (15, 11), [(4, 8, 0), (8, 4, 0), (4, 8, 0), (8, 4, 0)]),
    ((32, 8, 16), C, 32, &[(0, 0), (0, 1), (8, 0), (8, 1), (16, 0), (16, 1), (24, 0), (24, 1)], (31, 3), [(4, 8, 0), (8, 4, 0), (4, 8, 0), (8, 4, 0)]),
    ((8, 32, 16), C, 32, &[(0, 0), (1, 0), (0, 8), (1, 8), (0, 16), (1, 16), (0, 24), (1, 24)], (3, 31), [(8, 4, 0), (4, 8, 0), (8, 4, 0), (4, 8, 0)]),
    ];

    fn layout(row: &Row) -> FragmentLayout {
        let (m, n, k) = row.0;
        FragmentLayout::new(row.1, Shape { m, n, k }, row.2, row.3.len())
    }

    #[test]
    fn fragments_are_those_of_the_machine_code() {
        for row in &SEEN {
            let layout = layout(row);
            let turned = |line, place| if layout.lines_are_rows { (line, place) } else { (place, line) };
            let mut first = vec![None; row.3.len()];
            let mut last = None;
            layout.each(|register, lane, line, place, _| {
                if lane == 0 {
                    first[register].get_or_insert(turned(line, place));
                }
                if (register, lane) == (row.3.len() - 1, 29) {
                    last = Some(turned(line, place));
                }
            });
            assert_eq!(first.into_iter().flatten().collect::<Vec<_>>(), row.3, "{row:?}");
            assert_eq!(last, Some(row.4), "{row:?}");
        }
    }

    #[test]
    fn loads_are_those_of_the_machine_code() {
        for row in &SEEN {
            let layout = layout(row);
            let cases = [(true, true), (true, false), (false, true), (false, false)];
            for ((shared, by_rows), expected) in cases.into_iter().zip(row.5) {
                let along = by_rows == layout.lines_are_rows;
                let matrices = shared && row.1 != C;
                let accesses = layout.accesses(along, matrices);
                let bytes = accesses[0].elements * row.2 / 8;
                let found = (accesses.len(), bytes, layout.transposes(along, matrices));
                assert_eq!(found, expected, "{row:?}, shared {shared}, by rows {by_rows}");
                // Together the accesses touch every element once.
                let touched: usize =
                    accesses.iter().map(|a| a.lanes.count_ones() as usize * a.elements).sum();
                let elements = layout.blocks.len() * 32 * layout.run;
                assert_eq!(touched, elements, "{row:?}");
            }
        }
    }

    /// Sums of small integers are exact, so the test checks only which elements are multiplied.
    #[test]
    fn products_of_small_integers() {
        let shapes = [(16, 16, 16), (32, 8, 16), (8, 32, 16), (16, 16, 8)];
        let sums = [Accumulator::F32, Accumulator::S32 { saturate: false }];
        let mut products = 0;
        for (m, n, k) in shapes {
            for input in [Input::F16, Input::Bf16, Input::Tf32, Input::S8, Input::U8] {
                for sum in sums {
                    let shape = Shape { m, n, k };
                    if let Some(kind) = WmmaKind::new(shape, input, sum) {
                        check_small_integers(kind, shape, input, sum);
                        products += 1;
                    }
                }
            }
        }
        assert_eq!(products, 3 * 4 + 1);
    }

    fn check_small_integers(kind: WmmaKind, shape: Shape, input: Input, sum: Accumulator) {
        let encode = |x: usize| match input {
            Input::F16 => u32::from(half::f16::from_f32(x as f32).to_bits()),
            Input::Bf16 => u32::from(half::bf16::from_f32(x as f32).to_bits()),
            Input::Tf32 => (x as f32).to_bits(),
            _ => x as u32,
        };
        let a = |row: usize, k: usize| (3 * row + 5 * k) % 7;
        let b = |k: usize, column: usize| (2 * k + column) % 5;
        let c = |row: usize, column: usize| row + 2 * column;
        let registers = |matrix, value: &dyn Fn(usize, usize) -> u32, bits: usize, count: usize| {
            let layout = FragmentLayout::new(matrix, shape, bits, count);
            let mut lanes = vec![[0u32; 32]; count];
            layout.each(|register, lane, line, place, shift| {
                let (row, column) = if layout.lines_are_rows { (line, place) } else { (place, line) };
                lanes[register][lane] |= value(row, column) << shift;
            });
            (lanes, layout)
        };
        let count = |elements: usize| if input == Input::F16 { 8 } else { elements * input.bits() / 1024 };
        let (fa, _) = registers(A, &|i, j| encode(a(i, j)), input.bits(), count(shape.m * shape.k));
        let (fb, _) = registers(B, &|i, j| encode(b(i, j)), input.bits(), count(shape.k * shape.n));
        let number = |x: usize| if sum == Accumulator::F32 { (x as f32).to_bits() } else { x as u32 };
        let (mut sums, layout) = registers(C, &|i, j| number(c(i, j)), 32, shape.m * shape.n / 32);
        wmma(kind, TensorRules::Hopper, &fa, &fb, &mut sums).unwrap();
        layout.each(|register, lane, line, place, _| {
            let (row, column) = if layout.lines_are_rows { (line, place) } else { (place, line) };
            let expected = c(row, column) + (0..shape.k).map(|k| a(row, k) * b(k, column)).sum::<usize>();
            assert_eq!(sums[register][lane], number(expected), "{kind:?} {row} {column}");
        });
    }

    /// ptxas generates HMMA.1684 twice, on sm_90 too, where `mma` of tf32 sums eight products at once.
    #[test]
    fn tf32_chains_sums_of_four() {
        let shape = Shape { m: 16, n: 16, k: 8 };
        let kind = WmmaKind::new(shape, Input::Tf32, Accumulator::F32).unwrap();
        let mut a = vec![[0; 32]; 4];
        // The terms are 1, 0, 0, 2^-25 and then −1. Rounding between the two sums loses the small term.
        let small = 2f32.powi(-25);
        (a[0][0], a[0][3]) = (1f32.to_bits(), small.to_bits());
        a[2][0] = (-1f32).to_bits();
        let b = vec![[1f32.to_bits(); 32]; 4];
        let mut sums = vec![[0; 32]; 8];
        wmma(kind, TensorRules::Hopper, &a, &b, &mut sums).unwrap();
        assert_eq!(f32::from_bits(sums[0][0]), 0.0);
        let k8 =
            MmaKind::new(Shape { m: 16, n: 8, k: 8 }, Input::Tf32, Input::Tf32, Accumulator::F32).unwrap();
        let mut d = vec![[0; 32]; 4];
        mma(k8, TensorRules::Hopper, &a, &b[..2], &[[0; 32]; 4], &mut d).unwrap();
        assert_eq!(f32::from_bits(d[0][0]), small);
    }
}
