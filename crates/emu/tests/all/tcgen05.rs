//! Compares products in tensor memory with plain sums of small integers, which every type represents
//! exactly: operands in every layout, A in shared and in tensor memory, and D in every layout of one and of
//! two CTAs.

use ptx::{Dim3, Launch};

use crate::product::{small, words};

/// Swizzle mode of the descriptor in bits 62 and 63, and bytes per row of the swizzle pattern.
const PATTERNS: [(u64, usize); 4] = [(0, 16), (3, 32), (2, 64), (1, 128)];
const A_AT: usize = 0;
const B_AT: usize = 16384;
/// Bytes of the operands of a CTA. The mbarrier and the address of tensor memory follow.
const OPERANDS: usize = 49152;
/// Columns of D, then of A or of the scales.
const OTHERS_AT: usize = 256;
/// Columns that the kernel fills before the product.
const FILLED: usize = 16;

/// How elements become bytes: bits of an element along K, the elements of 16 bytes, and the encoding.
#[derive(Clone, Copy)]
struct Elements {
    kind: &'static str,
    /// Types of A and B in the instruction descriptor.
    code: u32,
    bits: usize,
    per_chunk: usize,
    encode: fn(i32) -> u32,
    signed: bool,
}

/// An operand of rows (of A) or columns (of B) with two chunks of 16 bytes along K.
#[derive(Clone, Copy)]
struct Layout {
    pattern: (u64, usize),
    transposed: bool,
}

impl Layout {
    /// Leading and stride byte offsets. Patterns are contiguous, first along K.
    fn offsets(self, k: usize) -> (usize, usize) {
        let (_, row) = self.pattern;
        match (self.transposed, row) {
            (false, 16) => (128, 256),
            (false, _) => (16, 8 * row),
            (true, 16) => (128, 128 * (k / 8)),
            (true, _) => (8 * row * (k / 8), 8 * row),
        }
    }

    /// The byte offset of the chunk of an element, and the index of the element in the chunk.
    fn place(self, major: usize, k: usize, depth: usize, per_chunk: usize) -> (usize, usize) {
        let (_, row) = self.pattern;
        let (leading, stride) = self.offsets(depth);
        let (linear, within) = if self.transposed {
            let (chunk, within) = (major / per_chunk, major % per_chunk);
            let (along, group) = match row {
                16 => (chunk * stride, leading),
                _ => (chunk / (row / 16) * leading + chunk % (row / 16) * 16, stride),
            };
            (along + k / 8 * group + k % 8 * row, within)
        } else {
            let along = if row == 16 { leading } else { 16 };
            (major / 8 * stride + major % 8 * row + k / per_chunk * along, k % per_chunk)
        };
        (linear ^ (linear >> 7 & (row / 16 - 1)) << 4, within)
    }

    fn descriptor(self, at: usize, k: usize) -> u64 {
        let (leading, stride) = self.offsets(k);
        let start = (1024 + at) as u64 / 16;
        let offsets = ((stride as u64 / 16) << 32) + ((leading as u64 / 16) << 16);
        (self.pattern.0 << 62) + (1 << 46) + offsets + start
    }
}

/// Scales of blocks: the modifier, the number of scales of a row, and whether they are ue8m0.
#[derive(Clone, Copy)]
struct Scales {
    name: &'static str,
    count: usize,
    powers: bool,
}

#[derive(Clone, Copy)]
struct Case {
    elements: Elements,
    ctas: usize,
    stationary: bool,
    m: usize,
    n: usize,
    /// Type of D in the instruction descriptor: 0 for f16, 1 for f32, 2 for s32.
    sums: u32,
    a: Layout,
    b: Layout,
    a_in_tensor_memory: bool,
    negated: bool,
    /// Lanes that keep D, in each CTA.
    masked: u32,
    /// The power of two by which the second product divides D.
    divides: u32,
    scales: Option<Scales>,
}

impl Case {
    fn depth(&self) -> usize {
        2 * self.elements.per_chunk
    }

    fn rows(&self) -> usize {
        self.m / self.ctas
    }

    fn a(&self, row: usize, k: usize) -> i32 {
        (row * 7 + k * 3) as i32 % 5 - if self.elements.signed { 2 } else { 0 }
    }

    fn b(&self, k: usize, column: usize) -> i32 {
        (column * 5 + k * 11) as i32 % 5 - if self.elements.signed { 2 } else { 0 }
    }

    /// The scale of a block of K of a row of A or a column of B, as a power of two from 0 to 2.
    fn scale(&self, row: usize, block: usize) -> u32 {
        ((row / 3 + 2 * block) % 3) as u32
    }

    fn put(&self, bytes: &mut [u8], (at, index): (usize, usize), value: i32) {
        let (bits, encoded) = (self.elements.bits, (self.elements.encode)(value));
        for bit in 0..bits {
            let place = index * bits + bit;
            bytes[at + place / 8] |= ((encoded >> bit & 1) as u8) << (place % 8);
        }
    }

    /// The operands of a CTA: its rows of A and its columns of B.
    fn shared(&self, cta: usize) -> Vec<u8> {
        let mut bytes = vec![0; OPERANDS];
        let (depth, per_chunk) = (self.depth(), self.elements.per_chunk);
        for k in 0..depth {
            for row in 0..self.rows() {
                let (at, index) = self.a.place(row, k, depth, per_chunk);
                self.put(&mut bytes, (A_AT + at, index), self.a(cta * self.rows() + row, k));
            }
            for column in 0..self.n / self.ctas {
                let (at, index) = self.b.place(column, k, depth, per_chunk);
                self.put(&mut bytes, (B_AT + at, index), self.b(k, cta * self.n / self.ctas + column));
            }
        }
        bytes
    }

    /// The lane of a row of D, and its column, in the tensor memory of a CTA.
    fn target(&self, row: usize, column: usize) -> (usize, usize) {
        match (self.rows(), self.stationary, self.ctas) {
            (64, false, 1) => (row / 16 * 32 + row % 16, column),
            (64, ..) => (row + 64 * (column / (self.n / 2)), column % (self.n / 2)),
            (32, ..) => (row + 32 * (column / (self.n / 4)), column % (self.n / 4)),
            _ => (row, column),
        }
    }

    /// The words that each lane of a CTA has before the product: A, or four words of scales of A and eight
    /// of B.
    fn filled(&self, cta: usize) -> Vec<u8> {
        let mut words = vec![0u32; 128 * FILLED];
        if self.a_in_tensor_memory {
            for lane in 0..128 {
                let rows = (0..self.rows()).filter(|r| (0..self.n).any(|c| self.target(*r, c).0 == lane));
                for row in rows {
                    let mut bytes = [0; 32];
                    for k in 0..self.depth() {
                        let chunk = (k / self.elements.per_chunk * 16, k % self.elements.per_chunk);
                        self.put(&mut bytes, chunk, self.a(cta * self.rows() + row, k));
                    }
                    let all = bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
                    all.enumerate().for_each(|(i, word)| words[lane * FILLED + i] = word);
                }
            }
        }
        if let Some(scales) = self.scales {
            let encode = |power: u32| if scales.powers { 127 + power } else { 0x38 + 8 * power };
            let word = |row: usize| {
                (0..scales.count).fold(0, |w, block| w | encode(self.scale(row, block)) << (8 * block))
            };
            for (lane, words) in words.chunks_exact_mut(FILLED).enumerate() {
                (0..4).for_each(|i| words[i] = word(cta * self.rows() + 32 * i + lane % 32));
                (0..8).for_each(|i| words[4 + i] = word(1000 + 32 * i + lane % 32));
            }
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn instruction_descriptor(&self) -> u32 {
        let Case { elements: Elements { code, .. }, negated, a, b, .. } = *self;
        let shape = ((self.n as u32 / 8) << 17) + ((self.m as u32 / 16) << 24);
        let types = (code << 7) + (code << 10);
        let majors = (u32::from(a.transposed) << 15) + (u32::from(b.transposed) << 16);
        let format = match self.scales {
            Some(scales) => u32::from(scales.powers) << 23,
            None => self.sums << 4,
        };
        shape + types + majors + (u32::from(negated) << 13) + format
    }

    fn products(&self) -> String {
        let mask = |cta: usize| (0..4).map(move |_| format!("{}", if cta == 0 { self.masked } else { 0 }));
        let masks: Vec<String> = (0..self.ctas).flat_map(mask).collect();
        let masks = if self.masked == 0 { String::new() } else { format!(" {{{}}},", masks.join(", ")) };
        let scales = match self.scales {
            Some(_) => format!(" [%r7+{OTHERS_AT}], [%r7+{}],", OTHERS_AT + 4),
            None => String::new(),
        };
        let block = self.scales.map_or(String::new(), |scales| format!(".block_scale{}", scales.name));
        let a = if self.a_in_tensor_memory { format!("[%r7+{OTHERS_AT}]") } else { "%rd4".into() };
        let one = |adds: &str, divides: String| {
            format!(
                "tcgen05.mma{}.cta_group::{}.kind::{}{block} [%r7], {a}, %rd5, %r6,{masks}{scales} {adds}{divides};\n",
                if self.stationary { ".ws" } else { "" },
                self.ctas,
                self.elements.kind,
            )
        };
        let divides = if self.divides == 0 { String::new() } else { format!(", {}", self.divides) };
        one("%p1", String::new()) + &one("%p2", divides)
    }

    /// The kernel fills shared and tensor memory, multiplies twice, and stores all lanes of D's columns.
    fn source(&self) -> String {
        let group = self.ctas;
        let barrier = match group {
            1 => "bar.sync 0;\n",
            _ => "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n",
        };
        let meet =
            format!("tcgen05.fence::before_thread_sync;\n{barrier}tcgen05.fence::after_thread_sync;\n");
        let list = |count: usize| (0..count).map(|i| format!("%d{i}")).collect::<Vec<_>>().join(", ");
        let fill: String = (0..FILLED).map(|i| format!("ld.global.b32 %d{i}, [%rd7+{}];\n", 4 * i)).collect();
        let commit = match group {
            1 => "[%r5];\n".into(),
            _ => "[%r5], %h0;\n".to_string(),
        };
        let multicast = if group == 1 { "" } else { ".multicast::cluster" };
        let columns = self.columns();
        let stores: String = (0..columns / 8)
            .map(|i| {
                let words: String =
                    (0..8).map(|j| format!("st.global.b32 [%rd3+{}], %d{j};\n", 4 * (8 * i + j))).collect();
                format!(
                    "tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{}}}, [%r8+{}];\ntcgen05.wait::ld.sync.aligned;\n{words}",
                    list(8),
                    8 * i
                )
            })
            .collect();
        format!(
            ".version 8.7\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n\
             .visible .entry k(.param .u64 operands, .param .u64 filled, .param .u64 out)\n{{\n\
             .reg .pred %p<8>;\n.reg .b16 %h<2>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<12>;\n.reg .b32 %d<{FILLED}>;\n\
             mov.u32 %r0, %tid.x;\nmov.u32 %r9, %ctaid.x;\nmov.u32 %r1, smem;\n\
             ld.param.u64 %rd0, [operands];\nld.param.u64 %rd1, [filled];\nld.param.u64 %rd2, [out];\n\
             mad.lo.u32 %r10, %r9, 128, %r0;\n\
             mul.wide.u32 %rd3, %r10, {row_bytes};\nadd.u64 %rd3, %rd2, %rd3;\n\
             mul.wide.u32 %rd7, %r10, {filled_bytes};\nadd.u64 %rd7, %rd1, %rd7;\n\
             mul.wide.u32 %rd8, %r9, {OPERANDS};\nadd.u64 %rd8, %rd0, %rd8;\n\
             mov.u32 %r2, %r0;\nCOPY:\nshl.b32 %r3, %r2, 2;\ncvt.u64.u32 %rd6, %r3;\nadd.u64 %rd6, %rd8, %rd6;\n\
             ld.global.b32 %r4, [%rd6];\nadd.u32 %r5, %r1, %r3;\nst.shared.b32 [%r5], %r4;\nadd.u32 %r2, %r2, 128;\n\
             setp.lt.u32 %p0, %r2, {words};\n@%p0 bra COPY;\n\
             setp.lt.u32 %p3, %r0, 32;\nadd.u32 %r5, %r1, {OPERANDS};\n\
             @%p3 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r5+8], 512;\n\
             @%p3 tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;\n\
             setp.eq.u32 %p4, %r0, 0;\n@%p4 mbarrier.init.shared::cta.b64 [%r5], 1;\n\
             fence.mbarrier_init.release.cluster;\nfence.proxy.async;\n{meet}ld.shared.b32 %r7, [%r5+8];\n\
             shr.u32 %r8, %r0, 5;\nshl.b32 %r8, %r8, 21;\nadd.u32 %r8, %r8, %r7;\n\
             {fill}tcgen05.st.sync.aligned.32x32b.x16.b32 [%r8+{OTHERS_AT}], {{{filled}}};\n\
             tcgen05.wait::st.sync.aligned;\n{clear}{meet}\
             mov.u64 %rd4, {a};\nmov.u64 %rd5, {b};\nmov.u32 %r6, {idesc};\nmov.u16 %h0, 3;\n\
             setp.ne.u32 %p1, %r0, %r0;\nsetp.eq.u32 %p2, %r0, %r0;\nsetp.eq.u32 %p5, %r10, 0;\n@!%p5 bra WAIT;\n\
             {products}tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 {commit}\
             WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p6, [%r5], 0;\n@!%p6 bra WAIT;\n\
             tcgen05.fence::after_thread_sync;\n{stores}{meet}\
             @%p3 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r7, 512;\nret;\n}}\n",
            row_bytes = 4 * columns,
            filled_bytes = 4 * FILLED,
            words = OPERANDS / 4,
            filled = list(FILLED),
            clear = self.clear(),
            a = self.a.descriptor(A_AT, self.depth()),
            b = self.b.descriptor(B_AT, self.depth()),
            idesc = self.instruction_descriptor(),
            products = self.products(),
        )
    }

    /// Stores zeros where the product leaves lanes of D alone.
    fn clear(&self) -> String {
        let zeros = ["0"; 8].join(", ");
        let one = |i: usize| format!("tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8+{}], {{{zeros}}};\n", 8 * i);
        (0..self.columns() / 8).map(one).collect::<String>() + "tcgen05.wait::st.sync.aligned;\n"
    }

    /// Columns of D in tensor memory.
    fn columns(&self) -> usize {
        match (self.rows(), self.stationary, self.ctas) {
            (64, false, 1) => self.n,
            (rows, ..) => self.n * rows / 128,
        }
    }

    fn check(&self) {
        let source = self.source();
        let all =
            |part: fn(&Case, usize) -> Vec<u8>| (0..self.ctas).flat_map(|cta| part(self, cta)).collect();
        let ctas = self.ctas as u32;
        let launch = Launch {
            dynamic_shared: OPERANDS as u32 + 16,
            cluster: Dim3(ctas, 1, 1),
            ..Launch::new(Dim3(ctas, 1, 1), Dim3(128, 1, 1))
        };
        let inputs = [("operands", all(Case::shared)), ("filled", all(Case::filled))];
        let flop = 2 * 2 * (self.m * self.n * self.depth());
        self.compare(&words(&source, launch, inputs, self.ctas * 128 * self.columns() * 4, flop), &source);
    }

    fn compare(&self, words: &[u32], source: &str) {
        let sign = if self.negated { -1.0 } else { 1.0 };
        for (row, column) in (0..self.m).flat_map(|row| (0..self.n).map(move |column| (row, column))) {
            let product: f64 = (0..self.depth()).map(|k| self.term(row, column, k)).sum();
            let product = sign * product;
            let (cta, own) = (row / self.rows(), row % self.rows());
            let (lane, at) = self.target(own, column);
            let kept = cta == 0 && self.masked >> (lane % 32) & 1 == 1;
            let expected = if kept { 0.0 } else { product + product / f64::from(1u32 << self.divides) };
            let word = words[(cta * 128 + lane) * self.columns() + at];
            let got = match self.sums {
                0 => half::f16::from_bits(word as u16).to_f64(),
                1 => f64::from(f32::from_bits(word)),
                _ => f64::from(word as i32),
            };
            assert_eq!(got, expected, "row {row} column {column}\n{source}");
        }
    }

    fn term(&self, row: usize, column: usize, k: usize) -> f64 {
        let product = f64::from(self.a(row, k) * self.b(k, column));
        let block = |count: usize| k / (self.depth() / count);
        let powers = self
            .scales
            .map_or(0, |s| self.scale(row, block(s.count)) + self.scale(1000 + column, block(s.count)));
        product * f64::from(1u32 << powers)
    }
}

const F16: Elements = Elements {
    kind: "f16",
    code: 0,
    bits: 16,
    per_chunk: 8,
    encode: |x| half::f16::from_f32(x as f32).to_bits().into(),
    signed: true,
};
const BF16: Elements =
    Elements { code: 1, encode: |x| half::bf16::from_f32(x as f32).to_bits().into(), ..F16 };
const TF32: Elements = Elements {
    kind: "tf32",
    code: 2,
    bits: 32,
    per_chunk: 4,
    encode: |x| (x as f32).to_bits(),
    signed: true,
};
const E4M3: Elements =
    Elements { kind: "f8f6f4", code: 0, bits: 8, per_chunk: 16, encode: |x| small(x, 4, 3), signed: true };
const E5M2: Elements = Elements { code: 1, encode: |x| small(x, 5, 2), ..E4M3 };
const E2M3: Elements = Elements { code: 3, bits: 6, encode: |x| small(x, 2, 3), ..E4M3 };
const E3M2: Elements = Elements { code: 4, bits: 6, encode: |x| small(x, 3, 2), ..E4M3 };
const E2M1: Elements = Elements { code: 5, bits: 4, encode: |x| small(x, 2, 1), ..E4M3 };
const U8: Elements =
    Elements { kind: "i8", code: 0, bits: 8, per_chunk: 16, encode: |x| x as u8 as u32, signed: false };
const S8: Elements = Elements { code: 1, signed: true, ..U8 };

const PLAIN: Layout = Layout { pattern: PATTERNS[3], transposed: false };
const BASE: Case = Case {
    elements: F16,
    ctas: 1,
    stationary: false,
    m: 128,
    n: 64,
    sums: 1,
    a: PLAIN,
    b: PLAIN,
    a_in_tensor_memory: false,
    negated: false,
    masked: 0,
    divides: 0,
    scales: None,
};

#[test]
fn every_layout_of_both_operands() {
    for (i, pattern) in PATTERNS.into_iter().enumerate() {
        for (a, b) in [(false, false), (false, true), (true, false), (true, true)] {
            let a = Layout { pattern: PATTERNS[(i + 1) % 4], transposed: a };
            let b = Layout { pattern, transposed: b };
            Case { n: [64, 16, 192, 256][i].max(pattern.1 / 2), a, b, negated: i == 2, ..BASE }.check();
        }
    }
}

#[test]
fn bytes_that_are_major_along_n() {
    let b = Layout { transposed: true, ..PLAIN };
    Case { elements: E4M3, n: 128, b, ..BASE }.check();
    Case { elements: S8, n: 128, sums: 2, a: b, b: Layout { pattern: PATTERNS[0], ..b }, ..BASE }.check();
}

#[test]
fn every_layout_of_sums() {
    for (ctas, stationary, m, n) in [
        (1, false, 64, 24),
        (1, false, 128, 256),
        (1, true, 32, 64),
        (1, true, 64, 128),
        (1, true, 128, 64),
        (2, false, 128, 64),
        (2, false, 256, 128),
    ] {
        for a_in_tensor_memory in [false, true] {
            Case { ctas, stationary, m, n, a_in_tensor_memory, ..BASE }.check();
        }
    }
}

#[test]
fn every_type() {
    for (elements, sums) in [
        (F16, 0),
        (BF16, 1),
        (TF32, 1),
        (E4M3, 1),
        (E4M3, 0),
        (E5M2, 1),
        (E2M3, 1),
        (E3M2, 1),
        (E2M1, 1),
        (U8, 2),
        (S8, 2),
    ] {
        let negated = sums != 2;
        Case { elements, sums, n: 32, negated, ..BASE }.check();
    }
    Case { elements: TF32, n: 32, a_in_tensor_memory: true, ..BASE }.check();
    Case { elements: S8, sums: 2, n: 32, a_in_tensor_memory: true, ..BASE }.check();
}

#[test]
fn lanes_that_keep_their_sums_and_sums_that_are_divided() {
    Case { n: 16, masked: 0xf0f0_0003, ..BASE }.check();
    Case { n: 32, ctas: 2, m: 256, masked: 0x8000_0001, ..BASE }.check();
    Case { n: 16, divides: 3, ..BASE }.check();
    Case { n: 16, sums: 0, divides: 1, ..BASE }.check();
}

#[test]
fn scales_of_blocks() {
    let mxf8 = Elements { kind: "mxf8f6f4", ..E4M3 };
    let mxf4 = Elements { kind: "mxf4", code: 1, bits: 4, per_chunk: 32, ..E2M1 };
    let nvf4 = Elements { kind: "mxf4nvf4", ..mxf4 };
    let scales = |name, count, powers| Some(Scales { name, count, powers });
    for (elements, scales) in [
        (mxf8, scales("", 1, true)),
        (Elements { kind: "mxf8f6f4", ..E3M2 }, scales(".scale_vec::1X", 1, true)),
        (mxf4, scales(".scale_vec::2X", 2, true)),
        (nvf4, scales(".scale_vec::4X", 4, false)),
    ] {
        Case { elements, scales, n: 64, ..BASE }.check();
        Case { elements, scales, n: 96, ctas: 2, m: 256, ..BASE }.check();
    }
}
