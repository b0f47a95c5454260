//! Evaluates score and mask programs over tiles of scores.
//!
//! An operation whose value depends only on the query is evaluated once per panel, one that depends only on
//! the key once per block of keys, and the others once per score, some lines of a tile at a time. A value
//! that depends only on the difference of query and key, as in ALiBi and relative biases, is evaluated once
//! for each diagonal of a tile; every line of the tile is then a part of the line of diagonals. Every buffer
//! holds f32 words: a float, the bits of an integer, or all bits set for true and none for false.
//!
//! Before a mask is evaluated, the ranges of its values over a panel and a block of keys show whether the
//! panel sees all keys of the block, or none.

mod apply;
mod load;

use problem::program::{BinaryOp, Comparison, Id, Input, Op, Range, Type, UnaryOp};
use problem::{KeyRange, Problem, Program, Programs};

use crate::simd::Simd;
use crate::view::TableMemory;
use apply::Operand;
pub(crate) use load::Loads;

/// Number of words of a tile that are evaluated at a time: the values of a few operations fit in the L1
/// cache.
const STRIP: usize = 2048;

/// The coordinates of a score on which a value depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axes {
    None,
    Row,
    Key,
    Both,
    /// On the difference of query and key alone.
    Diagonal,
}

impl Axes {
    const fn of(row: bool, key: bool) -> Axes {
        match (row, key) {
            (false, false) => Axes::None,
            (true, false) => Axes::Row,
            (false, true) => Axes::Key,
            (true, true) => Axes::Both,
        }
    }

    /// The axes of a value that depends on two values with these axes.
    const fn with(self, other: Axes) -> Axes {
        match (self, other) {
            (Axes::None, axes) | (axes, Axes::None) => axes,
            (Axes::Row, Axes::Row) => Axes::Row,
            (Axes::Key, Axes::Key) => Axes::Key,
            (Axes::Diagonal, Axes::Diagonal) => Axes::Diagonal,
            _ => Axes::Both,
        }
    }

    const fn row(self) -> bool {
        matches!(self, Axes::Row | Axes::Both)
    }

    const fn key(self) -> bool {
        matches!(self, Axes::Key | Axes::Both)
    }
}

/// A program with the values of a call.
pub(crate) struct Compiled<'a> {
    program: &'a Program,
    programs: &'a Programs,
    tables: &'a [TableMemory<'a>],
    /// For each operation, the coordinates on which its value depends.
    axes: Vec<Axes>,
    /// For each operation that is evaluated per score, the buffer that holds its value.
    buffer: Vec<usize>,
    /// Number of these buffers.
    buffers: usize,
    /// For integers that are sums of positions: the increments from query to query, and from key to key.
    slopes: Vec<Option<[i32; 2]>>,
}

impl<'a> Compiled<'a> {
    /// `grouped` states whether the rows of a panel may belong to several query heads.
    fn new(
        program: &'a Program,
        programs: &'a Programs,
        tables: &'a [TableMemory<'a>],
        grouped: bool,
    ) -> Self {
        let (axes, slopes) = axes_of(program, programs, grouped);
        let (buffer, buffers) = assign_buffers(program, &axes);
        Compiled { program, programs, tables, axes, buffer, buffers, slopes }
    }

    /// The integer of an operation at the first row and the first key of a tile, whose diagonal is `origin`.
    fn first(&self, id: Id, known: Known<'_>, origin: usize) -> i32 {
        let word = match self.axes[id] {
            Axes::None | Axes::Row => known.rows[id][0],
            Axes::Key => known.keys[id][0],
            Axes::Diagonal => known.diagonals[id][origin],
            Axes::Both => known.tile[self.buffer[id]][0],
        };
        word.to_bits() as i32
    }

    fn root(&self) -> Id {
        self.axes.len() - 1
    }
}

/// For each operation, the coordinates on which its value depends, and its slopes
/// ([`Compiled::slopes`]).
fn axes_of(program: &Program, programs: &Programs, grouped: bool) -> (Vec<Axes>, Vec<Option<[i32; 2]>>) {
    let (ops, types) = (program.ops(), program.types());
    let mut axes: Vec<Axes> = Vec::with_capacity(ops.len());
    let mut slopes: Vec<Option<[i32; 2]>> = Vec::with_capacity(ops.len());
    for (op, ty) in ops.iter().zip(types) {
        let joined = |ids: &mut dyn Iterator<Item = Id>| ids.fold(Axes::None, |all, id| all.with(axes[id]));
        let own = match op {
            Op::Input(Input::Score) => Axes::Both,
            Op::Input(Input::Query) => Axes::Row,
            Op::Input(Input::Head) => Axes::of(grouped, false),
            Op::Input(Input::Key) => Axes::Key,
            // A dimension that has one element, or repeats it, has no effect.
            Op::Load { table, index, .. } => {
                let table = &programs.tables[*table as usize];
                joined(&mut load::dimensions(table, index).map(|dimension| dimension.index))
            }
            op => joined(&mut op.reads().into_iter()),
        };
        let slope = match *op {
            Op::Input(Input::Query) => Some([1, 0]),
            Op::Input(Input::Key) => Some([0, 1]),
            _ if *ty != Type::Int => None,
            _ if own == Axes::None => Some([0, 0]),
            Op::Unary(UnaryOp::Neg, a) => slopes[a].map(|[q, k]| [-q, -k]),
            Op::Binary(BinaryOp::Add, a, b) => slopes[a].zip(slopes[b]).and_then(|(a, b)| summed(a, b, 1)),
            Op::Binary(BinaryOp::Sub, a, b) => slopes[a].zip(slopes[b]).and_then(|(a, b)| summed(a, b, -1)),
            _ => None,
        };
        // The rows of several heads are not consecutive.
        let is_difference = slope.is_some_and(|[q, k]| q != 0 && q == -k) || order(ops, op).is_some();
        let is_diagonal = !grouped && is_difference;
        axes.push(if is_diagonal { Axes::Diagonal } else { own });
        slopes.push(slope);
    }
    (axes, slopes)
}

/// For a comparison of the query's position with the key's, its operands.
fn order(ops: &[Op], op: &Op) -> Option<(Comparison, Id, Id)> {
    let Op::Compare(comparison, a, b) = *op else { return None };
    let of = (&ops[a], &ops[b]);
    let positions = (&Op::Input(Input::Query), &Op::Input(Input::Key));
    (of == positions || of == (positions.1, positions.0)).then_some((comparison, a, b))
}

/// The slopes `a + sign · b`; `None` if they leave the small numbers that programs have.
fn summed(a: [i32; 2], b: [i32; 2], sign: i32) -> Option<[i32; 2]> {
    let sum = [a[0] + sign * b[0], a[1] + sign * b[1]];
    sum.iter().all(|n| n.unsigned_abs() < 1 << 16).then_some(sum)
}

/// For each operation that is evaluated per score, a buffer that holds no value that is still needed; and the
/// number of buffers.
fn assign_buffers(program: &Program, axes: &[Axes]) -> (Vec<usize>, usize) {
    let mut last_read = vec![0; axes.len()];
    for (id, op) in program.ops().iter().enumerate() {
        op.reads().into_iter().for_each(|read| last_read[read] = id);
    }
    let (mut buffer, mut free, mut buffers) = (vec![0; axes.len()], Vec::new(), 0);
    for (id, op) in program.ops().iter().enumerate().filter(|&(id, _)| axes[id] == Axes::Both) {
        buffer[id] = free.pop().unwrap_or_else(|| {
            buffers += 1;
            buffers - 1
        });
        let mut reads = op.reads();
        reads.sort_unstable();
        reads.dedup();
        free.extend(
            reads.into_iter().filter(|&a| axes[a] == Axes::Both && last_read[a] == id).map(|a| buffer[a]),
        );
    }
    (buffer, buffers)
}

/// The programs of a call.
#[derive(Default)]
pub(crate) struct Evaluators<'a> {
    pub score: Option<Compiled<'a>>,
    pub mask: Option<Compiled<'a>>,
}

impl<'a> Evaluators<'a> {
    /// `grouped` states whether the rows of a panel may belong to several query heads.
    pub(crate) fn new(problem: &'a Problem, tables: &'a [TableMemory<'a>], grouped: bool) -> Self {
        let programs = &problem.programs;
        let compiled = |program: &'a Option<Program>| {
            program.as_ref().map(|program| Compiled::new(program, programs, tables, grouped))
        };
        Evaluators { score: compiled(&programs.score), mask: compiled(&programs.mask) }
    }
}

/// Number of operations that the programs of a problem evaluate per score, loads of tables counted twice.
pub(crate) fn operations_per_score(problem: &Problem) -> usize {
    let of = |program: &Program| {
        let (axes, _) = axes_of(program, &problem.programs, false);
        let ops = program.ops().iter().zip(&axes).filter(|(_, axes)| **axes == Axes::Both);
        ops.map(|(op, _)| if matches!(op, Op::Load { .. }) { 2 } else { 1 }).sum::<usize>()
    };
    problem.programs.all().map(of).sum()
}

/// The sequence of the rows of a panel.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub batch: usize,
    pub query_length: usize,
    pub key_length: usize,
}

/// The layout of the words of a tile in memory.
#[derive(Clone, Copy)]
pub(crate) enum Layout {
    /// A line for each key, with this number of words: one per row.
    Keys(usize),
    /// A line for each row, with this number of words: one per key, and some unused words at the end.
    Rows(usize),
}

/// The region for which a program is evaluated.
pub(crate) enum Region<'a> {
    /// The lanes of panel `panel`: query head and row of each.
    Panel { panel: usize, place: Place, lanes: &'a [(usize, usize)] },
    /// A block of keys. Up to 15 more keys are evaluated, with the position of the last key.
    Block(KeyRange),
    /// The first `keys` keys of the block for panel `panel`. `to` holds products of queries and keys, which
    /// become logits when multiplied by `factor`, and receives the result.
    Tile { panel: usize, keys: usize, layout: Layout, factor: f32, to: &'a mut [f32] },
}

/// Which keys of a block the rows of a panel see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    All,
    Some,
    None,
}

impl Verdict {
    fn of(range: Range) -> Verdict {
        match range {
            Range { low: 1, .. } => Verdict::All,
            Range { high: 0, .. } => Verdict::None,
            _ => Verdict::Some,
        }
    }
}

/// The values of a program's operations in a task, kept between calls.
#[derive(Default)]
pub(crate) struct Values {
    /// By panel and operation: the values that depend on the row or on nothing.
    panels: Vec<Lines>,
    /// By operation: the values that depend on the key.
    block: Lines,
    /// By operation: the values that depend on the diagonal, over the diagonals of a tile.
    diagonals: Vec<Vec<f32>>,
    /// By buffer.
    tile: Vec<Vec<f32>>,
    loads: Loads,
    /// The ranges of all operations for a verdict.
    ranges: Vec<Range>,
    /// The words of the last tile, joined by `&` and by `|`.
    joined: (u32, u32),
}

/// The values of operations over rows or over keys, and their ranges.
#[derive(Default)]
struct Lines {
    values: Vec<Vec<f32>>,
    ranges: Vec<Range>,
}

impl Lines {
    fn set_len(&mut self, ops: usize) {
        self.values.resize_with(ops, Vec::new);
        self.ranges.clear();
        self.ranges.resize(ops, Range::ALL);
    }
}

/// Values of a program's operations that an operation reads.
#[derive(Clone, Copy)]
struct Known<'a> {
    rows: &'a [Vec<f32>],
    keys: &'a [Vec<f32>],
    diagonals: &'a [Vec<f32>],
    tile: &'a [Vec<f32>],
}

/// The lines of words to evaluate.
#[derive(Clone, Copy)]
struct Shape {
    /// The first line: its row or its key, counted from the first one of the region.
    first: usize,
    /// Words of a line.
    width: usize,
    /// Lines of the region.
    lines: usize,
    /// The meaning of the words of a line: rows, keys or diagonals.
    along: Axes,
}

impl Compiled<'_> {
    /// The value of an operation as the operand of another.
    fn operand<'v>(&self, id: Id, known: Known<'v>, shape: Shape) -> Operand<'v> {
        let axes = self.axes[id];
        let data = match axes {
            Axes::None | Axes::Row => &known.rows[id],
            Axes::Key => &known.keys[id],
            Axes::Diagonal => &known.diagonals[id],
            Axes::Both => &known.tile[self.buffer[id]],
        };
        let (start, step, is_scalar) = match axes {
            Axes::Both => (0, shape.width as isize, false),
            _ if axes == shape.along => (0, 0, false),
            Axes::None => (0, 0, true),
            // Each line begins one diagonal before the previous line.
            Axes::Diagonal => (shape.lines - 1 - shape.first, -1, false),
            _ => (shape.first, 1, true),
        };
        Operand { data, start, step, is_scalar }
    }
}

/// Evaluates a region of a program. Inlined into [`Simd::evaluate`], which is compiled for the instruction
/// set.
#[inline(always)]
pub(crate) fn evaluate<S: Simd>(s: S, program: &Compiled<'_>, values: &mut Values, mut region: Region<'_>) {
    values.prepare(program, &region);
    let (panel, length, width, along) = match &region {
        Region::Panel { panel, lanes, .. } => (*panel, lanes.len(), lanes.len(), Axes::Row),
        Region::Block(keys) => (0, padded(*keys), padded(*keys), Axes::Key),
        Region::Tile { panel, layout: Layout::Keys(width), to, .. } => (*panel, to.len(), *width, Axes::Row),
        Region::Tile { panel, layout: Layout::Rows(width), to, .. } => (*panel, to.len(), *width, Axes::Key),
    };
    if let Region::Tile { .. } = region {
        diagonals(s, program, values, panel, Shape { first: 0, width, lines: length / width, along });
    }
    let lines = (STRIP / width).max(1);
    for first in (0..length / width).step_by(lines) {
        let words = width * lines.min(length / width - first);
        for id in 0..program.axes.len() {
            let axes = program.axes[id];
            let (along, width, words) = match (&region, axes) {
                (Region::Panel { .. }, Axes::None) => (Axes::None, 1, 1),
                (Region::Panel { .. }, Axes::Row)
                | (Region::Block(_), Axes::Key)
                | (Region::Tile { .. }, Axes::Both) => (along, width, words),
                _ => continue,
            };
            let shape = Shape { first, width, lines: length / width, along };
            let mut to = std::mem::take(values.slot(program, panel, id));
            to.resize(words, 0.0);
            if !region.position(&program.program.ops()[id], first * width, &mut to) {
                let Values { panels, block, diagonals, tile, loads, .. } = &mut *values;
                let known = Known { rows: &panels[panel].values, keys: &block.values, diagonals, tile };
                s.compute(Operation { program, id, known, shape }, loads, &mut to);
            }
            let measured = || measured(program.program.types()[id], &to);
            match axes {
                Axes::None | Axes::Row => values.panels[panel].ranges[id] = measured(),
                Axes::Key => values.block.ranges[id] = measured(),
                Axes::Both | Axes::Diagonal => {}
            }
            *values.slot(program, panel, id) = to;
        }
        if let Region::Tile { to, .. } = &mut region {
            let Values { panels, block, diagonals, tile, .. } = &*values;
            let known = Known { rows: &panels[panel].values, keys: &block.values, diagonals, tile };
            let shape = Shape { first, width, lines: length / width, along };
            let result = program.operand(program.root(), known, shape);
            let to = &mut to[first * width..][..words];
            apply::copy(result, to, width);
            let bits = to.iter().map(|x| x.to_bits());
            values.joined = bits.fold(values.joined, |(all, any), x| (all & x, any | x));
        }
    }
}

/// Evaluates the values that depend on the diagonal alone, over the diagonals of a tile: from the diagonal of
/// the last line's first word to that of the first line's last word.
#[inline(always)]
fn diagonals<S: Simd>(s: S, program: &Compiled<'_>, values: &mut Values, panel: usize, tile: Shape) {
    // The diagonal of the first row and the first key.
    let origin = tile.lines - 1;
    let width = tile.width + origin;
    for (id, _) in program.axes.iter().enumerate().filter(|(_, axes)| **axes == Axes::Diagonal) {
        let mut to = std::mem::take(&mut values.diagonals[id]);
        to.resize(width, 0.0);
        let Values { panels, block, diagonals, tile: of_tile, loads, .. } = &mut *values;
        let known = Known { rows: &panels[panel].values, keys: &block.values, diagonals, tile: of_tile };
        let ops = program.program.ops();
        let step = |[of_query, of_key]: [i32; 2]| if tile.along == Axes::Row { of_query } else { of_key };
        let of = |id: Id| program.first(id, known, origin);
        match (program.slopes[id], order(ops, &ops[id])) {
            (Some(slopes), _) => apply::ramp(&ops[id], of, (origin, step(slopes)), &mut to),
            (None, Some((comparison, a, b))) => {
                let slopes = if ops[a] == Op::Input(Input::Query) { [1, -1] } else { [-1, 1] };
                apply::ramp(&Op::Binary(BinaryOp::Sub, a, b), of, (origin, step(slopes)), &mut to);
                apply::compare_with_zero(comparison, &mut to);
            }
            (None, None) => {
                let shape = Shape { first: 0, width, lines: 1, along: Axes::Diagonal };
                s.compute(Operation { program, id, known, shape }, loads, &mut to);
            }
        }
        values.diagonals[id] = to;
    }
}

/// Number of words of a line of keys.
fn padded(keys: KeyRange) -> usize {
    keys.len().next_multiple_of(crate::simd::MAX_LANES)
}

impl Region<'_> {
    /// Writes the positions from word `at` of the region on. Returns false if the operation is not a
    /// position.
    #[inline(always)]
    fn position(&self, op: &Op, at: usize, to: &mut [f32]) -> bool {
        let int = |x: usize| f32::from_bits(x as i32 as u32);
        match (op, self) {
            (Op::Input(Input::Query), Region::Panel { lanes, .. }) => {
                to.iter_mut().zip(*lanes).for_each(|(to, lane)| *to = int(lane.1));
            }
            (Op::Input(Input::Head), Region::Panel { lanes, .. }) => {
                to.iter_mut().zip(*lanes).for_each(|(to, lane)| *to = int(lane.0));
            }
            (Op::Input(Input::Batch), Region::Panel { place, .. }) => to.fill(int(place.batch)),
            (Op::Input(Input::QueryLength), Region::Panel { place, .. }) => to.fill(int(place.query_length)),
            (Op::Input(Input::KeyLength), Region::Panel { place, .. }) => to.fill(int(place.key_length)),
            (Op::Input(Input::Key), Region::Block(keys)) => {
                to.iter_mut().enumerate().for_each(|(i, to)| *to = int((keys.start + i).min(keys.end - 1)));
            }
            (Op::Input(Input::Score), Region::Tile { factor, to: products, .. }) => {
                to.iter_mut().zip(&products[at..]).for_each(|(to, &product)| *to = product * factor);
            }
            _ => return false,
        }
        true
    }
}

/// An operation of a program that is not a position, and the lines for which it is evaluated.
#[derive(Clone, Copy)]
pub(crate) struct Operation<'a> {
    program: &'a Compiled<'a>,
    id: Id,
    known: Known<'a>,
    shape: Shape,
}

/// Evaluates one operation. Inlined into [`Simd::compute`], which is compiled for the instruction set.
#[inline(always)]
pub(crate) fn compute<S: Simd>(s: S, operation: Operation<'_>, loads: &mut Loads, to: &mut [f32]) {
    let Operation { program, id, known, shape } = operation;
    let (ops, types) = (program.program.ops(), program.program.types());
    let of = |id: Id| program.operand(id, known, shape);
    match &ops[id] {
        Op::Input(Input::FloatParameter(i)) => to.fill(program.programs.floats[*i as usize]),
        Op::Input(Input::IntParameter(i)) => {
            to.fill(f32::from_bits(program.programs.ints[*i as usize] as u32));
        }
        Op::Input(_) => {}
        Op::Float(bits) => to.fill(f32::from_bits(*bits)),
        Op::Int(x) => to.fill(f32::from_bits(*x as u32)),
        Op::Bool(x) => to.fill(apply::truth(*x)),
        Op::Load { table, index, .. } => {
            let number = *table as usize;
            let read =
                load::Read { table: &program.programs.tables[number], data: program.tables[number], index };
            load::load(s, program, read, known, shape, loads, to);
        }
        Op::Unary(op, a) => apply::unary(s, *op, types[*a], of(*a), to, shape.width),
        Op::Binary(op, a, b) => apply::binary(*op, types[*a], of(*a), of(*b), to, shape.width),
        Op::Compare(op, a, b) => apply::compare(*op, types[*a], of(*a), of(*b), to, shape.width),
        Op::Select(a, b, c) => apply::select([of(*a), of(*b), of(*c)], to, shape.width),
    }
}

/// The smallest and the largest of integers or truth values.
#[inline(always)]
fn measured(of: Type, words: &[f32]) -> Range {
    if of == Type::Float {
        return Range::ALL;
    }
    let bits = words.iter().map(|x| x.to_bits() as i32);
    let (low, high) = bits.fold((i32::MAX, i32::MIN), |(low, high), x| (low.min(x), high.max(x)));
    let (low, high) = match of {
        Type::Bool => ((high == -1).into(), (low == -1).into()), // true is −1
        _ => (low.into(), high.into()),
    };
    Range { low, high, position: false }
}

impl Values {
    /// Makes room for the values of a region.
    fn prepare(&mut self, program: &Compiled<'_>, region: &Region<'_>) {
        match region {
            Region::Panel { panel, .. } => {
                self.panels.resize_with(self.panels.len().max(panel + 1), Lines::default);
                self.panels[*panel].set_len(program.axes.len());
            }
            Region::Block(_) => self.block.set_len(program.axes.len()),
            Region::Tile { keys, .. } => {
                self.tile.resize_with(self.tile.len().max(program.buffers), Vec::new);
                self.diagonals.resize_with(self.diagonals.len().max(program.axes.len()), Vec::new);
                self.loads.keys = *keys;
                self.joined = (u32::MAX, 0);
            }
        }
    }

    /// The buffer that holds an operation's value.
    fn slot(&mut self, program: &Compiled<'_>, panel: usize, id: Id) -> &mut Vec<f32> {
        match program.axes[id] {
            Axes::None | Axes::Row => &mut self.panels[panel].values[id],
            Axes::Key => &mut self.block.values[id],
            Axes::Diagonal => &mut self.diagonals[id],
            Axes::Both => &mut self.tile[program.buffer[id]],
        }
    }

    /// How many scores the mask of the last tile shows: all, some or none.
    pub(crate) fn shown(&self) -> Verdict {
        match self.joined {
            (u32::MAX, _) => Verdict::All,
            (_, 0) => Verdict::None,
            _ => Verdict::Some,
        }
    }

    /// Decides from the ranges of a mask's values whether the rows of the panels see all keys of the block,
    /// some or none.
    pub(crate) fn verdict(&mut self, mask: &Compiled<'_>, panels: std::ops::Range<usize>) -> Verdict {
        let Values { panels: of_panels, block, ranges, .. } = self;
        ranges.clear();
        for (id, axes) in mask.axes.iter().enumerate() {
            let range = match axes {
                Axes::None | Axes::Row => {
                    let of = of_panels[panels.clone()].iter().map(|panel| panel.ranges[id]);
                    let join =
                        |a: Range, b: Range| Range { low: a.low.min(b.low), high: a.high.max(b.high), ..a };
                    of.reduce(join).unwrap_or(Range::ALL)
                }
                Axes::Key => block.ranges[id],
                Axes::Both | Axes::Diagonal => mask.program.range(id, ranges),
            };
            ranges.push(range);
        }
        Verdict::of(ranges[mask.root()])
    }
}

/// Sets logits to −∞ where a mask is false.
#[inline(always)]
pub(crate) fn hide(mask: &[f32], logits: &mut [f32]) {
    for (logit, mask) in logits.iter_mut().zip(mask) {
        let shown = mask.to_bits();
        *logit = f32::from_bits(logit.to_bits() & shown | f32::NEG_INFINITY.to_bits() & !shown);
    }
}
