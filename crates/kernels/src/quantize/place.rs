//! Parameters of the kernels that read the tensor, and the rows of a CTA.

use problem::{Mean, Problem, Quantization, Tensor};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Launch, Pointer, Pred, R32, R64, SpecialReg};

use tile::divide;

use super::code::{Passes, QuantizationCode, UNIT};
use super::units::{Unit, Units, factor};
use crate::contract::Contract;
use crate::forward::contract::declare_head_strides;
use crate::grid::{Axis, Extents, Grid};

/// The name of the temporary: the largest magnitude of each part of the rows of a factor.
const LARGEST: &str = "largest_magnitudes";
/// The name of the temporary: the sums of the columns of each part.
const SUMS: &str = "key_sums";
/// The name of the temporary: the means of the columns of each head, with the signs of the rotation.
const MEANS: &str = "key_means";

/// The task of one of the kernels that quantise a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Adds the rows of each part of the keys, for [`Mean`].
    Add,
    /// Finds the largest magnitudes.
    FindLargest,
    /// Writes codes and factors.
    Round,
}

/// Extents of a launch.
pub(super) struct Sizes {
    batch: u32,
    heads_kv: u32,
    /// Heads that share a factor.
    group: u32,
    /// Rows of a head.
    rows: u32,
    /// Rows of a head that share a factor.
    of_factor: u32,
    /// Factors of a head.
    blocks: u32,
    /// Tiles of the rows of a head that share a factor.
    tiles: u32,
    /// CTAs that share a factor.
    parts: u32,
}

impl Sizes {
    pub fn new(code: &QuantizationCode, problem: &Problem, options: &Quantization) -> Sizes {
        let [batch, heads, rows, _] = problem.extents(code.tensor);
        let group = (heads / problem.heads_kv) as u32;
        let of_factor = options.rows.map_or(rows as u32, |block| (rows as u32).min(block)).max(1);
        let tiles = of_factor.div_ceil(code.tile());
        // Each thread of the second kernel reads at most one part.
        let parts = match code.passes {
            Passes::Held { group, .. } => group,
            Passes::Two { .. } => (group * tiles).min(code.threads),
        };
        Sizes {
            batch: batch as u32,
            heads_kv: problem.heads_kv as u32,
            group,
            rows: rows as u32,
            of_factor,
            blocks: (rows as u32).div_ceil(of_factor).max(1),
            tiles,
            parts,
        }
    }

    /// The extents of the kernel that adds the rows: a CTA for each part, in the place of the rows with a
    /// factor.
    pub fn of_sums(code: &QuantizationCode, problem: &Problem) -> Sizes {
        let [batch, heads, rows, dim] = problem.extents(code.tensor);
        let mean = Mean::new(rows, dim);
        let of_factor = mean.part() as u32;
        Sizes {
            batch: batch as u32,
            heads_kv: heads as u32,
            group: 1,
            rows: rows as u32,
            of_factor,
            blocks: mean.parts() as u32,
            tiles: of_factor.div_ceil(code.tile()),
            parts: 1,
        }
    }

    const fn factors(&self) -> usize {
        self.batch as usize * self.heads_kv as usize * self.blocks as usize
    }

    /// The extents of the grid.
    pub fn grid(&self) -> Extents {
        Extents([u64::from(self.blocks) * u64::from(self.parts), self.heads_kv.into(), self.batch.into()])
    }

    pub fn launch(&self, code: &QuantizationCode) -> Launch {
        Launch {
            cluster: Dim3(code.cluster(), 1, 1),
            ..Launch::new(self.grid().launch(code.flat), Dim3(code.threads, 1, 1))
        }
    }
}

/// The parameters of a kernel.
pub(super) struct QuantizeParams {
    grid: Grid,
    from: Global,
    /// The codes and the factors, of the kernel that writes them.
    to: Option<(Global, Global)>,
    /// The largest magnitudes of parts; `None` if a single kernel finds and uses them.
    largest: Option<Global>,
    /// The sums of parts, of the kernel that adds rows.
    pub sums: Option<Global>,
    /// The means with the signs of the rotation, if they are subtracted.
    means: Option<Global>,
    batch_bytes: R64,
    head_bytes: R64,
    row_bytes: R64,
    rows: R32,
    of_factor: R32,
    group: R32,
    tiles: R32,
    pub parts: R32,
    /// The kernel that adds rows first multiplies each element by this power of two ([`Mean::scale`]).
    pub scale: Option<F32>,
    signs: Vec<R32>,
    /// Whether the grid goes through the tensor from its end. Kernels alternate, so that each begins with
    /// the rows that the kernel before it has read last, which L2 may still have.
    backward: bool,
}

impl QuantizeParams {
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (code, sizes): (&QuantizationCode, &Sizes),
        (problem, signs): (&Problem, &[u32]),
        work: Work,
    ) -> QuantizeParams {
        let tensor = code.tensor;
        let from = c.tensor(k, tensor);
        let rounds = work == Work::Round;
        let to = rounds.then(|| (c.codes(k, tensor, Access::Write), c.factors(k, tensor, sizes.factors())));
        let finds = work != Work::Add && matches!(code.passes, Passes::Two { .. });
        let largest = finds.then(|| {
            let bytes = 4 * sizes.factors() * sizes.parts as usize;
            c.temporary(k, LARGEST, bytes, if rounds { Access::Read } else { Access::Write })
        });
        let adds = work == Work::Add;
        let sums = adds.then(|| declare_sums(k, c, problem, Access::Write));
        let kernels_before = u32::from(code.smoothed && !adds) + u32::from(finds && rounds);
        let means = (code.smoothed && !adds).then(|| declare_means(k, c, problem, Access::Read));
        let [batch_bytes, head_bytes] = declare_head_strides(k, c, problem, tensor);
        let row_bytes = problem.strides(tensor).row.wrapping_mul(code.from.bytes() as i64);
        QuantizeParams {
            grid: sizes.grid().declare(k, c, code.flat),
            from,
            to,
            largest,
            sums,
            means,
            batch_bytes,
            head_bytes,
            row_bytes: c.i64(k, "row_bytes", row_bytes),
            rows: c.u32(k, "rows", sizes.rows),
            of_factor: c.u32(k, "rows_of_factor", sizes.of_factor),
            group: c.u32(k, "group", sizes.group),
            tiles: c.u32(k, "tiles", sizes.tiles),
            parts: c.u32(k, "parts", sizes.parts),
            scale: adds.then(|| c.f32(k, "scale", Mean::new(sizes.rows as usize, code.dim as usize).scale())),
            signs: (0..).zip(signs).map(|(i, &word)| c.u32(k, &format!("signs_{i}"), word)).collect(),
            backward: kernels_before % 2 == 1,
        }
    }
}

/// The rows of a CTA: those of one factor, or a part of them.
pub(super) struct CtaRows {
    code: QuantizationCode,
    pub params: QuantizeParams,
    pub units: Units,
    pub thread: R32,
    batch: R32,
    head_kv: R32,
    /// The index of the factor.
    pub index: R32,
    /// The part of this CTA: the head in the group if the CTA holds its rows.
    pub part: R32,
    /// The first row in the head that has the factor, and the number of those rows.
    first: R32,
    pub left: R32,
    /// The index of the last of those rows.
    last: R32,
}

/// The shares of a thread in one tile.
pub(super) struct RowTile {
    /// The bits of each share, unit by unit, and whether it exists.
    pub shares: Vec<(Vec<Vec<R32>>, Pred)>,
    /// Where the codes of the first unit belong; `None` in the first of two kernels.
    to: Option<Global>,
}

impl CtaRows {
    pub fn new(k: &mut Builder, code: QuantizationCode, params: QuantizeParams) -> CtaRows {
        let thread = k.special(SpecialReg::TidX);
        let grid = params.grid;
        let [ctas, heads_kv] = [Axis::X, Axis::Y].map(|axis| grid.extent(k, axis));
        let [cta, head_kv, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| {
            let index = grid.index(k, axis);
            if !params.backward {
                return index;
            }
            // count − 1 − index
            let (count, index) = (grid.extent(k, axis), k.not(index));
            k.add(count, index)
        });
        let mut units = Units::new(k, code, thread, &params.signs);
        let (block, blocks, part) = match code.passes {
            // The CTAs of a cluster follow each other.
            Passes::Held { group, .. } => {
                let [block, blocks] = [cta, ctas].map(|n| divide(k, n, group));
                (block, blocks, k.and(cta, group - 1))
            }
            Passes::Two { .. } => {
                let [block, blocks] = [cta, ctas].map(|n| k.div_u(n, params.parts));
                let before = k.mul(block, params.parts);
                (block, blocks, k.sub(cta, before))
            }
        };
        let head = k.mad(batch, heads_kv, head_kv);
        let index = k.mad(head, blocks, block);
        if let Some(means) = params.means {
            let of_head = k.index(means, head, 4 * code.dim);
            units.subtract(k, of_head);
        }
        let first = k.mul(block, params.of_factor);
        let left = k.sub(params.rows, first);
        let left = k.min_u(left, params.of_factor);
        let last = k.sub(left, 1);
        CtaRows { code, params, units, thread, batch, head_kv, index, part, first, left, last }
    }

    /// Loads the thread's shares of the tile that begins at row `row` of those with the factor, in the head
    /// `in_group` of the group. In place of a share that does not exist, the kernel that adds rows takes
    /// zeros, and the others take the last row, which changes no largest magnitude.
    pub fn load(&self, k: &mut Builder, (in_group, row): (R32, R32)) -> RowTile {
        let QuantizeParams { from, batch_bytes, head_bytes, row_bytes, rows, group, .. } = self.params;
        let head = k.mad(self.head_kv, group, in_group);
        let row = k.add(row, self.units.row);
        let [wide_batch, wide_head] = [self.batch, head].map(|n| k.zext(n));
        let of_head = k.mad(wide_batch, batch_bytes, from.base);
        let of_head = k.mad(wide_head, head_bytes, of_head);
        let of_head = Global { base: of_head, offset: from.offset };
        let of_head = k.index(of_head, self.units.first, 4 * self.code.words() as u32);
        let mut shares = Vec::new();
        for number in 0..self.code.shares() {
            let row = k.add(row, number * self.code.slab());
            let exists = self.units.exists(k, row, self.left);
            let (row, guard) = match self.params.sums {
                Some(_) => (row, Some(exists)),
                None => (k.min_u(row, self.last), None),
            };
            let row = k.add(self.first, row);
            let wide_row = k.zext(row);
            let at = Global { base: k.mad(wide_row, row_bytes, of_head.base), offset: of_head.offset };
            shares.push((self.units.load(k, at, guard), exists));
        }
        let in_head = k.add(self.first, row);
        let wide_row = k.zext(in_head);
        let to = self.params.to.map(|(codes, _)| {
            let heads_kv = self.params.grid.extent(k, Axis::Y);
            let heads = k.mul(heads_kv, group);
            let head = k.mad(self.batch, heads, head);
            let before = k.mul_wide_u(head, rows);
            let row = k.add(before, wide_row);
            let base = k.mad(row, self.code.dim, codes.base);
            k.index(Global { base, offset: codes.offset }, self.units.first, UNIT)
        });
        RowTile { shares, to }
    }

    /// Stores the codes of share `number` of a tile.
    pub fn store(&self, k: &mut Builder, (tile, number): (&RowTile, usize), units: &[Unit], multiplier: F32) {
        let Some(to) = tile.to else { return };
        let to = to.at(number as i64 * i64::from(self.code.slab() * self.code.dim));
        self.units.store(k, (to, tile.shares[number].1), units, multiplier);
    }

    /// Runs `body` for each tile of the CTA's part.
    pub fn for_tiles(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, RowTile)) {
        let QuantizeParams { group, tiles, parts, .. } = self.params;
        let Passes::Two { grouped, .. } = self.code.passes else { return };
        let all = if grouped { k.mul(group, tiles) } else { tiles };
        k.for_range(self.part, all, parts, |k, tile| {
            k.nounroll();
            let (in_group, tile) = if grouped {
                let in_group = k.div_u(tile, tiles);
                let before = k.mul(in_group, tiles);
                (in_group, k.sub(tile, before))
            } else {
                (k.mov(0), tile)
            };
            let row = k.mul(tile, self.code.tile());
            let loaded = self.load(k, (in_group, row));
            body(k, loaded);
        });
    }

    /// Stores the factor 1 and exits if the tensor has no rows.
    pub fn exit_without_rows(&self, k: &mut Builder) {
        let is_empty = k.setp_u(CmpOp::Eq, self.left, 0);
        if let Some((_, factors)) = self.params.to {
            let to = k.index(factors, self.index, 4);
            let one: F32 = k.mov(1.0f32);
            let stores = k.setp_u(CmpOp::Eq, self.thread, 0);
            let stores = k.and_pred(stores, is_empty);
            k.guarded(stores, |k| k.st(to, one));
        }
        k.exit_if(is_empty);
    }

    /// Stores the factor, by one thread of those that share it. Returns the multiplier of elements.
    pub fn store_factor(&self, k: &mut Builder, largest: R32) -> F32 {
        let [factor, multiplier] = factor(k, &self.code, largest);
        if let Some((_, factors)) = self.params.to {
            let to = k.index(factors, self.index, 4);
            let rank = k.or(self.thread, self.part);
            let is_first = k.setp_u(CmpOp::Eq, rank, 0);
            k.guarded(is_first, |k| k.st(to, factor));
        }
        multiplier
    }

    /// The address of the largest magnitude of part 0.
    pub fn largest(&self, k: &mut Builder) -> Option<Global> {
        let before = k.mul_wide_u(self.index, self.params.parts);
        let largest = self.params.largest?;
        Some(Global { base: k.mad(before, 4, largest.base), offset: largest.offset })
    }
}

/// The address of the sums, f32, `[batch][head][part][column]`.
pub(super) fn declare_sums(
    k: &mut Builder,
    c: &mut Contract<'_>,
    problem: &Problem,
    access: Access,
) -> Global {
    let [batch, heads, rows, dim] = problem.extents(Tensor::K);
    c.temporary(k, SUMS, 4 * batch * heads * Mean::new(rows, dim).parts() * dim, access)
}

/// The address of the means, f32, `[batch][head][column]`.
pub(super) fn declare_means(
    k: &mut Builder,
    c: &mut Contract<'_>,
    problem: &Problem,
    access: Access,
) -> Global {
    let [batch, heads, _, dim] = problem.extents(Tensor::K);
    c.temporary(k, MEANS, 4 * batch * heads * dim, access)
}
