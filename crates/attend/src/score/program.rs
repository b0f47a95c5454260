//! Emits score and mask programs on tiles of scores.
//!
//! A value that depends only on the query, the head or the batch entry is computed once for each of the
//! lane's rows, before the KV blocks. A value that depends only on the key is computed once for each of the
//! lane's columns of a block. Parameters of programs, and strides and extents of tables, are launch
//! parameters.
//!
//! A row beyond the queries, or a column beyond the keys, reads tables at the last position. Its scores are
//! hidden or not stored.

use problem::ElementType;
use problem::program::{BinaryOp, Id, Input, Op};
use ptx::{Builder, F32, Global, Half, Pred, R16, R32, R64, TensorMapPtr, Type};
use tile::{AccTile, Threads};

use super::emit::{Division, Value, binary, compare, select, truth, unary};
use super::lower::{Index, Node, ProgramCode, ValuePlace};
use super::words::Words;
use crate::{Coverage, RowRange};

/// A table in a kernel.
#[derive(Clone, Debug)]
pub struct TableParams {
    /// Its first element.
    pub start: Global,
    /// Type of the elements.
    pub dtype: ElementType,
    /// Bytes between neighbours in each dimension; `None` for the size of an element.
    pub strides: Vec<Option<R64>>,
    /// The last index in each dimension.
    pub lasts: Vec<R32>,
    /// Whether two neighbours in the last dimension may be read as one word; `None` if their type or stride
    /// excludes it.
    pub pairs: Option<Pred>,
    /// Whether eight neighbours in the last dimension may be read as one vector of 16 bytes; `None` as above.
    pub eights: Option<Pred>,
}

/// Launch parameters that programs read; `None` for parameters and tables that no program reads.
#[derive(Clone, Debug)]
pub struct ProgramParams {
    /// The factor that turns the product of a query and a key, or its capped form, into the logit.
    pub factor: F32,
    /// Float parameters.
    pub floats: Vec<Option<F32>>,
    /// Integer parameters.
    pub ints: Vec<Option<R32>>,
    /// Tables.
    pub tables: Vec<Option<TableParams>>,
}

/// The launch parameters of a staged read.
#[derive(Clone, Copy, Debug)]
pub struct StagedParams {
    /// The table as `[outer, inner, query, key]`.
    pub map: TensorMapPtr,
    /// The type of the elements.
    pub half: Half,
    /// The last index of the outer and of the inner dimension: 0 if the elements repeat along it.
    pub lasts: [Option<R32>; 2],
}

/// The programs of a problem, ready to be emitted.
#[derive(Clone, Debug)]
pub struct ScorePrograms {
    pub(super) code: ProgramCode,
    pub(super) params: ProgramParams,
    /// Whether the mask program also runs in full blocks.
    pub(super) masks_full: bool,
    /// Whether every block has all of its keys, so that none lies beyond the last key.
    pub(super) whole_blocks: bool,
    /// Whether table elements are read one block ahead.
    pub(super) reads_ahead: bool,
    /// Whether logits get the factor log2 e here, and not in the exponent ([`crate::Softcap`]).
    pub(super) wide: bool,
    /// The parameters of the staged reads, in the order of [`ProgramCode::staged`].
    pub(super) staged: Vec<StagedParams>,
}

/// The values of the nodes that were computed so far.
pub(super) type Memo = Vec<Option<Value>>;

/// The programs for the rows of a tile, with the values that depend on the rows alone.
#[derive(Clone, Debug)]
pub struct RowPrograms<'a> {
    pub(super) programs: &'a ScorePrograms,
    pub(super) rows: RowRange,
    /// The lane's first column in a block.
    pub(super) column: R32,
    /// The last key, or 0 if there is none.
    pub(super) last_key: R32,
    pub(super) once: Memo,
    pub(super) of_rows: Vec<Memo>,
    /// Elements of the next block.
    pub(super) ahead: Vec<Words>,
}

/// The source of the elements of a full block, for tables that are read from global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Memory.
    InPlace,
    /// Registers, if [`RowPrograms::read_ahead`] reads the table. It was called for this block.
    Ahead,
}

impl ScorePrograms {
    /// The programs of this code.
    pub const fn new(code: ProgramCode, params: ProgramParams) -> ScorePrograms {
        ScorePrograms {
            code,
            params,
            masks_full: true,
            whole_blocks: false,
            reads_ahead: false,
            wide: false,
            staged: Vec::new(),
        }
    }

    /// Whether there is a score program, and not only a mask program.
    pub fn has_score(&self) -> bool {
        self.code.has_score()
    }

    /// Omits the mask program in full blocks. Correct if the coverage of the blocks takes the mask program
    /// into account.
    #[must_use]
    pub fn masking_partial_blocks(self) -> ScorePrograms {
        ScorePrograms { masks_full: false, ..self }
    }

    /// Multiplies the scores by `descale` as well before the score program takes them.
    #[must_use]
    pub fn descaled(mut self, k: &mut Builder, descale: F32) -> ScorePrograms {
        self.params.factor = k.mul(self.params.factor, descale);
        self
    }

    /// Whether there is a score program. If so, the softmax gets logits in units of the natural logarithm.
    pub const fn shapes_scores(&self) -> bool {
        self.code.score.is_some()
    }

    /// Multiplies logits by log2 e, for a softmax whose factor is 1 ([`crate::Softcap`]).
    #[must_use]
    pub fn of_wide(self, wide: bool) -> ScorePrograms {
        ScorePrograms { wide, ..self }
    }

    /// Whether logits are multiplied by log2 e.
    pub(crate) const fn is_wide(&self) -> bool {
        self.wide
    }

    /// Reads tables without a test for keys beyond the last one. Correct if blocks of keys divide the keys
    /// evenly (`divides`).
    #[must_use]
    pub fn on_whole_blocks(self, divides: bool) -> ScorePrograms {
        ScorePrograms { whole_blocks: divides, ..self }
    }

    /// The programs for warps that hold `warp_rows` rows of the range and `warp_keys` keys of each block.
    /// `head` is the tile's query head, or group of packed heads.
    pub fn for_rows(
        &self,
        k: &mut Builder,
        threads: &Threads,
        rows: &RowRange,
        (warp_rows, warp_keys): (u32, u32),
        [head, batch]: [R32; 2],
    ) -> RowPrograms<'_> {
        let first = k.mad(threads.row_warp, warp_rows, rows.first);
        let first = k.add(first, threads.quad);
        let column = match threads.part {
            None => threads.column,
            Some(part) => k.mad(part, warp_keys, threads.column),
        };
        let [last_query, last_key] = [rows.seq_q, rows.seq_kv].map(|length| {
            let last = k.sub(length, 1);
            k.max_s(last, 0)
        });
        let none = vec![None; self.code.nodes.len()];
        let mut at = Scope::new(self, rows);
        (at.head, at.batch) = (Some(head), Some(batch));
        let needed = self.code.of_rows();
        let of_rows = (0..warp_rows / 8).map(|i| {
            let row = k.add(first, i / 2 * 16 + i % 2 * 8);
            let [head, position] = rows.head_and_position(k, head, row);
            at.head = Some(head);
            at.query = Some(k.min_u(position, last_query));
            at.row = none.clone();
            for &id in &needed {
                at.value(k, id);
            }
            std::mem::take(&mut at.row)
        });
        let of_rows = of_rows.collect();
        let ahead = self.ahead(k, (warp_rows, warp_keys));
        RowPrograms { programs: self, rows: *rows, column, last_key, once: at.once, of_rows, ahead }
    }
}

impl RowPrograms<'_> {
    /// Whether only a mask program runs, so that blocks whose keys it shows need no code.
    pub fn only_mask(&self) -> bool {
        !self.programs.has_score()
    }

    /// Turns the products of the tile's queries with the keys from `origin` on into logits, and hides the
    /// keys that the mask program hides. The products may have been capped before.
    pub fn apply(&self, k: &mut Builder, s: &AccTile, origin: R32, coverage: Coverage) {
        self.apply_with(k, s, (origin, coverage), Elements::InPlace, &[]);
    }

    /// Like [`RowPrograms::apply`], with table elements from `elements`, and those of staged reads from
    /// `staged`.
    pub fn apply_with(
        &self,
        k: &mut Builder,
        s: &AccTile,
        (origin, coverage): (R32, Coverage),
        elements: Elements,
        staged: &[Words],
    ) {
        let code = &self.programs.code;
        let mask = code.mask.filter(|_| self.programs.masks_full || coverage == Coverage::Partial);
        if mask.is_none() && code.score.is_none() {
            return;
        }
        if (coverage, elements) == (Coverage::Full, Elements::Ahead) {
            self.exchange_eights(k);
        }
        let first = k.add(origin, self.column);
        let block = (first, coverage);
        let pairs = if coverage == Coverage::Full { self.pairs(k) } else { None };
        match pairs {
            None => self.columns(k, s, block, (mask, None), staged),
            Some(pairs) => k.if_else(
                pairs,
                |k| self.columns(k, s, block, (mask, Some(elements)), staged),
                |k| self.columns(k, s, block, (mask, None), staged),
            ),
        }
    }

    /// Whether the elements of two neighbouring columns may be read together; `None` if no table has such
    /// elements.
    pub(super) fn pairs(&self, k: &mut Builder) -> Option<Pred> {
        self.all_tables(k, |table| table.pairs)
    }

    /// Whether a property holds for all tables that are read along the keys; `None` if no table is, or none
    /// can have the property.
    pub(super) fn all_tables(
        &self,
        k: &mut Builder,
        property: impl Fn(&TableParams) -> Option<Pred>,
    ) -> Option<Pred> {
        let programs = self.programs;
        let tables = (0..programs.code.nodes.len()).filter(|&id| programs.is_along_keys(id));
        let tables = tables.filter_map(|id| property(programs.table_of(id)?));
        tables.reduce(|a, b| k.and_pred(a, b))
    }

    /// Implementation of [`RowPrograms::apply`]. `mask` is the mask program to run. `pairs` says where pairs
    /// of neighbouring elements of tables come from; with `None`, elements are read one by one.
    fn columns(
        &self,
        k: &mut Builder,
        s: &AccTile,
        block: (R32, Coverage),
        (mask, pairs): (Option<Id>, Option<Elements>),
        staged: &[Words],
    ) {
        let code = &self.programs.code;
        let mut at = Scope::new(self.programs, &self.rows);
        at.once.clone_from(&self.once);
        let (first, coverage) = block;
        at.first_key = Some((first, if self.programs.whole_blocks { Coverage::Full } else { coverage }));
        at.last_key = Some(self.last_key);
        at.in_pairs = pairs.is_some();
        let ahead = if pairs == Some(Elements::Ahead) { &*self.ahead } else { &[] };
        let rows: Vec<Vec<F32>> = (0..s.lane_rows()).map(|i| s.row(i).collect()).collect();
        let none: Memo = vec![None; code.nodes.len()];
        // For each row, the elements that were read together with the elements of the previous column.
        let mut read = vec![none.clone(); rows.len()];
        for column in 0..rows[0].len() {
            at.offset = column as u32 / 2 * 8 + column as u32 % 2;
            at.column.clone_from(&none);
            for (row, scores) in rows.iter().enumerate() {
                let score = scores[column];
                at.row.clone_from(&self.of_rows[row]);
                at.element = std::mem::replace(&mut read[row], none.clone());
                at.score = Some(score);
                for words in ahead.iter().chain(staged).filter(|_| column % 2 == 0) {
                    let (id, [element, next]) = words.pair(k, row, column);
                    (at.element[id], at.next[id]) = (Some(element), Some(next));
                }
                let sees = mask.map(|mask| at.value(k, mask).bool());
                if let Some(result) = code.score {
                    let logit = at.value(k, result).float();
                    match self.programs.wide {
                        true => k.mul_to(score, logit, std::f32::consts::LOG2_E),
                        false => k.mov_to(score, logit),
                    }
                }
                if let Some(sees) = sees {
                    k.selp_to(score, score, f32::NEG_INFINITY, sees);
                }
                std::mem::swap(&mut read[row], &mut at.next);
            }
        }
    }
}

impl ScorePrograms {
    /// The table that a node reads.
    pub(super) fn table_of(&self, id: Id) -> Option<&TableParams> {
        let Node::Load { table, .. } = &self.code.nodes[id] else { return None };
        self.params.tables[*table].as_ref()
    }

    /// Whether the element that a node reads is followed in memory by the element of the next key, so that
    /// both may be read as one word.
    pub(super) fn is_along_keys(&self, id: Id) -> bool {
        let Node::Load { parts, .. } = &self.code.nodes[id] else { return false };
        let Some(table) = self.table_of(id) else { return false };
        let is_key = |part: &Id| {
            let Node::Address { indices, .. } = &self.code.nodes[*part] else { return false };
            let last = table.lasts.len() - 1;
            indices.iter().any(|index| index.dimension == last && self.code.is_key(index.value))
        };
        table.pairs.is_some() && self.code.places[id] == ValuePlace::Element && parts.iter().any(is_key)
    }
}

/// A point of evaluation: the known positions, and the values computed so far for each place.
pub(super) struct Scope<'a> {
    programs: &'a ScorePrograms,
    rows: &'a RowRange,
    pub head: Option<R32>,
    pub batch: Option<R32>,
    /// The row's query, or its key in a transposed tile.
    pub query: Option<R32>,
    /// The key, or the query in a transposed tile, of the lane's first column, and whether all positions of
    /// the block exist.
    pub first_key: Option<(R32, Coverage)>,
    pub last_key: Option<R32>,
    /// Offset of the column from the lane's first column.
    pub offset: u32,
    /// The register of the score.
    pub score: Option<F32>,
    pub once: Memo,
    pub row: Memo,
    pub column: Memo,
    pub element: Memo,
    /// Whether elements of tables are read together with those of the next column.
    in_pairs: bool,
    /// The elements that were read in advance for the next column.
    next: Memo,
}

/// A value is requested only where the positions of its place are known.
const KNOWN: &str = "the position is known at this place";

impl<'a> Scope<'a> {
    pub fn new(programs: &'a ScorePrograms, rows: &'a RowRange) -> Scope<'a> {
        let none: Memo = vec![None; programs.code.nodes.len()];
        Scope {
            programs,
            rows,
            head: None,
            batch: None,
            query: None,
            first_key: None,
            last_key: None,
            offset: 0,
            score: None,
            once: none.clone(),
            row: none.clone(),
            column: none.clone(),
            element: none.clone(),
            in_pairs: false,
            next: none,
        }
    }

    fn memo(&mut self, id: Id) -> &mut Option<Value> {
        let of_place = match self.programs.code.places[id] {
            ValuePlace::Once => &mut self.once,
            ValuePlace::Row => &mut self.row,
            ValuePlace::Column => &mut self.column,
            ValuePlace::Element => &mut self.element,
        };
        &mut of_place[id]
    }

    /// The value of a node, computed once and then reused.
    pub fn value(&mut self, k: &mut Builder, id: Id) -> Value {
        if let Some(known) = *self.memo(id) {
            return known;
        }
        let value = self.compute(k, id);
        *self.memo(id) = Some(value);
        value
    }

    fn compute(&mut self, k: &mut Builder, id: Id) -> Value {
        let programs = self.programs;
        match &programs.code.nodes[id] {
            Node::Op(op) => self.operation(k, op),
            Node::Reciprocal(a) => {
                let a = self.value(k, *a).float();
                Value::Float(k.rcp(a))
            }
            Node::Address { table, from_start, indices } => {
                Value::At(self.address(k, *table, *from_start, indices))
            }
            Node::Load { table, parts } => {
                let at = self.sum(k, parts);
                let params = self.table(*table);
                let half = half_of(params.dtype).filter(|_| self.in_pairs && programs.is_along_keys(id));
                let Some(half) = half else { return load(k, params.dtype, at) };
                let both: R32 = k.ld_read_only(Type::B32, at);
                let [value, next] = k.unpack(half, both);
                self.next[id] = Some(Value::Float(next));
                Value::Float(value)
            }
            Node::Staged(_) => unreachable!("elements of tiles are read before the block's scores"),
        }
    }

    /// The sum of the addresses of a load.
    pub fn sum(&mut self, k: &mut Builder, parts: &[Id]) -> Global {
        let parts: Vec<Global> = parts.iter().map(|&part| self.value(k, part).at()).collect();
        let sum = |a: Global, b: &Global| Global { base: k.add(a.base, b.base), offset: a.offset + b.offset };
        parts[1..].iter().fold(parts[0], sum)
    }

    fn operation(&mut self, k: &mut Builder, op: &Op) -> Value {
        let code = &self.programs.code;
        match *op {
            Op::Input(input) => self.input(k, input),
            Op::Float(bits) => Value::Float(k.mov(f32::from_bits(bits))),
            Op::Int(x) => Value::Int(k.mov(x)),
            Op::Bool(x) => Value::Bool(truth(k, x)),
            Op::Load { .. } => unreachable!("loads are nodes of their own"),
            Op::Unary(op, a) => {
                let a = self.value(k, a);
                unary(k, op, a)
            }
            Op::Binary(BinaryOp::Add, a, b) if code.is_score(a) != code.is_score(b) => {
                let other = if code.is_score(a) { b } else { a };
                let other = self.value(k, other).float();
                Value::Float(self.logit_plus(k, other))
            }
            Op::Binary(BinaryOp::Sub, a, b) if code.is_score(a) && !code.is_score(b) => {
                let other = self.value(k, b).float();
                let minus = k.neg(other);
                Value::Float(self.logit_plus(k, minus))
            }
            Op::Binary(op, a, b) => {
                let division = Division { natural: code.is_natural(a), by: code.constant(b) };
                let (a, b) = (self.value(k, a), self.value(k, b));
                binary(k, op, a, b, division)
            }
            Op::Compare(op, a, b) => {
                let (a, b) = (self.value(k, a), self.value(k, b));
                Value::Bool(compare(k, op, a, b))
            }
            Op::Select(a, b, c) => {
                let (a, b, c) = (self.value(k, a).bool(), self.value(k, b), self.value(k, c));
                select(k, a, b, c)
            }
        }
    }

    /// The logit plus a value. The FMA also applies the scale.
    fn logit_plus(&self, k: &mut Builder, other: F32) -> F32 {
        k.mad(self.score.expect(KNOWN), self.programs.params.factor, other)
    }

    fn input(&self, k: &mut Builder, input: Input) -> Value {
        let programs = self.programs;
        let params = &programs.params;
        let (of_rows, of_columns) = match programs.code.transposed {
            false => (self.rows.seq_q, self.rows.seq_kv),
            true => (self.rows.seq_kv, self.rows.seq_q),
        };
        match input {
            Input::Score => Value::Float(k.mul(self.score.expect(KNOWN), params.factor)),
            Input::Query if programs.code.transposed => Value::Int(self.key(k)),
            Input::Query => Value::Int(self.query.expect(KNOWN)),
            Input::Key if programs.code.transposed => Value::Int(self.query.expect(KNOWN)),
            Input::Key => Value::Int(self.key(k)),
            Input::Batch => Value::Int(self.batch.expect(KNOWN)),
            Input::Head => Value::Int(self.head.expect(KNOWN)),
            Input::QueryLength => Value::Int(of_rows),
            Input::KeyLength => Value::Int(of_columns),
            Input::FloatParameter(i) => Value::Float(params.floats[i as usize].expect("declared")),
            Input::IntParameter(i) => Value::Int(params.ints[i as usize].expect("declared")),
        }
    }

    /// The key of the column, or the last key if the column lies beyond it.
    fn key(&self, k: &mut Builder) -> R32 {
        let (first, coverage) = self.first_key.expect(KNOWN);
        let key = if self.offset == 0 { first } else { k.add(first, self.offset) };
        match coverage {
            Coverage::Full => key,
            Coverage::Partial => k.min_u(key, self.last_key.expect(KNOWN)),
        }
    }

    fn table(&self, table: usize) -> &'a TableParams {
        self.programs.params.tables[table].as_ref().expect("declared")
    }

    /// The element of a table at the indices, each clamped to its extent.
    pub fn element(&mut self, k: &mut Builder, table: usize, indices: &[(usize, R32)]) -> Value {
        let params = self.table(table);
        let mut at = params.start;
        for &(dimension, index) in indices {
            let index = k.max_s(index, 0);
            let index = k.min_s(index, params.lasts[dimension]);
            at = further(k, Some(at), index, params.strides[dimension], params.dtype.bytes() as u32);
        }
        load(k, params.dtype, at)
    }

    fn address(&mut self, k: &mut Builder, table: usize, from_start: bool, indices: &[Index]) -> Global {
        let params = self.table(table);
        let element = params.dtype.bytes() as u32;
        let mut at = from_start.then_some(params.start);
        for index in indices {
            let stride = params.strides[index.dimension];
            if let (true, None, Some((first, Coverage::Full))) =
                (self.programs.code.is_key(index.value), stride, self.first_key)
            {
                let from = further(k, at, first, stride, element);
                at = Some(Global { offset: from.offset + i64::from(self.offset * element), ..from });
                continue;
            }
            let mut i = self.value(k, index.value).int();
            if index.clamp_low {
                i = k.max_s(i, 0);
            }
            if index.clamp_high {
                i = k.min_s(i, params.lasts[index.dimension]);
            }
            at = Some(further(k, at, i, stride, element));
        }
        at.expect("an address has indices")
    }
}

/// `at + i · stride` in bytes. Without `at`, the sum starts at 0.
fn further(k: &mut Builder, at: Option<Global>, i: R32, stride: Option<R64>, element: u32) -> Global {
    let offset = at.map_or(0, |at| at.offset);
    let base = match (at, stride) {
        (None, None) => k.mul_wide_u(i, element),
        (Some(at), None) => k.mad_wide_u(i, element, at.base),
        (at, Some(stride)) => {
            let i = k.zext(i);
            match at {
                None => k.mul(i, stride),
                Some(at) => k.mad(i, stride, at.base),
            }
        }
    };
    Global { base, offset }
}

/// The 16-bit float type of a table's elements; `None` for other types.
pub const fn half_of(dtype: ElementType) -> Option<Half> {
    match dtype {
        ElementType::F16 => Some(Half::F16),
        ElementType::Bf16 => Some(Half::Bf16),
        _ => None,
    }
}

/// An element of a table.
fn load(k: &mut Builder, dtype: ElementType, at: Global) -> Value {
    let mut half = |half: Half| {
        let bits: R16 = k.ld_read_only(Type::B16, at);
        Value::Float(k.to_f32(half, bits))
    };
    match dtype {
        ElementType::F16 => half(Half::F16),
        ElementType::Bf16 => half(Half::Bf16),
        ElementType::F32 => Value::Float(k.ld_read_only(Type::F32, at)),
        ElementType::I32 => Value::Int(k.ld_read_only(Type::S32, at)),
        // `Table::check` refuses the 8-bit floats.
        ElementType::U8 | ElementType::E4m3 | ElementType::E5m2 => Value::Int(k.ld_read_only(Type::U8, at)),
    }
}
