//! Warp-level products on `mma.m16n8k16`. A warp holds all columns of its rows, so the next product with the
//! result as its A operand needs no exchange between warps.

use ptx::{Builder, Half, R32, Shared};

use crate::{AccTile, Fragment, MatrixReader, OpenTile, OperandTile, Threads, TileLayout};

/// One warp's rows of an A operand.
#[derive(Clone, Debug)]
pub struct OperandA {
    m_tiles: u32,
    chunks: u32,
    half: Half,
    sign: Sign,
    source: Source,
}

/// Transformation of A. With it, a softmax can use a positive factor for every scale. All three are exact in
/// f16 and bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A unchanged.
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
}

enum Opened<'a> {
    Shared(OpenTile),
    Registers(&'a [Fragment]),
}

impl OperandA {
    /// An operand that stays in shared memory and is read at each step along k. `tile` holds the CTA's rows;
    /// the warp takes `rows` of them.
    pub fn shared(
        k: &mut Builder,
        threads: &Threads,
        half: Half,
        sign: Sign,
        layout: TileLayout,
        tile: Shared,
        rows: u32,
    ) -> OperandA {
        let reader = MatrixReader::rows_first(k, threads, layout);
        let start = k.mad(threads.row_warp, rows * layout.pitch(), tile.base);
        let source = Source::Shared(reader, Shared { base: start, offset: tile.offset });
        OperandA { m_tiles: rows / 16, chunks: layout.chunks, half, sign, source }
    }

    /// Reads the operand once and keeps it in registers. The tile must be complete and visible.
    pub fn into_registers(self, k: &mut Builder) -> OperandA {
        let open = self.open(k);
        let all = (0..self.steps()).flat_map(|j| (0..self.m_tiles).map(move |m| (m, j)));
        let fragments = all.map(|(m, j)| self.fragment(k, &open, m, j)).collect();
        OperandA { source: Source::Registers(fragments), ..self }
    }

    /// Number of steps along head_dim. The last step is a K8 step if k is not a multiple of 16.
    pub fn steps(&self) -> u32 {
        self.chunks.div_ceil(2)
    }

    /// The `ldmatrix` addresses for one product. They are recomputed for each product, because keeping them
    /// would occupy registers throughout the main loop.
    fn open(&self, k: &mut Builder) -> Opened<'_> {
        match &self.source {
            Source::Shared(reader, tile) => Opened::Shared(reader.open(k, *tile)),
            Source::Registers(fragments) => Opened::Registers(fragments),
        }
    }

    fn fragment(&self, k: &mut Builder, open: &Opened, m: u32, step: u32) -> Fragment {
        match open {
            Opened::Registers(fragments) => fragments[(step * self.m_tiles + m) as usize],
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

    fn adjust<const N: usize>(
        &self,
        k: &mut Builder,
        load: impl FnOnce(&mut Builder) -> [R32; N],
    ) -> [R32; N] {
        let fragment = load(k);
        match self.sign {
            Sign::Keep => fragment,
            Sign::Negate => fragment.map(|r| k.xor(r, 0x8000_8000u32)),
            Sign::Clear => fragment.map(|_| k.mov(0)),
        }
    }
}

/// A tile whose rows are the columns of a B operand, with k contiguous.
#[derive(Clone, Debug)]
pub struct OperandB {
    /// Reads the chunks in pairs.
    pub tile: OpenTile,
    /// Reads the odd last chunk, if k is not a multiple of 16.
    pub tail: Option<OpenTile>,
}

/// D = A Bᵀ, with a column for each row of the tile of B.
pub fn mma_abt(k: &mut Builder, a: &OperandA, b: &OperandB) -> AccTile {
    let columns = b.tile.layout().rows;
    let d = AccTile::zero(k, 16 * a.m_tiles, columns);
    let open = a.open(k);
    for step in 0..a.steps() {
        let fragments: Vec<Fragment> = (0..a.m_tiles).map(|m| a.fragment(k, &open, m, step)).collect();
        for pair in 0..columns / 16 {
            let n = 2 * pair;
            match &b.tail {
                Some(tail) if 2 * step + 1 == a.chunks => {
                    let b: [R32; 2] = k.ldmatrix(tail.address(16 * pair, 2 * step));
                    product(k, a.half, &d, n, &fragments, |j| [b[j], b[j]]);
                }
                _ => {
                    let b: [R32; 4] = k.ldmatrix(b.tile.address(16 * pair, 2 * step));
                    product(k, a.half, &d, n, &fragments, |j| [b[2 * j], b[2 * j + 1]]);
                }
            }
        }
    }
    d
}

/// Columns `8n` to `8n + 16` of one step of D, for all rows of the warp. `b(j)` is the B fragment of tile `n
/// + j`.
fn product(k: &mut Builder, half: Half, d: &AccTile, n: u32, a: &[Fragment], b: impl Fn(usize) -> [R32; 2]) {
    for (m, fragment) in a.iter().enumerate() {
        for j in 0..2 {
            let acc = d.tile(m as u32, n + j as u32);
            match fragment {
                Fragment::K16(a) => k.mma_m16n8k16(half, acc, *a, b(j)),
                Fragment::K8(a) => k.mma_m16n8k8(half, acc, *a, b(j)[0]),
            }
        }
    }
}

/// D += A B. The rows of the tile of B are along k and its columns are contiguous; `ldmatrix.trans`
/// transposes it.
pub fn mma_ab(k: &mut Builder, half: Half, a: &OperandTile, b: &OpenTile, d: &AccTile) {
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
