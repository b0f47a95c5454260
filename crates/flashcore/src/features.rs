//! The optional parts of a call besides Q, K and V: lengths, sinks, biases, masks and programs.

use problem::program::{Input, library};
use problem::{
    ElementType, Elements, Expr, LengthArray, Lengths, Operand, OperandMap, Operands, ProblemError, Program,
    Programs, Scales, SideLengths, Table, Tensor,
};

use crate::error::refused;
use crate::raw::View;
use crate::{AttentionError, TableView};

/// Values of the arrays of lengths. An array that is empty is not used.
#[derive(Clone, Copy, Debug, Default)]
pub struct LengthValues<'a> {
    /// `batch + 1` cumulative lengths of packed queries (`cu_seqlens_q` in Python).
    pub cumulative_q: &'a [i32],
    /// `batch + 1` cumulative lengths of packed keys (`cu_seqlens_k`).
    pub cumulative_kv: &'a [i32],
    /// `batch` used lengths of the queries (`seqused_q`).
    pub used_q: &'a [i32],
    /// `batch` used lengths of the keys (`seqused_k`).
    pub used_kv: &'a [i32],
    /// `batch` numbers of padding rows before the first key (`leftpad_k`).
    pub left_pad: &'a [i32],
}

impl<'a> LengthValues<'a> {
    /// The first array that is used: its name and its values.
    pub(crate) fn given(self) -> Option<(&'static str, &'a [i32])> {
        let arrays = self.arrays().into_iter().map(|(_, name, values)| (name, values));
        arrays.into_iter().find(|(_, values)| !values.is_empty())
    }

    /// The arrays with their names in this struct and their values.
    fn arrays(self) -> [(LengthArray, &'static str, &'a [i32]); 5] {
        [
            (LengthArray::CumulativeQ, "cumulative_q", self.cumulative_q),
            (LengthArray::CumulativeKv, "cumulative_kv", self.cumulative_kv),
            (LengthArray::UsedQ, "used_q", self.used_q),
            (LengthArray::UsedKv, "used_kv", self.used_kv),
            (LengthArray::LeftPad, "left_pad", self.left_pad),
        ]
    }
}

/// Values of the descale factors, each from the first factor to the last:
/// [`Problem::scale_len`](crate::Problem::scale_len) elements. An array that the problem does not use is
/// empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScaleValues<'a> {
    /// Factors of Q (`descale_q`).
    pub q: &'a [f32],
    /// Factors of K (`descale_k`).
    pub k: &'a [f32],
    /// Factors of V (`descale_v`).
    pub v: &'a [f32],
}

/// The features of a call, as its builder has collected them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Features<'a> {
    pub lengths: LengthValues<'a>,
    /// Values of the score's operands, with the names of the builder's methods.
    pub of_heads: Vec<(&'static str, Operand, &'a [f32])>,
    /// The probability of dropout and the words of the generator's state.
    pub dropout: Option<(f32, [i32; 4])>,
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
    /// Where the call lies in a larger one, whose positions and heads the programs see.
    pub place: Option<CallPlace>,
}

/// A call that computes one sequence of a larger call, or some of its rows, keys and heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallPlace {
    /// `[batch, heads_q, seq_q, seq_kv]` of the larger call.
    pub scores: [usize; 4],
    /// The first query, the first key, the first batch entry and the first query head of the call.
    pub first: [usize; 4],
    /// The length of the sequence, on both sides.
    pub length: usize,
}

impl CallPlace {
    /// A program of the larger call as one of this call. The numbers of the place are integer parameters from
    /// `parameters` on, so that all places have one program.
    fn program(self, of_whole: &Expr, parameters: usize) -> Expr {
        let number = |i: usize| library::int((parameters + i) as u32);
        let moved = [Input::Query, Input::Key, Input::Batch, Input::Head].into_iter().enumerate();
        let moved = moved.map(|(i, input)| (input, Expr::input(input) + number(i)));
        let lengths = [Input::QueryLength, Input::KeyLength].map(|input| (input, number(4)));
        moved
            .chain(lengths)
            .fold(of_whole.clone(), |program, (input, of_place)| program.replace(input, &of_place))
    }

    /// The values of the integer parameters.
    fn numbers(self) -> impl Iterator<Item = i32> {
        self.first.into_iter().chain([self.length]).map(|number| number as i32)
    }
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
    ) -> Result<(Programs, Vec<Elements<'a>>), AttentionError> {
        let scores = self.place.map_or(scores, |place| place.scores);
        let [batch, heads, ..] = scores;
        let mut tables: Vec<Table> = self.tables.iter().map(|view| view.table.clone()).collect();
        let mut data: Vec<Elements<'a>> = self.tables.iter().map(|view| view.data).collect();
        let mut add = |table: Table, contents: Elements<'a>| {
            tables.push(table);
            data.push(contents);
            (tables.len() - 1) as u32
        };
        let mut score = self.score_program.clone();
        if let Some(slopes) = self.slopes {
            let table = slopes_table(slopes.len(), batch, heads)?;
            let i = add(table, Elements::F32(slopes));
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
            let placed = expr.map(|expr| match self.place {
                None => expr,
                Some(place) => place.program(&expr, self.ints.len()),
            });
            placed
                .map(|expr| Program::new(&expr))
                .transpose()
                .map_err(|error| AttentionError::Program { what, error })
        };
        let (score, mask) = (program("score", score)?, program("mask", mask)?);
        let mut ints = self.ints.clone();
        if score.is_some() || mask.is_some() {
            ints.extend(self.place.iter().flat_map(|place| place.numbers()));
        }
        Ok((Programs { score, mask, floats: self.floats.clone(), ints, tables }, data))
    }

    /// The inputs of a call beside Q, K and V, whose tables `programs` has returned.
    pub fn inputs<'b>(&'b self, tables: Vec<Elements<'b>>) -> Operands<'b> {
        let lengths =
            self.lengths.arrays().map(|(array, _, values)| (Operand::Lengths(array), values.into()));
        let ScaleValues { q, k, v } = self.scales.1;
        let factors = [(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v)];
        let factors = factors.map(|(tensor, values)| (Operand::Descale(tensor), values.into()));
        let of_heads = self.of_heads.iter().map(|&(_, operand, values)| (operand, values.into()));
        let state = self.dropout.iter().map(|(_, state)| (Operand::RngState, Elements::I32(state)));
        let given = lengths.into_iter().chain(factors).chain(of_heads).chain(state);
        // More tables than a `u8` counts are rejected when the problem is checked.
        let tables = (0..=u8::MAX).zip(tables).map(|(i, table)| (Operand::Table(i), table));
        given.filter(|(_, elements): &(_, Elements<'_>)| !elements.is_empty()).chain(tables).collect()
    }

    /// The arrays of lengths, the values of heads and the state of dropout as views.
    pub fn array_views(&self) -> Result<OperandMap<View>, AttentionError> {
        let lengths = self.lengths.arrays().map(|(array, _, values)| (Operand::Lengths(array), values.len()));
        let lengths = lengths.into_iter().filter(|(_, len)| *len > 0);
        let mut views = OperandMap::default();
        for (operand, len) in lengths {
            views.insert(operand, View::dense(ElementType::I32, &[len])?);
        }
        for &(_, operand, values) in &self.of_heads {
            views.insert(operand, View::dense(ElementType::F32, &[values.len()])?);
        }
        if let Some((_, state)) = &self.dropout {
            views.insert(Operand::RngState, View::dense(ElementType::I32, &[state.len()])?);
        }
        Ok(views)
    }

    /// Sets the values of one of the score's operands. `argument` is the name of the builder's method.
    pub fn set_of_heads(&mut self, argument: &'static str, operand: Operand, values: &'a [f32]) {
        self.of_heads.retain(|(_, other, _)| *other != operand);
        self.of_heads.push((argument, operand, values));
    }

    /// Rejects values of the score's operands that are not one per query head.
    pub fn check_of_heads(&self, heads: usize) -> Result<(), AttentionError> {
        match self.of_heads.iter().find(|(_, _, values)| values.len() != heads) {
            Some((argument, _, values)) => {
                Err(refused(argument, "number of elements", values.len(), format!("heads_q = {heads}")))
            }
            None => Ok(()),
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
            return Err(refused("alibi", "number of slopes", len, format!("heads_q = {heads}{each}")));
        }
    };
    Ok(Table { dtype: ElementType::F32, extents: vec![batch, heads], strides: vec![batch_stride, 1] })
}

fn wrong_type(argument: &'static str, dtype: ElementType, expected: &str) -> AttentionError {
    let value = format!("{dtype:?}").to_lowercase();
    refused(argument, "element type", value, expected)
}

/// The error for keys that have another number of batch entries than the queries.
fn batches_differ(cumulative: [&[i32]; 2], [batch_q, batch_kv]: [usize; 2]) -> AttentionError {
    let [q_packed, kv_packed] = cumulative.map(|ends| !ends.is_empty());
    let (argument, what) = if kv_packed { ("cumulative_kv", "number of sequences") } else { ("k", "batch") };
    let of_q = if q_packed { "the number of sequences of cumulative_q" } else { "the batch of q" };
    let expected = format!("{batch_q}, {of_q}");
    refused(argument, what, batch_kv, expected)
}

/// An error of the problem with the arrays of lengths named as the fields of [`LengthValues`].
pub(crate) fn with_rust_names(error: ProblemError) -> ProblemError {
    let arrays = LengthValues::default().arrays();
    let named = |argument: &'static str| {
        let known = arrays.iter().find(|(array, ..)| array.name() == argument);
        known.map_or(argument, |(_, name, _)| name)
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
        return Err(refused(tensor, "batch", batch, format!("1, since {argument} packs all sequences")));
    }
    // Wrong values are refused later; a problem has a row, if only as an upper bound.
    let ends = cumulative.iter().zip(rest);
    let longest = ends.map(|(&start, &end)| end.saturating_sub(start)).max().unwrap_or(0).max(1);
    Ok((rest.len(), rows.min(longest as usize)))
}
