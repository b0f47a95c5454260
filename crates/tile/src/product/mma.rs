//! Warp-level products on `mma.m16n8k16`. A warp holds all columns of its rows, so the products of a KV block
//! need no exchange between warps.

use ptx::{Builder, Half, R32, Shared};

use crate::{AccTile, Fragment, MatrixReader, OpenTile, ProbTile, Threads, TileLayout};

/// One warp's rows of Q: the A operand of S = Q Kᵀ.
#[derive(Clone, Debug)]
pub struct Queries {
    m_tiles: u32,
    chunks: u32,
    half: Half,
    sign: Sign,
    source: Source,
}

/// Transformation of Q that lets the softmax factor be positive for every scale. All three are exact in f16
/// and bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Q unchanged.
    Keep,
    /// −Q, for a negative factor.
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

impl Queries {
    /// Queries that stay in shared memory and are read at each step along head_dim. `tile` holds the CTA's
    /// rows; the warp takes `rows` of them.
    pub fn shared(
        k: &mut Builder,
        threads: &Threads,
        half: Half,
        sign: Sign,
        layout: TileLayout,
        tile: Shared,
        rows: u32,
    ) -> Queries {
        let reader = MatrixReader::rows_first(k, threads, layout);
        let start = k.mad(threads.row_warp, rows * layout.pitch(), tile.base);
        let source = Source::Shared(reader, Shared { base: start, offset: tile.offset });
        Queries { m_tiles: rows / 16, chunks: layout.chunks, half, sign, source }
    }

    /// Reads the queries once and keeps them in registers. The tile must be complete and visible.
    pub fn into_registers(self, k: &mut Builder) -> Queries {
        let open = self.open(k);
        let all = (0..self.steps()).flat_map(|j| (0..self.m_tiles).map(move |m| (m, j)));
        let fragments = all.map(|(m, j)| self.fragment(k, &open, m, j)).collect();
        Queries { source: Source::Registers(fragments), ..self }
    }

    /// Number of steps along head_dim. The last step is a K8 step if head_dim is not a multiple of 16.
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

/// A tile of keys: the B operand of S = Q Kᵀ. Its rows are keys, and head_dim is contiguous.
#[derive(Clone, Debug)]
pub struct KeyTile {
    /// Reads the chunks in pairs.
    pub tile: OpenTile,
    /// Reads the odd last chunk, if head_dim is not a multiple of 16.
    pub tail: Option<OpenTile>,
}

/// S = Q Kᵀ for the keys of one tile.
pub fn mma_qk(k: &mut Builder, q: &Queries, key: &KeyTile) -> AccTile {
    let keys = key.tile.layout().rows;
    let s = AccTile::zero(k, 16 * q.m_tiles, keys);
    let open = q.open(k);
    for step in 0..q.steps() {
        let a: Vec<Fragment> = (0..q.m_tiles).map(|m| q.fragment(k, &open, m, step)).collect();
        for pair in 0..keys / 16 {
            let n = 2 * pair;
            match &key.tail {
                Some(tail) if 2 * step + 1 == q.chunks => {
                    let b: [R32; 2] = k.ldmatrix(tail.address(16 * pair, 2 * step));
                    product(k, q.half, &s, n, &a, |j| [b[j], b[j]]);
                }
                _ => {
                    let b: [R32; 4] = k.ldmatrix(key.tile.address(16 * pair, 2 * step));
                    product(k, q.half, &s, n, &a, |j| [b[2 * j], b[2 * j + 1]]);
                }
            }
        }
    }
    s
}

/// Columns `8n` to `8n + 16` of one step of S, for all rows of the warp. `b(j)` is the B fragment of tile `n
/// + j`.
fn product(k: &mut Builder, half: Half, s: &AccTile, n: u32, a: &[Fragment], b: impl Fn(usize) -> [R32; 2]) {
    for (m, fragment) in a.iter().enumerate() {
        for j in 0..2 {
            let acc = s.tile(m as u32, n + j as u32);
            match fragment {
                Fragment::K16(a) => k.mma_m16n8k16(half, acc, *a, b(j)),
                Fragment::K8(a) => k.mma_m16n8k8(half, acc, *a, b(j)[0]),
            }
        }
    }
}

/// O += P V for one tile of values. Its rows are keys and head_dim_v is contiguous; `ldmatrix.trans`
/// transposes it.
pub fn mma_pv(k: &mut Builder, half: Half, p: &ProbTile, value: &OpenTile, o: &AccTile) {
    for j in 0..p.k_tiles() {
        for n in (0..o.n_tiles()).step_by(2) {
            let from = value.address(16 * j, n);
            let b: Vec<[R32; 2]> = if n + 1 < o.n_tiles() {
                let [b0, b1, b2, b3] = k.ldmatrix_trans(from);
                vec![[b0, b1], [b2, b3]]
            } else {
                vec![k.ldmatrix_trans(from)]
            };
            for m in 0..o.m_tiles() {
                for (tile, b) in b.iter().enumerate() {
                    k.mma_m16n8k16(half, o.tile(m, n + tile as u32), p.fragment(m, j), *b);
                }
            }
        }
    }
}
