//! Fragments in registers: accumulators and A operands of tensor-core products.

use ptx::{Builder, CmpOp, F32, Half, Pred, R32, Type};

use crate::Threads;

/// Bytes of four registers of every lane of a warp, such as its registers of a 16×8 tile.
pub const WARP_VECTOR_BYTES: u32 = 4 * 4 * 32;

/// Bytes of `count` times four registers of every lane of a warp.
pub const fn warp_vectors(count: u32) -> i64 {
    count as i64 * WARP_VECTOR_BYTES as i64
}

/// The type of an A operand in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperandType {
    /// 16 bits.
    Half(Half),
    /// 8 bits: 4 bits of exponent, 3 of mantissa, numbers up to 448.
    E4m3,
}

impl OperandType {
    /// The PTX type of an element.
    pub const fn ty(self) -> Type {
        match self {
            OperandType::Half(half) => half.ty(),
            OperandType::E4m3 => Type::E4m3,
        }
    }

    /// Columns of a step along k, which are 32 bytes.
    pub const fn step(self) -> u32 {
        256 / self.ty().bits()
    }
}

impl From<Half> for OperandType {
    fn from(half: Half) -> OperandType {
        OperandType::Half(half)
    }
}

/// A warp's accumulator of `16 · m_tiles` rows × `8 · n_tiles` columns in f32 registers (PTX ISA, "Matrix
/// Fragments for mma.m16n8k16"). In a 16×8 tile, lane `l` holds columns `2 (l mod 4) + {0, 1}` of rows `l /
/// 4` (registers 0 and 1) and `l / 4 + 8` (registers 2 and 3). In two neighbouring tiles
/// [in quads](AccTile::in_quads), the lane holds columns `4 (l mod 4) + {0, 1}` and `+ {2, 3}`.
#[derive(Clone, Debug)]
pub struct AccTile {
    n_tiles: u32,
    tiles: Vec<[F32; 4]>,
    quads: bool,
}

impl AccTile {
    /// An accumulator set to zero.
    pub fn zero(k: &mut Builder, rows: u32, columns: u32) -> AccTile {
        let (m_tiles, n_tiles) = (rows / 16, columns / 8);
        let tiles = (0..m_tiles * n_tiles).map(|_| std::array::from_fn(|_| k.mov(0.0f32))).collect();
        AccTile { n_tiles, tiles, quads: false }
    }

    /// Uninitialised registers, for a product that overwrites its accumulator.
    pub fn unset(k: &mut Builder, rows: u32, columns: u32) -> AccTile {
        let n_tiles = columns / 8;
        AccTile { n_tiles, tiles: (0..rows / 16 * n_tiles).map(|_| k.regs()).collect(), quads: false }
    }

    /// A view of `n_tiles` 8-column tiles from tile `first` on: the returned tile names the registers of
    /// `self`.
    #[must_use]
    pub fn columns(&self, first: u32, n_tiles: u32) -> AccTile {
        let of_row = |row: &[[F32; 4]]| row[first as usize..(first + n_tiles) as usize].to_vec();
        let tiles = self.tiles.chunks_exact(self.n_tiles as usize).flat_map(of_row).collect();
        AccTile { n_tiles, tiles, quads: self.quads }
    }

    /// A view of the result of a product with 8-bit B ([`crate::mma_ab`]) that has the lane's columns in
    /// order. Of 16 columns, the product leaves the even ones in the first tile and the odd ones in the
    /// second, so that the lane holds four neighbouring columns.
    #[must_use]
    pub fn in_quads(&self) -> AccTile {
        let tiles = self.tiles.chunks_exact(2).flat_map(|pair| {
            let (even, odd) = (pair[0], pair[1]);
            [[even[0], odd[0], even[2], odd[2]], [even[1], odd[1], even[3], odd[3]]]
        });
        AccTile { n_tiles: self.n_tiles, tiles: tiles.collect(), quads: true }
    }

    /// Whether the lane holds four neighbouring columns of each 16 ([`AccTile::in_quads`]).
    pub fn is_in_quads(&self) -> bool {
        self.quads
    }

    /// The first column that the lane holds.
    pub fn lane_column(&self, k: &mut Builder, threads: &Threads) -> R32 {
        if self.quads { k.shl(threads.column, 1) } else { threads.column }
    }

    /// The column of the lane's pair in 8-column tile `n`, counted from its first column.
    pub fn pair_column(&self, n: u32) -> u32 {
        if self.quads { n / 2 * 16 + n % 2 * 2 } else { 8 * n }
    }

    /// The lane's four registers of each 16×8 tile, row of tiles by row of tiles.
    pub fn tiles(&self) -> &[[F32; 4]] {
        &self.tiles
    }

    /// The lane's registers, tile by tile.
    pub fn registers(&self) -> Vec<F32> {
        self.tiles.concat()
    }

    /// Tiles of 16 rows.
    pub fn m_tiles(&self) -> u32 {
        self.tiles.len() as u32 / self.n_tiles
    }

    /// Tiles of 8 columns.
    pub fn n_tiles(&self) -> u32 {
        self.n_tiles
    }

    /// The lane's four registers of a 16×8 tile.
    pub fn tile(&self, m: u32, n: u32) -> [F32; 4] {
        self.tiles[(m * self.n_tiles + n) as usize]
    }

    /// Number of rows of which the lane holds elements. Lane row `i` is row `16 (i / 2) + 8 (i mod 2) + lane
    /// / 4` of the tile.
    pub fn lane_rows(&self) -> u32 {
        2 * self.m_tiles()
    }

    /// The lane's elements of its row `i`, in column order.
    pub fn row(&self, i: u32) -> impl Iterator<Item = F32> + '_ {
        let (m, half) = (i / 2, 2 * (i % 2) as usize);
        (0..self.n_tiles).flat_map(move |n| {
            let tile = self.tile(m, n);
            [tile[half], tile[half + 1]]
        })
    }

    /// Copies the elements of another tile.
    pub fn copy_from(&self, k: &mut Builder, other: &AccTile) {
        for (to, from) in self.tiles.iter().zip(&other.tiles) {
            for (&to, &from) in to.iter().zip(from) {
                k.mov_to(to, from);
            }
        }
    }

    /// Multiplies the lane's row `i` by `factor`.
    pub fn scale_row(&self, k: &mut Builder, i: u32, factor: F32) {
        for element in self.row(i) {
            k.mul_to(element, element, factor);
        }
    }

    /// Rounds the tile to the A operand of the next product. No data moves between lanes.
    ///
    /// In 16 bits, the accumulators of two neighbouring 16×8 tiles hold exactly the elements of one 16×16 A
    /// fragment in every lane. In 8 bits, the accumulators of four neighbouring tiles hold the elements of a
    /// 16×32 A fragment in another column order, [`column_of_byte`]; the rows of B must have the same order.
    pub fn round(&self, k: &mut Builder, ty: impl Into<OperandType>) -> OperandTile {
        let ty = ty.into();
        let k_tiles = 8 * self.n_tiles / ty.step();
        let fragments = (0..self.m_tiles() * k_tiles)
            .map(|i| {
                let (m, j) = (i / k_tiles, i % k_tiles);
                match ty {
                    OperandType::Half(half) => self.round_to_half(k, half, m, 2 * j),
                    OperandType::E4m3 => self.round_to_bytes(k, m, 4 * j),
                }
            })
            .collect();
        OperandTile { k_tiles, fragments }
    }

    /// The 16×16 A fragment of the tiles `n` and `n + 1`.
    fn round_to_half(&self, k: &mut Builder, half: Half, m: u32, n: u32) -> [R32; 4] {
        let pair = |k: &mut Builder, t: [F32; 4]| [k.pack(half, t[0], t[1]), k.pack(half, t[2], t[3])];
        let [low, high] = [pair(k, self.tile(m, n)), pair(k, self.tile(m, n + 1))];
        [low[0], low[1], high[0], high[1]]
    }

    /// The 16×32 A fragment of the tiles from `n` to `n + 3`, in e4m3.
    fn round_to_bytes(&self, k: &mut Builder, m: u32, n: u32) -> [R32; 4] {
        let mut quad = |n: u32, row: usize| {
            let (left, right) = (self.tile(m, n), self.tile(m, n + 1));
            k.pack_e4m3([left[row], left[row + 1], right[row], right[row + 1]])
        };
        [quad(n, 0), quad(n, 2), quad(n + 2, 0), quad(n + 2, 2)]
    }
}

impl AccTile {
    /// The tile without rounding, as the A operand of f32 products ([`crate::MmaType::F32`] and
    /// [`crate::MmaType::Tf32`]): one fragment for every 8 columns. A lane holds columns `2t` and `2t + 1`,
    /// while such a fragment has `t` and `t + 4`, so the product reads the rows of B in that order.
    pub fn words(&self, k: &mut Builder) -> OperandTile {
        let fragments = self.tiles.iter().map(|&[a, b, c, d]| [a, c, b, d].map(|word| k.to_bits(word)));
        OperandTile { k_tiles: self.n_tiles, fragments: fragments.collect() }
    }

    /// Sets the existing registers to zero.
    pub fn clear(&self, k: &mut Builder) {
        for &element in self.tiles.iter().flatten() {
            k.mov_to(element, 0.0);
        }
    }

    /// Like [`AccTile::round`], but writes to the registers of `to`.
    pub fn round_to(&self, k: &mut Builder, ty: impl Into<OperandType>, to: &OperandTile) {
        let rounded = self.round(k, ty);
        for (to, from) in to.fragments.iter().flatten().zip(rounded.fragments.iter().flatten()) {
            k.mov_to(*to, *from);
        }
    }
}

/// The column of an accumulator that byte `byte` of a rounded row holds ([`AccTile::round`]). In each group
/// of 16 columns, a lane has columns `2t`, `2t + 1`, `2t + 8` and `2t + 9` of the accumulator, and bytes `4t`
/// to `4t + 3` of the fragment.
pub const fn column_of_byte(byte: u32) -> u32 {
    let (lane, tile, odd) = (byte / 4 % 4, byte / 2 % 2, byte % 2);
    byte / 16 * 16 + 8 * tile + 2 * lane + odd
}

/// An A operand in registers, of `16 · m` rows and `k_tiles` steps of 32 bytes of columns.
#[derive(Clone, Debug)]
pub struct OperandTile {
    k_tiles: u32,
    fragments: Vec<[R32; 4]>,
}

impl OperandTile {
    /// Uninitialised registers.
    pub fn unset(k: &mut Builder, ty: impl Into<OperandType>, rows: u32, columns: u32) -> OperandTile {
        let k_tiles = columns / ty.into().step();
        OperandTile { k_tiles, fragments: (0..rows / 16 * k_tiles).map(|_| k.regs()).collect() }
    }

    /// A view of the first `k_tiles` steps along k: the returned tile names the registers of `self`.
    /// Requires a tile of 16 rows.
    #[must_use]
    pub fn first_tiles(&self, k_tiles: u32) -> OperandTile {
        OperandTile { k_tiles, fragments: self.fragments[..k_tiles as usize].to_vec() }
    }

    /// Sets the steps along k from `first` on to zero, in a tile of 16 rows.
    pub fn clear_from(&self, k: &mut Builder, first: u32) {
        for &register in self.fragments[first as usize..].iter().flatten() {
            k.mov_to(register, 0);
        }
    }

    /// Whether all elements are below 2, provided that none is negative. In f16 and in bf16, 2 is the
    /// smallest number whose highest exponent bit is set; infinities and NaN have that bit too. The test
    /// costs one instruction per register, which holds two elements, plus the reduction of four chains.
    pub fn below_two(&self, k: &mut Builder) -> Pred {
        const HIGHEST: u32 = 0x4000_4000;
        let (first, others) = self.fragments.split_first().expect("a tile has fragments");
        let chains = others
            .iter()
            .fold(*first, |chains, fragment| std::array::from_fn(|i| k.or(chains[i], fragment[i])));
        let all = chains.into_iter().reduce(|a, b| k.or(a, b)).expect("four chains");
        let reached = k.and(all, HIGHEST);
        k.setp_u(CmpOp::Eq, reached, 0)
    }

    /// Whether all e4m3 elements are below 448, provided that none is negative. If so, no element was too
    /// large, infinite or NaN before the conversion. 448 and NaN have the codes 0x7E and 0x7F. The test costs
    /// two instructions per register, which holds four elements, plus the reduction of four chains.
    pub fn below_448(&self, k: &mut Builder) -> Pred {
        const TO_SIGN: u32 = 0x0202_0202;
        const SIGNS: u32 = 0x8080_8080;
        let mut chains: [Option<R32>; 4] = [None; 4];
        for fragment in &self.fragments {
            for (chain, &register) in chains.iter_mut().zip(fragment) {
                let raised = k.add(register, TO_SIGN);
                *chain = Some(chain.map_or(raised, |chain| k.or(chain, raised)));
            }
        }
        let all = chains.into_iter().flatten().reduce(|a, b| k.or(a, b)).expect("a tile has fragments");
        let reached = k.and(all, SIGNS);
        k.setp_u(CmpOp::Eq, reached, 0)
    }

    /// Steps along k, of 32 bytes.
    pub fn k_tiles(&self) -> u32 {
        self.k_tiles
    }

    /// The fragment of 16 rows and one step along k.
    pub fn fragment(&self, m: u32, j: u32) -> [R32; 4] {
        self.fragments[(m * self.k_tiles + j) as usize]
    }
}

/// The A operand of one step along k.
#[derive(Clone, Copy, Debug)]
pub enum Fragment {
    /// 16 columns.
    K16([R32; 4]),
    /// 8 columns: the last step of a head_dim that is not a multiple of 16.
    K8([R32; 2]),
}
