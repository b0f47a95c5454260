//! Judges kernels with quantised inputs against the values that their codes represent. The quantisation error
//! is a separate figure and does not change the verdict.

use problem::{OperandMap, Problem, Tensor};

use judge::values::{Inputs, Values};

/// A tensor quantised as the original kernels with 8-bit inputs take it: affine over ±448 with one scale per
/// head. Zero has no code: it lies half-way between 127 and 128.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// `[batch · head][row · dim]`.
    pub codes: Vec<u8>,
    /// One per head: the largest magnitude over 448.
    pub scales: Vec<f32>,
}

/// Span of the codes, in units of a head's scale.
pub const RANGE: f32 = 896.0;
/// Half of [`RANGE`]: code 0 is −448 scales.
pub const OFFSET: f32 = 448.0;

/// Quantises a dense tensor whose heads have `per_head` elements.
pub fn quantise(values: &[f32], per_head: usize) -> Quantised {
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::new();
    for head in values.chunks(per_head.max(1)) {
        let largest = head.iter().fold(0f32, |m, x| m.max(x.abs()));
        let scale = if largest > 0.0 { largest / OFFSET } else { 1.0 };
        scales.push(scale);
        codes.extend(
            head.iter().map(|x| ((x / scale + OFFSET) * (255.0 / RANGE)).round().clamp(0.0, 255.0) as u8),
        );
    }
    Quantised { codes, scales }
}

/// The values of the codes, rounded to f16 as the kernel does; results are compared with attention on these
/// values.
pub fn dequantise(tensor: &Quantised) -> Vec<f32> {
    let per_head = tensor.codes.len() / tensor.scales.len().max(1);
    let value = |(i, code): (usize, &u8)| {
        let scale = tensor.scales[i / per_head.max(1)];
        let exact = f32::from(*code).mul_add(RANGE / 255.0 * scale, -OFFSET * scale);
        half::f16::from_f32(exact).to_f32()
    };
    tensor.codes.iter().enumerate().map(value).collect()
}

/// Quantised inputs.
pub(super) struct Codes {
    pub codes: OperandMap<Vec<u8>>,
    /// Scales of each head of Q, then of K, then of V.
    pub scales: Vec<f32>,
    /// The values that the codes stand for.
    pub decoded: Inputs,
}

/// Quantises dense inputs head by head.
pub(super) fn encode(problem: &Problem, inputs: &Inputs) -> Codes {
    let mut scales = Vec::new();
    let mut tensor = |values: &Values, seq: usize, dim: usize| {
        let wide: Vec<f32> = (0..values.len()).filter_map(|i| values.get(i)).collect();
        let quantised = quantise(&wide, seq * dim);
        scales.extend(&quantised.scales);
        let decoded = Values::round(problem.dtypes.q, &dequantise(&quantised));
        (quantised.codes, decoded)
    };
    let (mut codes, mut decoded) = (OperandMap::default(), inputs.clone());
    for of in [Tensor::Q, Tensor::K, Tensor::V] {
        let [.., rows, dim] = problem.extents(of);
        let (of_tensor, values) = tensor(&inputs[of.into()], rows, dim);
        codes.insert(of.into(), of_tensor);
        decoded[of.into()] = values;
    }
    Codes { codes, scales, decoded }
}

/// Relative Frobenius distance of two outputs: the quantisation error.
pub(super) fn distance(quantised: &[f64], exact: &[f64]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (x, y) in quantised.iter().zip(exact) {
        error += (x - y) * (x - y);
        norm += y * y;
    }
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}
