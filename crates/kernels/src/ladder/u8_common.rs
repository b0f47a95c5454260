//! What the u8-quantised rungs share: the quantiser of the seeds, the launch contract, and the attention loop.
//!
//! The seeds give times, sizes and the union; of the loop they say only that it is scalar, and that stage B is where
//! halves replace codes in it ("FP16 arithmetic doesn't help"). So up to stage A the tiles hold codes and the inner loop
//! decodes each one again for every row that meets it. The rest is what their other kernels do: 32 query rows by 64
//! keys, four warps with eight rows each, a lane to a key for the scores and a lane to a column for the output, tiles
//! without padding, so that the lanes of a score loop read two banks (codes) or one (halves).

use problem::Problem;
use ptx::{
    Access, Arg, BufferSpec, Builder, CmpOp, Dim3, F32, Global, Half, Kernel, Launch, Pointer, R32, Shared,
    SpecialReg, Type,
};

use crate::Arch;

/// Query rows of a CTA.
pub(super) const ROWS: u32 = 32;
/// Keys of a tile.
pub(super) const KEYS: u32 = 64;
/// Head dimension.
pub(super) const DIM: u32 = 64;
/// Threads of a CTA.
pub(super) const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;
const ROWS_PER_WARP: u32 = ROWS / WARPS;

/// A tensor quantised as the seeds did it: affine over ±448 with one scale a head. Zero has no code of its own: it
/// lies half-way between 127 and 128.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// `[batch · head][row · dim]`.
    pub codes: Vec<u8>,
    /// One per head: the largest magnitude over 448.
    pub scales: Vec<f32>,
}

/// Span of the codes, in units of a head's scale.
const RANGE: f32 = 896.0;
const OFFSET: f32 = 448.0;

/// Quantises a dense tensor whose heads have `per_head` elements.
pub fn quantise(values: &[f32], per_head: usize) -> Quantised {
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::new();
    for head in values.chunks(per_head.max(1)) {
        let largest = head.iter().fold(0f32, |m, x| m.max(x.abs()));
        let scale = if largest > 0.0 { largest / OFFSET } else { 1.0 };
        scales.push(scale);
        codes.extend(
            head.iter().map(|x| ((x / scale + OFFSET) * (255.0 / RANGE)).round().clamp(0.0, 255.0) as u8),
        );
    }
    Quantised { codes, scales }
}

/// What the codes stand for: the values that a kernel is judged against, rounded to f16 as the kernel does.
pub fn dequantise(tensor: &Quantised) -> Vec<f32> {
    let per_head = tensor.codes.len() / tensor.scales.len().max(1);
    let value = |(i, code): (usize, &u8)| {
        let scale = tensor.scales[i / per_head.max(1)];
        let exact = f32::from(*code).mul_add(RANGE / 255.0 * scale, -OFFSET * scale);
        half::f16::from_f32(exact).to_f32()
    };
    tensor.codes.iter().enumerate().map(value).collect()
}

/// What the tiles in shared memory hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    /// u8 codes, decoded wherever they are used.
    Code,
    /// f16 values.
    Half,
}

impl Element {
    const fn bytes(self) -> u32 {
        match self {
            Element::Code => 1,
            Element::Half => 2,
        }
    }

    /// The value at an address; `map` is the tensor's.
    fn load(self, k: &mut Builder, from: Shared, (factor, offset): (F32, F32)) -> F32 {
        match self {
            Element::Code => {
                let code = k.ld_as::<R32, Shared>(Type::U8, from);
                let code = k.u32_to_f32(code);
                k.mad(code, factor, offset)
            }
            Element::Half => {
                let bits = k.ld(from);
                k.to_f32(Half::F16, bits)
            }
        }
    }
}

/// How tiles of codes come to shared memory.
pub(super) trait Loader {
    /// What they are there.
    const ELEMENT: Element;
    /// Shared memory in bytes, beside what the loop needs.
    fn shared_bytes(&self) -> u32;
    /// Called once, with the number of tiles; may request the first tile.
    fn start(&mut self, k: &mut Builder, cta: &Cta);
    /// Leaves tile `index` of keys and of values ready and says where.
    fn tile(&mut self, k: &mut Builder, cta: &Cta, index: R32) -> [Shared; 2];
    /// Leaves the CTA's query rows and says where; the barrier of the first tile covers them.
    fn queries(&mut self, k: &mut Builder, cta: &Cta) -> Shared;
}

/// What the CTA works on.
pub(super) struct Cta {
    /// Thread in the CTA.
    pub thread: R32,
    /// Start of the head in q (advanced to the CTA's rows), k and v.
    pub codes: [Global; 3],
    /// Affine map of each: value = code · factor + offset.
    pub maps: [(F32, F32); 3],
    /// Keys.
    pub seq: u32,
    /// The part of shared memory that belongs to the loader.
    pub shared: Shared,
}

/// The kernel of a rung: `loader` brings the tiles, the loop is the same for all.
pub(super) fn emit(problem: &Problem, arch: &Arch, entry: &str, mut loader: impl Loader) -> Kernel {
    let mut k = Builder::kernel(entry);
    k.max_threads(THREADS);
    let heads = (problem.batch * problem.heads_q) as u32;
    body(&mut k, problem, heads, &mut loader);
    let elements = problem.batch * problem.heads_q * problem.seq_q * problem.head_dim;
    let buffer = |name: &str, bytes: usize, access| BufferSpec { name: name.to_owned(), bytes, access };
    Kernel {
        module: k.into_module(arch.target()),
        entry: entry.to_owned(),
        launch: Launch {
            grid: Dim3(problem.seq_q as u32 / ROWS, problem.heads_q as u32, problem.batch as u32),
            cluster: Dim3(1, 1, 1),
            block: Dim3(THREADS, 1, 1),
            dynamic_shared: WARPS * KEYS * 4 + loader.shared_bytes(),
        },
        buffers: vec![
            buffer("q_codes", elements, Access::Read),
            buffer("k_codes", elements, Access::Read),
            buffer("v_codes", elements, Access::Read),
            buffer("out", 2 * elements, Access::Write),
            buffer("scales", 3 * 4 * heads as usize, Access::Read),
        ],
        args: (0..5).map(|index| Arg::Buffer { index, offset: 0 }).collect(),
    }
}

fn body<L: Loader>(k: &mut Builder, problem: &Problem, heads: u32, loader: &mut L) {
    let inputs = ["q", "k", "v"].map(|name| k.param_pointer(name));
    let (out, scales) = (k.param_pointer("out"), k.param_pointer("scales"));
    let (thread, row_block) = (k.special(SpecialReg::TidX), k.special(SpecialReg::CtaidX));
    let (head, batch) = (k.special(SpecialReg::CtaidY), k.special(SpecialReg::CtaidZ));
    let head: R32 = k.mad(batch, problem.heads_q as u32, head);
    let seq = problem.seq_q as u32;
    let head_start: R32 = k.mul(head, seq * DIM);
    let first_row: R32 = k.mul(row_block, ROWS);
    let codes = [0, 1, 2].map(|i| {
        let start = if i == 0 { k.mad(first_row, DIM, head_start) } else { head_start };
        k.index(inputs[i], start, 1)
    });
    let maps = [0, 1, 2].map(|i| {
        let at = k.index(scales, head, 4).at(i64::from(i * heads * 4));
        let scale: F32 = k.ld(at);
        (k.mul(scale, RANGE / 255.0), k.mul(scale, -OFFSET))
    });
    let shared = k.dynamic_shared(128);
    let cta = Cta { thread, codes, maps, seq, shared: shared.at(i64::from(WARPS * KEYS * 4)) };
    let mut rows = WarpRows::new(k, &cta, shared, problem.softmax_scale(), L::ELEMENT);
    loader.start(k, &cta);
    let q = loader.queries(k, &cta);
    k.for_range(0, seq / KEYS, 1, |k, index| {
        let [key, value] = loader.tile(k, &cta, index);
        rows.update(k, q, key, value);
        k.bar_sync();
    });
    let to = k.mad(first_row, DIM, head_start);
    let to = k.index(out, to, 2);
    rows.store(k, to);
}

/// The eight rows of a warp: maxima, sums, and two columns of the output a lane.
struct WarpRows {
    warp: R32,
    lane: R32,
    /// The warp's row of P.
    p: Shared,
    scale: f32,
    element: Element,
    maps: [(F32, F32); 3],
    state: Vec<(F32, F32, [F32; 2])>,
}

impl WarpRows {
    fn new(k: &mut Builder, cta: &Cta, shared: Shared, scale: f32, element: Element) -> WarpRows {
        let (warp, lane): (R32, R32) = (k.shr_u(cta.thread, 5), k.and(cta.thread, 31));
        let p = k.shared_index(shared, warp, KEYS * 4);
        let state = (0..ROWS_PER_WARP)
            .map(|_| (k.mov(f32::NEG_INFINITY), k.mov(0.0f32), [k.mov(0.0f32), k.mov(0.0f32)]))
            .collect();
        WarpRows { warp, lane, p, scale, element, maps: cta.maps, state }
    }

    /// One tile: scores, online softmax and output of each row in turn.
    fn update(&mut self, k: &mut Builder, q: Shared, key: Shared, value: Shared) {
        let first: R32 = k.mul(self.warp, ROWS_PER_WARP);
        let size = self.element.bytes();
        let q = k.shared_index(q, first, DIM * size);
        let keys = k.shared_index(key, self.lane, DIM * size);
        let values = k.shared_index(value, self.lane, size);
        for row in 0..ROWS_PER_WARP {
            let q_row = q.at(i64::from(row * DIM * size));
            let scores = self.scores(k, q_row, keys);
            let (m, l, o) = self.state[row as usize];
            self.softmax(k, scores, m, l, o);
            self.accumulate(k, values, o);
        }
    }

    /// q · k for key `lane` and key `lane + 32`.
    fn scores(&self, k: &mut Builder, q_row: Shared, keys: Shared) -> [F32; 2] {
        let s: [F32; 2] = [k.mov(0.0f32), k.mov(0.0f32)];
        let size = i64::from(self.element.bytes());
        k.for_range(0, DIM, 4, |k, d| {
            let (q, key) = (k.shared_index(q_row, d, size as u32), k.shared_index(keys, d, size as u32));
            for i in 0..4 {
                let q = self.element.load(k, q.at(size * i), self.maps[0]);
                for (half, s) in s.into_iter().enumerate() {
                    let at = key.at(size * (i + half as i64 * 32 * i64::from(DIM)));
                    let x = self.element.load(k, at, self.maps[1]);
                    k.mad_to(s, q, x, s);
                }
            }
        });
        s.map(|s| k.mul(s, self.scale))
    }

    /// P = exp(S − m) into the warp's row, O and l rescaled.
    fn softmax(&self, k: &mut Builder, s: [F32; 2], m: F32, l: F32, o: [F32; 2]) {
        let mut largest: F32 = k.max(s[0], s[1]);
        for lanes in [16, 8, 4, 2, 1] {
            let other = k.shfl_xor(largest, lanes);
            largest = k.max(largest, other);
        }
        let next: F32 = k.max(m, largest);
        let rescale = exp_difference(k, m, next);
        let p = s.map(|s| exp_difference(k, s, next));
        let mut sum: F32 = k.add(p[0], p[1]);
        for lanes in [16, 8, 4, 2, 1] {
            let other = k.shfl_xor(sum, lanes);
            sum = k.add(sum, other);
        }
        k.mad_to(l, l, rescale, sum);
        k.mov_to(m, next);
        o.into_iter().for_each(|o| k.mul_to(o, o, rescale));
        let to = k.shared_index(self.p, self.lane, 4);
        k.st(to, p[0]);
        k.st(to.at(128), p[1]);
        k.warp_sync();
    }

    /// O += P V for columns `lane` and `lane + 32`.
    fn accumulate(&self, k: &mut Builder, values: Shared, o: [F32; 2]) {
        let size = i64::from(self.element.bytes());
        k.for_range(0, KEYS, 4, |k, key| {
            let (p, value) = (k.shared_index(self.p, key, 4), k.shared_index(values, key, DIM * size as u32));
            for i in 0..4 {
                let p: F32 = k.ld(p.at(4 * i));
                for (half, o) in o.into_iter().enumerate() {
                    let at = value.at(size * (i * i64::from(DIM) + half as i64 * 32));
                    let x = self.element.load(k, at, self.maps[2]);
                    k.mad_to(o, p, x, o);
                }
            }
        });
        k.warp_sync();
    }

    /// O / l, a half a store.
    fn store(&self, k: &mut Builder, to: Global) {
        let first: R32 = k.mul(self.warp, ROWS_PER_WARP);
        let place: R32 = k.mad(first, DIM, self.lane);
        let to = k.index(to, place, 2);
        for (row, (_, l, o)) in self.state.iter().enumerate() {
            let inverse = k.rcp(*l);
            for (half, o) in o.iter().enumerate() {
                let x: F32 = k.mul(*o, inverse);
                let x = k.from_f32(Half::F16, x);
                k.st(to.at(row as i64 * i64::from(DIM) * 2 + half as i64 * 64), x);
            }
        }
    }
}

/// exp(a − b) as `__expf` does it.
fn exp_difference(k: &mut Builder, a: F32, b: F32) -> F32 {
    let difference: F32 = k.sub(a, b);
    let power: F32 = k.mul(difference, std::f32::consts::LOG2_E);
    k.ex2(power)
}

/// A code as a half.
pub(super) fn decode(k: &mut Builder, code: R32, (factor, offset): (F32, F32)) -> ptx::R16 {
    let code = k.u32_to_f32(code);
    let value: F32 = k.mad(code, factor, offset);
    k.from_f32(Half::F16, value)
}

/// The tile of `KEYS` rows, in bytes.
pub(super) const CODE_BYTES: u32 = KEYS * DIM;

/// Copies codes from global to shared memory, one byte a load: element `thread`, `thread + 128`, ….
pub(super) fn copy_scalar(k: &mut Builder, cta: &Cta, from: Global, to: Shared, elements: u32) {
    k.for_range(cta.thread, elements, THREADS, |k, i| {
        let (from, to) = (k.index(from, i, 1), k.shared_index(to, i, 1));
        let code = k.ld_as::<R32, Global>(Type::U8, from);
        k.st_as::<R32, Shared>(Type::U8, to, code);
    });
}

/// Codes of a tile, one byte a load, decoded to halves: element `thread`, `thread + 128`, ….
pub(super) fn convert_scalar<P: Pointer>(
    k: &mut Builder,
    cta: &Cta,
    map: (F32, F32),
    from: impl Fn(&mut Builder, R32) -> P,
    to: Shared,
    elements: u32,
) {
    k.for_range(cta.thread, elements, THREADS, |k, i| {
        let at = from(k, i);
        let code = k.ld_as::<R32, P>(Type::U8, at);
        let value = decode(k, code, map);
        let to = k.shared_index(to, i, 2);
        k.st(to, value);
    });
}

/// Whether the tile after `index` exists.
pub(super) fn has_next(k: &mut Builder, cta: &Cta, index: R32) -> ptx::Pred {
    k.setp_u(CmpOp::Lt, index, cta.seq / KEYS - 1)
}
