//! Lowers score and mask programs to one list of nodes, each with the place where its value is computed.

use std::collections::HashMap;

use problem::program::{BinaryOp, Id, Input, Op, Range, UnaryOp};
use problem::{Problem, Program, Programs};

/// Integers up to this magnitude are exact in f32.
const EXACT: i64 = 1 << 24;

/// Where a value is computed. Each value is computed at the first place that its operands allow, which is the
/// least frequent one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum ValuePlace {
    /// Once for all rows of a tile.
    Once,
    /// Once for each of the lane's rows.
    Row,
    /// Once for each of the lane's columns of a block.
    Column,
    /// For each score.
    Element,
}

impl ValuePlace {
    /// The place of a value that depends on values of two places.
    fn with(self, other: ValuePlace) -> ValuePlace {
        match (self, other) {
            (ValuePlace::Row, ValuePlace::Column) | (ValuePlace::Column, ValuePlace::Row) => {
                ValuePlace::Element
            }
            _ => self.max(other),
        }
    }
}

/// An index into a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Index {
    pub dimension: usize,
    pub value: Id,
    /// Whether the index may be negative.
    pub clamp_low: bool,
    /// Whether the index may exceed the extent.
    pub clamp_high: bool,
}

/// A read of a table at the query and, in the last dimension, at the key. Its other indices are the same for
/// all scores of a tile of rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TileRead {
    /// The number of the table.
    pub table: usize,
    /// The dimension of the query.
    pub query: usize,
    /// The other indices, at most two, in the order of the dimensions.
    pub(super) others: Vec<Index>,
}

impl TileRead {
    /// The dimensions of the other indices, the inner one last; `None` for a dimension that the table does
    /// not have.
    pub fn others(&self) -> [Option<usize>; 2] {
        let dimension = |from_end| {
            let position = self.others.len().checked_sub(from_end)?;
            Some(self.others[position].dimension)
        };
        [dimension(2), dimension(1)]
    }
}

/// A value of a kernel's programs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// An operation of a program that reads no table.
    Op(Op),
    /// The reciprocal of a float.
    Reciprocal(Id),
    /// The address of a table element, or an offset to it, from some of the indices.
    Address {
        table: usize,
        /// Whether the table's start is added; otherwise the result is an offset.
        from_start: bool,
        indices: Vec<Index>,
    },
    /// The element of a table at the sum of addresses.
    Load { table: usize, parts: Vec<Id> },
    /// The element of a table in a tile in shared memory.
    Staged(TileRead),
}

impl Node {
    fn reads(&self) -> Vec<Id> {
        match self {
            Node::Op(op) => op.reads(),
            Node::Reciprocal(a) => vec![*a],
            Node::Address { indices, .. } => indices.iter().map(|index| index.value).collect(),
            Node::Load { parts, .. } => parts.clone(),
            // The thread that requests the tiles computes the indices.
            Node::Staged(_) => Vec::new(),
        }
    }
}

/// The code of a problem's programs: operations in the order of evaluation, each with the place where its
/// value is computed. Values of parameters and extents of tables are not part of it. Problems whose lengths
/// bound the positions alike have equal code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ProgramCode {
    pub(super) nodes: Vec<Node>,
    pub(super) places: Vec<ValuePlace>,
    /// The node of the score program's result.
    pub(super) score: Option<Id>,
    /// The node of the mask program's result.
    pub(super) mask: Option<Id>,
    /// The node of the factor on the gradient of the logit, in the backward pass; `None` for a factor of 1.
    pub(super) slope: Option<Id>,
    /// The nodes of the indices of an element of a table, in the backward pass: the element's gradient has
    /// that of the logit as a part.
    pub(super) target: Vec<Id>,
    /// Whether the rows of a tile are keys and its columns queries.
    pub(super) transposed: bool,
    /// Whether the values of a node are integers that never leave 32 bits.
    fits: Vec<bool>,
    /// Whether a node is the dividend of a division by a constant and never negative.
    natural: Vec<bool>,
    /// Whether the rows of a tile belong to several heads.
    pub(super) packed: bool,
}

/// The code of programs under construction.
struct Lowering {
    code: ProgramCode,
    /// Bounds of integer nodes; `None` for other nodes.
    ranges: Vec<Option<Range>>,
    known: HashMap<Node, Id>,
}

impl Lowering {
    /// Adds a program; returns its result.
    fn add(&mut self, program: &Program, problem: &Problem) -> Id {
        let ranges = program.ranges(problem);
        let mut ids: Vec<Id> = Vec::with_capacity(ranges.len());
        for (op, &range) in program.ops().iter().zip(&ranges) {
            let id = match op {
                Op::Load { table, index, .. } => {
                    let indices = index.iter().enumerate().map(|(dimension, &read)| Index {
                        dimension,
                        value: ids[read],
                        clamp_low: ranges[read].low < 0,
                        // `Problem::check` rejects a table that is smaller than the positions that index it.
                        clamp_high: !ranges[read].position && program.ops()[read] != Op::Int(0),
                    });
                    self.load(*table as usize, indices.collect())
                }
                Op::Unary(UnaryOp::ToFloat, a) => {
                    let integer = ids[*a];
                    self.as_float(integer).unwrap_or_else(|| self.convert(integer))
                }
                Op::Binary(BinaryOp::Div, a, b) if program.types()[*b] == problem::program::Type::Float => {
                    let inverse = self.push(Node::Reciprocal(ids[*b]), None);
                    self.push(Node::Op(Op::Binary(BinaryOp::Mul, ids[*a], inverse)), None)
                }
                op => {
                    let own = renumbered(op, &ids);
                    self.push(Node::Op(own), Some(range))
                }
            };
            ids.push(id);
        }
        ids[ids.len() - 1]
    }

    /// A read of a table. The indices of one place form one part of the address.
    fn load(&mut self, table: usize, indices: Vec<Index>) -> Id {
        let mut parts = Vec::new();
        for place in [ValuePlace::Once, ValuePlace::Row, ValuePlace::Column, ValuePlace::Element] {
            let of_place = |index: &Index| self.code.places[index.value] == place;
            let indices: Vec<Index> = indices.iter().copied().filter(of_place).collect();
            if !indices.is_empty() {
                let from_start = parts.is_empty();
                parts.push(self.push(Node::Address { table, from_start, indices }, None));
            }
        }
        self.push(Node::Load { table, parts }, None)
    }

    fn convert(&mut self, integer: Id) -> Id {
        self.push(Node::Op(Op::Unary(UnaryOp::ToFloat, integer)), None)
    }

    /// An integer as a float without a conversion for each score: the operands are converted instead, if all
    /// values are exact in f32. A conversion has at most a quarter of the throughput of an addition.
    fn as_float(&mut self, integer: Id) -> Option<Id> {
        let exact = |range: Range| -EXACT <= range.low && range.high <= EXACT;
        if !self.ranges[integer].is_some_and(exact) {
            return None;
        }
        if self.code.places[integer] != ValuePlace::Element {
            return Some(self.convert(integer));
        }
        let Node::Op(op) = self.code.nodes[integer].clone() else { return None };
        let op = match op {
            Op::Unary(op @ (UnaryOp::Neg | UnaryOp::Abs), a) => Op::Unary(op, self.as_float(a)?),
            Op::Binary(
                op @ (BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Min | BinaryOp::Max),
                a,
                b,
            ) => Op::Binary(op, self.as_float(a)?, self.as_float(b)?),
            _ => return None,
        };
        Some(self.push(Node::Op(op), None))
    }

    fn push(&mut self, node: Node, range: Option<Range>) -> Id {
        if let Some(&id) = self.known.get(&node) {
            return id;
        }
        let own = match node {
            Node::Op(Op::Input(Input::Score)) => ValuePlace::Element,
            Node::Op(Op::Input(Input::Query)) => ValuePlace::Row,
            Node::Op(Op::Input(Input::Key)) => ValuePlace::Column,
            Node::Op(Op::Input(Input::Head)) if self.code.packed => ValuePlace::Row,
            _ => ValuePlace::Once,
        };
        self.code
            .places
            .push(node.reads().iter().fold(own, |place, &read| place.with(self.code.places[read])));
        self.ranges.push(range);
        self.code
            .fits
            .push(range.is_some_and(|range| range.low > Range::ALL.low && range.high < Range::ALL.high));
        let id = self.code.nodes.len();
        self.code.nodes.push(node.clone());
        self.known.insert(node, id);
        id
    }
}

impl ProgramCode {
    /// Whether there is a score program, and not only a mask program.
    pub fn has_score(&self) -> bool {
        self.score.is_some()
    }

    /// The code of a problem's programs. `packed` says whether the rows of a tile belong to several heads.
    pub fn new(problem: &Problem, packed: bool) -> ProgramCode {
        let Programs { score, mask, .. } = &problem.programs;
        ProgramCode::of([score.as_ref(), mask.as_ref(), None], &[], problem, packed)
    }

    /// The code of a problem's programs in the backward pass, with a factor on the gradient of the logit.
    pub fn of_gradient(problem: &Problem, factor: Option<&Program>) -> ProgramCode {
        let Programs { score, mask, .. } = &problem.programs;
        ProgramCode::of([score.as_ref(), mask.as_ref(), factor], &[], problem, false)
    }

    /// As [`ProgramCode::of_gradient`], with the indices of the element of a table to which the gradient is
    /// added.
    pub fn of_gradient_at(problem: &Problem, factor: Option<&Program>, index: &[Program]) -> ProgramCode {
        let Programs { score, mask, .. } = &problem.programs;
        ProgramCode::of([score.as_ref(), mask.as_ref(), factor], index, problem, false)
    }

    /// The code for tiles whose rows are keys and whose columns are queries.
    #[must_use]
    pub fn transposed(&self) -> ProgramCode {
        let swapped = |place: &ValuePlace| match place {
            ValuePlace::Row => ValuePlace::Column,
            ValuePlace::Column => ValuePlace::Row,
            other => *other,
        };
        let places = self.places.iter().map(swapped).collect();
        ProgramCode { places, transposed: !self.transposed, ..self.clone() }
    }

    /// The code of the mask program alone.
    pub fn of_mask(problem: &Problem, packed: bool) -> ProgramCode {
        ProgramCode::of([None, problem.programs.mask.as_ref(), None], &[], problem, packed)
    }

    fn of(
        programs: [Option<&Program>; 3],
        target: &[Program],
        problem: &Problem,
        packed: bool,
    ) -> ProgramCode {
        let code = ProgramCode { packed, ..ProgramCode::default() };
        let mut lowering = Lowering { code, ranges: Vec::new(), known: HashMap::new() };
        let [score, mask, slope] =
            programs.map(|program| program.map(|program| lowering.add(program, problem)));
        let target = target.iter().map(|index| lowering.add(index, problem)).collect();
        let Lowering { code, ranges, .. } = lowering;
        let mut natural = vec![false; code.nodes.len()];
        for node in &code.nodes {
            if let Node::Op(Op::Binary(BinaryOp::Div | BinaryOp::Rem, dividend, by)) = *node
                && code.constant(by).is_some()
            {
                natural[dividend] = ranges[dividend].is_some_and(|range| range.low >= 0);
            }
        }
        ProgramCode { score, mask, slope, target, natural, ..code }
    }

    /// Whether a program reads an input.
    pub fn reads(&self, input: Input) -> bool {
        self.nodes.contains(&Node::Op(Op::Input(input)))
    }

    /// Whether a program reads a table other than from tiles.
    pub fn reads_table(&self, number: usize) -> bool {
        self.nodes.iter().any(|node| matches!(node, Node::Load { table, .. } if *table == number))
    }

    /// The per-row values that are used inside blocks, and so are computed before the blocks.
    pub(super) fn of_rows(&self) -> Vec<Id> {
        let is_of_rows = |&id: &Id| self.places[id] <= ValuePlace::Row;
        let of_blocks = self.needed().into_iter().filter(|id| !is_of_rows(id));
        let read = of_blocks.flat_map(|id| self.nodes[id].reads());
        let mut found: Vec<Id> = read.chain(self.results()).filter(is_of_rows).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The nodes of a place on which the results depend, in the order of evaluation.
    pub(super) fn needed_at(&self, place: ValuePlace) -> Vec<Id> {
        let mut found: Vec<Id> = self.needed().into_iter().filter(|&id| self.places[id] == place).collect();
        found.sort_unstable();
        found
    }

    /// The nodes of the results.
    fn results(&self) -> impl Iterator<Item = Id> {
        self.score.into_iter().chain(self.mask).chain(self.slope).chain(self.target.iter().copied())
    }

    /// The nodes on which the results depend.
    fn needed(&self) -> Vec<Id> {
        self.needed_by(self.results())
    }

    /// The nodes on which these nodes depend, with these nodes.
    pub(super) fn needed_by(&self, roots: impl Iterator<Item = Id>) -> Vec<Id> {
        let mut needed = vec![false; self.nodes.len()];
        roots.for_each(|root| needed[root] = true);
        let mut found = Vec::new();
        for id in (0..needed.len()).rev() {
            if needed[id] {
                found.push(id);
                self.nodes[id].reads().into_iter().for_each(|read| needed[read] = true);
            }
        }
        found
    }

    /// The value of a node that is a constant integer.
    pub(super) fn constant(&self, id: Id) -> Option<i32> {
        match self.nodes[id] {
            Node::Op(Op::Int(x)) => Some(x),
            _ => None,
        }
    }

    /// Whether an operation yields integers that cannot overflow 32 bits, whatever its operands are.
    pub(super) fn fits(&self, id: Id) -> bool {
        self.fits[id]
    }

    /// Whether the dividend of a division by a constant is never negative.
    pub(super) fn is_natural(&self, id: Id) -> bool {
        self.natural[id]
    }

    /// Whether a node is the key's position.
    pub(super) fn is_key(&self, id: Id) -> bool {
        self.nodes[id] == Node::Op(Op::Input(Input::Key))
    }

    /// Whether a node is the query's position.
    pub(super) fn is_query(&self, id: Id) -> bool {
        self.nodes[id] == Node::Op(Op::Input(Input::Query))
    }

    /// Whether a node is the score.
    pub(super) fn is_score(&self, id: Id) -> bool {
        self.nodes[id] == Node::Op(Op::Input(Input::Score))
    }
}

/// The operation with its operands renumbered by `ids`.
fn renumbered(op: &Op, ids: &[Id]) -> Op {
    match *op {
        Op::Unary(op, a) => Op::Unary(op, ids[a]),
        Op::Binary(op, a, b) => Op::Binary(op, ids[a], ids[b]),
        Op::Compare(op, a, b) => Op::Compare(op, ids[a], ids[b]),
        Op::Select(a, b, c) => Op::Select(ids[a], ids[b], ids[c]),
        ref leaf => leaf.clone(),
    }
}
