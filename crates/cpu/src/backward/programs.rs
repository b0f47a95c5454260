//! Score and mask programs in the backward pass, and the gradients of their tables, one score at a time.

use problem::program::{Derivative, InRow, Point, Precision};
use problem::{ElementType, Elements, Operand, OperandMap, Problem, ProblemError, Program, Programs, Table};

use super::tile::{BLOCK_KV, ScoreTile};
use crate::Input;
use crate::view::{TableMemory, tables};

/// The programs of a call with dense copies of their tables.
pub(crate) struct TableValues {
    programs: Programs,
    floats: Vec<Vec<f32>>,
    ints: Vec<Vec<i32>>,
}

impl TableValues {
    pub(crate) fn of(problem: &Problem, inputs: &OperandMap<Input<'_>>) -> TableValues {
        let mut all =
            TableValues { programs: problem.programs.clone(), floats: Vec::new(), ints: Vec::new() };
        let layouts = all.programs.tables.iter_mut().zip(&problem.programs.tables);
        for ((layout, table), memory) in layouts.zip(tables(inputs)) {
            let (places, is_float) = (places(table), table.dtype.is_float());
            let read = |memory: &TableMemory<'_>, at: usize| match memory {
                TableMemory::F32(x) => x.read(at),
                TableMemory::F16(x) => x.read(at).to_f32(),
                TableMemory::Bf16(x) => x.read(at).to_f32(),
                TableMemory::I32(_) | TableMemory::U8(_) => f32::NAN,
            };
            let read_int = |memory: &TableMemory<'_>, at: usize| match memory {
                TableMemory::I32(x) => x.read(at),
                TableMemory::U8(x) => x.read(at).into(),
                TableMemory::F32(_) | TableMemory::F16(_) | TableMemory::Bf16(_) => 0,
            };
            let of_floats = places.iter().filter(|_| is_float).map(|&at| read(&memory, at));
            let of_ints = places.iter().filter(|_| !is_float).map(|&at| read_int(&memory, at));
            all.floats.push(of_floats.collect());
            all.ints.push(of_ints.collect());
            let dense = table.gradient().strides;
            let stride = |(&stride, dense): (&i64, i64)| if stride == 0 { 0 } else { dense };
            *layout = Table {
                dtype: if is_float { ElementType::F32 } else { ElementType::I32 },
                extents: table.extents.clone(),
                strides: table.strides.iter().zip(dense).map(stride).collect(),
            };
        }
        all
    }

    /// The contents of the tables.
    pub(super) fn elements(&self) -> Vec<Elements<'_>> {
        let tables = self.floats.iter().zip(&self.ints).zip(&self.programs.tables);
        tables
            .map(|((floats, ints), table)| match table.dtype.is_float() {
                true => Elements::F32(floats),
                false => Elements::I32(ints),
            })
            .collect()
    }

    pub(super) fn programs(&self) -> &Programs {
        &self.programs
    }
}

/// The offset of each element of a table, without the repetitions by strides of 0.
fn places(table: &Table) -> Vec<usize> {
    let mut places = vec![0];
    for (&extent, &stride) in table.gradient().extents.iter().zip(&table.strides) {
        places = places
            .into_iter()
            .flat_map(|at| (0..extent).map(move |i| at + i * stride as usize)) // strides are not negative
            .collect();
    }
    places
}

/// The derivative of the score program.
///
/// # Errors
/// When it has none.
pub(super) fn derivative(problem: &Problem) -> Result<Option<Derivative>, ProblemError> {
    let program = problem.programs.score.as_ref().map(Program::derivative).transpose();
    program.map_err(|error| ProblemError::Program { what: "score", reason: error.to_string() })
}

/// The programs of a call, in one row.
pub(super) struct RowPrograms<'a> {
    mask: Option<InRow<'a>>,
    score: Option<InRow<'a>>,
    slope: Option<InRow<'a>>,
    reads: Vec<Read<'a>>,
}

/// A read of a table whose gradient is wanted.
struct Read<'a> {
    table: usize,
    gradient: Table,
    index: Vec<InRow<'a>>,
    factor: InRow<'a>,
}

/// What a row's scores are made of.
pub(super) struct RowTerms {
    pub scale: f32,
    pub cap: Option<f32>,
    pub lse: f32,
    pub delta: f32,
}

impl<'a> RowPrograms<'a> {
    pub(super) fn new(
        problem: &Problem,
        programs: &'a Programs,
        contents: &'a [Elements<'a>],
        derivative: Option<&'a Derivative>,
        point: Point,
    ) -> RowPrograms<'a> {
        let in_row = |program: &'a Program| program.in_row(programs, contents, point, Precision::Single);
        let wants = problem.pass.wants();
        let reads = derivative.into_iter().flat_map(|derivative| &derivative.reads);
        let reads = reads.filter(|read| wants.table(read.table as u8)).map(|read| Read {
            table: read.table as usize,
            gradient: programs.tables[read.table as usize].gradient(),
            index: read.index.iter().map(in_row).collect(),
            factor: in_row(&read.factor),
        });
        RowPrograms {
            mask: programs.mask.as_ref().map(in_row),
            score: programs.score.as_ref().map(in_row),
            slope: derivative.and_then(|derivative| derivative.score.as_ref()).map(in_row),
            reads: reads.collect(),
        }
    }

    /// Turns row `row` of S and dP into P and dS, adds to the gradients of tables, and notes in `shown` which
    /// keys the row sees. Key 0 of the tile is key `first_key` of the sequence.
    pub(super) fn weigh(
        &mut self,
        terms: &RowTerms,
        (row, first_key, [from, end]): (usize, usize, [usize; 2]),
        scores: &mut ScoreTile,
        shown: &mut [bool],
        tables: &mut [Vec<f64>],
    ) {
        for i in 0..BLOCK_KV {
            let (at, key) = (row * BLOCK_KV + i, first_key + i);
            let in_band = (from..end).contains(&i);
            shown[at] = in_band && self.mask.as_mut().is_none_or(|mask| mask.evaluate(key, 0.0).is_true());
            if !shown[at] {
                (scores.weights[at], scores.slopes[at]) = (0.0, 0.0);
                continue;
            }
            let product = terms.scale * scores.weights[at];
            let (score, mut slope) = match terms.cap {
                None => (product, 1.0),
                Some(cap) => {
                    let capped = (product / cap).tanh();
                    (cap * capped, 1.0 - capped * capped)
                }
            };
            let mut logit = score;
            if let Some(program) = &mut self.score {
                logit = program.evaluate(key, score.into()).float() as f32;
                let of_program = self.slope.as_mut().map_or(0.0, |s| s.evaluate(key, score.into()).float());
                slope *= of_program as f32;
            }
            let weight = (logit - terms.lse).exp();
            let d_logit = weight * (scores.slopes[at] - terms.delta);
            for Read { table, gradient, index, factor } in &mut self.reads {
                let factor = factor.evaluate(key, score.into()).float();
                let index = index.iter_mut().map(|index| index.evaluate(key, score.into()).int().into());
                tables[*table][gradient.offset(index)] += f64::from(d_logit) * factor;
            }
            (scores.weights[at], scores.slopes[at]) = (weight, d_logit * slope);
        }
    }
}

/// The sums of the gradients of all tables up to the last one that is wanted.
pub(super) fn table_sums(problem: &Problem) -> Vec<Vec<f64>> {
    let wanted = problem.outputs().filter_map(|spec| match spec.operand {
        Operand::DTable(table) => Some(usize::from(table) + 1),
        _ => None,
    });
    let count = wanted.max().unwrap_or(0);
    problem.programs.tables[..count].iter().map(|table| vec![0.0; table.gradient().span()]).collect()
}
