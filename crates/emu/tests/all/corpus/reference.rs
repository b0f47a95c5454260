//! Reference results of the kernels, computed in f64.

pub fn wide(values: &[f32]) -> impl Iterator<Item = f64> {
    values.iter().copied().map(f64::from)
}

/// Attention over contiguous heads. Each head has rows of `dim` numbers.
pub struct Heads {
    pub heads: usize,
    pub dim: usize,
    pub scale: f64,
    pub causal: bool,
}

/// The output, and the natural log-sum-exp of each row.
#[derive(Default)]
pub struct Attention {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

/// Attention. A causal mask is aligned to the bottom right.
pub fn attention(q: &[f32], k: &[f32], v: &[f32], shape: &Heads) -> Attention {
    let dim = shape.dim;
    let mut result = Attention::default();
    let per_head = k.len() / shape.heads;
    for (head, queries) in q.chunks(q.len() / shape.heads).enumerate() {
        let keys: Vec<&[f32]> = k[head * per_head..][..per_head].chunks(dim).collect();
        let values = &v[head * per_head..][..per_head];
        let rows = queries.len() / dim;
        for (row, query) in queries.chunks(dim).enumerate() {
            let visible = if shape.causal { row + 1 + keys.len() - rows } else { keys.len() };
            let dot = |key: &[f32]| wide(query).zip(wide(key)).map(|(a, b)| a * b).sum::<f64>();
            let weights: Vec<f64> =
                keys[..visible].iter().map(|key| (shape.scale * dot(key)).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let column = |d| wide(&values[d..]).step_by(dim).zip(&weights).map(|(v, w)| v * w).sum::<f64>();
            result.out.extend((0..dim).map(|d| column(d) / sum));
            result.lse.push(sum.ln());
        }
    }
    result
}

/// `a` of shape `[m][depth]` times `b`. `at` returns an element of `b` for (column, depth).
pub fn matmul(a: &[f32], depth: usize, n: usize, at: impl Fn(usize, usize) -> f32) -> Vec<f64> {
    let dot = |row: &[f32], col: usize| wide(row).enumerate().map(|(k, x)| x * f64::from(at(col, k))).sum();
    a.chunks(depth).flat_map(|row| (0..n).map(|col| dot(row, col)).collect::<Vec<f64>>()).collect()
}

/// Softmax of rows of `cols` numbers.
pub fn softmax(x: &[f32], cols: usize) -> Vec<f64> {
    let row = |row: &[f32]| {
        let weights: Vec<f64> = wide(row).map(f64::exp).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(move |w| w / sum)
    };
    x.chunks(cols).flat_map(row).collect()
}

/// Layer normalisation of rows as long as `weight`, with ε = 10⁻⁵.
pub fn layernorm(x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f64> {
    let count = weight.len() as f64;
    let row = |row: &[f32]| {
        let mean = wide(row).sum::<f64>() / count;
        let variance = wide(row).map(|v| (v - mean).powi(2)).sum::<f64>() / count;
        let affine = wide(weight).zip(wide(bias));
        wide(row)
            .zip(affine)
            .map(|(v, (w, b))| (v - mean) / (variance + 1e-5).sqrt() * w + b)
            .collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(row).collect()
}

/// A matrix of `rows` rows, transposed.
pub fn transpose(x: &[f32], rows: usize) -> Vec<f64> {
    let cols = x.len() / rows;
    (0..x.len()).map(|i| f64::from(x[i % rows * cols + i / rows])).collect()
}

/// Inclusive prefix sums of parts of `length` numbers.
pub fn prefix_sums(x: &[i32], length: usize) -> Vec<i32> {
    let sums = |part: &[i32]| -> Vec<i32> {
        let running = part.iter().scan(0, |sum, v| {
            *sum += v;
            Some(*sum)
        });
        running.collect()
    };
    x.chunks(length).flat_map(sums).collect()
}

/// Merges the splits of each head: unnormalised outputs of `dim` numbers, row maxima, and sums of weights.
pub fn merge(parts: &[f32], tops: &[f32], sums: &[f32], splits: usize, dim: usize) -> Vec<f64> {
    let head = |(h, tops): (usize, &[f32])| {
        let weights: Vec<f64> = wide(tops).map(f64::exp).collect();
        let total: f64 = wide(&sums[h * splits..]).zip(&weights).map(|(s, w)| s * w).sum();
        let parts = &parts[h * splits * dim..][..splits * dim];
        let column = |d| wide(&parts[d..]).step_by(dim).zip(&weights).map(|(x, w)| x * w).sum::<f64>();
        (0..dim).map(|d| column(d) / total).collect::<Vec<_>>()
    };
    tops.chunks(splits).enumerate().flat_map(head).collect()
}
