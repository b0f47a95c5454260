//! Judges kernels with quantised inputs against the values that their codes represent. The quantisation error
//! is a separate figure and does not change the verdict.

use kernels::ladder::{dequantise, quantise};
use problem::{OperandMap, Problem, Tensor};

use judge::values::{Inputs, Values};

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
