//! The problem that the views of a call's operands state: the check of shapes for all callers.

use problem::{
    DType, DTypes, GradientStrides, LengthArray, Lengths, Operand, OperandMap, Pages, Problem, Programs,
    ScaleLayout, Scales, Score, SideLengths, Storage, Strides, Table, Tensor,
};

use super::{CallOptions, View};
use crate::AttentionError;
use crate::error::refused;

/// The problem of a call. Its values are not checked yet ([`Problem::check`]).
///
/// # Errors
/// When an operand is missing, has another number of dimensions than its kind, or does not fit another one.
pub(crate) fn problem_of<T>(
    operands: &OperandMap<T>,
    view: impl Fn(&T) -> &View,
    options: &CallOptions,
) -> Result<Problem, AttentionError> {
    let of = |operand| operands.get(operand).map(&view);
    let four = |tensor: Tensor| rows(tensor, of(tensor.into()));
    let [q, k, v, out] = [four(Tensor::Q)?, four(Tensor::K)?, four(Tensor::V)?, four(Tensor::Out)?];
    let gradient = |tensor: Tensor, whose: (&'static str, &Rows)| {
        of(tensor.into()).map(|view| gradient_strides(tensor, view, whose)).transpose()
    };
    let gradients = GradientStrides {
        d_out: gradient(Tensor::DOut, ("out", &out))?,
        dq: gradient(Tensor::Dq, ("q", &q))?,
        dk: gradient(Tensor::Dk, ("k", &k))?,
        dv: gradient(Tensor::Dv, ("v", &v))?,
    };
    if let Some(before) = of(Operand::OutBefore) {
        check_before(before, of(Operand::OUT))?;
    }
    let array = |array| of(Operand::Lengths(array));
    let starts = [array(LengthArray::CumulativeQ), array(LengthArray::CumulativeKv)];
    let pages = of(Operand::PageTable).map(|table| pages_of(table, &k)).transpose()?;
    let [packed_q, packed_kv] = starts.map(|array| array.is_some());
    check_extents([&q, &k, &v, &out], [packed_q, packed_kv || pages.is_some()])?;
    let sequences = starts.into_iter().flatten().next().map(|starts| starts.elements().saturating_sub(1));
    let batch = sequences.unwrap_or(q.extents[0]);
    check_batch("q", q.extents[0], batch, packed_q)?;
    if pages.is_none() {
        check_batch("k", k.extents[0], batch, packed_kv)?;
    }
    let side = |starts: Option<&View>, rows: usize, used| SideLengths {
        packed: starts.map(|_| rows),
        used: array(used).is_some(),
    };
    let lengths = Lengths {
        q: side(starts[0], q.extents[2], LengthArray::UsedQ),
        kv: side(starts[1], k.extents[2], LengthArray::UsedKv),
        left_padded: array(LengthArray::LeftPad).is_some(),
    };
    let [longest_q, longest_kv] = options.longest;
    // A problem has at least one row, even if that is only an upper bound.
    let seq_q = lengths.q.packed.map_or(q.extents[2], |rows| longest_q.unwrap_or(rows).max(1));
    let stored = pages.map(|pages| pages.per_sequence.saturating_mul(pages.rows));
    let most = lengths.kv.packed.or(stored);
    let held = stored.unwrap_or(usize::MAX);
    let seq_kv = most.map_or(k.extents[2], |rows| longest_kv.unwrap_or(rows).min(held));
    let dtypes = DTypes { q: q.dtype, k: k.dtype, v: v.dtype, out: out.dtype, tf32: options.tf32 };
    let CallOptions { pass, band, scale, softcap, dropout, scale_rows, .. } = *options;
    let tables = operands.iter().filter(|(operand, _)| matches!(operand, Operand::Table(_)));
    let problem = Problem {
        pass,
        heads_kv: k.extents[1],
        seq_kv,
        head_dim_v: v.extents[3],
        band,
        score: Score { scale, softcap, ..Score::default() }.with_operands(|operand| of(operand).is_some()),
        dropout,
        lengths,
        storage: pages.map_or(Storage::Rows, Storage::Pages),
        programs: Programs {
            score: options.score.clone(),
            mask: options.mask.clone(),
            floats: options.floats.clone(),
            ints: options.ints.clone(),
            tables: tables.map(|(_, table)| table_of(view(table))).collect(),
        },
        q: q.strides,
        k: k.strides,
        v: v.strides,
        out: out.strides,
        gradients,
        ..Problem::new(batch, q.extents[1], seq_q, q.extents[3], dtypes)
    };
    let factors = |tensor: Tensor, rows: usize, block: u32| {
        of(Operand::Descale(tensor)).map(|view| scales(tensor, view, &problem, rows, block)).transpose()
    };
    let [of_q, of_k, of_v] = scale_rows;
    let scales = Scales {
        q: factors(Tensor::Q, seq_q, of_q)?,
        k: factors(Tensor::K, seq_kv, of_k)?,
        v: factors(Tensor::V, seq_kv, of_v)?,
    };
    Ok(Problem { scales, ..problem })
}

/// A tensor `[batch, head, row, dim]` of floats with contiguous rows.
struct Rows {
    dtype: DType,
    extents: [usize; 4],
    strides: Strides,
}

fn rows(tensor: Tensor, view: Option<&View>) -> Result<Rows, AttentionError> {
    let argument = tensor.name();
    let view = view.ok_or(AttentionError::OperandWanted { operand: argument, wanted: true })?;
    if view.dimensions != 4 {
        return Err(refused(argument, "number of dimensions", view.dimensions, "4: batch, head, row, dim"));
    }
    let dtype = view.dtype.float().ok_or_else(|| {
        refused(argument, "element type", view.dtype, DType::ALL.map(DType::name).join(", "))
    })?;
    let [batch, head, row, stride] = view.strides;
    if stride != 1 && view.shape[3] > 1 && !view.shape.contains(&0) {
        return Err(AttentionError::Strided { tensor: argument, stride });
    }
    Ok(Rows { dtype, extents: view.shape, strides: Strides { batch, head, row } })
}

/// The pages of a pool of keys, by the page table `[batch, page]`.
fn pages_of(table: &View, k: &Rows) -> Result<Pages, AttentionError> {
    let &[_, per_sequence] = table.shape() else {
        return Err(refused(
            Operand::PageTable.name(),
            "number of dimensions",
            table.dimensions,
            "2: batch, page",
        ));
    };
    let [count, _, rows, _] = k.extents;
    Ok(Pages { rows, count, per_sequence })
}

/// The strides of the gradient of a tensor, which has the tensor's extents.
fn gradient_strides(
    tensor: Tensor,
    view: &View,
    (other, expected): (&'static str, &Rows),
) -> Result<Strides, AttentionError> {
    let Rows { extents, strides, .. } = rows(tensor, Some(view))?;
    let dimensions = ["batch", "heads", "sequence length", "head_dim"];
    for (what, (value, expected)) in dimensions.into_iter().zip(extents.into_iter().zip(expected.extents)) {
        if value != expected {
            return Err(AttentionError::Shape { tensor: tensor.name(), what, value, other, expected });
        }
    }
    Ok(strides)
}

/// Rejects O of an earlier result that is laid out unlike the output.
fn check_before(before: &View, out: Option<&View>) -> Result<(), AttentionError> {
    let Some(out) = out.filter(|out| *out != before) else { return Ok(()) };
    let of = |view: &View| format!("{} {:?} with strides {:?}", view.dtype, view.shape(), view.strides());
    let (argument, what) = (Operand::OutBefore.name(), "layout");
    Err(refused(argument, what, of(before), format!("{}, as out", of(out))))
}

/// Rejects extents that must be equal and differ.
fn check_extents([q, k, v, out]: [&Rows; 4], packed: [bool; 2]) -> Result<(), AttentionError> {
    let [q, k, v, out] = [q, k, v, out].map(|rows| rows.extents);
    // The batch extents of packed tensors are checked later.
    let of_q = if packed == [false; 2] { ("q", q[0]) } else { ("k", k[0]) };
    let pairs = [
        ("k", "batch", k[0], of_q.0, of_q.1),
        ("v", "batch", v[0], "k", k[0]),
        ("k", "head_dim", k[3], "q", q[3]),
        ("v", "heads", v[1], "k", k[1]),
        ("v", "sequence length", v[2], "k", k[2]),
        ("out", "batch", out[0], "q", q[0]),
        ("out", "heads", out[1], "q", q[1]),
        ("out", "sequence length", out[2], "q", q[2]),
        ("out", "head_dim", out[3], "v", v[3]),
    ];
    match pairs.into_iter().find(|(_, _, value, _, expected)| value != expected) {
        Some((tensor, what, value, other, expected)) => {
            Err(AttentionError::Shape { tensor, what, value, other, expected })
        }
        None => Ok(()),
    }
}

/// Rejects a tensor whose batch extent is not the number of sequences, or not 1 if it is packed.
fn check_batch(
    argument: &'static str,
    batch: usize,
    sequences: usize,
    packed: bool,
) -> Result<(), AttentionError> {
    let expected = if packed { 1 } else { sequences };
    if batch == expected {
        return Ok(());
    }
    let why = if packed { ", since cu_seqlens packs all sequences" } else { ", the number of sequences" };
    Err(refused(argument, "batch", batch, format!("{expected}{why}")))
}

fn table_of(view: &View) -> Table {
    Table { dtype: view.dtype, extents: view.shape().to_vec(), strides: view.strides().to_vec() }
}

/// The layout of the descale factors of a tensor with `rows` rows, of which `block` share a factor.
fn scales(
    tensor: Tensor,
    view: &View,
    problem: &Problem,
    rows: usize,
    block: u32,
) -> Result<ScaleLayout, AttentionError> {
    let blocks = rows.checked_div(block as usize).map(|_| rows.div_ceil(block as usize));
    let expected = [problem.batch, problem.heads_kv, blocks.unwrap_or(1)];
    let expected = &expected[..if blocks.is_some() { 3 } else { 2 }];
    if view.shape() != expected {
        return Err(refused(
            Operand::Descale(tensor).name(),
            "shape",
            format!("{:?}", view.shape()),
            format!("{expected:?}"),
        ));
    }
    let [batch, head, of_block, _] = view.strides;
    Ok(ScaleLayout { rows: blocks.map(|_| block), batch, head, block: of_block })
}
