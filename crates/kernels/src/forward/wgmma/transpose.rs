//! The transposition of V for 8-bit products, whose B operand must be contiguous along the keys: a separate
//! kernel that runs first, and the tensor map with which the attention kernel loads the result.

use problem::{Problem, Tensor};
use ptx::{Access, Builder, Dim3, Element, Global, Launch, R32, R64, SpecialReg, Target, TensorMapPtr};
use tile::{ByteTranspose, SwizzledTile, TensorRows};

use super::plan::WgmmaPlan;
use crate::Baked;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::{declare_head_strides, distinct_extents};
use crate::grid::{Axis, Extents, Grid};

const ENTRY: &str = "flash_transpose_values";
/// The name of the temporary.
const TRANSPOSED: &str = "transposed_values";
/// Size of the groups within which the transposition reorders keys ([`tile::column_of_byte`]).
const GROUP: usize = 16;

/// V with the keys as columns, `[batch][head][dim][keys]`. Batch entries and heads with stride 0 count as
/// one.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransposedValues {
    batch: usize,
    heads: usize,
    dim: usize,
    /// The number of keys, rounded up to whole groups. The keys beyond the last are zero.
    keys: usize,
}

impl TransposedValues {
    pub(super) fn new(problem: &Problem) -> TransposedValues {
        let [batch, heads, keys, dim] = distinct_extents(problem, Tensor::V);
        TransposedValues { batch, heads, dim, keys: keys.next_multiple_of(GROUP) }
    }

    /// The extents of the grid of the transposition.
    pub(super) fn grid(self) -> Extents {
        let tiles = self.keys.div_ceil(ByteTranspose::ROWS as usize);
        Extents([tiles, self.heads, self.batch].map(|n| n as u64))
    }

    /// Bytes of the temporary.
    const fn bytes(self) -> usize {
        self.batch * self.heads * self.dim * self.keys
    }

    /// The tensor map for tiles of all dims and some keys.
    pub(super) fn declare_map(
        self,
        k: &mut Builder,
        c: &mut Contract<'_>,
        tile: SwizzledTile,
    ) -> TensorMapPtr {
        c.temporary_map(k, TRANSPOSED, self.bytes(), |buffer| {
            let [of_row, of_head, of_batch] =
                [self.keys, self.keys * self.dim, self.keys * self.dim * self.heads].map(|n| n as u64);
            tile.map(&TensorRows {
                buffer,
                offset: 0,
                element: Element::U8,
                extents: [self.batch, self.heads, self.dim, self.keys].map(|n| n as u64),
                strides: [of_batch, of_head, of_row],
            })
        })
    }
}

impl WgmmaPlan {
    /// The kernel that transposes V. The plan has been checked.
    pub(super) fn transpose_values<'a>(
        &self,
        problem: &Problem,
        baked: &'a Baked,
        target: Target,
    ) -> Draft<'a> {
        let values = TransposedValues::new(problem);
        let tile = ByteTranspose { columns: baked.head_dim_v() };
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(ByteTranspose::THREADS);
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, (problem, baked), values);
        let launch = Launch {
            dynamic_shared: tile.shared_bytes(),
            ..Launch::new(values.grid().launch(baked.flat), Dim3(ByteTranspose::THREADS, 1, 1))
        };
        Draft::new(k, contract, (ENTRY, launch), target, move |k| body(k, params, tile))
    }
}

/// The parameters of the transposition.
struct Params {
    grid: Grid,
    from: Global,
    to: Global,
    batch_bytes: R64,
    head_bytes: R64,
    row_bytes: R64,
    /// The number of keys.
    keys: R32,
    heads: R32,
    /// The number of keys in a row of the transposed tensor.
    pitch: R32,
}

impl Params {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        values: TransposedValues,
    ) -> Params {
        let from = c.tensor(k, Tensor::V);
        let to = c.temporary(k, TRANSPOSED, values.bytes(), Access::Write);
        let [batch_bytes, head_bytes] = declare_head_strides(k, c, problem, Tensor::V);
        Params {
            grid: values.grid().declare(k, c, baked.flat),
            from,
            to,
            batch_bytes,
            head_bytes,
            row_bytes: c.i64(k, "v_row_bytes", problem.v.row),
            keys: c.u32(k, "seq_kv", problem.seq_kv as u32),
            heads: c.u32(k, "heads", values.heads as u32),
            pitch: c.u32(k, "keys", values.keys as u32),
        }
    }
}

/// Each CTA transposes 128 keys of a head.
fn body(k: &mut Builder, params: Params, tile: ByteTranspose) {
    let Params { grid, from, to, batch_bytes, head_bytes, row_bytes, keys, heads, pitch } = params;
    let shared = k.dynamic_shared(16);

    let [cta, head, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| grid.index(k, axis));
    let thread = k.special(SpecialReg::TidX);
    let first = k.mul(cta, ByteTranspose::ROWS);
    let [wide_batch, wide_head, wide_first] = [batch, head, first].map(|n| k.zext(n));
    let start = k.mad(wide_batch, batch_bytes, from.base);
    let start = k.mad(wide_head, head_bytes, start);
    let start = k.mad(wide_first, row_bytes, start);
    let row = |k: &mut Builder, row: R32| {
        let row = k.zext(row);
        Global { base: k.mad(row, row_bytes, start), offset: from.offset }
    };
    let left = k.sub(keys, first);
    tile.load(k, (shared, thread), left, row);
    k.bar_sync();

    let before = k.mad(batch, heads, head);
    let before = k.mul(before, tile.columns);
    let wide_pitch = k.zext(pitch);
    let column = |k: &mut Builder, column: R32| {
        let index = k.add(before, column);
        let index = k.zext(index);
        let start = k.mad(index, wide_pitch, to.base);
        Global { base: k.add(start, wide_first), offset: to.offset }
    };
    let left = k.sub(pitch, first);
    tile.store(k, (shared, thread), left, column);
}
