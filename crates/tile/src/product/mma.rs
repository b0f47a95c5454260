//! Warp-level products with `mma.m16n8k16`, with `mma.m16n8k32` for 8-bit floats, and with tf32 `mma.m16n8k8`
//! for f32. A warp holds all columns of its rows, so the next product can use the result as its A operand
//! without an exchange between warps.

use ptx::{Builder, F32, Half, Pointer, R32, Shared, Type};

use crate::{AccTile, Fragment, MatrixReader, OpenTile, OperandTile, Threads, TileLayout, warp_vectors};

/// The element type of a product's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MmaType {
    /// A 16-bit type.
    Half(Half),
    /// f32, each number as the sum of two tf32 numbers: three products of tf32, without the product of the
    /// two small parts (3xTF32; Markidis et al. 2018). The omitted product is at most 2^-22 of |a·b| of
    /// its term.
    F32,
    /// f32, each number rounded to tf32 (11 significant bits): one product of tf32.
    Tf32,
    /// 8-bit floats: the types of A and of B.
    Fp8([Type; 2]),
}

impl MmaType {
    /// The sign bits of the elements in a register.
    const fn signs(self) -> u32 {
        match self {
            MmaType::Half(_) => 0x8000_8000,
            MmaType::F32 | MmaType::Tf32 => 0x8000_0000,
            MmaType::Fp8(_) => 0x8080_8080,
        }
    }
}

/// One warp's rows of an A operand.
#[derive(Clone, Debug)]
pub struct OperandA {
    m_tiles: u32,
    chunks: u32,
    ty: MmaType,
    sign: Sign,
    source: Source,
}

/// Transformation of A. It lets a softmax use a positive factor for every scale. All three transformations
/// are exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sign {
    /// A unchanged, for a positive factor.
    Keep,
    /// −A, for a negative factor.
    Negate,
    /// 0, for a factor of zero.
    Clear,
}

#[derive(Clone, Debug)]
enum Source {
    Shared(MatrixReader, Shared),
    Registers(Vec<Fragment>),
    Lanes(Shared),
}

pub(super) enum Opened<'a> {
    Shared(OpenTile),
    Lanes(Shared),
    Registers(&'a [Fragment]),
}

impl OperandA {
    /// An operand that stays in shared memory and is read at each step along k. `tile` holds the CTA's rows;
    /// the warp takes `rows` of them.
    pub fn shared(
        k: &mut Builder,
        threads: &Threads,
        ty: MmaType,
        sign: Sign,
        layout: TileLayout,
        tile: Shared,
        rows: u32,
    ) -> OperandA {
        let reader = MatrixReader::rows_first(k, threads, layout);
        let start = k.mad(threads.row_warp, rows * layout.pitch(), tile.base);
        let source = Source::Shared(reader, Shared { base: start, offset: tile.offset });
        OperandA { m_tiles: rows / 16, chunks: layout.chunks, ty, sign, source }
    }

    /// An operand of 16 rows and a 16-bit type in registers: the fragments of each step along k.
    pub fn in_registers(half: Half, fragments: &[[R32; 4]]) -> OperandA {
        OperandA {
            m_tiles: 1,
            chunks: 2 * fragments.len() as u32,
            ty: MmaType::Half(half),
            sign: Sign::Keep,
            source: Source::Registers(fragments.iter().copied().map(Fragment::K16).collect()),
        }
    }

    /// An operand of 16 rows and a 16-bit type in shared memory, in which each lane has stored its fragments
    /// of `steps` steps along k. `at` is the lane's place; the fragments of a step follow those of the step
    /// before at [`WARP_VECTOR_BYTES`](crate::WARP_VECTOR_BYTES).
    pub fn of_lanes(half: Half, steps: u32, at: Shared) -> OperandA {
        OperandA { chunks: 2 * steps, source: Source::Lanes(at), ..OperandA::in_registers(half, &[]) }
    }

    /// The operand of one half of the columns: the first if `half` is 0, the second if it is 1. The tile has
    /// a multiple of 32 columns.
    #[must_use]
    pub fn in_halves(self, k: &mut Builder, half: R32) -> OperandA {
        let source = match self.source {
            Source::Shared(reader, tile) => Source::Shared(reader.in_halves(k, half), tile),
            Source::Registers(_) | Source::Lanes(_) => {
                unreachable!("only a tile in shared memory has a place to start")
            }
        };
        OperandA { source, chunks: self.chunks / 2, ..self }
    }

    /// Reads the operand once and keeps it in registers. The tile must be complete and visible.
    pub fn into_registers(self, k: &mut Builder) -> OperandA {
        let open = self.open(k);
        let all = (0..self.steps()).flat_map(|j| (0..self.m_tiles).map(move |m| (m, j)));
        let fragments = all.map(|(m, j)| self.fragment(k, &open, m, j)).collect();
        OperandA { source: Source::Registers(fragments), ..self }
    }

    /// Number of steps along head_dim. The last step is a K8 step if k is not a multiple of 16; 8-bit types
    /// have only whole steps.
    pub fn steps(&self) -> u32 {
        self.chunks.div_ceil(2)
    }

    /// The `ldmatrix` addresses for one product. They are recomputed for each product, because keeping them
    /// would occupy registers throughout the main loop.
    pub(super) fn open(&self, k: &mut Builder) -> Opened<'_> {
        match &self.source {
            Source::Shared(reader, tile) => Opened::Shared(reader.open(k, *tile)),
            Source::Registers(fragments) => Opened::Registers(fragments),
            Source::Lanes(at) => Opened::Lanes(*at),
        }
    }

    fn fragment(&self, k: &mut Builder, open: &Opened, m: u32, step: u32) -> Fragment {
        match open {
            Opened::Registers(fragments) => fragments[(step * self.m_tiles + m) as usize],
            Opened::Lanes(at) => Fragment::K16(k.ld_vec(at.at(warp_vectors(step)))),
            Opened::Shared(tile) => {
                let from = tile.address(16 * m, 2 * step);
                if 2 * step + 1 == self.chunks {
                    Fragment::K8(self.adjust(k, |k| k.ldmatrix(from)))
                } else {
                    Fragment::K16(self.adjust(k, |k| k.ldmatrix(from)))
                }
            }
        }
    }

    /// The fragment of a step of 16 columns, for one tile of rows and a 16-bit type.
    pub(super) fn halves(&self, k: &mut Builder, open: &Opened, step: u32) -> [R32; 4] {
        match self.fragment(k, open, 0, step) {
            Fragment::K16(words) => words,
            Fragment::K8(_) => unreachable!("rows have whole steps"),
        }
    }

    fn adjust<const N: usize>(
        &self,
        k: &mut Builder,
        load: impl FnOnce(&mut Builder) -> [R32; N],
    ) -> [R32; N] {
        let fragment = load(k);
        let fragment = match self.sign {
            Sign::Keep => fragment,
            Sign::Negate => {
                let signs = self.ty.signs();
                fragment.map(|r| k.xor(r, signs))
            }
            Sign::Clear => fragment.map(|_| k.mov(0)),
        };
        if self.ty == MmaType::Tf32 { fragment.map(|word| rounded(k, word)) } else { fragment }
    }
}

/// The sums of A ∘ B along each row of two operands of one 16-bit type and one shape: one number for each of
/// the lane's rows ([`AccTile::lane_rows`]), equal in the lanes of a quad. Both tiles must be visible.
pub fn row_dots(k: &mut Builder, half: Half, a: &OperandA, b: &OperandA) -> Vec<F32> {
    let opened = [a.open(k), b.open(k)];
    let mut dots = Vec::new();
    for m in 0..a.m_tiles {
        let sums: [F32; 2] = [k.mov(0.0f32), k.mov(0.0f32)];
        for step in 0..a.steps() {
            let [x, y] = [(a, &opened[0]), (b, &opened[1])].map(|(operand, open)| {
                match operand.fragment(k, open, m, step) {
                    Fragment::K16(words) => words.to_vec(),
                    Fragment::K8(words) => words.to_vec(),
                }
            });
            // Words of the lane's upper and lower row take turns.
            for (i, (x, y)) in x.into_iter().zip(y).enumerate() {
                let [x, y] = [x, y].map(|pair| k.unpack(half, pair));
                for (x, y) in x.into_iter().zip(y) {
                    k.mad_to(sums[i % 2], x, y, sums[i % 2]);
                }
            }
        }
        for sum in sums {
            for mask in [1, 2] {
                let other = k.shfl_xor(sum, mask);
                k.add_to(sum, sum, other);
            }
            dots.push(sum);
        }
    }
    dots
}

/// A tile whose rows are the columns of a B operand, with k contiguous.
#[derive(Clone, Debug)]
pub struct OperandB {
    /// Reads the chunks in pairs.
    pub tile: OpenTile,
    /// Reads the odd last chunk, if k is not a multiple of 16. For f32 along the rows of a tile, reads the
    /// odd rows.
    pub tail: Option<OpenTile>,
}

/// D = A Bᵀ, with a column for each row of the tile of B.
pub fn mma_abt(k: &mut Builder, a: &OperandA, b: &OperandB) -> AccTile {
    let columns = b.tile.layout().rows;
    let d = AccTile::zero(k, 16 * a.m_tiles, columns);
    match a.ty {
        MmaType::F32 => {
            abt_of_f32(k, a, b, &d);
            return d;
        }
        MmaType::Tf32 => {
            abt_of_tf32(k, a, b, &d);
            return d;
        }
        MmaType::Half(_) | MmaType::Fp8(_) => {}
    }
    mma_abt_onto(k, a, b, &d);
    d
}

/// D += A Bᵀ of 16-bit or 8-bit types, with a column for each row of the tile of B.
pub fn mma_abt_onto(k: &mut Builder, a: &OperandA, b: &OperandB, d: &AccTile) {
    let open = a.open(k);
    for step in 0..a.steps() {
        let fragments: Vec<Fragment> = (0..a.m_tiles).map(|m| a.fragment(k, &open, m, step)).collect();
        for pair in 0..b.tile.layout().rows / 16 {
            let n = 2 * pair;
            match &b.tail {
                Some(tail) if 2 * step + 1 == a.chunks => {
                    let b: [R32; 2] = k.ldmatrix(tail.address(16 * pair, 2 * step));
                    product(k, a.ty, d, n, &fragments, |j| [b[j], b[j]]);
                }
                _ => {
                    let b: [R32; 4] = k.ldmatrix(b.tile.address(16 * pair, 2 * step));
                    product(k, a.ty, d, n, &fragments, |j| [b[2 * j], b[2 * j + 1]]);
                }
            }
        }
    }
}

/// Computes columns `8n` to `8n + 16` of one step of D, for all rows of the warp. `b(j)` is the B fragment of
/// tile `n + j`.
fn product(k: &mut Builder, ty: MmaType, d: &AccTile, n: u32, a: &[Fragment], b: impl Fn(usize) -> [R32; 2]) {
    for (m, fragment) in a.iter().enumerate() {
        for j in 0..2 {
            let acc = d.tile(m as u32, n + j as u32);
            match (ty, fragment) {
                (MmaType::Half(half), Fragment::K16(a)) => k.mma_m16n8k16(half, acc, *a, b(j)),
                (MmaType::Half(half), Fragment::K8(a)) => k.mma_m16n8k8(half, acc, *a, b(j)[0]),
                (MmaType::Fp8(types), Fragment::K16(a)) => k.mma_m16n8k32(types, acc, *a, b(j)),
                (MmaType::Fp8(_), Fragment::K8(_)) => unreachable!("8-bit rows have whole steps"),
                (MmaType::F32 | MmaType::Tf32, _) => unreachable!("f32 has products of its own"),
            }
        }
    }
}

/// D += A B. The rows of the tile of B are along k, and its columns are contiguous; `ldmatrix.trans`
/// transposes it. With 8-bit types, the columns of D are in the order of [`AccTile::in_quads`], and those of
/// A in the order of [`AccTile::round`].
pub fn mma_ab(k: &mut Builder, ty: MmaType, a: &OperandTile, b: &OperandB, d: &AccTile) {
    match ty {
        MmaType::Half(half) => ab_of_halves(k, half, a, &b.tile, d),
        MmaType::F32 => ab_of_f32(k, a, b, d),
        MmaType::Tf32 => ab_of_tf32(k, a, b, d),
        MmaType::Fp8(types) => ab_of_bytes(k, types, a, &b.tile, d, Addition::Onto),
    }
}

/// Like [`mma_ab`] of 8-bit types, but A B has separate accumulators, which are added to D in f32: sums of
/// 8-bit products on the tensor cores keep few bits below the largest term.
pub fn mma_ab_apart(k: &mut Builder, types: [Type; 2], a: &OperandTile, b: &OperandB, d: &AccTile) {
    ab_of_bytes(k, types, a, &b.tile, d, Addition::Apart);
}

/// Like [`mma_ab_apart`], with a factor for A B in each of the lane's rows.
pub fn mma_ab_scaled(
    k: &mut Builder,
    types: [Type; 2],
    a: &OperandTile,
    b: &OperandB,
    d: &AccTile,
    factors: &[F32],
) {
    ab_of_bytes(k, types, a, &b.tile, d, Addition::Scaled(factors));
}

/// How a product is added to D.
#[derive(Clone, Copy)]
enum Addition<'a> {
    /// By the tensor cores.
    Onto,
    /// In f32, from accumulators of its own.
    Apart,
    /// In f32, from accumulators of its own, times a factor for each of the lane's rows.
    Scaled(&'a [F32]),
}

/// The product of 8-bit A and B, 16 columns at a time. `ldmatrix.trans` moves pairs of bytes: a lane gets two
/// rows of the neighbouring columns `2g` and `2g + 1`, where `g` is its index among the columns of a
/// fragment. From two such registers, one permutation takes the bytes of the even column and another those of
/// the odd column, each with four rows in the order of [`AccTile::round`].
fn ab_of_bytes(
    k: &mut Builder,
    types: [Type; 2],
    a: &OperandTile,
    b: &OpenTile,
    d: &AccTile,
    addition: Addition<'_>,
) {
    const EVEN: u32 = 0x6420;
    const ODD: u32 = 0x7531;
    for n in (0..d.n_tiles()).step_by(4) {
        // Number of tiles of D for each chunk of 16 columns.
        let chunks = ((d.n_tiles() - n) / 2).min(2);
        let sums = if !matches!(addition, Addition::Onto) {
            // Without this barrier, ptxas would begin the sums of many columns at once, and spill registers.
            if n > 0 && d.n_tiles() > 16 {
                k.warp_sync();
            }
            AccTile::zero(k, 16 * d.m_tiles(), 16 * chunks)
        } else {
            d.columns(n, 2 * chunks)
        };
        for j in 0..a.k_tiles() {
            // For each chunk, the registers of four groups of eight rows.
            let groups = [0, 16].map(|row| {
                let from = b.address(32 * j + row, n / 2);
                if chunks == 2 {
                    k.ldmatrix_trans::<4>(from).to_vec()
                } else {
                    k.ldmatrix_trans::<2>(from).to_vec()
                }
            });
            for chunk in 0..chunks {
                let at = 2 * chunk as usize;
                for (tile, selector) in [(2 * chunk, EVEN), (2 * chunk + 1, ODD)] {
                    let fragment =
                        [0, 1].map(|half: usize| k.prmt(groups[half][at], groups[half][at + 1], selector));
                    for m in 0..d.m_tiles() {
                        k.mma_m16n8k32(types, sums.tile(m, tile), a.fragment(m, j), fragment);
                    }
                }
            }
        }
        match addition {
            Addition::Onto => {}
            Addition::Apart => add_tiles(k, &d.columns(n, 2 * chunks), &sums),
            Addition::Scaled(factors) => add_scaled(k, &d.columns(n, 2 * chunks), &sums, factors),
        }
    }
}

fn ab_of_halves(k: &mut Builder, half: Half, a: &OperandTile, b: &OpenTile, d: &AccTile) {
    for j in 0..a.k_tiles() {
        for n in (0..d.n_tiles()).step_by(2) {
            let from = b.address(16 * j, n);
            let fragments: Vec<[R32; 2]> = if n + 1 < d.n_tiles() {
                let [b0, b1, b2, b3] = k.ldmatrix_trans(from);
                vec![[b0, b1], [b2, b3]]
            } else {
                vec![k.ldmatrix_trans(from)]
            };
            for m in 0..d.m_tiles() {
                for (tile, b) in fragments.iter().enumerate() {
                    k.mma_m16n8k16(half, d.tile(m, n + tile as u32), a.fragment(m, j), *b);
                }
            }
        }
    }
}

/// D = A Bᵀ of f32, in steps of 8 columns. The products of the large parts and all other products have
/// separate accumulators: sums on the tensor cores are truncated, and with this split fewer of them are as
/// large as D.
fn abt_of_f32(k: &mut Builder, a: &OperandA, b: &OperandB, d: &AccTile) {
    let small = AccTile::zero(k, 16 * d.m_tiles(), 8 * d.n_tiles());
    let open = a.open(k);
    for step in 0..a.steps() {
        let fragments: Vec<[Parts; 4]> = (0..a.m_tiles)
            .map(|m| match a.fragment(k, &open, m, step) {
                Fragment::K16(words) => words.map(|word| Parts::of(k, word)),
                Fragment::K8(_) => unreachable!("tiles of f32 have an even number of chunks"),
            })
            .collect();
        for pair in 0..d.n_tiles() / 2 {
            let words: [R32; 4] = k.ldmatrix(b.tile.address(16 * pair, 2 * step));
            let [b0, b1, b2, b3] = words.map(|word| Parts::of(k, word));
            for (m, a) in (0..).zip(&fragments) {
                for (n, b) in [(2 * pair, [b0, b1]), (2 * pair + 1, [b2, b3])] {
                    small_products(k, a, &b, small.tile(m, n));
                    large_product(k, a, &b, d.tile(m, n));
                }
            }
        }
    }
    add_tiles(k, d, &small);
}

/// D += A B of f32, in steps of 8 rows of B. The sums of a block have separate accumulators: sums on the
/// tensor cores are truncated, while the addition to D, once per block, is rounded. The products of small
/// parts come first, so that their sums are truncated while they are small.
fn ab_of_f32(k: &mut Builder, a: &OperandTile, b: &OperandB, d: &AccTile) {
    let [even, odd] = [Some(&b.tile), b.tail.as_ref()].map(|rows| rows.expect("readers of both rows"));
    let parts = |k: &mut Builder, m: u32, j: u32| a.fragment(m, j).map(|word| Parts::of(k, word));
    let fragments: Vec<Vec<[Parts; 4]>> =
        (0..a.k_tiles()).map(|j| (0..d.m_tiles()).map(|m| parts(k, m, j)).collect()).collect();
    for n in 0..d.n_tiles() {
        let sums = AccTile::zero(k, 16 * d.m_tiles(), 8);
        let columns: Vec<[Parts; 2]> = (0..a.k_tiles())
            .map(|j| {
                [even, odd].map(|rows| {
                    let word: R32 = k.ld(rows.address(8 * j, 2 * n));
                    Parts::of(k, word)
                })
            })
            .collect();
        for multiply in [small_products, large_product] {
            for (fragments, b) in fragments.iter().zip(&columns) {
                for (m, a) in (0..).zip(fragments) {
                    multiply(k, a, b, sums.tile(m, 0));
                }
            }
        }
        for m in 0..d.m_tiles() {
            for (sum, part) in d.tile(m, n).into_iter().zip(sums.tile(m, 0)) {
                k.add_to(sum, sum, part);
            }
        }
    }
}

/// D = A Bᵀ of f32 numbers rounded to tf32, in steps of 8 columns.
fn abt_of_tf32(k: &mut Builder, a: &OperandA, b: &OperandB, d: &AccTile) {
    let open = a.open(k);
    for step in 0..a.steps() {
        let fragments: Vec<[R32; 4]> = (0..a.m_tiles)
            .map(|m| match a.fragment(k, &open, m, step) {
                Fragment::K16(words) => words,
                Fragment::K8(_) => unreachable!("tiles of f32 have an even number of chunks"),
            })
            .collect();
        for pair in 0..d.n_tiles() / 2 {
            let words: [R32; 4] = k.ldmatrix(b.tile.address(16 * pair, 2 * step));
            let [b0, b1, b2, b3] = words.map(|word| rounded(k, word));
            for (m, &a) in (0..).zip(&fragments) {
                for (n, b) in [(2 * pair, [b0, b1]), (2 * pair + 1, [b2, b3])] {
                    k.mma_tf32(d.tile(m, n), a, b);
                }
            }
        }
    }
}

/// D += A B of f32 numbers rounded to tf32, in steps of 8 rows of B.
fn ab_of_tf32(k: &mut Builder, a: &OperandTile, b: &OperandB, d: &AccTile) {
    let [even, odd] = [Some(&b.tile), b.tail.as_ref()].map(|rows| rows.expect("readers of both rows"));
    for j in 0..a.k_tiles() {
        let fragments: Vec<[R32; 4]> =
            (0..d.m_tiles()).map(|m| a.fragment(m, j).map(|word| rounded(k, word))).collect();
        for n in 0..d.n_tiles() {
            let b = [even, odd].map(|rows| {
                let word: R32 = k.ld(rows.address(8 * j, 2 * n));
                rounded(k, word)
            });
            for (m, &a) in (0..).zip(&fragments) {
                k.mma_tf32(d.tile(m, n), a, b);
            }
        }
    }
}

/// The tf32 number nearest to an f32.
fn rounded(k: &mut Builder, word: R32) -> R32 {
    let value = k.from_bits(word);
    k.to_tf32(value)
}

/// An f32 as the sum of two tf32 numbers. The remainder is at most 2^-23 of the number.
#[derive(Clone, Copy)]
struct Parts {
    large: R32,
    small: R32,
}

impl Parts {
    /// Three instructions: add, and, subtract. One `cvt.rna.tf32` alone takes three on Hopper. Adding half a
    /// unit and clearing the 13 low bits rounds to the nearest tf32. The rest has at most 12 significant
    /// bits. The tensor core ignores the 13 low bits of its operands, which drops at most one of the 12. The
    /// large part of a NaN may be an infinity or a zero; the rest is then still NaN.
    fn of(k: &mut Builder, word: R32) -> Parts {
        const HALF_UNIT: u32 = 1 << 12;
        const KEPT: u32 = !((1 << 13) - 1);
        let raised = k.add(word, HALF_UNIT);
        let large = k.and(raised, KEPT);
        let [value, of_large]: [F32; 2] = [word, large].map(|word| k.from_bits(word));
        let rest = k.sub(value, of_large);
        Parts { large, small: k.to_bits(rest) }
    }
}

/// The products of one step of a small part with a large one.
fn small_products(k: &mut Builder, a: &[Parts; 4], b: &[Parts; 2], sum: [F32; 4]) {
    k.mma_tf32(sum, a.map(|parts| parts.small), b.map(|parts| parts.large));
    k.mma_tf32(sum, a.map(|parts| parts.large), b.map(|parts| parts.small));
}

/// The product of one step of the large parts.
fn large_product(k: &mut Builder, a: &[Parts; 4], b: &[Parts; 2], sum: [F32; 4]) {
    k.mma_tf32(sum, a.map(|parts| parts.large), b.map(|parts| parts.large));
}

/// Adds a tile times a factor for each of the lane's rows.
fn add_scaled(k: &mut Builder, sum: &AccTile, other: &AccTile, factors: &[F32]) {
    for (row, &factor) in (0..).zip(factors) {
        for (sum, other) in sum.row(row).zip(other.row(row)) {
            k.mad_to(sum, other, factor, sum);
        }
    }
}

fn add_tiles(k: &mut Builder, sum: &AccTile, other: &AccTile) {
    for (sum, other) in sum.tiles().iter().zip(other.tiles()) {
        for (&sum, &other) in sum.iter().zip(other) {
            k.add_to(sum, sum, other);
        }
    }
}
