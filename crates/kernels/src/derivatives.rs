//! Programs in the backward pass: the code of their derivatives, and the gradients of their tables.

use attend::ProgramCode;
use problem::program::{Derivative, Input, Op, TableRead};
use problem::{Expr, Problem, Program};

use crate::PlanError;

/// The most reads of a table whose gradient kernels add up.
const MOST_READS: usize = 16;

/// The gradient of a table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TableGradient {
    /// The number of the table.
    pub table: u8,
    /// The index that each dimension of the gradient follows.
    pub axes: Vec<TableAxis>,
    /// The programs with the derivative by the element; `None` if no program reads the table, or if kernels
    /// add up the gradient.
    pub code: Option<ProgramCode>,
    /// The programs with the derivative by the element of each read and with its indices. For each of them, a
    /// kernel adds the gradients of scores to the elements by atomics.
    pub added: Vec<ProgramCode>,
}

/// The index that a dimension of a table's gradient follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TableAxis {
    Batch,
    Head,
    Query,
    Key,
    /// The dimension has one element.
    One,
}

impl TableAxis {
    /// The axis of an index; `None` for any other expression than a position.
    fn of_index(index: &Program) -> Option<TableAxis> {
        match index.ops() {
            [Op::Input(Input::Batch)] => Some(TableAxis::Batch),
            [Op::Input(Input::Head)] => Some(TableAxis::Head),
            [Op::Input(Input::Query)] => Some(TableAxis::Query),
            [Op::Input(Input::Key)] => Some(TableAxis::Key),
            _ => None,
        }
    }
}

impl TableGradient {
    /// The gradients of tables that a problem wants.
    ///
    /// # Errors
    /// For a table that a program reads at more than [`MOST_READS`] places or at indices that depend on the
    /// score; and in a deterministic pass for one that it reads twice or at other indices than positions.
    pub fn all(problem: &Problem, family: &'static str) -> Result<Vec<TableGradient>, PlanError> {
        let wants = problem.pass.wants();
        if wants.tables == 0 {
            return Ok(Vec::new());
        }
        let reads = derivative(problem).map(|derivative| derivative.reads).unwrap_or_default();
        let tables = (0..).zip(&problem.programs.tables).filter(|&(number, _)| wants.table(number));
        let gradients = tables.map(|(number, table)| {
            let extents = table.gradient().extents;
            let reads: Vec<_> = reads.iter().filter(|read| read.table == u32::from(number)).collect();
            let [read] = reads[..] else { return TableGradient::added(problem, family, number, &reads) };
            let axes = extents.iter().zip(&read.index);
            let axes: Option<Vec<TableAxis>> = axes
                .map(|(&extent, index)| match extent {
                    1 => Some(TableAxis::One),
                    _ => TableAxis::of_index(index),
                })
                .collect();
            let is_twice =
                |axes: &[TableAxis], i: usize| axes[i] != TableAxis::One && axes[..i].contains(&axes[i]);
            let axes = axes.filter(|axes| !(0..axes.len()).any(|i| is_twice(axes, i)));
            let Some(axes) = axes else { return TableGradient::added(problem, family, number, &reads) };
            let code = Some(ProgramCode::of_gradient(problem, factor_of(read)));
            Ok(TableGradient { table: number, axes, code, added: Vec::new() })
        });
        gradients.collect()
    }

    /// The gradient of a table that is read at any indices, or not at all.
    fn added(
        problem: &Problem,
        family: &'static str,
        table: u8,
        reads: &[&TableRead],
    ) -> Result<TableGradient, PlanError> {
        let refuse = |value: &str, accepted: &str| {
            let what = format!("the gradient of table {table}");
            Err(PlanError::unsupported(family, what, value, accepted))
        };
        if !reads.is_empty() && problem.pass.deterministic() {
            let accepted = "in a deterministic pass, tables that the score program reads once, at b, h, q or k \
                            in each dimension that does not repeat";
            let value = if reads.len() > 1 { "read at two places" } else { "an index that is an expression" };
            return refuse(value, accepted);
        }
        if reads.len() > MOST_READS {
            return refuse(
                "more reads",
                &format!("tables that the score program reads at most {MOST_READS} times"),
            );
        }
        let of_score = |index: &Program| index.ops().contains(&Op::Input(Input::Score));
        if reads.iter().any(|read| read.index.iter().any(of_score)) {
            return refuse("an index that depends on the score", "indices of positions and tables");
        }
        let code = |read: &&TableRead| ProgramCode::of_gradient_at(problem, factor_of(read), &read.index);
        let added = reads.iter().map(code).collect();
        Ok(TableGradient { table, axes: Vec::new(), code: None, added })
    }

    /// The dimension that an axis indexes.
    pub fn dimension(&self, axis: TableAxis) -> Option<usize> {
        self.axes.iter().position(|&known| known == axis)
    }
}

/// The code of a problem's programs with the derivative by the score; `None` without programs.
pub(crate) fn code_of_scores(problem: &Problem) -> Option<ProgramCode> {
    if problem.programs.is_empty() {
        return None;
    }
    let zero = || Program::new(&Expr::from(0.0)).ok();
    let factor = derivative(problem).and_then(|derivative| derivative.score.or_else(zero));
    Some(ProgramCode::of_gradient(problem, factor.filter(|factor| !is_one(factor)).as_ref()))
}

/// The derivative of the score program, if there is one. The problem's check has refused programs without.
fn derivative(problem: &Problem) -> Option<Derivative> {
    problem.programs.score.as_ref()?.derivative().ok()
}

/// The factor on the gradient of the logit, if it is not 1.
fn factor_of(read: &TableRead) -> Option<&Program> {
    Some(&read.factor).filter(|factor| !is_one(factor))
}

fn is_one(program: &Program) -> bool {
    *program.ops() == [Op::Float(1.0f32.to_bits())]
}
