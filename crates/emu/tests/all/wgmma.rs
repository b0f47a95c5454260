//! Compares warpgroup products with plain sums of small integers, which every type represents exactly:
//! operands in every layout that descriptors describe, and A from registers.

use ptx::{Dim3, Launch};

use crate::product::{small, words};

/// Swizzle mode of the descriptor, and bytes per row of the swizzle pattern; 16 without a swizzle.
const PATTERNS: [(u64, usize); 4] = [(0, 16), (3, 32), (2, 64), (1, 128)];
const A_AT: usize = 0;
const B_AT: usize = 16384;
const A_BYTES: usize = B_AT - A_AT;
const B_BYTES: usize = 32768;

/// An operand with `major` rows (of A) or columns (of B), and 32 bytes along K.
#[derive(Clone, Copy)]
struct Layout {
    /// Swizzle mode of the descriptor, and bytes per row of its pattern.
    pattern: (u64, usize),
    transposed: bool,
    major: usize,
}

impl Layout {
    /// Leading and stride byte offsets. Patterns are contiguous, first along K where K spans two of them.
    fn offsets(self) -> (usize, usize) {
        let (_, row) = self.pattern;
        match (self.transposed, row) {
            // Eight rows of 16 bytes. The two chunks along K are adjacent.
            (false, 16) => (128, 256),
            (false, _) => (16, 8 * row),
            // Eight k of 16 bytes. The two groups along k are adjacent.
            (true, 16) => (128, 256),
            // Patterns of 8 k: both patterns for one row's worth of columns, then the next columns.
            (true, _) => (16 * row, 8 * row),
        }
    }

    /// Byte offset of an element.
    fn place(self, major: usize, k: usize, size: usize) -> usize {
        let (_, row) = self.pattern;
        let (leading, stride) = self.offsets();
        let per_chunk = 16 / size;
        let linear = if self.transposed {
            let (chunk, within) = (major / per_chunk, major % per_chunk * size);
            let along = if row == 16 {
                chunk * stride
            } else {
                chunk / (row / 16) * leading + chunk % (row / 16) * 16
            };
            let groups = if row == 16 { leading } else { stride };
            along + k / 8 * groups + k % 8 * row + within
        } else {
            let (chunk, within) = (k / per_chunk, k % per_chunk * size);
            let along = if row == 16 { leading } else { 16 };
            major / 8 * stride + major % 8 * row + chunk * along + within
        };
        let mask = row / 16 - 1;
        linear ^ (linear >> 7 & mask) << 4
    }

    fn descriptor(self, at: usize) -> u64 {
        let (leading, stride) = self.offsets();
        let address = (1024 + at) as u64;
        (self.pattern.0 << 62) + ((stride as u64 / 16) << 32) + ((leading as u64 / 16) << 16) + address / 16
    }
}

struct Case {
    ty: &'static str,
    d: &'static str,
    k: usize,
    encode: fn(i32) -> u32,
    columns: usize,
    a: Layout,
    b: Layout,
    a_in_registers: bool,
    negated: bool,
}

impl Case {
    fn size(&self) -> usize {
        32 / self.k
    }

    fn a(&self, row: usize, k: usize) -> i32 {
        (row * 7 + k * 3) as i32 % 5 - if self.ty == "u8" { 0 } else { 2 }
    }

    fn b(&self, k: usize, column: usize) -> i32 {
        (column * 5 + k * 11) as i32 % 7 - if self.ty == "u8" { 0 } else { 3 }
    }

    fn shared(&self) -> Vec<u8> {
        let mut bytes = vec![0; A_BYTES + B_BYTES];
        let mut put = |at: usize, value: i32| {
            let encoded = (self.encode)(value).to_le_bytes();
            bytes[at..at + self.size()].copy_from_slice(&encoded[..self.size()]);
        };
        for k in 0..self.k {
            (0..64).for_each(|row| put(A_AT + self.a.place(row, k, self.size()), self.a(row, k)));
            (0..self.columns)
                .for_each(|column| put(B_AT + self.b.place(column, k, self.size()), self.b(k, column)));
        }
        bytes
    }

    /// A thread's four registers of A in the layout of the PTX ISA's figure: rows g and g + 8, first the
    /// lower 16 bytes along K, then the upper.
    fn fragments(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let per_register = self.k / 8;
        for thread in 0..128 {
            let (warp, lane) = (thread / 32, thread % 32);
            for register in 0..4 {
                let row = 16 * warp + lane / 4 + 8 * (register % 2);
                for i in 0..per_register {
                    let k = self.k / 2 * (register / 2) + lane % 4 * per_register + i;
                    bytes.extend(&(self.encode)(self.a(row, k)).to_le_bytes()[..self.size()]);
                }
            }
        }
        bytes
    }

    fn source(&self) -> String {
        let registers = self.columns / if self.d == "f16" { 4 } else { 2 };
        let list = |name: &str, count: usize| {
            (0..count).map(|i| format!("%{name}{i}")).collect::<Vec<_>>().join(", ")
        };
        let scales = match (self.ty, self.negated) {
            ("s8" | "u8", _) => "",
            (_, false) => ", 1, 1",
            (_, true) => ", -1, 1",
        };
        let transposes = match self.ty {
            "f16" | "bf16" if self.a_in_registers => format!(", {}", u8::from(self.b.transposed)),
            "f16" | "bf16" => format!(", {}, {}", u8::from(self.a.transposed), u8::from(self.b.transposed)),
            _ => String::new(),
        };
        let a = if self.a_in_registers { format!("{{{}}}", list("a", 4)) } else { "%rd4".into() };
        let product = format!(
            "wgmma.mma_async.sync.aligned.m64n{}k{}.{}.{}.{} {{{}}}, {a}, %rd5",
            self.columns,
            self.k,
            self.d,
            self.ty,
            self.ty,
            list("d", registers)
        );
        let stores: String =
            (0..registers).map(|i| format!("st.global.b32 [%rd3+{}], %d{i};\n", 4 * i)).collect();
        format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n\
             .visible .entry k(.param .u64 operands, .param .u64 fragments, .param .u64 out)\n{{\n\
             .reg .pred %p<4>;\n.reg .b32 %r<8>;\n.reg .b64 %rd<8>;\n.reg .b32 %a<4>;\n.reg .b32 %d<{registers}>;\n\
             mov.u32 %r0, %tid.x;\nmov.u32 %r1, smem;\nld.param.u64 %rd0, [operands];\nld.param.u64 %rd1, [fragments];\n\
             ld.param.u64 %rd2, [out];\nmul.wide.u32 %rd3, %r0, {};\nadd.u64 %rd3, %rd2, %rd3;\n\
             mov.u32 %r2, %r0;\nCOPY:\nshl.b32 %r3, %r2, 2;\ncvt.u64.u32 %rd6, %r3;\nadd.u64 %rd6, %rd0, %rd6;\n\
             ld.global.b32 %r4, [%rd6];\nadd.u32 %r5, %r1, %r3;\nst.shared.b32 [%r5], %r4;\nadd.u32 %r2, %r2, 128;\n\
             setp.lt.u32 %p0, %r2, {};\n@%p0 bra COPY;\n\
             mul.wide.u32 %rd7, %r0, 16;\nadd.u64 %rd7, %rd1, %rd7;\nld.global.v4.b32 {{{}}}, [%rd7];\n\
             fence.proxy.async;\nbar.sync 0;\nmov.u64 %rd4, {};\nmov.u64 %rd5, {};\nsetp.ne.u32 %p1, %r0, %r0;\nsetp.eq.u32 %p2, %r0, %r0;\n\
             wgmma.fence.sync.aligned;\n{product}, %p1{scales}{transposes};\n{product}, %p2{scales}{transposes};\n\
             wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n{stores}ret;\n}}\n",
            4 * registers,
            (A_BYTES + B_BYTES) / 4,
            list("a", 4),
            self.a.descriptor(A_AT),
            self.b.descriptor(B_AT),
        )
    }

    /// Checks twice the product: the first wgmma does not add to D, the second does.
    fn check(&self) {
        let launch = Launch {
            dynamic_shared: (A_BYTES + B_BYTES) as u32,
            ..Launch::new(Dim3(1, 1, 1), Dim3(128, 1, 1))
        };
        let inputs = [("operands", self.shared()), ("fragments", self.fragments())];
        let out = 64 * self.columns * if self.d == "f16" { 2 } else { 4 };
        self.compare(&words(&self.source(), launch, inputs, out, 2 * 2 * 64 * self.columns * self.k));
    }

    fn compare(&self, words: &[u32]) {
        let per_thread = words.len() / 128;
        let sign = if self.negated { -1 } else { 1 };
        for row in 0..64 {
            for column in 0..self.columns {
                let expected: i32 = (0..self.k).map(|k| self.a(row, k) * self.b(k, column)).sum();
                let expected = 2 * sign * expected;
                // PTX ISA, "Register Fragments for wgmma.mma_async": D.
                let thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
                let element = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
                let got = match self.d {
                    "f16" => {
                        let word = words[thread * per_thread + element / 2];
                        half::f16::from_bits((word >> (16 * (element % 2))) as u16).to_f32() as i32
                    }
                    "f32" => f32::from_bits(words[thread * per_thread + element]) as i32,
                    _ => words[thread * per_thread + element] as i32,
                };
                assert_eq!(got, expected, "{} row {row} column {column}\n{}", self.ty, self.source());
            }
        }
    }
}

fn f16(x: i32) -> u32 {
    half::f16::from_f32(x as f32).to_bits().into()
}

fn bf16(x: i32) -> u32 {
    half::bf16::from_f32(x as f32).to_bits().into()
}

fn f32(x: i32) -> u32 {
    (x as f32).to_bits()
}

fn e4m3(x: i32) -> u32 {
    small(x, 4, 3)
}

fn e5m2(x: i32) -> u32 {
    small(x, 5, 2)
}

fn byte(x: i32) -> u32 {
    x as u8 as u32
}

const K_MAJOR: Layout = Layout { pattern: PATTERNS[3], transposed: false, major: 64 };

#[test]
fn every_layout_of_both_operands() {
    for (i, pattern) in PATTERNS.into_iter().enumerate() {
        for (a, b) in [(false, false), (false, true), (true, false), (true, true)] {
            let columns = [64, 8, 136, 256][i];
            let case = Case {
                ty: "f16",
                d: "f32",
                k: 16,
                encode: f16,
                columns,
                a: Layout { pattern: PATTERNS[(i + 1) % 4], transposed: a, major: 64 },
                b: Layout { pattern, transposed: b, major: columns },
                a_in_registers: false,
                negated: a != b,
            };
            // A row of an MN-major pattern spans this many columns.
            let whole = !b || columns % (pattern.1 / 2) == 0;
            if whole && case.b.major * 32 <= B_BYTES {
                case.check();
            }
        }
    }
}

#[test]
fn every_type_from_registers_and_from_shared_memory() {
    type Kind = (&'static str, &'static [&'static str], usize, fn(i32) -> u32);
    let kinds: [Kind; 7] = [
        ("f16", &["f32", "f16"], 16, f16),
        ("bf16", &["f32"], 16, bf16),
        ("tf32", &["f32"], 8, f32),
        ("e4m3", &["f32", "f16"], 32, e4m3),
        ("e5m2", &["f32", "f16"], 32, e5m2),
        ("s8", &["s32"], 32, byte),
        ("u8", &["s32"], 32, byte),
    ];
    for (ty, accumulators, k, encode) in kinds {
        for d in accumulators {
            for a_in_registers in [false, true] {
                let b = Layout { major: 48, ..K_MAJOR };
                Case { ty, d, k, encode, columns: 48, a: K_MAJOR, b, a_in_registers, negated: false }.check();
            }
        }
    }
}
