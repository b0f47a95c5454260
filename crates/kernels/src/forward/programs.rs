//! Launch parameters of score and mask programs.

use attend::{ProgramCode, ProgramParams, ScorePrograms, TableParams};
use problem::program::Input;
use problem::{Operand, Problem, Table};
use ptx::{Builder, CmpOp, Global, Pred, R64};

use super::contract::is_wide;
use crate::contract::Contract;

/// The programs of this code in a kernel; `None` without code.
///
/// Parameters, strides and extents are launch parameters. One stride is known to the code: that neighbours in
/// a table's last dimension are neighbours in memory.
pub(crate) fn declare_programs(
    k: &mut Builder,
    c: &mut Contract<'_>,
    problem: &Problem,
    code: Option<&ProgramCode>,
) -> Option<ScorePrograms> {
    let (code, programs) = (code?, &problem.programs);
    let factor = c.f32(k, "logit_factor", logit_factor(problem));
    let floats = (0..).zip(&programs.floats).map(|(i, &value)| {
        code.reads(Input::FloatParameter(i)).then(|| c.f32(k, &format!("float_{i}"), value))
    });
    let floats = floats.collect();
    let ints = (0..).zip(&programs.ints).map(|(i, &value)| {
        code.reads(Input::IntParameter(i)).then(|| c.u32(k, &format!("int_{i}"), value.cast_unsigned()))
    });
    let ints = ints.collect();
    let tables = (0..)
        .zip(&programs.tables)
        .map(|(i, table)| code.reads_table(i as usize).then(|| declare_table(k, c, i, table)));
    let tables = tables.collect();
    let programs = ScorePrograms::new(code.clone(), ProgramParams { factor, floats, ints, tables });
    Some(programs.of_wide(is_wide(problem)))
}

/// The factor that turns the product of a query and a key, or the capped product, into the logit. A negative
/// scale negates the product itself.
fn logit_factor(problem: &Problem) -> f32 {
    problem.score.softcap.unwrap_or(problem.softmax_scale().abs())
}

fn declare_table(k: &mut Builder, c: &mut Contract<'_>, number: u8, table: &Table) -> TableParams {
    let start = c.operand(k, Operand::Table(number)).expect("the problem has the table");
    let last_dimension = table.extents.len() - 1;
    let strides = table.strides.iter().enumerate().map(|(dimension, &stride)| {
        let bytes = stride * table.dtype.bytes() as i64;
        let name = format!("table_{number}_stride_{dimension}");
        (dimension != last_dimension || stride != 1).then(|| c.i64(k, &name, bytes))
    });
    let strides: Vec<Option<R64>> = strides.collect();
    let lasts = table.extents.iter().enumerate();
    let lasts = lasts
        .map(|(dimension, &extent)| c.u32(k, &format!("table_{number}_last_{dimension}"), extent as u32 - 1));
    let lasts = lasts.collect();
    let dense = table.dtype.bytes() == 2 && table.strides[last_dimension] == 1;
    let [pairs, eights] = [4, 16].map(|bytes| dense.then(|| are_aligned(k, start, &strides, bytes)));
    TableParams { start, dtype: table.dtype, strides, lasts, pairs, eights }
}

/// Whether the first element of each row of a table is aligned to `bytes`.
fn are_aligned(k: &mut Builder, start: Global, strides: &[Option<R64>], bytes: u32) -> Pred {
    let start = k.trunc(start.base);
    let bits = strides.iter().flatten().fold(start, |bits, &stride| {
        let stride = k.trunc(stride);
        k.or(bits, stride)
    });
    let rest = k.and(bits, bytes - 1);
    k.setp_u(CmpOp::Eq, rest, 0)
}
