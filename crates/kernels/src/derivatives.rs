//! Programs in the backward pass: the code of their derivatives, and the gradients of their tables.

use attend::ProgramCode;
use problem::program::{Derivative, Input, Op};
use problem::{Expr, Problem, Program};

use crate::PlanError;

/// The gradient of a table, which one kernel computes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TableGradient {
    /// The number of the table.
    pub table: u8,
    /// The index that each dimension of the gradient follows.
    pub axes: Vec<TableAxis>,
    /// The programs with the derivative by the element; `None` if no program reads the table.
    pub code: Option<ProgramCode>,
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
    /// For a table that a program reads at more than one place or at other indices than positions.
    pub fn all(problem: &Problem, family: &'static str) -> Result<Vec<TableGradient>, PlanError> {
        let wants = problem.pass.wants();
        if wants.tables == 0 {
            return Ok(Vec::new());
        }
        let reads = derivative(problem).map(|derivative| derivative.reads).unwrap_or_default();
        let tables = (0..).zip(&problem.programs.tables).filter(|&(number, _)| wants.table(number));
        let gradients = tables.map(|(number, table)| {
            let extents = table.gradient().extents;
            let refuse = |value: &str| {
                let accepted = "tables that the score program reads once, at b, h, q or k in each dimension \
                     that does not repeat";
                let what = format!("the gradient of table {number}");
                Err(PlanError::unsupported(family, what, value, accepted))
            };
            let mut reads = reads.iter().filter(|read| read.table == u32::from(number));
            let Some(read) = reads.next() else {
                return Ok(TableGradient { table: number, axes: Vec::new(), code: None });
            };
            if reads.next().is_some() {
                return refuse("read at two places");
            }
            let axes = extents.iter().zip(&read.index);
            let axes: Option<Vec<TableAxis>> = axes
                .map(|(&extent, index)| match extent {
                    1 => Some(TableAxis::One),
                    _ => TableAxis::of_index(index),
                })
                .collect();
            let Some(axes) = axes else { return refuse("an index that is an expression") };
            let twice = |(i, axis): (usize, &TableAxis)| *axis != TableAxis::One && axes[..i].contains(axis);
            if axes.iter().enumerate().any(twice) {
                return refuse("two equal indices");
            }
            let factor = Some(&read.factor).filter(|factor| !is_one(factor));
            let code = Some(ProgramCode::of_gradient(problem, factor));
            Ok(TableGradient { table: number, axes, code })
        });
        gradients.collect()
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

fn is_one(program: &Program) -> bool {
    *program.ops() == [Op::Float(1.0f32.to_bits())]
}
