//! The optional parts of a call besides Q, K and V: lengths, sinks, biases, masks and programs.

use problem::program::{Input, library};
use problem::{
    Expr, LengthValues, Lengths, Operands, ProblemError, Program, Programs, ScaleValues, Scales, SideLengths,
    Table, TableData, TableType,
};

use crate::{AttentionError, TableView};

/// The features of a call, as its builder has collected them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Features<'a> {
    pub lengths: LengthValues<'a>,
    pub sinks: Option<&'a [f32]>,
    /// Layouts and values of descale factors.
    pub scales: (Scales, ScaleValues<'a>),
    pub slopes: Option<&'a [f32]>,
    pub bias: Option<TableView<'a>>,
    pub mask: Option<TableView<'a>>,
    pub score_program: Option<Expr>,
    pub mask_program: Option<Expr>,
    /// The tables that the programs read by number.
    pub tables: Vec<TableView<'a>>,
    pub floats: Vec<f32>,
    pub ints: Vec<i32>,
}

/// Batch entries and the longest sequence on each side, and how rows belong to batch entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub batch: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub lengths: Lengths,
}

impl<'a> Features<'a> {
    /// The extents of a call whose Q has the shape `q` and whose K has the shape `k`.
    pub fn extents(&self, q: [usize; 4], k: [usize; 4]) -> Result<Extents, AttentionError> {
        let LengthValues { cumulative_q, cumulative_kv, used_q, used_kv, left_pad } = self.lengths;
        let (batch_q, seq_q) = side("cumulative_q", "q", cumulative_q, [q[0], q[2]])?;
        let (batch_kv, seq_kv) = side("cumulative_kv", "k", cumulative_kv, [k[0], k[2]])?;
        if batch_q != batch_kv {
            return Err(batches_differ([cumulative_q, cumulative_kv], [batch_q, batch_kv]));
        }
        let packed = |values: &[i32], rows| (!values.is_empty()).then_some(rows);
        let lengths = Lengths {
            q: SideLengths { packed: packed(cumulative_q, q[2]), used: !used_q.is_empty() },
            kv: SideLengths { packed: packed(cumulative_kv, k[2]), used: !used_kv.is_empty() },
            left_padded: !left_pad.is_empty(),
        };
        Ok(Extents { batch: batch_q, seq_q, seq_kv, lengths })
    }

    /// The programs of a call over scores `[batch, heads_q, seq_q, seq_kv]`, and the contents of their
    /// tables. `bounds` is a mask that the call's mask is joined with.
    pub fn programs(
        &self,
        scores: [usize; 4],
        bounds: Option<Expr>,
    ) -> Result<(Programs, Vec<TableData<'a>>), AttentionError> {
        let [batch, heads, ..] = scores;
        let mut tables: Vec<Table> = self.tables.iter().map(|view| view.table.clone()).collect();
        let mut data: Vec<TableData<'a>> = self.tables.iter().map(|view| view.data).collect();
        let mut add = |table: Table, contents: TableData<'a>| {
            tables.push(table);
            data.push(contents);
            (tables.len() - 1) as u32
        };
        let mut score = self.score_program.clone();
        if let Some(slopes) = self.slopes {
            let table = slopes_table(slopes.len(), batch, heads)?;
            let i = add(table, TableData::F32(slopes));
            score = Some(on_top(score, library::alibi(i)));
        }
        if let Some(bias) = &self.bias {
            if !bias.table.dtype.is_float() {
                return Err(wrong_type("bias", bias.table.dtype, "f32, f16 or bf16"));
            }
            let i = add(bias.over_scores("bias", scores)?, bias.data);
            score = Some(on_top(score, library::bias(i)));
        }
        let mut masks: Vec<Expr> = bounds.into_iter().chain(self.mask_program.clone()).collect();
        if let Some(tensor) = &self.mask {
            if tensor.table.dtype.is_float() {
                return Err(wrong_type("mask", tensor.table.dtype, "bool, u8 or i32"));
            }
            let i = add(tensor.over_scores("mask", scores)?, tensor.data);
            masks.push(library::mask_tensor(i));
        }
        let mask = masks.into_iter().reduce(|a, b| a & b);
        let program = |what, expr: Option<Expr>| {
            expr.map(|expr| Program::new(&expr))
                .transpose()
                .map_err(|error| AttentionError::Program { what, error })
        };
        let (score, mask) = (program("score", score)?, program("mask", mask)?);
        Ok((Programs { score, mask, floats: self.floats.clone(), ints: self.ints.clone(), tables }, data))
    }

    /// The operands of a call, whose tables `programs` has returned.
    pub fn operands<'b>(&'b self, tables: &'b [TableData<'b>]) -> Operands<'b> {
        Operands {
            lengths: self.lengths,
            scales: self.scales.1,
            sinks: self.sinks.unwrap_or_default(),
            tables,
        }
    }

    /// Rejects sinks that are not one per query head.
    pub fn check_sinks(&self, heads: usize) -> Result<(), AttentionError> {
        match self.sinks {
            Some(sinks) if sinks.len() != heads => Err(AttentionError::Operand {
                argument: "sink",
                what: "number of elements",
                value: sinks.len().to_string(),
                expected: format!("heads_q = {heads}"),
            }),
            _ => Ok(()),
        }
    }
}

/// The program that adds `term` to the result of a score program.
fn on_top(score: Option<Expr>, term: Expr) -> Expr {
    match score {
        None => term,
        Some(score) => term.replace(Input::Score, &score),
    }
}

/// The table of slopes, `[heads]` or `[batch, heads]`.
fn slopes_table(len: usize, batch: usize, heads: usize) -> Result<Table, AttentionError> {
    let all = batch.checked_mul(heads);
    let batch_stride = match len {
        _ if len == heads => 0,
        _ if Some(len) == all => heads as i64,
        _ => {
            let each = all.map_or(String::new(), |all| format!(", or batch · heads_q = {all}"));
            return Err(AttentionError::Operand {
                argument: "alibi",
                what: "number of slopes",
                value: len.to_string(),
                expected: format!("heads_q = {heads}{each}"),
            });
        }
    };
    Ok(Table { dtype: TableType::F32, extents: vec![batch, heads], strides: vec![batch_stride, 1] })
}

fn wrong_type(argument: &'static str, dtype: TableType, expected: &str) -> AttentionError {
    let value = format!("{dtype:?}").to_lowercase();
    AttentionError::Operand { argument, what: "element type", value, expected: expected.to_owned() }
}

/// The error for keys that have another number of batch entries than the queries.
fn batches_differ(cumulative: [&[i32]; 2], [batch_q, batch_kv]: [usize; 2]) -> AttentionError {
    let [q_packed, kv_packed] = cumulative.map(|ends| !ends.is_empty());
    let (argument, what) = if kv_packed { ("cumulative_kv", "number of sequences") } else { ("k", "batch") };
    let of_q = if q_packed { "the number of sequences of cumulative_q" } else { "the batch of q" };
    let expected = format!("{batch_q}, {of_q}");
    AttentionError::Operand { argument, what, value: batch_kv.to_string(), expected }
}

/// An error of the problem with the arrays of lengths named as the fields of [`LengthValues`].
pub(crate) fn with_rust_names(error: ProblemError) -> ProblemError {
    let named = |argument: &'static str| match argument {
        "cu_seqlens_q" => "cumulative_q",
        "cu_seqlens_k" => "cumulative_kv",
        "seqused_q" => "used_q",
        "seqused_k" => "used_kv",
        "leftpad_k" => "left_pad",
        other => other,
    };
    match error {
        ProblemError::Lengths { argument, len, expected } => {
            ProblemError::Lengths { argument: named(argument), len, expected }
        }
        ProblemError::Length { argument, index, value, expected } => {
            ProblemError::Length { argument: named(argument), index, value, expected }
        }
        other => other,
    }
}

/// The number of batch entries and the longest sequence of one side. `shape` is the tensor's batch extent and
/// its rows.
fn side(
    argument: &'static str,
    tensor: &'static str,
    cumulative: &[i32],
    [batch, rows]: [usize; 2],
) -> Result<(usize, usize), AttentionError> {
    let [_, rest @ ..] = cumulative else { return Ok((batch, rows)) };
    if batch != 1 {
        return Err(AttentionError::Operand {
            argument: tensor,
            what: "batch",
            value: batch.to_string(),
            expected: format!("1, since {argument} packs all sequences"),
        });
    }
    // Wrong values are refused later; a problem has a row, if only as an upper bound.
    let ends = cumulative.iter().zip(rest);
    let longest = ends.map(|(&start, &end)| end.saturating_sub(start)).max().unwrap_or(0).max(1);
    Ok((rest.len(), rows.min(longest as usize)))
}
