//! Built-in reference operations, computed in f64, each with a bound of its error.
//!
//! An operation returns for every element its value and a magnitude to which errors are proportional: the sum
//! of the absolute values of the terms, times the factor by which the operation amplifies the error of one
//! rounding. A kernel that rounds each step to the accumulator's type stays within a small multiple of `u ·
//! magnitude`; a sum of n terms in any order contributes √n (Higham and Mary, "A New Approach to
//! Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019).

use crate::launchfile::View;

/// Elements of an input in the order of its shape.
pub(super) struct InputTensor {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
    /// Half the distance from 1 to the next number of the element type; 0 for integers.
    pub roundoff: f64,
}

/// An element of the result: its value, and the magnitude to which errors are proportional.
pub(super) type Element = (f64, f64);

/// The operation of a reduction or a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Sum,
    Mean,
    Max,
    Min,
    Product,
}

impl Operation {
    pub(super) const ACCEPTED: &'static str = "sum, mean, max, min, product";

    pub(super) fn named(name: &str) -> Option<Operation> {
        Some(match name {
            "sum" => Operation::Sum,
            "mean" => Operation::Mean,
            "max" => Operation::Max,
            "min" => Operation::Min,
            "product" => Operation::Product,
            _ => return None,
        })
    }

    /// The result for a run of elements, with the magnitude of a sum in any order.
    fn of(self, values: impl Iterator<Item = f64> + Clone) -> Element {
        let n = values.clone().count() as f64;
        let sum = || values.clone().sum::<f64>();
        let size = || values.clone().map(f64::abs).sum::<f64>() * n.sqrt();
        match self {
            Operation::Sum => (sum(), size()),
            Operation::Mean => (sum() / n, size() / n),
            // `f64::max` ignores NaN, which a maximum must not.
            Operation::Max => (extreme(values, |a, b| a > b), 0.0),
            Operation::Min => (extreme(values, |a, b| a < b), 0.0),
            Operation::Product => {
                let product: f64 = values.product();
                (product, product.abs() * n)
            }
        }
    }
}

fn extreme(values: impl Iterator<Item = f64>, better: fn(f64, f64) -> bool) -> f64 {
    let best = values.reduce(|a, b| if a.is_nan() || better(a, b) { a } else { b });
    best.unwrap_or(f64::NAN)
}

/// A built-in reference with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum Builtin {
    /// Over the last dimension.
    Softmax,
    /// Over the last dimension of x, then times weight plus bias, if these are given.
    LayerNorm { eps: f64 },
    /// Over the last dimension of x, then times weight, if it is given.
    RmsNorm { eps: f64 },
    /// alpha · A·B + beta · C, with A of shape [.., M, K] and B of [.., K, N].
    Gemm { alpha: f64, beta: f64 },
    /// Over the trailing dimensions that the output does not have.
    Reduce(Operation),
    /// Along the last dimension; with `exclusive`, each result leaves out its own element.
    Scan { operation: Operation, exclusive: bool },
    /// Swaps the last two dimensions.
    Transpose,
    /// Rotates pairs of the last dimension of x, [.., positions, dim], by position · base^(−2i/dim), or by
    /// the given cos and sin of shape [positions, dim/2]. Pairs are (i, i + dim/2), or (2i, 2i + 1) if
    /// interleaved.
    Rope { base: f64, interleaved: bool },
    /// `−log softmax(logits)[label]`, of logits `[rows, classes]` and labels `[rows]`; the mean of the rows
    /// if the output has one element.
    CrossEntropy,
    /// softmax(scale · Q·Kᵀ)·V of [batch, heads, rows, dim] tensors. A causal mask is aligned to the bottom
    /// right.
    Attention { scale: Option<f64>, causal: bool },
    /// A gradient of `Attention`, for the gradient of its output as the fourth input.
    AttentionBackward { gradient: Gradient, scale: Option<f64>, causal: bool },
}

/// The input of attention by which a loss is differentiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    Q,
    K,
    V,
}

impl Gradient {
    pub(super) const ACCEPTED: &'static str = "q, k, v";

    pub(super) fn named(name: &str) -> Option<Gradient> {
        Some(match name {
            "q" => Gradient::Q,
            "k" => Gradient::K,
            "v" => Gradient::V,
            _ => return None,
        })
    }
}

impl Builtin {
    pub(super) const ACCEPTED: &'static str = "softmax, layernorm, rmsnorm, gemm, reduce, scan, transpose, \
         rope, cross_entropy, attention, attention_backward";

    /// The name in a launch file.
    pub const fn name(&self) -> &'static str {
        match self {
            Builtin::Softmax => "softmax",
            Builtin::LayerNorm { .. } => "layernorm",
            Builtin::RmsNorm { .. } => "rmsnorm",
            Builtin::Gemm { .. } => "gemm",
            Builtin::Reduce(_) => "reduce",
            Builtin::Scan { .. } => "scan",
            Builtin::Transpose => "transpose",
            Builtin::Rope { .. } => "rope",
            Builtin::CrossEntropy => "cross_entropy",
            Builtin::Attention { .. } => "attention",
            Builtin::AttentionBackward { .. } => "attention_backward",
        }
    }

    /// The shapes of the inputs, in words.
    pub(super) const fn inputs(&self) -> &'static str {
        match self {
            Builtin::Softmax | Builtin::Scan { .. } => "one input of the output's shape",
            Builtin::LayerNorm { .. } => {
                "x of the output's shape, then optionally weight and bias, each as long as the last dimension"
            }
            Builtin::RmsNorm { .. } => {
                "x of the output's shape, then optionally weight, as long as the last dimension"
            }
            Builtin::Gemm { .. } => {
                "A [.., M, K], B [.., K, N] and optionally C [.., M, N], for an output [.., M, N]"
            }
            Builtin::Reduce(_) => "one input whose leading dimensions are the output's shape",
            Builtin::Transpose => "one input of the output's shape with the last two dimensions swapped",
            Builtin::Rope { .. } => {
                "x of the output's shape [.., positions, dim] with an even dim, then optionally cos and sin, each \
                 [positions, dim/2]"
            }
            Builtin::CrossEntropy => {
                "logits [rows, classes] and labels [rows], for an output of rows or 1 elements"
            }
            Builtin::Attention { .. } => {
                "Q [batch, heads, rows, dim], K [batch, kv heads, keys, dim] and V [batch, kv heads, keys, dim of out]"
            }
            Builtin::AttentionBackward { .. } => {
                "Q [batch, heads, rows, dim], K [batch, kv heads, keys, dim], V [batch, kv heads, keys, dim of out] \
                 and the gradient of the output [batch, heads, rows, dim of out], for an output of the shape of the \
                 input that `gradient` names"
            }
        }
    }

    /// Whether the shapes fit each other.
    pub(super) fn fits(&self, inputs: &[View], out: &View) -> bool {
        let shapes: Vec<&[usize]> = inputs.iter().map(View::shape).collect();
        let (o, n) = (out.shape(), out.shape().last().copied().unwrap_or(1));
        let vector = |v: &&[usize]| v.iter().product::<usize>() == n;
        match (self, &shapes[..]) {
            (Builtin::Softmax | Builtin::Scan { .. }, [x]) => *x == o,
            (Builtin::LayerNorm { .. }, [x, rest @ ..]) => {
                *x == o && rest.len() <= 2 && rest.iter().all(vector)
            }
            (Builtin::RmsNorm { .. }, [x, rest @ ..]) => {
                *x == o && rest.len() <= 1 && rest.iter().all(vector)
            }
            (Builtin::Gemm { .. }, [[ab @ .., m, ka], [bb @ .., kb, columns], c @ ..]) => {
                let right = [ab, &[*m, *columns][..]].concat();
                ab == bb && ka == kb && o == right && c.len() <= 1 && c.iter().all(|c| *c == o)
            }
            (Builtin::Reduce(_), [x]) => {
                let elements = out.len();
                x.starts_with(o) || elements == 1 || (0..x.len()).any(|d| o == [&x[..d], &[1][..]].concat())
            }
            (Builtin::Transpose, [[batch @ .., r, c]]) => o == [batch, &[*c, *r][..]].concat(),
            (Builtin::Rope { .. }, [x @ [.., positions, dim], rest @ ..]) => {
                let table = [*positions, dim / 2];
                *x == o && dim % 2 == 0 && matches!(rest.len(), 0 | 2) && rest.iter().all(|t| **t == table)
            }
            (Builtin::CrossEntropy, [[rows, _], labels]) => {
                labels.iter().product::<usize>() == *rows && (out.len() == *rows || out.len() == 1)
            }
            (Builtin::Attention { .. }, [[b, h, s, d], [bk, hk, t, dk], [bv, hv, tv, dv]]) => {
                [b, d, bk, hk, t] == [bk, dk, bv, hv, tv] && h % hk == 0 && o == [*b, *h, *s, *dv]
            }
            (
                Builtin::AttentionBackward { gradient, .. },
                [q @ [b, h, s, d], k @ [bk, hk, t, dk], v @ [bv, hv, tv, dv], by],
            ) => {
                let of = [q, k, v][*gradient as usize];
                [b, d, bk, hk, t] == [bk, dk, bv, hv, tv]
                    && h % hk == 0
                    && *by == [*b, *h, *s, *dv]
                    && o == *of
            }
            _ => false,
        }
    }

    /// The number of operations that [`Builtin::compute`] needs for shapes that fit.
    pub(super) fn work(&self, inputs: &[View], out: &View) -> f64 {
        let last = |at: usize| inputs.get(at).and_then(|x| x.shape().last()).copied().unwrap_or(1) as f64;
        let elements = out.len() as f64;
        match self {
            Builtin::Gemm { .. } => elements * last(0),
            Builtin::Attention { .. } => {
                let keys = inputs.get(1).and_then(|k| k.shape().get(2)).copied().unwrap_or(1) as f64;
                elements / last(2) * keys * (last(0) + 2.0 * last(2))
            }
            Builtin::AttentionBackward { .. } => {
                let keys = inputs.get(1).and_then(|k| k.shape().get(2)).copied().unwrap_or(1) as f64;
                let rows = inputs.first().map_or(0, View::len) as f64 / last(0);
                rows * keys * (2.0 * last(0) + 2.0 * last(2))
            }
            _ => inputs.iter().map(View::len).sum::<usize>() as f64 + elements,
        }
    }

    /// The result in the order of the output's shape. The shapes fit (see [`Builtin::fits`]).
    pub(super) fn compute(&self, inputs: &[InputTensor], out: &View) -> Vec<Element> {
        let x = &inputs[0];
        let n = x.shape.last().copied().unwrap_or(1);
        let rows = || x.values.chunks(n);
        let vector = |at: usize, i: usize, default: f64| inputs.get(at).map_or(default, |v| v.values[i]);
        match *self {
            Builtin::Softmax => rows()
                .flat_map(|row| {
                    let (weights, max, sum) = weights(row);
                    let grow = (n as f64).sqrt();
                    let row: Vec<Element> = row
                        .iter()
                        .zip(weights)
                        .map(|(&x, w)| (w / sum, w / sum * (2.0 + grow + finite((x - max).abs()))))
                        .collect();
                    row
                })
                .collect(),
            Builtin::LayerNorm { eps } => rows()
                .flat_map(|row| {
                    let mean = row.iter().sum::<f64>() / n as f64;
                    let square = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
                    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n as f64;
                    let scale = 1.0 / (variance + eps).sqrt();
                    // E[x²] − mean² loses digits where the mean is large against the deviation.
                    let loss = (n as f64).sqrt() * (1.0 + square * scale * scale);
                    (0..n)
                        .map(|i| {
                            let (weight, bias) = (vector(1, i, 1.0), vector(2, i, 0.0));
                            let normal = (row[i] - mean) * scale;
                            let size = (row[i].abs() + mean.abs()) * scale + normal.abs() * loss;
                            (normal * weight + bias, size * weight.abs() + bias.abs())
                        })
                        .collect::<Vec<Element>>()
                })
                .collect(),
            Builtin::RmsNorm { eps } => rows()
                .flat_map(|row| {
                    let square = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
                    let scale = 1.0 / (square + eps).sqrt();
                    (0..n)
                        .map(|i| {
                            let value = row[i] * scale * vector(1, i, 1.0);
                            (value, value.abs() * (2.0 + (n as f64).sqrt()))
                        })
                        .collect::<Vec<Element>>()
                })
                .collect(),
            Builtin::Gemm { alpha, beta } => gemm(inputs, alpha, beta),
            Builtin::Reduce(operation) => {
                let n = x.values.len() / out.len();
                x.values.chunks(n).map(|run| operation.of(run.iter().copied())).collect()
            }
            Builtin::Scan { operation, exclusive } => {
                rows().flat_map(|row| scan(row, operation, exclusive)).collect()
            }
            Builtin::Transpose => {
                let (r, c) = (x.shape[x.shape.len() - 2], n);
                x.values
                    .chunks(r * c)
                    .flat_map(|matrix| {
                        (0..c * r).map(|i| (matrix[i % r * c + i / r], 0.0)).collect::<Vec<_>>()
                    })
                    .collect()
            }
            Builtin::Rope { base, interleaved } => rope(inputs, base, interleaved),
            Builtin::CrossEntropy => cross_entropy(inputs, out),
            Builtin::Attention { scale, causal } => attention(inputs, scale, causal),
            Builtin::AttentionBackward { gradient, scale, causal } => {
                attention_backward(inputs, gradient, scale, causal)
            }
        }
    }
}

/// The results for all prefixes of a row.
fn scan(row: &[f64], operation: Operation, exclusive: bool) -> Vec<Element> {
    let neutral = match operation {
        Operation::Sum | Operation::Mean => 0.0,
        Operation::Product => 1.0,
        Operation::Max => f64::NEG_INFINITY,
        Operation::Min => f64::INFINITY,
    };
    let (mut value, mut size) = (neutral, 0.0);
    let mut all = Vec::with_capacity(row.len());
    for (i, &x) in row.iter().enumerate() {
        let before = (value, size);
        value = match operation {
            Operation::Sum | Operation::Mean => value + x,
            Operation::Product => value * x,
            Operation::Max => extreme([value, x].into_iter(), |a, b| a > b),
            Operation::Min => extreme([value, x].into_iter(), |a, b| a < b),
        };
        size += x.abs();
        let (value, size, n) =
            if exclusive { (before.0, before.1, i as f64) } else { (value, size, i as f64 + 1.0) };
        all.push(match operation {
            Operation::Sum => (value, size * n.sqrt()),
            Operation::Mean => (value / n.max(1.0), size / n.sqrt().max(1.0)),
            Operation::Product => (value, value.abs() * n),
            Operation::Max | Operation::Min => (value, 0.0),
        });
    }
    all
}

/// A finite magnitude: an infinite distance is replaced, because it belongs to a weight of 0.
fn finite(x: f64) -> f64 {
    if x.is_finite() { x } else { 0.0 }
}

/// Unnormalised softmax weights of a row, its maximum and the sum of the weights.
fn weights(row: &[f64]) -> (Vec<f64>, f64, f64) {
    let max = extreme(row.iter().copied(), |a, b| a > b);
    let weights: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
    let sum = weights.iter().sum();
    (weights, max, sum)
}

fn gemm(inputs: &[InputTensor], alpha: f64, beta: f64) -> Vec<Element> {
    let (a, b, c) = (&inputs[0], &inputs[1], inputs.get(2));
    let (rank, columns) = (a.shape.len(), b.shape[b.shape.len() - 1]);
    let (m, k) = (a.shape[rank - 2], a.shape[rank - 1]);
    let mut all = Vec::with_capacity(a.values.len() / k * columns);
    for (a, b) in a.values.chunks(m * k).zip(b.values.chunks(k * columns)) {
        for row in a.chunks(k) {
            let mut sums = vec![(0.0, 0.0); columns];
            for (x, line) in row.iter().zip(b.chunks(columns)) {
                for (sum, y) in sums.iter_mut().zip(line) {
                    sum.0 += x * y;
                    sum.1 += (x * y).abs();
                }
            }
            for (sum, size) in sums {
                let old = c.map_or(0.0, |c| beta * c.values[all.len()]);
                all.push((alpha * sum + old, alpha.abs() * size * (k as f64).sqrt() + old.abs()));
            }
        }
    }
    all
}

fn rope(inputs: &[InputTensor], base: f64, interleaved: bool) -> Vec<Element> {
    let x = &inputs[0];
    let (dim, positions) = (x.shape[x.shape.len() - 1], x.shape[x.shape.len() - 2]);
    let half = dim / 2;
    let mut all = vec![(0.0, 0.0); x.values.len()];
    for (row, start) in (0..x.values.len()).step_by(dim).enumerate() {
        let position = row % positions;
        for i in 0..half {
            let angle = position as f64 * base.powf(-2.0 * i as f64 / dim as f64);
            let (cos, sin, turn) = match (inputs.get(1), inputs.get(2)) {
                (Some(cos), Some(sin)) => {
                    (cos.values[position * half + i], sin.values[position * half + i], 0.0)
                }
                _ => (angle.cos(), angle.sin(), angle),
            };
            let (at, other) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (a, b) = (x.values[start + at], x.values[start + other]);
            // The rounding of the angle causes an error of `angle · u`.
            let size = (a.abs() + b.abs()) * (2.0 + turn);
            all[start + at] = (a * cos - b * sin, size);
            all[start + other] = (b * cos + a * sin, size);
        }
    }
    all
}

fn cross_entropy(inputs: &[InputTensor], out: &View) -> Vec<Element> {
    let (logits, labels) = (&inputs[0], &inputs[1]);
    let classes = logits.shape[1];
    let losses: Vec<Element> = logits
        .values
        .chunks(classes)
        .zip(&labels.values)
        .map(|(row, &label)| {
            let (_, max, sum) = weights(row);
            let chosen = match row.get(label as usize) {
                Some(x) if label >= 0.0 => *x,
                _ => f64::NAN,
            };
            (max + sum.ln() - chosen, max.abs() + chosen.abs() + (classes as f64).sqrt())
        })
        .collect();
    if out.len() == losses.len() {
        return losses;
    }
    let n = losses.len() as f64;
    let (sum, size) =
        losses.iter().fold((0.0, 0.0), |(s, m), (v, size)| (s + v, m + v.abs() * n.sqrt() + size));
    vec![(sum / n, size / n)]
}

/// One query row of attention.
struct Row {
    /// The probability of each key that the row sees.
    weights: Vec<f64>,
    /// The largest sum of the absolute values of the terms of a score.
    size: f64,
}

/// The rows of attention, in the order batch entry, head, row: `visit` gets the number of the row, that of
/// its head of keys and values, and the row.
fn attention_rows(
    inputs: &[InputTensor],
    scale: f64,
    causal: bool,
    mut visit: impl FnMut(usize, usize, &Row),
) {
    let (q, k) = (&inputs[0], &inputs[1]);
    let [batch, heads, rows, dim] = q.shape[..] else { return };
    let (kv_heads, keys) = (k.shape[1], k.shape[2]);
    for head in 0..batch * heads {
        let kv = head / heads * kv_heads + head % heads / (heads / kv_heads);
        for row in 0..rows {
            let query = &q.values[(head * rows + row) * dim..][..dim];
            let seen = if causal { (row + 1 + keys).saturating_sub(rows).min(keys) } else { keys };
            let mut size = 0.0f64;
            let scores: Vec<f64> = (0..seen)
                .map(|key| {
                    let key = &k.values[(kv * keys + key) * dim..][..dim];
                    let terms = query.iter().zip(key).map(|(a, b)| a * b);
                    size = size.max(scale.abs() * terms.clone().map(f64::abs).sum::<f64>());
                    scale * terms.sum::<f64>()
                })
                .collect();
            let (mut weights, _, sum) = if seen == 0 { (Vec::new(), 0.0, 1.0) } else { weights(&scores) };
            weights.iter_mut().for_each(|weight| *weight /= sum);
            visit(head * rows + row, kv, &Row { weights, size });
        }
    }
}

/// The factor by which errors of a probability grow: the errors of a softmax over `keys`, of its scores, and
/// of the rounding of probabilities to the type of the inputs, expressed in roundings of f32.
fn growth(inputs: &[InputTensor], row: &Row) -> f64 {
    let keys = inputs[1].shape[2] as f64;
    2.0 + keys.sqrt() + row.size + 4.0 * inputs[0].roundoff / f64::from(f32::EPSILON)
}

fn scale_of(inputs: &[InputTensor], scale: Option<f64>) -> f64 {
    scale.unwrap_or_else(|| 1.0 / (inputs[0].shape[3] as f64).sqrt())
}

fn attention(inputs: &[InputTensor], scale: Option<f64>, causal: bool) -> Vec<Element> {
    let v = &inputs[2];
    let (keys, wide) = (v.shape[2], v.shape[3]);
    let mut all = Vec::new();
    attention_rows(inputs, scale_of(inputs, scale), causal, |_, kv, row| {
        for column in 0..wide {
            let value = |key: usize| v.values[(kv * keys + key) * wide + column];
            let terms = || row.weights.iter().enumerate().map(|(key, weight)| weight * value(key));
            let size: f64 = terms().map(f64::abs).sum();
            all.push((terms().sum(), size * growth(inputs, row)));
        }
    });
    all
}

/// dV = Pᵀ·dO; dS = P∘(dO·Vᵀ − D), where D is the sum of P∘(dO·Vᵀ) over the keys; dQ = scale · dS·K and
/// dK = scale · dSᵀ·Q. Query heads that share keys add up.
fn attention_backward(
    inputs: &[InputTensor],
    gradient: Gradient,
    scale: Option<f64>,
    causal: bool,
) -> Vec<Element> {
    let (scale, [q, k, v, by]) = (scale_of(inputs, scale), [0, 1, 2, 3].map(|at| &inputs[at]));
    let (rows, dim, keys, wide) = (q.shape[2], q.shape[3], k.shape[2], v.shape[3]);
    let of = [q, k, v][gradient as usize];
    let mut all = vec![(0.0, 0.0); of.values.len()];
    let mut add = |at: usize, factor: f64, size: f64, vector: &[f64]| {
        for (sum, x) in all[at * vector.len()..].iter_mut().zip(vector) {
            sum.0 += factor * x;
            sum.1 += size * x.abs();
        }
    };
    // A sum of n terms in any order contributes √n, and dO·Vᵀ is a separate sum.
    let terms = if gradient == Gradient::Q { keys } else { rows * q.shape[1] / k.shape[1] };
    let sums = (wide as f64).sqrt() + (terms as f64).sqrt();
    attention_rows(inputs, scale, causal, |at, kv, row| {
        let grow = growth(inputs, row) + sums;
        let (query, by) = (&q.values[at * dim..][..dim], &by.values[at * wide..][..wide]);
        if gradient == Gradient::V {
            for (key, &weight) in row.weights.iter().enumerate() {
                add(kv * keys + key, weight, weight * grow, by);
            }
            return;
        }
        let products = |key: usize| by.iter().zip(&v.values[(kv * keys + key) * wide..]).map(|(a, b)| a * b);
        let of_keys =
            (0..row.weights.len()).map(|key| (products(key).sum(), products(key).map(f64::abs).sum()));
        let of_keys: Vec<Element> = of_keys.collect();
        let mean = |part: fn(&Element) -> f64| -> f64 {
            row.weights.iter().zip(&of_keys).map(|(weight, element)| weight * part(element)).sum()
        };
        let (delta, size_of_delta) = (mean(|e| e.0), mean(|e| e.1));
        for (key, (&weight, (value, size))) in row.weights.iter().zip(&of_keys).enumerate() {
            let factor = scale * weight * (value - delta);
            let size = scale.abs() * weight * (size + size_of_delta) * grow;
            match gradient {
                Gradient::Q => add(at, factor, size, &k.values[(kv * keys + key) * dim..][..dim]),
                _ => add(kv * keys + key, factor, size, query),
            }
        }
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(shape: &[usize], values: &[f64]) -> InputTensor {
        InputTensor {
            shape: shape.to_vec(),
            values: values.to_vec(),
            roundoff: f64::from(f32::EPSILON) / 2.0,
        }
    }

    fn values(builtin: &Builtin, inputs: &[InputTensor], out: &[usize]) -> Vec<f64> {
        let views: Vec<View> = inputs.iter().map(|x| View::dense(&x.shape)).collect();
        let out = View::dense(out);
        assert!(builtin.fits(&views, &out), "{builtin:?}");
        builtin.compute(inputs, &out).into_iter().map(|(value, _)| value).collect()
    }

    fn near(found: &[f64], wanted: &[f64]) {
        assert_eq!(found.len(), wanted.len());
        assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-9), "{found:?} {wanted:?}");
    }

    #[test]
    fn operations_have_their_textbook_values() {
        let x = || input(&[2, 3], &[1.0, 2.0, 3.0, -1.0, 0.0, 4.0]);
        let e = |x: f64| x.exp();
        let sum = e(1.0) + e(2.0) + e(3.0);
        let softmax = values(&Builtin::Softmax, &[x()], &[2, 3]);
        near(&softmax[..3], &[e(1.0) / sum, e(2.0) / sum, e(3.0) / sum]);
        let root = 1.5f64.sqrt();
        let layer = values(&Builtin::LayerNorm { eps: 0.0 }, &[x()], &[2, 3]);
        near(&layer[..3], &[-root, 0.0, root]);
        let rms = (14.0f64 / 3.0).sqrt();
        let weight = input(&[3], &[1.0, 2.0, 3.0]);
        let scaled = values(&Builtin::RmsNorm { eps: 0.0 }, &[x(), weight], &[2, 3]);
        near(&scaled[..3], &[1.0 / rms, 4.0 / rms, 9.0 / rms]);
        let b = input(&[3, 1], &[1.0, 0.0, 2.0]);
        near(&values(&Builtin::Gemm { alpha: 2.0, beta: 0.0 }, &[x(), b], &[2, 1]), &[14.0, 14.0]);
        near(&values(&Builtin::Reduce(Operation::Sum), &[x()], &[2]), &[6.0, 3.0]);
        near(&values(&Builtin::Reduce(Operation::Max), &[x()], &[1]), &[4.0]);
        near(&values(&Builtin::Reduce(Operation::Mean), &[x()], &[2, 1]), &[2.0, 1.0]);
        let scan = |exclusive| Builtin::Scan { operation: Operation::Sum, exclusive };
        near(&values(&scan(false), &[x()], &[2, 3]), &[1.0, 3.0, 6.0, -1.0, -1.0, 3.0]);
        near(&values(&scan(true), &[x()], &[2, 3]), &[0.0, 1.0, 3.0, 0.0, -1.0, -1.0]);
        near(&values(&Builtin::Transpose, &[x()], &[3, 2]), &[1.0, -1.0, 2.0, 0.0, 3.0, 4.0]);
        let losses = values(&Builtin::CrossEntropy, &[x(), input(&[2], &[2.0, 0.0])], &[2]);
        near(&losses[..1], &[sum.ln() - 3.0]);
        let mean = values(&Builtin::CrossEntropy, &[x(), input(&[2], &[2.0, 0.0])], &[1]);
        near(&mean, &[(losses[0] + losses[1]) / 2.0]);
    }

    #[test]
    fn rope_turns_pairs_and_attention_averages_values() {
        let x = || input(&[2, 2], &[1.0, 0.0, 1.0, 0.0]);
        let rope = |interleaved| Builtin::Rope { base: 10_000.0, interleaved };
        let turned = [1.0, 0.0, 1f64.cos(), 1f64.sin()];
        near(&values(&rope(false), &[x()], &[2, 2]), &turned);
        near(&values(&rope(true), &[x()], &[2, 2]), &turned);
        let table = |x: f64| input(&[2, 1], &[x, x]);
        near(&values(&rope(true), &[x(), table(0.0), table(1.0)], &[2, 2]), &[0.0, 1.0, 0.0, 1.0]);
        let zeros = || input(&[1, 1, 2, 1], &[0.0, 0.0]);
        let v = || input(&[1, 1, 2, 1], &[2.0, 4.0]);
        let attention = |causal| Builtin::Attention { scale: None, causal };
        near(&values(&attention(false), &[zeros(), zeros(), v()], &[1, 1, 2, 1]), &[3.0, 3.0]);
        near(&values(&attention(true), &[zeros(), zeros(), v()], &[1, 1, 2, 1]), &[2.0, 3.0]);
    }

    /// Compares gradients with finite differences of the loss, which is the sum of the output times its
    /// gradient.
    #[test]
    fn gradients_of_attention_are_those_of_its_loss() {
        let number = |i: usize| ((i * 37 + 11) % 19) as f64 / 7.0 - 1.3;
        let filled = |shape: [usize; 4], from: usize| {
            input(&shape, &(0..shape.iter().product()).map(|i| number(from + i)).collect::<Vec<f64>>())
        };
        let inputs = || {
            [
                filled([2, 4, 3, 2], 0),
                filled([2, 2, 5, 2], 5),
                filled([2, 2, 5, 3], 9),
                filled([2, 4, 3, 3], 2),
            ]
        };
        for causal in [false, true] {
            let loss = |inputs: &[InputTensor]| -> f64 {
                let out = attention(&inputs[..3], Some(0.7), causal);
                out.iter().zip(&inputs[3].values).map(|((o, _), by)| o * by).sum()
            };
            for gradient in [Gradient::Q, Gradient::K, Gradient::V] {
                let (at, scale) = (gradient as usize, Some(0.7));
                let backward = Builtin::AttentionBackward { gradient, scale, causal };
                let shape = inputs()[at].shape.clone();
                let found = values(&backward, &inputs(), &shape);
                for (i, found) in found.iter().enumerate() {
                    let moved = |by: f64| {
                        let mut inputs = inputs();
                        inputs[at].values[i] += by;
                        loss(&inputs)
                    };
                    let wanted = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                    assert!((found - wanted).abs() < 1e-7, "{gradient:?} {i}: {found} {wanted}");
                }
            }
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_told() {
        let fits = |builtin: Builtin, inputs: &[&[usize]], out: &[usize]| {
            let views: Vec<View> = inputs.iter().map(|shape| View::dense(shape)).collect();
            builtin.fits(&views, &View::dense(out))
        };
        let gemm = || Builtin::Gemm { alpha: 1.0, beta: 0.0 };
        assert!(fits(gemm(), &[&[2, 3], &[3, 4]], &[2, 4]) && !fits(gemm(), &[&[2, 3], &[4, 3]], &[2, 4]));
        assert!(!fits(Builtin::Softmax, &[&[2, 3]], &[3, 2]) && !fits(Builtin::Softmax, &[], &[2]));
        assert!(
            !fits(Builtin::Transpose, &[&[6]], &[6])
                && !fits(Builtin::Reduce(Operation::Sum), &[&[6, 2]], &[2])
        );
        let rope = Builtin::Rope { base: 1.0, interleaved: false };
        assert!(!fits(rope, &[&[2, 3]], &[2, 3]), "an odd dim");
    }
}
