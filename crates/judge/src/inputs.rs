//! The input styles of a check: independent random draws, and inputs that make faulty kernels fail.

use problem::{Band, DType, E5m2, KeyPlaces, Operand, Pass, Problem, ProblemError, Sequence, Span, Tensor};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::normal::draw_normals;
use crate::operands::{draw_others, spoil_factors, spoil_pages};
use crate::values::{Inputs, Values};

/// A style of input. Q, K and V are always drawn independently: equal tensors would hide transposed or
/// swapped operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Style {
    /// Standard normal.
    Normal,
    /// Uniform in [0, 1). All terms of a sum have one sign, so a dropped term shows as a bias.
    Positive,
    /// Logits of about ±10⁴. An exponential without subtraction of the row max overflows, and so does a
    /// finite sentinel.
    HugeLogits,
    /// All keys are equal except for the last bits. All probabilities are near 1/seq_kv, so a lost key shows.
    NearTies,
    /// Logits that grow along the keys. In kernels that go forward through the keys, the row max rises by
    /// many bits in every block, so each rescale matters.
    Rising,
    /// Logits that fall along the keys: each rescale matters for kernels that go backward through the keys.
    Falling,
    /// One key weighs 2^18 times as much as any other key and has values of 0. The other keys matter as a
    /// whole, and 16-bit arithmetic must not round them away.
    Spike,
    /// Values near the smallest number of the type, with standard normal queries and keys: products of values
    /// with probabilities far below one may fall below the range of f32.
    TinyValues,
    /// NaN in one key of each head, and, without a mask, infinity in one value that every row sees.
    NonFinite,
    /// Logits of −∞ for all keys except the first third. These keys have weight 0, even in a block that
    /// contains only such keys.
    MinusInfinity,
    /// NaN in every buffer element outside the rows (the padding between rows).
    PoisonedPadding,
    /// One key is 2^25.4 times as heavy as any other and has values of 1; the other keys have large negative
    /// values, which cancel a part of it. An f16 weight that is 1 for the heaviest key cannot represent the
    /// weights of the others.
    Light,
    /// One key is 2^26.5 times as heavy as any other and has values of 0; the other keys have large values,
    /// which make up all of O.
    Lighter,
    /// Normal, with one large element (10² to 6·10⁴) in Q, K or V of each key head, in a row that causal
    /// masks show to all queries, to some or to one. The element must not change the output of queries that
    /// do not see it.
    Outlier,
    /// Normal, with the largest numbers of the type, of both signs, in one element in 64 of Q and in eight
    /// of V.
    Saturated,
    /// Normal, with one descale factor of each of Q and K that is 0, negative, infinite or NaN.
    BadFactors,
    /// Normal, with entries of the page table that are no pages of the pool.
    BadPages,
}

impl Style {
    /// Styles that test very small weights. A kernel that rounds probabilities of at most 1 to f16 fails
    /// them, as FlashAttention does: they are for kernels that promise more.
    pub const LIGHT: [Style; 2] = [Style::Light, Style::Lighter];

    /// Styles for 8-bit inputs. For problems with such inputs, they are used in addition to [`Style::ALL`].
    pub const FP8: [Style; 2] = [Style::Saturated, Style::BadFactors];

    /// The style for keys and values in pages, in addition to [`Style::ALL`]. Implementations that read the
    /// page table on the host refuse it.
    pub const PAGES: [Style; 1] = [Style::BadPages];

    /// Every style except those of [`Style::LIGHT`], [`Style::FP8`] and [`Style::PAGES`].
    pub const ALL: [Style; 12] = [
        Style::Normal,
        Style::Positive,
        Style::HugeLogits,
        Style::NearTies,
        Style::Rising,
        Style::Falling,
        Style::Spike,
        Style::TinyValues,
        Style::NonFinite,
        Style::MinusInfinity,
        Style::PoisonedPadding,
        Style::Outlier,
    ];

    pub const fn is_finite(self) -> bool {
        !matches!(self, Style::NonFinite | Style::MinusInfinity | Style::BadFactors)
    }

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Style::Normal => "normal",
            Style::Positive => "positive",
            Style::HugeLogits => "huge logits",
            Style::NearTies => "near ties",
            Style::Rising => "rising maximum",
            Style::Falling => "falling maximum",
            Style::Spike => "one key above all",
            Style::TinyValues => "tiny values",
            Style::NonFinite => "NaN and Inf",
            Style::MinusInfinity => "logits of -Inf",
            Style::PoisonedPadding => "NaN in padding",
            Style::Outlier => "one large element",
            Style::Saturated => "largest numbers",
            Style::BadFactors => "invalid descale factors",
            Style::BadPages => "entries that are no pages",
            Style::Light => "keys 2^25.4 lighter than one",
            Style::Lighter => "keys 2^26.5 lighter than one",
        }
    }
}

pub fn draw(problem: &Problem, style: Style, seed: u64) -> Inputs {
    let mut others = draw_others(problem, seed);
    if style == Style::BadFactors {
        spoil_factors(&mut others, seed);
    }
    if style == Style::BadPages {
        spoil_pages(problem, &mut others, seed);
    }
    let mut inputs = Inputs { operands: others };
    let sequences = inputs.sequences(problem);
    let elements = inputs.elements();
    let paged = KeyPlaces::of(problem, &elements);
    let tensor = |tensor: Tensor, stream: u64| {
        let mut rng = SmallRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream);
        let places = match tensor {
            Tensor::K | Tensor::V => paged,
            _ => KeyPlaces::ROWS,
        };
        let rows = (&sequences[..], places);
        let mut data = fill(problem, tensor, style, rows, &mut rng);
        if style == Style::Outlier {
            place_outliers(problem, tensor, rows, seed, &mut data, &mut rng);
        }
        let mut values = Values::round(problem.dtypes.of(tensor), &data);
        if let Values::E5m2(codes) = &mut values {
            // Rounding saturates, so infinities are set here: kernels must handle infinities too.
            for (code, x) in codes.iter_mut().zip(&data).filter(|(_, x)| x.is_infinite()) {
                *code = E5m2::from_bits(if x.is_sign_positive() { 0x7c } else { 0xfc });
            }
        }
        values
    };
    let keys_and_values = || rayon::join(|| tensor(Tensor::K, 2), || tensor(Tensor::V, 3));
    let (q, (k, mut v)) = rayon::join(|| tensor(Tensor::Q, 1), keys_and_values);
    if problem.v_in_k {
        v = k.first(v.len()); // the same strides, and fewer elements of the last row
    }
    let d_out = problem.pass.is_backward().then(|| tensor(Tensor::DOut, 4));
    inputs.operands.extend([(Operand::Q, q), (Operand::K, k), (Operand::V, v)]);
    if let Some(d_out) = d_out {
        inputs.operands.insert(Operand::Tensor(Tensor::DOut), d_out);
        // A problem that the oracle rejects here is rejected again, with the reason, when it is judged.
        let _ = add_outputs(problem, style, &mut inputs);
    }
    inputs
}

fn fill(
    problem: &Problem,
    tensor: Tensor,
    style: Style,
    (sequences, places): (&[Sequence], KeyPlaces<'_>),
    rng: &mut SmallRng,
) -> Vec<f32> {
    let (elements, origin) = problem.span(tensor).unwrap_or((0, 0));
    // A correct kernel never reads the padding. NaN there exposes a kernel that does.
    let padding = if style == Style::PoisonedPadding { f32::NAN } else { 0.0 };
    let mut data = vec![padding; elements];
    let [_, heads, _, dim] = problem.extents(tensor);
    let strides = problem.strides(tensor);
    let mut common = vec![0.0; dim];
    draw_normals(rng, &mut common);
    // These styles draw more than a normal number for each element.
    let at_once = if matches!(style, Style::Positive | Style::Saturated) { 1 } else { dim.max(1) };
    for (span, head, row) in rows_of(sequences, tensor, heads) {
        let (batch, at) = places.place(span.batch, span.start + row);
        let start = (origin as i64 + strides.offset(batch, head, at)) as usize;
        for (i, part) in data[start..start + dim].chunks_mut(at_once).enumerate() {
            draw_normals(rng, part);
            for (d, x) in (i * at_once..).zip(part) {
                *x = element(problem, tensor, style, (row, d), (*x, &common), rng);
            }
        }
    }
    data
}

/// Puts a large element into this tensor's rows of every third key head, starting at a head that `seed`
/// chooses.
fn place_outliers(
    problem: &Problem,
    tensor: Tensor,
    (sequences, places): (&[Sequence], KeyPlaces<'_>),
    seed: u64,
    data: &mut [f32],
    rng: &mut SmallRng,
) {
    let [.., dim] = problem.extents(tensor);
    let origin = problem.span(tensor).map_or(0, |(_, origin)| origin) as i64;
    let heads = sequences.iter().flat_map(|s| (0..problem.heads_kv).map(move |h| (side(s, tensor), h)));
    for (index, (span, kv_head)) in heads.enumerate() {
        let rows = span.len;
        if rows == 0 || dim == 0 {
            continue;
        }
        let turn = (seed.wrapping_add(index as u64) % 3) as usize;
        if [Tensor::V, Tensor::K, Tensor::Q][turn] != tensor {
            continue;
        }
        let head = if tensor == Tensor::Q { kv_head * problem.group_size() } else { kv_head };
        let row = [0, rng.random_range(0..rows), rows - 1][rng.random_range(0..3)];
        let (batch, at) = places.place(span.batch, span.start + row);
        let start = origin + problem.strides(tensor).offset(batch, head, at);
        // Gradients are products of three inputs, and must stay in the range of f16.
        let sizes = if problem.pass.is_backward() { 1 } else { 3 };
        data[start as usize + rng.random_range(0..dim)] = [100.0, 1000.0, 6e4][rng.random_range(0..sizes)];
    }
}

/// The rows of a tensor that belong to sequences: the sequence's span, the head and the position in the
/// sequence, in the order batch entry, head, row.
pub fn rows_of(
    sequences: &[Sequence],
    tensor: Tensor,
    heads: usize,
) -> impl Iterator<Item = (Span, usize, usize)> {
    sequences.iter().flat_map(move |sequence| {
        let span = side(sequence, tensor);
        (0..heads).flat_map(move |head| (0..span.len).map(move |row| (span, head, row)))
    })
}

/// The rows of a tensor that belong to the sequence.
const fn side(sequence: &Sequence, tensor: Tensor) -> Span {
    if tensor.is_of_keys() { sequence.kv } else { sequence.q }
}

/// An element of a tensor, from a normal number and the row that all keys have nearly in common.
fn element(
    problem: &Problem,
    tensor: Tensor,
    style: Style,
    (row, d): (usize, usize),
    (noise, common): (f32, &[f32]),
    rng: &mut SmallRng,
) -> f32 {
    match (style, tensor) {
        (
            Style::Normal | Style::PoisonedPadding | Style::Outlier | Style::BadFactors | Style::BadPages,
            _,
        ) => noise,
        (Style::Saturated, Tensor::Q | Tensor::V) if problem.dtypes.of(tensor).is_fp8() => {
            let one_in = if tensor == Tensor::Q { 64 } else { 8 };
            let largest = problem.dtypes.of(tensor).largest();
            if rng.random_range(0..one_in) == 0 { largest.copysign(noise) } else { noise }
        }
        (Style::Saturated, _) => noise,
        (Style::Positive, _) => rng.random::<f32>(),
        // A logit is scale · Σ q k. For normal draws times a, its size is scale · √head_dim · a².
        (Style::HugeLogits, Tensor::Q | Tensor::K) => {
            let spread = problem.softmax_scale().abs().max(1e-6) * (problem.head_dim as f32).sqrt();
            noise * (1e4 / 3.0 / spread).sqrt().min(100.0)
        }
        (Style::HugeLogits, Tensor::DOut) => 0.125 * noise,
        (Style::NearTies, Tensor::K) => common[d] * (1.0 + problem.dtypes.k.unit_roundoff() as f32 * noise),
        // Queries of one sign and keys with a slope: logits from −24 to 24 for any head dim.
        (Style::Rising | Style::Falling | Style::Spike, Tensor::Q) => 1.0 + 0.1 * noise,
        (Style::Rising | Style::Falling, Tensor::K) => {
            let along = 2.0 * row as f32 / problem.seq_kv.max(1) as f32 - 1.0;
            let slope = if style == Style::Rising { along } else { -along };
            let scale = problem.softmax_scale() * problem.head_dim as f32;
            24.0 * slope / scale.abs().max(1e-3) + 0.05 * noise
        }
        (Style::Spike, Tensor::K) if row == problem.seq_kv / 3 => {
            let scale = problem.softmax_scale() * problem.head_dim as f32;
            18.0 * std::f32::consts::LN_2 / scale.abs().max(1e-3) * scale.signum()
        }
        (Style::Spike, Tensor::K) => 0.05 * noise,
        (Style::Spike, Tensor::V) if row == problem.seq_kv / 3 => 0.0,
        (Style::Spike, _) => 1.0 + 0.1 * noise,
        (Style::Light | Style::Lighter, _) => beside_one(problem, tensor, style, row, d, noise),
        (Style::TinyValues, Tensor::V) => noise * tiny(problem.dtypes.v),
        (Style::NonFinite, Tensor::K) if row == problem.seq_kv / 2 && d == 0 => f32::NAN,
        // Only without a mask: the matrix product multiplies a masked probability, 0, by the value, and 0 · ∞
        // is NaN.
        (Style::NonFinite, Tensor::V)
            if problem.band == Band::FULL
                && problem.programs.mask.is_none()
                && row == problem.seq_kv / 3
                && d == 1 =>
        {
            f32::INFINITY
        }
        // All of one sign, so that no infinity meets a zero or the opposite infinity. A scale of zero has no
        // such logits.
        (Style::MinusInfinity, Tensor::Q) if d == 0 => 1.0 + noise.abs(),
        (Style::MinusInfinity, Tensor::K)
            if d == 0 && row >= problem.seq_kv.div_ceil(3) && problem.softmax_scale() != 0.0 =>
        {
            f32::NEG_INFINITY * problem.softmax_scale().signum()
        }
        (
            Style::HugeLogits
            | Style::NearTies
            | Style::Rising
            | Style::Falling
            | Style::TinyValues
            | Style::NonFinite
            | Style::MinusInfinity,
            _,
        ) => noise,
    }
}

/// Elements for queries that are 1 in their first dimension and keys that are 0 there, except for one heavy
/// key.
fn beside_one(problem: &Problem, tensor: Tensor, style: Style, row: usize, d: usize, noise: f32) -> f32 {
    let (powers, value, others) = match style {
        Style::Light => (25.4, 1.0, -4096.0),
        _ => (26.5, 0.0, 1024.0),
    };
    let heavy = row == problem.seq_kv / 3;
    match (tensor, heavy, d) {
        (Tensor::Q, _, 0) => 1.0,
        (Tensor::Q, ..) => noise,
        (Tensor::K, true, 0) => powers * std::f32::consts::LN_2 / problem.softmax_scale(),
        (Tensor::K, true, _) | (Tensor::K, _, 0) => 0.0,
        (Tensor::K, ..) => 0.05 * noise,
        (_, true, _) => value,
        _ => others * (1.0 + 0.1 * noise),
    }
}

/// The size of tiny values. The mean over thousands of keys is still a normal number of the type.
fn tiny(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 2f32.powi(-6),
        DType::Bf16 | DType::F32 => 2f32.powi(-110),
        // The smallest normal numbers are 2⁻⁶ and 2⁻¹⁴.
        DType::E4m3 => 2f32.powi(-4),
        DType::E5m2 => 2f32.powi(-8),
    }
}

/// Adds the inputs of the backward pass that follow from others: O and the LSE by the oracle. `inputs` has
/// all other inputs.
///
/// # Errors
/// When the oracle rejects the problem.
fn add_outputs(problem: &Problem, style: Style, inputs: &mut Inputs) -> Result<(), ProblemError> {
    let forward = problem.clone().with_pass(Pass::forward(true));
    let elements = inputs.elements();
    let of_forward = forward.inputs().filter_map(|spec| Some((spec.operand, *elements.get(spec.operand)?)));
    let reference = oracle::oracle_with(&forward, &of_forward.collect())?;
    // Rows that belong to no sequence hold what lies between rows.
    let padding = if style == Style::PoisonedPadding { f32::NAN } else { 0.0 };
    let mut in_sequence = vec![false; problem.lse_len()];
    for row in rows_in_sequences(problem, Tensor::Out, &inputs.sequences(problem)) {
        in_sequence[row] = true;
    }
    let dim = problem.head_dim_v.max(1);
    let narrow = |(index, &x): (usize, &f64)| if in_sequence[index] { x as f32 } else { padding };
    let lse: Vec<f32> = reference.lse.iter().enumerate().map(narrow).collect();
    let out = reference.out.iter().enumerate().map(|(i, x)| narrow((i / dim, x)));
    let out = lay_out(problem, &out.collect::<Vec<f32>>(), padding);
    inputs.operands.insert(Operand::OUT, Values::round(problem.dtypes.out, &out));
    inputs.operands.insert(Operand::Lse, Values::F32(lse));
    Ok(())
}

/// O with the problem's strides, from dense rows.
fn lay_out(problem: &Problem, dense: &[f32], padding: f32) -> Vec<f32> {
    let [_, heads, rows, dim] = problem.extents(Tensor::Out);
    let (elements, origin) = problem.span(Tensor::Out).unwrap_or_default(); // checked by the oracle
    let mut laid = vec![padding; elements];
    for (i, row) in dense.chunks(dim.max(1)).enumerate() {
        let offset = problem.out.offset(i / (heads * rows), i / rows % heads, i % rows);
        let start = (origin as i64 + offset) as usize;
        laid[start..start + dim].copy_from_slice(row);
    }
    laid
}

/// The index of each row of a tensor that belongs to a sequence among its rows `[batch, head, row]`, in the
/// order batch entry, head, row.
pub fn rows_in_sequences(problem: &Problem, tensor: Tensor, sequences: &[Sequence]) -> Vec<usize> {
    let [_, heads, rows, _] = problem.extents(tensor);
    rows_of(sequences, tensor, heads)
        .map(|(span, head, row)| (span.batch * heads + head) * rows + span.start + row)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_independent_and_repeatable() {
        let problem = Problem::new(1, 2, 40, 16, DType::F32);
        let inputs = draw(&problem, Style::Normal, 7);
        assert_eq!(inputs, draw(&problem, Style::Normal, 7));
        assert_ne!(inputs, draw(&problem, Style::Normal, 8));
        assert_ne!(inputs[Operand::Q], inputs[Operand::K]);
        let mean = {
            let q = &inputs[Operand::Q];
            (0..q.len()).filter_map(|i| q.get(i)).sum::<f32>() / q.len() as f32
        };
        assert!(mean.abs() < 0.1, "{mean}");
    }

    #[test]
    fn padding_is_poisoned_and_rows_are_not() {
        let mut problem = Problem::new(1, 1, 3, 4, DType::F16);
        problem.k.row = 6;
        let inputs = draw(&problem, Style::PoisonedPadding, 1);
        let k = &inputs[Operand::K];
        let nan: Vec<bool> = (0..k.len()).filter_map(|i| k.get(i)).map(f32::is_nan).collect();
        assert_eq!(nan.len(), 16);
        assert!((0..16).all(|i| nan[i] == (i % 6 >= 4)));
    }

    #[test]
    fn one_large_element_in_a_tensor_of_each_key_head() {
        let mut problem = Problem::new(1, 6, 40, 16, DType::F16);
        problem.heads_kv = 3;
        let problem = problem.with_layout(problem::Layout::Bhsd);
        for seed in 0..9 {
            let inputs = draw(&problem, Style::Outlier, seed);
            for operand in [Operand::Q, Operand::K, Operand::V] {
                let values = &inputs[operand];
                let large = (0..values.len()).filter_map(|i| values.get(i)).filter(|x| *x >= 100.0);
                assert_eq!(large.count(), 1, "seed {seed}");
            }
        }
    }

    #[test]
    fn huge_logits_are_huge() {
        let problem = Problem::mission();
        let inputs = draw(&problem, Style::HugeLogits, 1);
        let dot = |row: usize| -> f32 {
            let (q, k) = (&inputs[Operand::Q], &inputs[Operand::K]);
            (0..64).map(|d| q.get(d).unwrap() * k.get(row * 64 + d).unwrap()).sum::<f32>() * 0.125
        };
        let largest = (0..512).map(|r| dot(r).abs()).fold(0.0, f32::max);
        assert!((2e3..1e5).contains(&largest), "{largest}");
    }
}
