//! Loads elements of tables as words.

use problem::Table;
use problem::program::Id;

use super::apply::Operand;
use super::{Axes, Compiled, Known, Shape};
use crate::simd::Simd;
use crate::view::TableMemory;

/// A read of a table.
#[derive(Clone, Copy)]
pub(super) struct Read<'a> {
    pub table: &'a Table,
    pub data: TableMemory<'a>,
    pub index: &'a [Id],
}

/// A dimension of a table with more than one distinct element.
#[derive(Clone, Copy)]
pub(super) struct Dimension {
    /// The operation that gives the index.
    pub index: Id,
    extent: i32,
    stride: usize,
}

impl Dimension {
    /// The offset of the element at an index, which is clamped to the extent.
    #[inline(always)]
    fn offset(&self, index: f32) -> usize {
        (index.to_bits() as i32).clamp(0, self.extent - 1) as usize * self.stride
    }

    /// The offset of the first of several indices, if their elements are contiguous.
    #[inline(always)]
    fn run(&self, indices: &[f32]) -> Option<usize> {
        let first = indices[0].to_bits() as i32;
        let follow = |(i, index): (usize, &f32)| index.to_bits() as i32 == first.wrapping_add(i as i32);
        let is_run = indices.iter().enumerate().fold(true, |run, index| run & follow(index));
        let inside = first >= 0 && i64::from(first) + indices.len() as i64 <= i64::from(self.extent);
        (is_run && inside && self.stride == 1).then_some(first as usize)
    }
}

/// The dimensions that have more than one element.
pub(super) fn dimensions(table: &Table, index: &[Id]) -> impl Iterator<Item = Dimension> + Clone {
    let all = index.iter().zip(&table.extents).zip(&table.strides);
    all.filter(|&((_, &extent), &stride)| extent > 1 && stride != 0)
        // The table's check has limited both numbers.
        .map(|((&index, &extent), &stride)| Dimension {
            index,
            extent: extent as i32,
            stride: stride as usize,
        })
}

/// Scratch memory for loads, kept between calls.
#[derive(Default)]
pub(crate) struct Loads {
    /// Number of keys of the tile that exist.
    pub keys: usize,
    rows_at: Vec<usize>,
    keys_at: Vec<usize>,
    /// Words by row, to be transposed.
    by_rows: Vec<f32>,
}

/// Reads the elements of a table into `to`.
#[inline(always)]
pub(super) fn load<S: Simd>(
    s: S,
    program: &Compiled<'_>,
    read: Read<'_>,
    known: Known<'_>,
    shape: Shape,
    loads: &mut Loads,
    to: &mut [f32],
) {
    let dimensions = dimensions(read.table, read.index);
    let axes = |dimension: &Dimension| program.axes[dimension.index];
    let separable =
        dimensions.clone().all(|dimension| !matches!(axes(&dimension), Axes::Both | Axes::Diagonal));
    let lines = to.len() / shape.width;
    let is_tile = dimensions.clone().any(|d| axes(&d).row()) && dimensions.clone().any(|d| axes(&d).key());
    if !(separable && is_tile) {
        for (line, to) in to.chunks_exact_mut(shape.width).enumerate() {
            load_line(program, s, read, known, shape, line, (&mut loads.rows_at, to));
        }
        return;
    }
    let is_by_keys = shape.along == Axes::Row;
    // Rows of the panel and keys of the strip.
    let (rows, first_key, keys) =
        if is_by_keys { (shape.width, shape.first, lines) } else { (lines, 0, shape.width.min(loads.keys)) };
    let first_row = if is_by_keys { 0 } else { shape.first };
    // The keys of a block usually are elements that follow each other.
    let mut of_keys = dimensions.clone().filter(|d| axes(d) == Axes::Key);
    let run = match (of_keys.next(), of_keys.next()) {
        (Some(d), None) if keys > 0 => d.run(&known.keys[d.index][first_key..][..keys]),
        _ => None,
    };
    let sums = |of: Axes, values: &[Vec<f32>], first: usize, count: usize, sums: &mut Vec<usize>| {
        sums.clear();
        sums.resize(count, 0);
        for dimension in dimensions.clone().filter(|d| axes(d) == of) {
            let index = &values[dimension.index][first..][..count];
            sums.iter_mut().zip(index).for_each(|(at, &index)| *at += dimension.offset(index));
        }
    };
    sums(Axes::Row, known.rows, first_row, rows, &mut loads.rows_at);
    if run.is_none() {
        sums(Axes::Key, known.keys, first_key, keys, &mut loads.keys_at);
    }
    let constant = dimensions.clone().filter(|d| axes(d) == Axes::None);
    let start: usize = constant.map(|d| d.offset(known.rows[d.index][0])).sum();
    loads.rows_at.iter_mut().for_each(|at| *at += start);
    let Loads { rows_at, keys_at, by_rows, .. } = loads;
    let run = run.or_else(|| keys_at.first().copied().filter(|_| is_run(keys_at)));
    if !is_by_keys {
        for (line, &row) in to.chunks_exact_mut(shape.width).zip(&*rows_at) {
            let (line, rest) = line.split_at_mut(keys);
            line_of(s, read.data, row, keys_at, run, line);
            rest.fill(0.0);
        }
        return;
    }
    by_rows.resize(rows * keys, 0.0);
    for (line, &row) in by_rows.chunks_exact_mut(keys).zip(&*rows_at) {
        line_of(s, read.data, row, keys_at, run, line);
    }
    s.transpose(by_rows, keys, to, shape.width, rows, keys);
}

/// Reads the elements of a line. `at` is memory for offsets.
#[inline(always)]
fn load_line<S: Simd>(
    program: &Compiled<'_>,
    s: S,
    read: Read<'_>,
    known: Known<'_>,
    shape: Shape,
    line: usize,
    (at, to): (&mut Vec<usize>, &mut [f32]),
) {
    let indices = || dimensions(read.table, read.index).map(|d| (program.operand(d.index, known, shape), d));
    let of_scalar = |(index, d): (Operand<'_>, Dimension)| d.offset(index.scalar(line));
    let start: usize = indices().filter(|(index, _)| index.is_scalar).map(of_scalar).sum();
    let mut moving = indices().filter(|(index, _)| !index.is_scalar);
    match (moving.next(), moving.next()) {
        (None, _) => pick(read.data, std::iter::repeat(start), to),
        (Some((index, d)), None) => {
            let indices = index.line(line, shape.width);
            match d.run(indices) {
                Some(first) => widen(s, read.data, start + first, to),
                None => pick(read.data, indices.iter().map(|&index| start + d.offset(index)), to),
            }
        }
        _ => {
            at.clear();
            at.resize(shape.width, start);
            for (index, d) in indices().filter(|(index, _)| !index.is_scalar) {
                let indices = index.line(line, shape.width);
                at.iter_mut().zip(indices).for_each(|(at, &index)| *at += d.offset(index));
            }
            pick(read.data, at.iter().copied(), to);
        }
    }
}

/// Whether the offsets are consecutive.
#[inline(always)]
fn is_run(at: &[usize]) -> bool {
    at.iter().enumerate().fold(true, |run, (i, &at_i)| run & (at_i == at[0].wrapping_add(i)))
}

/// The elements of a row of the table: those from offset `run` on, or those at offsets.
#[inline(always)]
fn line_of<S: Simd>(
    s: S,
    data: TableMemory<'_>,
    row: usize,
    keys_at: &[usize],
    run: Option<usize>,
    to: &mut [f32],
) {
    if let Some(first) = run {
        return widen(s, data, row + first, to);
    }
    pick(data, keys_at.iter().map(|at| row + at), to);
}

/// The elements at offsets.
#[inline(always)]
fn pick(data: TableMemory<'_>, at: impl Iterator<Item = usize>, to: &mut [f32]) {
    let to = to.iter_mut().zip(at);
    match data {
        TableMemory::F32(x) => to.for_each(|(to, at)| *to = x.read(at)),
        TableMemory::F16(x) => to.for_each(|(to, at)| *to = x.read(at).to_f32()),
        TableMemory::Bf16(x) => {
            to.for_each(|(to, at)| *to = f32::from_bits(u32::from(x.read(at).to_bits()) << 16));
        }
        TableMemory::I32(x) => to.for_each(|(to, at)| *to = f32::from_bits(x.read(at) as u32)),
        TableMemory::U8(x) => to.for_each(|(to, at)| *to = f32::from_bits(x.read(at).into())),
    }
}

/// The elements from offset `at` on.
#[inline(always)]
fn widen<S: Simd>(s: S, data: TableMemory<'_>, at: usize, to: &mut [f32]) {
    let count = to.len();
    match data {
        TableMemory::F32(x) => to.copy_from_slice(x.slice(at, count)),
        TableMemory::F16(x) => s.widen_f16(x.slice(at, count), to),
        TableMemory::Bf16(x) => s.widen_bf16(x.slice(at, count), to),
        TableMemory::I32(x) => {
            to.iter_mut().zip(x.slice(at, count)).for_each(|(to, &x)| *to = f32::from_bits(x as u32));
        }
        TableMemory::U8(x) => {
            to.iter_mut().zip(x.slice(at, count)).for_each(|(to, &x)| *to = f32::from_bits(x.into()));
        }
    }
}
