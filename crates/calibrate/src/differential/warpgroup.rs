//! A kernel in which each warpgroup copies A and B to shared memory, multiplies by `wgmma`, and stores the
//! result.
//!
//! A fragment is defined as for `mma.sync`: 16 rows and 8 columns of D with their C, over one K. A product
//! m64nNkK holds N/2 fragments: each pairs one of four A with one of N/8 B and has its own C. Every fourth
//! product replaces C instead of adding to it.
//!
//! The host lays A and B out as shared memory must hold them, by [`Layout::place`]. This function restates
//! the PTX ISA's canonical layouts and shares no code with the emulator's decoding of descriptors. Bytes that
//! no product may read are NaN.

use std::fmt;

use emu::numerics::Lanes32;
use emu::numerics::tensor::{self, Accumulator, Distribution, Input, MmaKind, TensorRules};
use ptx::{
    Builder, CmpOp, Global, Imm, Major, Module, Op, Operand, Pointer, R32, R64, Shared, SpecialReg, Swizzle,
    Target, Type, Value, Wgmma, WgmmaSource,
};

use super::Operands;
use super::kernel::{ENTRY, in_memory, input, registers_of};

/// Warps of a warpgroup, each with 16 rows.
const WARPS: usize = 4;
/// Threads of a warpgroup.
const THREADS: usize = 32 * WARPS;
/// Bytes of K in one product.
const K_BYTES: usize = 32;
/// Bytes that a warpgroup copies at a time, a multiple of every swizzle pattern.
const COPY: usize = 16 * THREADS;
/// One in this number of products has no C.
const REPLACING: u32 = 4;

/// The layout of an operand in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    major: Major,
    swizzle: Swizzle,
}

impl Layout {
    /// Bytes of a row of the swizzle pattern; without a swizzle, of a 16-byte chunk.
    fn row(self) -> usize {
        self.swizzle.span().map_or(16, |span| span as usize)
    }

    /// Leading and stride byte offset. Patterns are stored one after the other, along K first where K has two
    /// of them.
    fn offsets(self) -> (usize, usize) {
        let row = self.row();
        match (self.major, self.swizzle) {
            // Blocks of eight rows (K-major) or eight values of k (MN-major) of 16 bytes, with the two halves
            // of K side by side.
            (_, Swizzle::None) => (128, 256),
            // The leading offset is not read: a row of the pattern holds the whole K.
            (Major::K, _) => (16, 8 * row),
            (Major::Mn, _) => (16 * row, 8 * row),
        }
    }

    /// Bytes before the first element. In a K-major layout a product may start anywhere in a row; here it
    /// starts at the row's last part.
    fn start(self) -> usize {
        match self.major {
            Major::K => self.row().saturating_sub(K_BYTES),
            Major::Mn => 0,
        }
    }

    /// The byte offset of an element of `size` bytes in row `line` of A or column `line` of B.
    fn place(self, line: usize, k: usize, size: usize) -> usize {
        let row = self.row();
        let (leading, stride) = self.offsets();
        let chunks = row / 16;
        let along = if self.major == Major::K { k * size } else { line * size };
        let (chunk, within) = (along / 16, along % 16);
        let linear = match (self.major, self.swizzle) {
            (Major::K, Swizzle::None) => line / 8 * stride + line % 8 * 16 + chunk * leading,
            (Major::K, _) => line / 8 * stride + line % 8 * row + self.start() + chunk * 16,
            (Major::Mn, Swizzle::None) => chunk * stride + k / 8 * leading + k % 8 * 16,
            (Major::Mn, _) => chunk / chunks * leading + k / 8 * stride + k % 8 * row + chunk % chunks * 16,
        };
        // The swizzle permutes chunks by their row number in the pattern.
        (linear ^ (linear >> 7 & (chunks - 1)) << 4) + within
    }

    /// Bytes of an operand of `lines` rows or columns.
    fn bytes(self, lines: usize) -> usize {
        let along_lines = if self.major == Major::K { self.row().max(K_BYTES) } else { K_BYTES };
        (lines * along_lines).next_multiple_of(COPY)
    }

    /// The matrix descriptor without the address (PTX ISA, "Matrix Descriptor Format"): offsets in units of
    /// 16 bytes from bits 16 and 32 on.
    fn descriptor(self) -> u64 {
        let (leading, stride) = self.offsets();
        let mode = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes128 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes32 => 3,
        };
        mode << 62 | (stride as u64 / 16) << 32 | (leading as u64 / 16) << 16
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.major == Major::K { "K-major" } else { "MN-major" })?;
        self.swizzle.span().map_or(Ok(()), |span| write!(f, " swizzled {span}"))
    }
}

/// A `wgmma` product with the layouts of its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// The product of 16 rows and 8 columns of which it consists.
    kind: MmaKind,
    columns: usize,
    /// The layout of A in shared memory; `None` for A in registers.
    a: Option<Layout>,
    b: Layout,
    /// Whether A and B are negated.
    negated: [bool; 2],
}

impl Product {
    /// Every type with A in registers and in shared memory, for a few N, and every layout of 16-bit operands.
    pub fn all() -> Vec<Product> {
        let mut products = Vec::new();
        for (i, kind) in kinds().into_iter().enumerate() {
            let negates = !matches!(kind.a(), Input::S8 | Input::U8);
            let columns = |i: usize| [64, 96, 8, 256, 24, 128, 32, 192][i % 8];
            let negated = |bits: usize| [negates && bits & 1 != 0, negates && bits & 2 != 0];
            let a = Some(k_major(i + 1));
            products.push(Product { kind, columns: columns(i), a, b: k_major(i), negated: negated(i) });
            let b = k_major(i + 2);
            products.push(Product { kind, columns: columns(i + 3), a: None, b, negated: negated(i + 1) });
            match kind.a() {
                Input::Bf16 => products.extend(mn_major(kind, &SWIZZLES)),
                Input::F16 => products.extend(mn_major(kind, &[Swizzle::Bytes128])),
                _ => {}
            }
        }
        products
    }

    /// Every N of every type with 8-bit floats. A comes from registers for every other N, and the layout and
    /// the signs change from N to N.
    pub fn of_every_width() -> Vec<Product> {
        let float8 = |kind: &MmaKind| matches!(kind.a(), Input::E4m3 | Input::E5m2);
        let of_kind = |(first, kind): (usize, MmaKind)| {
            (1..=32).map(move |eights| {
                let i = first + eights;
                let a = (i % 2 == 0).then(|| k_major(i / 2));
                Product { kind, columns: 8 * eights, a, b: k_major(i / 8), negated: [i & 4 != 0, i & 8 != 0] }
            })
        };
        kinds().into_iter().filter(float8).enumerate().flat_map(of_kind).collect()
    }

    pub(super) fn fragments(self) -> usize {
        WARPS * self.columns / 8
    }

    /// Bytes of A, B, C and D. A and B are in shared-memory layout, C and D by register and thread.
    pub(super) fn bytes(self) -> [usize; 4] {
        let sums = self.fragments() * self.kind.registers()[2] * 32 * 4;
        let a = self.a.map_or(Wgmma::A_REGISTERS * THREADS * 4, |a| a.bytes(Wgmma::ROWS.into()));
        [a, self.b.bytes(self.columns), sums, sums]
    }

    pub(super) fn shared(self) -> u32 {
        let [a, b, ..] = self.bytes();
        (b + self.a.map_or(0, |_| a)) as u32
    }

    fn operation(self) -> Wgmma {
        let (sum, satfinite) = match self.kind.accumulator() {
            Accumulator::F16 => (Type::F16, false),
            Accumulator::F32 | Accumulator::F64 => (Type::F32, false),
            Accumulator::S32 { saturate } => (Type::S32, saturate),
        };
        let source = if self.a.is_some() { WgmmaSource::Shared } else { WgmmaSource::Registers };
        let a = input(self.kind.a());
        Wgmma { b: input(self.kind.b()), satfinite, ..Wgmma::new(self.columns as u16, sum, a, source) }
    }

    /// The module, and the instruction with its operands' layout.
    pub(super) fn module(self, target: Target) -> (Module, String) {
        let sign = |negated: bool| if negated { "−" } else { "" };
        let a = self.a.map_or("from registers".to_owned(), |layout| layout.to_string());
        let [sign_a, sign_b] = self.negated.map(sign);
        let text = format!("{}, {sign_a}A {a}, {sign_b}B {}", Op::Wgmma(self.operation()), self.b);
        (self.build(target), text)
    }

    fn build(self, target: Target) -> Module {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(THREADS as u32);
        let pointers = ["a", "b", "c", "d"].map(|name| k.param_pointer(name));
        let shared = k.dynamic_shared(1024);
        let (cta, thread) = (k.special(SpecialReg::CtaidX), k.special(SpecialReg::TidX));
        let bytes = self.bytes();
        let places = [0, 1, 2, 3].map(|i| k.index(pointers[i], cta, bytes[i] as u32));
        let registers_at = |k: &mut Builder, place: Global| k.index(place, thread, 4);
        let copy = |k: &mut Builder, from: Global, to: Shared, layout: Layout, bytes: usize| {
            let (from, to) = (k.index(from, thread, 16), k.shared_index(to, thread, 16));
            for at in (0..bytes as i64).step_by(COPY) {
                let chunk: [R32; 4] = k.ld_vec(from.at(at));
                k.st_vec(to.at(at), chunk);
            }
            layout.descriptor()
        };
        let b_at = shared.at(i64::from(self.shared()) - bytes[1] as i64);
        let b_fields = copy(&mut k, places[1], b_at, self.b, bytes[1]);
        let a = if let Some(layout) = self.a {
            let fields = copy(&mut k, places[0], shared, layout, bytes[0]);
            Operand::Reg(descriptor(&mut k, shared.at(layout.start() as i64), fields).reg())
        } else {
            let from = registers_at(&mut k, places[0]);
            load(&mut k, from, Wgmma::A_REGISTERS).1
        };
        let b = descriptor(&mut k, b_at.at(self.b.start() as i64), b_fields);
        let from = registers_at(&mut k, places[2]);
        let (sums, d) = load(&mut k, from, self.operation().d_registers());
        let turn = k.and(cta, REPLACING - 1);
        let adds = k.setp_u(CmpOp::Ne, turn, REPLACING - 1);
        k.fence_proxy_async_shared();
        k.bar_sync();
        k.wgmma_fence();
        let operands = [d, a, Operand::Reg(b.reg()), Operand::Reg(adds.reg())];
        k.op(Op::Wgmma(self.operation()), operands.into_iter().chain(self.immediates()));
        k.wgmma_commit();
        k.wgmma_wait(0);
        let to = registers_at(&mut k, places[3]);
        for (register, sum) in sums.into_iter().enumerate() {
            k.st(to.at(register as i64 * THREADS as i64 * 4), sum);
        }
        k.into_module(target)
    }

    /// `imm-scale-a`, `imm-scale-b`, `imm-trans-a` and `imm-trans-b`, where the instruction has them.
    fn immediates(self) -> Vec<Operand> {
        let op = self.operation();
        let scales = self.negated.map(|negated| if negated { -1 } else { 1 });
        let majors = self.a.into_iter().chain([self.b]).map(|layout| i64::from(layout.major == Major::Mn));
        let scales = scales.into_iter().filter(|_| op.has_scales());
        let values = scales.chain(majors.filter(|_| op.has_transpose()));
        values.map(|value| Operand::Imm(Imm::Int(value))).collect()
    }

    /// Random operands and the emulator's result.
    pub(super) fn draw(self, distribution: Distribution, seed: u64) -> Result<Operands, tensor::MmaError> {
        let seed_of = |part: usize| seed.wrapping_mul(128) + part as u64;
        let parts: Vec<_> = (0..WARPS.max(self.columns / 8))
            .map(|part| tensor::random_fragment(self.kind, distribution, seed_of(part)))
            .collect();
        let [mut a, mut b, ..] = self.bytes().map(|bytes| vec![0xFF; bytes]);
        for (line, part) in parts.iter().enumerate().take(WARPS) {
            match self.a {
                Some(layout) => self.lay(&mut a, layout, 16 * line, &part.a, self.kind.a()),
                None => place_registers(&mut a, 0, line, &part.a),
            }
        }
        for (tile, part) in parts.iter().enumerate().take(self.columns / 8) {
            self.lay(&mut b, self.b, 8 * tile, &part.b, self.kind.b());
        }
        let [.., mut c, mut d] = self.bytes().map(|bytes| vec![0; bytes]);
        let registers = self.kind.registers()[2];
        let nothing = vec![[0; 32]; registers];
        for i in 0..self.fragments() {
            let given = tensor::random_sums(self.kind, distribution, seed_of(i));
            let (tile, warp) = (i / WARPS, i % WARPS);
            let left = signed(&parts[warp].a, self.kind.a(), self.negated[0]);
            let right = signed(&parts[tile].b, self.kind.b(), self.negated[1]);
            let replaces = seed % u64::from(REPLACING) == u64::from(REPLACING) - 1;
            let start = if replaces { &nothing } else { &given };
            let mut sums = nothing.clone();
            tensor::mma(self.kind, TensorRules::HopperAsync, &left, &right, start, &mut sums)?;
            place_registers(&mut c, tile * registers, warp, &given);
            place_registers(&mut d, tile * registers, warp, &sums);
        }
        Ok([a, b, c, d])
    }

    /// Writes 16 rows of A or 8 columns of B, starting at `line`. The registers have the order of `mma`: 16
    /// bytes of K in four lanes, for rows 0 to 7 and, in A, rows 8 to 15; then the other 16 bytes of K.
    fn lay(self, to: &mut [u8], layout: Layout, line: usize, registers: &[Lanes32], element: Input) {
        let size = element.bits() / 8;
        let blocks = registers.len() / 2;
        for (register, lanes) in registers.iter().enumerate() {
            for (lane, word) in lanes.iter().enumerate() {
                let line = line + register % blocks * 8 + lane / 4;
                let first = register / blocks * (16 / size) + lane % 4 * (4 / size);
                for (i, bytes) in word.to_le_bytes().chunks_exact(size).enumerate() {
                    to[layout.place(line, first + i, size)..][..size].copy_from_slice(bytes);
                }
            }
        }
    }
}

const SWIZZLES: [Swizzle; 4] = [Swizzle::Bytes128, Swizzle::None, Swizzle::Bytes64, Swizzle::Bytes32];

fn k_major(i: usize) -> Layout {
    Layout { major: Major::K, swizzle: SWIZZLES[i % 4] }
}

/// Products of 16-bit operands with at least one M- or N-contiguous operand, for each swizzle.
fn mn_major(kind: MmaKind, swizzles: &[Swizzle]) -> impl Iterator<Item = Product> {
    swizzles.iter().enumerate().flat_map(move |(i, &swizzle)| {
        let transposed = Layout { major: Major::Mn, swizzle };
        let operands = [
            (None, transposed),
            (Some(transposed), transposed),
            (Some(transposed), k_major(i)),
            (Some(k_major(i + 1)), transposed),
        ];
        operands.map(|(a, b)| Product { kind, columns: 128, a, b, negated: [false; 2] })
    })
}

/// The products of 16 rows and 8 columns that `wgmma` supports, except for single-bit ones: 32 bytes of K.
fn kinds() -> Vec<MmaKind> {
    let whole = |kind: &MmaKind| {
        let (a, shape) = (kind.a(), kind.shape());
        let known = !matches!(a, Input::F64 | Input::Bits(_));
        known && shape.m == 16 && shape.k * a.bits() == 8 * K_BYTES
    };
    MmaKind::all().into_iter().filter(whole).collect()
}

/// The descriptor of a matrix at an address.
fn descriptor(k: &mut Builder, at: Shared, fields: u64) -> R64 {
    let address = k.add(at.base, at.offset as u32);
    let address = k.shr_u(address, 4);
    let address = k.zext(address);
    k.or(address, fields)
}

/// Loads a thread's registers. In memory, each register of all threads of the warpgroup is contiguous.
fn load(k: &mut Builder, from: Global, count: usize) -> (Vec<R32>, Operand) {
    let values: Vec<R32> = (0..count).map(|r| k.ld(from.at((r * THREADS * 4) as i64))).collect();
    (values.clone(), registers_of(values))
}

/// Writes a warp's registers, starting at register `first` of the warpgroup.
fn place_registers(to: &mut [u8], first: usize, warp: usize, registers: &[Lanes32]) {
    for (i, lanes) in registers.iter().enumerate() {
        let at = ((first + i) * THREADS + 32 * warp) * 4;
        to[at..at + 128].copy_from_slice(&in_memory(lanes, u32::to_le_bytes));
    }
}

/// Registers of a floating-point operand with the sign flipped if it is negated.
fn signed(registers: &[Lanes32], element: Input, negated: bool) -> Vec<Lanes32> {
    let signs = match element.bits() {
        8 => 0x8080_8080,
        16 => 0x8000_8000,
        _ => 0x8000_0000,
    };
    let flip = if negated { signs } else { 0 };
    registers.iter().map(|lanes| lanes.map(|word| word ^ flip)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use half::{bf16, f16};
    use predict::resources::Ptxas;

    use super::*;

    /// The value of an element from its bytes.
    fn value(element: Input, bytes: &[u8]) -> f64 {
        let bits = bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
        match element {
            Input::F16 => f16::from_bits(bits as u16).to_f64(),
            Input::Bf16 => bf16::from_bits(bits as u16).to_f64(),
            Input::Tf32 => f32::from_bits(bits & !0x1FFF).into(),
            Input::E5m2 => f16::from_bits((bits << 8) as u16).to_f64(),
            Input::E4m3 => {
                let (exponent, fraction) = (bits as i32 >> 3 & 15, f64::from(bits & 7) / 8.0);
                let magnitude = match exponent {
                    0 => fraction * 2f64.powi(-6),
                    _ => (1.0 + fraction) * 2f64.powi(exponent - 7),
                };
                if bits & 0x80 != 0 { -magnitude } else { magnitude }
            }
            Input::S8 => (bits as u8 as i8).into(),
            Input::U8 => bits.into(),
            Input::F64 | Input::Bits(_) => unreachable!("no product of {element:?} is compared"),
        }
    }

    impl Product {
        fn a_at(self, a: &[u8], row: usize, k: usize) -> f64 {
            let size = self.kind.a().bits() / 8;
            let at = self.a.map_or_else(
                // PTX ISA, "Register Fragments for wgmma.mma_async": A, 16 bytes of K in the registers 0 and
                // 1.
                || {
                    let (half, within) = (k * size / 16, k * size % 16);
                    let thread = row / 16 * 32 + row % 8 * 4 + within / 4;
                    ((2 * half + row % 16 / 8) * THREADS + thread) * 4 + within % 4
                },
                |layout| layout.start() + place_from_start(layout, row, k, size),
            );
            value(self.kind.a(), &a[at..at + size])
        }

        fn b_at(self, b: &[u8], k: usize, column: usize) -> f64 {
            let size = self.kind.b().bits() / 8;
            let at = self.b.start() + place_from_start(self.b, column, k, size);
            value(self.kind.b(), &b[at..at + size])
        }

        /// An element of C or D (PTX ISA, "Register Fragments for wgmma.mma_async": D).
        fn sum_at(self, sums: &[u8], row: usize, column: usize) -> f64 {
            let thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
            let element = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
            let word = |register: usize| {
                let at = (register * THREADS + thread) * 4;
                u32::from_le_bytes([sums[at], sums[at + 1], sums[at + 2], sums[at + 3]])
            };
            match self.kind.accumulator() {
                Accumulator::F16 => {
                    f16::from_bits((word(element / 2) >> (16 * (element % 2))) as u16).to_f64()
                }
                Accumulator::F32 | Accumulator::F64 => f32::from_bits(word(element)).into(),
                Accumulator::S32 { .. } => (word(element) as i32).into(),
            }
        }

        /// The tolerance against exact arithmetic, from the largest term and the sum: truncation of every
        /// term, and rounding. The 13 bits for fp8 are those of MMA-Sim.
        fn tolerance(self, largest: f64, sum: f64) -> f64 {
            let kept = if self.kind.a().bits() == 8 { 13 } else { 25 };
            let terms = self.kind.shape().k as f64 + 1.0;
            let rounding = if self.kind.accumulator() == Accumulator::F16 { -11 } else { 2 - kept.min(24) };
            // The alignment uses exponents, and a product's exponent can be one less than that of its value.
            largest * terms * 2f64.powi(1 - kept) + sum.abs() * 2f64.powi(rounding)
        }

        fn check(self, seed: u64) {
            let [a, b, c, d] = self.draw(Distribution::Normal, seed).unwrap();
            let signs = self.negated.map(|negated| if negated { -1.0 } else { 1.0 });
            for row in [0, 7, 13, 30, 63] {
                for column in [0, 5, self.columns / 2, self.columns - 1] {
                    let start = if seed % 4 == 3 { 0.0 } else { self.sum_at(&c, row, column) };
                    let factors = (0..self.kind.shape().k)
                        .map(|k| signs[0] * self.a_at(&a, row, k) * signs[1] * self.b_at(&b, k, column));
                    let (mut sum, mut largest) = (start, start.abs());
                    for factor in factors {
                        (sum, largest) = (sum + factor, largest.max(factor.abs()));
                    }
                    let (sum, tolerance) = match self.kind.accumulator() {
                        Accumulator::S32 { saturate: true } => (f64::from(sum as i32), 0.0),
                        Accumulator::S32 { saturate: false } => (f64::from(sum as i64 as i32), 0.0),
                        _ => (sum, self.tolerance(largest, sum)),
                    };
                    let found = self.sum_at(&d, row, column);
                    let text = || self.module(Target::sm_a(90)).1;
                    assert!(
                        (found - sum).abs() <= tolerance,
                        "{}: {found} for {sum} at {row}, {column}",
                        text()
                    );
                }
            }
        }
    }

    /// The canonical layouts as strides of rows and 16-byte chunks without the swizzle, as in CUTLASS's
    /// mma_sm90_desc.hpp, followed by the swizzle of the PTX ISA's figures.
    fn place_from_start(layout: Layout, line: usize, k: usize, size: usize) -> usize {
        let (linear, row) = match (layout.major, layout.swizzle) {
            (Major::K, Swizzle::None) => (256 * (line / 8) + 16 * (line % 8) + 128 * (k * size / 16), 16),
            (Major::Mn, Swizzle::None) => (256 * (line / 8) + 16 * (k % 8) + 128 * (k / 8), 16),
            (Major::K, swizzle) => {
                let row = swizzle.span().unwrap() as usize;
                (row * line + k * size / 16 * 16, row)
            }
            (Major::Mn, swizzle) => {
                let row = swizzle.span().unwrap() as usize;
                (16 * row * (line * size / row) + row * k + line * size % row / 16 * 16, row)
            }
        };
        let within = if layout.major == Major::K { k * size % 16 } else { line * size % 16 };
        let at = layout.start() + linear;
        let swizzled = match row {
            128 => at ^ (at / 128 % 8) << 4,
            64 => at ^ (at / 128 % 4) << 4,
            32 => at ^ (at / 128 % 2) << 4,
            _ => at,
        };
        swizzled + within - layout.start()
    }

    #[test]
    fn what_is_expected_is_the_product_of_the_matrices() {
        for product in Product::all() {
            product.check(6);
            product.check(7);
        }
    }

    #[test]
    fn every_type_source_and_layout_is_there() {
        let all = Product::all();
        assert_eq!(kinds().len(), 20, "{:?}", kinds());
        for kind in kinds() {
            let of_kind = || all.iter().filter(|product| product.kind == kind);
            assert!(of_kind().any(|p| p.a.is_some()) && of_kind().any(|p| p.a.is_none()), "{kind:?}");
        }
        let layouts: HashSet<String> = all
            .iter()
            .filter(|product| product.kind.a() == Input::Bf16)
            .filter_map(|product| product.a.map(|a| format!("{:?} {}", a.major, product.b)))
            .collect();
        assert!(layouts.len() >= 12, "{layouts:?}");
        let mut texts = HashSet::new();
        for product in &all {
            let (module, text) = product.module(Target::sm_a(90));
            assert!(module.to_string().contains(&Op::Wgmma(product.operation()).to_string()));
            assert!(texts.insert(text.clone()), "twice: {text}");
        }
    }

    #[test]
    fn every_width_of_eight_bit_floats_is_there() {
        let all = Product::of_every_width();
        let shapes: HashSet<String> = all.iter().map(|p| format!("{:?} {}", p.kind, p.columns)).collect();
        assert_eq!((all.len(), shapes.len()), (8 * 32, 8 * 32));
        for source in [true, false] {
            let layouts: HashSet<String> = all
                .iter()
                .filter(|product| product.a.is_some() == source)
                .map(|product| product.b.to_string())
                .collect();
            assert_eq!(layouts.len(), 4, "{layouts:?}");
        }
        for product in all.iter().step_by(5) {
            product.check(6);
        }
    }

    /// Runs only where ptxas is installed.
    #[test]
    fn ptxas_takes_every_product() {
        let Ok(ptxas) = Ptxas::find() else { return };
        for product in Product::all() {
            let (module, text) = product.module(Target::sm_a(90));
            let resources = ptxas.resources(&module.to_string(), "sm_90a", ENTRY);
            let resources = resources.unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(resources.spill_stores, 0, "{text}");
        }
    }
}
