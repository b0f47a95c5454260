//! Checks the operands of a call other than Q, K and V.

use problem::{Operands, Problem, ProblemError, SideLengths};

use crate::{CpuError, TableInput};

/// Names of tables in messages, as in the text of programs.
const TABLES: [&str; problem::Programs::MOST_TABLES] = ["t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7"];

/// Rejects sinks and tables of the wrong size or type, and lengths that do not ascend or that exceed the
/// tensor. [`Problem::sequences`] rejects arrays of lengths of the wrong size.
pub(crate) fn check(problem: &Problem, operands: &Operands<'_, TableInput<'_>>) -> Result<(), CpuError> {
    problem.check_scale_values(&operands.scales)?;
    let sinks = if problem.score.sink { problem.heads_q } else { 0 };
    let counts = [
        ("sinks", operands.sinks.len(), sinks),
        ("tables", operands.tables.len(), problem.programs.tables.len()),
    ];
    for (argument, len, expected) in counts {
        if len != expected {
            return Err(ProblemError::Lengths { argument, len, expected }.into());
        }
    }
    for ((table, data), tensor) in problem.programs.tables.iter().zip(operands.tables).zip(TABLES) {
        let (given, len) = data.size();
        if given != table.dtype {
            return Err(CpuError::TableType { table: tensor, given, expected: table.dtype });
        }
        let needed = table.span();
        if len < needed {
            return Err(CpuError::BufferTooShort { tensor, len, needed });
        }
    }
    let (lengths, values) = (problem.lengths, operands.lengths);
    check_cumulative("cu_seqlens_q", values.cumulative_q, lengths.q, problem.seq_q)?;
    check_cumulative("cu_seqlens_k", values.cumulative_kv, lengths.kv, problem.seq_kv)?;
    check_each("seqused_q", values.used_q, problem.seq_q)?;
    check_each("seqused_k", values.used_kv, problem.seq_kv)?;
    check_each("leftpad_k", values.left_pad, problem.seq_kv)
}

/// Rejects cumulative lengths that do not ascend, that exceed the packed tensor, or whose sequences are
/// longer than `seq`.
fn check_cumulative(
    array: &'static str,
    values: &[i32],
    side: SideLengths,
    seq: usize,
) -> Result<(), CpuError> {
    let rows = side.packed.unwrap_or(0);
    let (mut low, mut high) = (0, rows);
    for (index, &value) in values.iter().enumerate() {
        check_one(array, index, value, low, high)?;
        low = value as usize; // not negative, as `check_one` has found
        high = rows.min(low + seq);
    }
    Ok(())
}

fn check_each(array: &'static str, values: &[i32], most: usize) -> Result<(), CpuError> {
    values.iter().enumerate().try_for_each(|(index, &value)| check_one(array, index, value, 0, most))
}

fn check_one(array: &'static str, index: usize, value: i32, low: usize, high: usize) -> Result<(), CpuError> {
    if usize::try_from(value).is_ok_and(|value| (low..=high).contains(&value)) {
        return Ok(());
    }
    Err(CpuError::Length { array, index, value, low, high })
}
