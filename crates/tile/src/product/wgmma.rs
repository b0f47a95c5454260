//! Warpgroup-level products on m64nNk16, or m64nNk32 for 8-bit operands: four warps of 16 rows each, B and
//! optionally A straight from shared memory. A warp's part of the accumulator is an [`AccTile`] of 16 rows;
//! the register fragments are those of `mma.m16n8k16`, tile by tile (PTX ISA, "Register Fragments for
//! wgmma.mma_async.m64nNk16").
//!
//! Products are asynchronous. They read registers and shared memory until [`Products::wait`] has returned for
//! their group. Until then, their operands and accumulators must not be accessed.

use ptx::{Builder, Major, R32, R64, Shared, Type};

use crate::{AccTile, Ones, OperandTile, SwizzledTile};

/// Rows of a warpgroup's accumulator.
pub const WARPGROUP_ROWS: u32 = 64;
/// Steps of a product along k, in bytes: 16 elements of 16 bits, or 32 of 8.
const K_BYTES: u32 = 32;

/// A [`SwizzledTile`], or a part of one, as an operand: a matrix descriptor (PTX ISA, "Matrix Descriptor
/// Format").
#[derive(Clone, Copy, Debug)]
pub struct SharedMatrix {
    tile: SwizzledTile,
    major: Major,
    /// Descriptor of the tile's start.
    descriptor: R64,
    /// Byte offset of the part from the tile's start.
    offset: u32,
    /// Increment of the descriptor for 16 bytes.
    unit: i64,
    /// For one half of the columns ([`SharedMatrix::in_halves`]): the descriptor of its half of the middle
    /// panel, if the number of panels is odd.
    half: Option<Option<R64>>,
}

/// Increment that advances the start and keeps the second panel in place: the leading dimension offset (bits
/// 16–29) shrinks as the start address (bits 0–13) grows.
const NEXT_PANEL_STAYS: i64 = 1 - (1 << 16);

impl SharedMatrix {
    /// A tile whose columns are the k dimension (K-major).
    pub fn over_columns(k: &mut Builder, tile: SwizzledTile, at: Shared) -> SharedMatrix {
        // The leading dimension offset is not used: no k step crosses the width of the swizzle.
        SharedMatrix::new(k, tile, at, Major::K, 16)
    }

    /// A tile of 16-bit elements whose rows are the k dimension (MN-major).
    pub fn over_rows(k: &mut Builder, tile: SwizzledTile, at: Shared) -> SharedMatrix {
        SharedMatrix::new(k, tile, at, Major::Mn, tile.panel_bytes())
    }

    /// A tile of one panel whose rows are the k dimension, with [`Ones`] as the columns that follow. The same
    /// ones serve all rows and the tiles of all stages.
    pub fn over_rows_beside(k: &mut Builder, tile: SwizzledTile, at: Shared, ones: Ones) -> SharedMatrix {
        debug_assert!(tile.panels() == 1 && ones.at.base == at.base && ones.at.offset > at.offset);
        let distance = (ones.at.offset - at.offset) as u32;
        let unit = NEXT_PANEL_STAYS;
        SharedMatrix { unit, ..SharedMatrix::new(k, tile, at, Major::Mn, distance) }
    }

    fn new(k: &mut Builder, tile: SwizzledTile, at: Shared, major: Major, leading: u32) -> SharedMatrix {
        // In a cluster, an address holds the CTA's rank from bit 24 on. The rank must not reach the next
        // field of the descriptor.
        let address = k.add(at.base, at.offset as u32);
        let address = k.shr_u(address, 4);
        let address = k.and(address, 0x3FFF);
        let address = k.zext(address);
        let descriptor = k.or(address, descriptor_constants(tile, leading));
        SharedMatrix { tile, major, descriptor, offset: 0, unit: 1, half: None }
    }

    /// The part from `row` on, a multiple of 8.
    #[must_use]
    pub const fn from_row(self, row: u32) -> SharedMatrix {
        SharedMatrix { offset: self.offset + row * self.tile.row_bytes(), ..self }
    }

    /// The part from `column` on. The columns of an operand lie within one panel or begin at a panel.
    #[must_use]
    pub const fn from_column(self, column: u32) -> SharedMatrix {
        SharedMatrix { offset: self.offset + self.column_offset(column), ..self }
    }

    /// Tile `number` of tiles that lie side by side.
    #[must_use]
    pub const fn tile(self, number: u32) -> SharedMatrix {
        SharedMatrix { offset: self.offset + number * self.tile.bytes(), ..self }
    }

    /// Part `part` (in a register) of `width` columns. Its columns lie within one panel or begin at a panel.
    #[must_use]
    pub fn column_part(self, k: &mut Builder, part: R32, width: u32) -> SharedMatrix {
        let bytes = self.column_offset(width);
        self.moved(k, part, bytes)
    }

    /// Part `part` (in a register) of `rows` rows, a multiple of 8.
    #[must_use]
    pub fn row_part(self, k: &mut Builder, part: R32, rows: u32) -> SharedMatrix {
        self.moved(k, part, rows * self.tile.row_bytes())
    }

    /// One half of the columns of a K-major tile: the first panels if `half` (in a register) is 0, the last
    /// panels if it is 1, and half of the middle panel if the number of panels is odd. Two products over both
    /// halves cover all columns.
    #[must_use]
    pub fn in_halves(self, k: &mut Builder, half: R32) -> SharedMatrix {
        let (panels, bytes) = (self.tile.panels(), self.tile.panel_bytes());
        let middle = (panels % 2 == 1).then(|| {
            let first = self.step_at(k, panels / 2 * bytes);
            let of_half = k.mul_wide_u(half, (self.tile.row_bytes() / 2) >> 4);
            k.add(first, of_half)
        });
        let moved = self.moved(k, half, panels.div_ceil(2) * bytes);
        SharedMatrix { half: Some(middle), ..moved }
    }

    /// The tile in a stage of a ring, where tiles lie side by side.
    #[must_use]
    pub fn stage(self, k: &mut Builder, stage: R32) -> SharedMatrix {
        self.moved(k, stage, self.tile.bytes())
    }

    /// The matrix `count · bytes` bytes further on.
    fn moved(self, k: &mut Builder, count: R32, bytes: u32) -> SharedMatrix {
        let by = i64::from(bytes >> 4) * self.unit;
        let advance = if by < 0 { k.mul_wide_s(count, by as i32) } else { k.mul_wide_u(count, by as u32) };
        let half = self.half.map(|middle| middle.map(|middle| k.add(middle, advance)));
        SharedMatrix { descriptor: k.add(self.descriptor, advance), half, ..self }
    }

    const fn column_offset(self, column: u32) -> u32 {
        let panel = self.tile.panel();
        column / panel * self.tile.panel_bytes() + column % panel * self.tile.element
    }

    /// Number of k steps. Along the columns, the last step may read the zeros that pad the last panel.
    const fn steps(self) -> u32 {
        match (self.major, self.half) {
            (Major::Mn, _) => self.tile.rows * 2 / K_BYTES,
            (Major::K, None) => (self.tile.columns * self.tile.element).div_ceil(K_BYTES),
            (Major::K, Some(_)) => self.tile.panels() * (self.tile.row_bytes() / K_BYTES) / 2,
        }
    }

    /// The descriptor of one k step.
    fn step(self, k: &mut Builder, step: u32) -> (R64, Major) {
        let whole = self.tile.panels() / 2 * (self.tile.row_bytes() / K_BYTES);
        if let Some(Some(middle)) = self.half
            && step >= whole
        {
            let by = i64::from((self.offset + (step - whole) * K_BYTES) >> 4);
            return (k.add(middle, by.cast_unsigned()), self.major);
        }
        let bytes = match self.major {
            Major::K => self.column_offset(step * K_BYTES / self.tile.element),
            Major::Mn => step * K_BYTES / 2 * self.tile.row_bytes(),
        };
        (self.step_at(k, self.offset + bytes), self.major)
    }

    /// The descriptor `bytes` bytes from the tile's start.
    fn step_at(self, k: &mut Builder, bytes: u32) -> R64 {
        let by = i64::from(bytes >> 4) * self.unit;
        k.add(self.descriptor, by.cast_unsigned())
    }
}

/// Fields that all descriptors of a tile share: the swizzle (bits 62–63), the stride between groups of eight
/// rows (bits 32–45), and `leading` bytes between panels (bits 16–29).
const fn descriptor_constants(tile: SwizzledTile, leading: u32) -> u64 {
    let swizzle = if tile.row_bytes() == 64 { 2 } else { 1 };
    let stride = 8 * tile.row_bytes() as u64;
    swizzle << 62 | (stride >> 4) << 32 | (leading as u64 >> 4) << 16
}

/// Whether a product replaces its accumulator or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulate {
    /// D = A B.
    Set,
    /// D = D + A B.
    Add,
}

/// A committed group of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group(u32);

/// Issues the products of a warpgroup and numbers their groups. A copy of this value in a branch knows the
/// groups that were committed before the branch.
#[derive(Clone, Debug)]
pub struct Products {
    /// The types of A and B.
    types: [Type; 2],
    negates: bool,
    committed: u32,
}

impl Products {
    /// For operands A and B of these types.
    pub const fn new(types: [Type; 2]) -> Products {
        Products { types, negates: false, committed: 0 }
    }

    /// Computes D = −A B in products of two shared operands that replace D ([`Accumulate::Set`]), so that a
    /// softmax with a negative scale can use a positive factor.
    #[must_use]
    pub const fn negating(self) -> Products {
        Products { negates: true, ..self }
    }

    /// Orders register writes of the warps before the products that follow (`wgmma.fence`). Needed before the
    /// first product, and whenever an accumulator or an A fragment was written by anything but a product of
    /// the same shape.
    pub fn fence(&self, k: &mut Builder) {
        k.wgmma_fence();
    }

    /// Commits the products since the last commit as a group.
    pub fn commit(&mut self, k: &mut Builder) -> Group {
        k.wgmma_commit();
        self.committed += 1;
        Group(self.committed)
    }

    /// Waits until a group and all groups before it are complete.
    pub fn wait(&self, k: &mut Builder, group: Group) {
        k.wgmma_wait(self.committed - group.0);
    }

    /// D = A B, or D += A B, with A and B in shared memory (SS). `d` has 64 rows. If the rows of A are the k
    /// dimension ([`SharedMatrix::over_rows`]), its columns are one panel.
    pub fn wgmma_ss(
        &self,
        k: &mut Builder,
        a: SharedMatrix,
        b: SharedMatrix,
        d: &AccTile,
        accumulate: Accumulate,
    ) {
        let registers = d.registers();
        for step in 0..a.steps() {
            let (a, b) = (a.step(k, step), b.step(k, step));
            let add = step > 0 || accumulate == Accumulate::Add;
            let negated = self.negates && accumulate == Accumulate::Set;
            k.wgmma_ss(self.types, &registers, a, b, add, negated);
        }
    }

    /// D = A B, or D += A B, with A in registers and B in shared memory (RS). `d` has 64 rows, and `a` has
    /// one column for each row of `b`. A rounded accumulator can be used as A without an exchange between
    /// lanes.
    pub fn wgmma_rs(
        &self,
        k: &mut Builder,
        a: &OperandTile,
        b: SharedMatrix,
        d: &AccTile,
        accumulate: Accumulate,
    ) {
        let registers = d.registers();
        for step in 0..a.k_tiles() {
            let b = b.step(k, step);
            let add = step > 0 || accumulate == Accumulate::Add;
            k.wgmma_rs(self.types, &registers, a.fragment(0, step), b, add);
        }
    }
}
