//! Attention of one sequence, in f64 loops.

use candle::{DType, Device, Tensor};

/// The options of a call.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub scale: f32,
    pub window: [Option<usize>; 2],
    pub softcap: Option<f32>,
    pub slopes: Option<Vec<f32>>,
    /// A logit without a value for each head.
    pub sinks: Option<Vec<f32>>,
    /// Ranges of positions that see each other in any window.
    pub ranges: Vec<[i32; 2]>,
}

impl Options {
    pub fn sees(&self, level: i64, key: i64) -> bool {
        let within = |size: Option<usize>, distance: i64| size.is_none_or(|size| distance <= size as i64);
        let inside = |at: i64, [start, end]: [i32; 2]| (i64::from(start)..i64::from(end)).contains(&at);
        let [left, right] = self.window;
        within(left, level - key) && within(right, key - level)
            || self.ranges.iter().any(|&range| inside(level, range) && inside(key, range))
    }
}

/// Numbers with a pattern of their own for each seed, as a tensor.
pub fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let number = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let numbers: Vec<f32> = (0..shape.iter().product()).map(number).collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// `[row, head, dim]` of one sequence, in f64. A row that sees no key is 0.
pub fn attention([q, k, v]: [&Tensor; 3], options: &Options) -> Vec<f64> {
    let (rows, heads, dim) = q.dims3().unwrap();
    let (keys, heads_kv, _) = k.dims3().unwrap();
    let dim_v = v.dims()[2];
    let (q, k, v) = (floats(q), floats(k), floats(v));
    let mut out = Vec::with_capacity(rows * heads * dim_v);
    for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        let of_kv = head / (heads / heads_kv);
        let level = row as i64 + keys as i64 - rows as i64;
        let logit = |key: usize| {
            let terms =
                (0..dim).map(|d| q[(row * heads + head) * dim + d] * k[(key * heads_kv + of_kv) * dim + d]);
            let mut logit = terms.sum::<f64>() * f64::from(options.scale);
            if let Some(cap) = options.softcap.map(f64::from) {
                logit = cap * (logit / cap).tanh();
            }
            if let Some(slopes) = &options.slopes {
                logit -= f64::from(slopes[head]) * (level - key as i64).abs() as f64;
            }
            logit
        };
        let seen: Vec<(usize, f64)> =
            (0..keys).filter(|&key| options.sees(level, key as i64)).map(|key| (key, logit(key))).collect();
        let sink = options.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
        let largest = seen.iter().fold(sink, |largest, &(_, logit)| largest.max(logit));
        let sum = seen.iter().map(|(_, logit)| (logit - largest).exp()).sum::<f64>() + (sink - largest).exp();
        out.extend((0..dim_v).map(|d| {
            let weight = |&(key, logit): &(usize, f64)| {
                (logit - largest).exp() * v[(key * heads_kv + of_kv) * dim_v + d]
            };
            if seen.is_empty() { 0.0 } else { seen.iter().map(weight).sum::<f64>() / sum }
        }));
    }
    out
}

/// The largest difference between a tensor and expected numbers; infinite if one is NaN.
pub fn distance(found: &Tensor, expected: &[f64]) -> f64 {
    let found = floats(found);
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs());
    differences.fold(0.0, |largest, x| if x.is_nan() { f64::INFINITY } else { largest.max(x) })
}

pub fn close(name: &str, found: &Tensor, expected: &[f64], tolerance: f64) {
    let distance = distance(found, expected);
    assert!(
        distance <= tolerance,
        "{name}: the largest difference is {distance:e}, not at most {tolerance:e}"
    );
    assert!(expected.iter().any(|x| x.abs() > 8.0 * tolerance), "{name}: expected numbers are all about 0");
}

/// The tolerance for outputs of magnitude 1 in a type.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2e-3,
        DType::BF16 => 1.2e-2,
        _ => 2e-5,
    }
}
