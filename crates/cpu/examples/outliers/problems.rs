//! Random problems with one large element, and the allowed error of each element of O and of the LSE.

use std::error::Error;

use flashcore_cpu::{CpuError, CpuPlan, Element, Isa, Lanes, Order, Rows, attention};
use half::{bf16, f16};
use oracle::{Reference, oracle};
use problem::{Band, DType, Layout, Problem, ProblemError, Strides, Tensor};
use rand::{Rng, SeedableRng, rngs::SmallRng};

/// The unit roundoff of f32, in which all sums are computed.
const F32: f64 = 1.0 / (1u64 << 24) as f64;

/// A problem, the position and value of its large element, and the seed of its inputs.
#[derive(Clone, Debug)]
pub struct Case {
    pub problem: Problem,
    pub tensor: Tensor,
    /// Batch, head, row and column of the large element.
    pub at: [usize; 4],
    pub large: f32,
    pub seed: u64,
}

impl Case {
    /// A random shape, mask, type and strides. The large element is anywhere, at keys that all rows or few
    /// rows see.
    pub fn random(seed: u64) -> Case {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut any = |of: &[usize]| of[rng.random_range(0..of.len())];
        let dtype = DType::OUTPUTS[any(&[0, 1, 1, 2, 2])];
        let (heads_kv, group) = (any(&[1, 1, 2]), any(&[1, 1, 2, 3]));
        let mut p = Problem::new(any(&[1, 1, 2]), heads_kv * group, 1, 1, dtype);
        p.heads_kv = heads_kv;
        p.seq_q = any(&[1, 3, 16, 33, 64, 65, 100, 130]);
        p.seq_kv = any(&[1, 5, 16, 17, 48, 64, 100, 129, 200, 300]);
        p.head_dim = any(&[1, 8, 16, 40, 64, 64, 96, 128]);
        p.head_dim_v = if any(&[0, 0, 1]) == 0 { p.head_dim } else { any(&[1, 8, 24, 64, 100]) };
        p = p.with_layout([Layout::Bhsd, Layout::Bshd][any(&[0, 1])]);
        p.band = Band::NAMED[any(&[0, 1, 1, 2, 2])];
        for tensor in [Tensor::Q, Tensor::K, Tensor::V, Tensor::Out] {
            let padded = spread(&p, tensor, any(&[0, 0, 3]) as i64, any(&[0, 0, 1]) == 1);
            p.set_strides(tensor, padded);
        }
        let tensor = [Tensor::Q, Tensor::K, Tensor::V, Tensor::V][any(&[0, 1, 2, 3])];
        let [batches, heads, rows, dim] = p.extents(tensor);
        let mut below = |count| rng.random_range(0..count);
        // The first, the last, or any row.
        let row = [0, rows - 1, below(rows)][below(3)];
        let at = [below(batches), below(heads), row, below(dim)];
        let large = [1e2, 1e3, 6e4, 10f32.powf(rng.random_range(2.0..4.778))][rng.random_range(0..4)];
        let large = if rng.random() { large } else { -large };
        Case { problem: p, tensor, at, large, seed }
    }

    /// The default plan for the instruction set `isa`, or a random plan with it.
    pub fn plan(&self, isa: Isa) -> CpuPlan {
        let mut rng = SmallRng::seed_from_u64(self.seed ^ 0x9e37_79b9);
        let default = CpuPlan { threads: 1, ..CpuPlan::with_isa(&self.problem, isa) };
        if rng.random() {
            return default;
        }
        let vectors = rng.random_range(1..=isa.tile().0);
        CpuPlan {
            isa,
            block_q: rng.random_range(1..150),
            block_kv: rng.random_range(1..300),
            vectors,
            tile_rows: rng.random_range(1..=isa.tile_rows(vectors)),
            lanes: if isa.has_dims() && rng.random() { Lanes::Dims } else { Lanes::Queries },
            rows: if rng.random() { Rows::Group } else { Rows::Head },
            order: if rng.random() { Order::Longest } else { Order::Heads },
            splits: rng.random_range(1..4),
            ..default
        }
    }

    /// Computes the case with a plan. If the instruction set has its own arithmetic, also computes in f32, to
    /// find out whether that arithmetic was used.
    ///
    /// # Errors
    /// The error of [`attention`] or of [`oracle`].
    pub fn run(&self, plan: &CpuPlan) -> Result<Outcome, Box<dyn Error>> {
        match self.problem.dtypes.q {
            DType::F32 => self.run_as::<f32>(plan),
            DType::F16 => self.run_as::<f16>(plan),
            DType::Bf16 => self.run_as::<bf16>(plan),
            dtype => unreachable!("{dtype} is not drawn"),
        }
    }

    fn run_as<T: Element>(&self, plan: &CpuPlan) -> Result<Outcome, Box<dyn Error>> {
        let inputs = self.inputs::<T>();
        let bounds = Bounds::of(&self.problem, &inputs)?;
        let mut outcome = Outcome { worst: 0.0, what: "", own: false };
        let (out, lse) = attend(&self.problem, &inputs, plan, true)?;
        outcome.hold("O beside an LSE", &out, &bounds.exact.out, &bounds.out);
        outcome.hold("LSE", &lse, &bounds.exact.lse, &bounds.lse);
        let (alone, _) = attend(&self.problem, &inputs, plan, false)?;
        outcome.hold("O", &alone, &bounds.exact.out, &bounds.out);
        if plan.isa.wide() != plan.isa {
            let vectors = plan.vectors.min(plan.isa.wide().tile().0);
            let tile_rows = plan.tile_rows.min(plan.isa.wide().tile_rows(vectors));
            let wide = CpuPlan { isa: plan.isa.wide(), vectors, tile_rows, ..*plan };
            outcome.own = attend(&self.problem, &inputs, &wide, false)?.0 != alone;
        }
        Ok(outcome)
    }

    /// Normal draws, with the large element at its place.
    pub fn inputs<T: Element>(&self) -> [Vec<T>; 3] {
        let mut rng = SmallRng::seed_from_u64(self.seed);
        [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
            let (elements, origin) = self.problem.span(tensor).unwrap_or((0, 0));
            let mut data: Vec<T> = (0..elements).map(|_| T::from_f32(normal(&mut rng))).collect();
            if tensor == self.tensor {
                let [batch, head, row, column] = self.at;
                let start = origin as i64 + self.problem.strides(tensor).offset(batch, head, row);
                data[start as usize + column] = T::from_f32(self.large);
            }
            data
        })
    }
}

/// The result of a case.
pub struct Outcome {
    /// The largest ratio of an error to the allowed error.
    pub worst: f64,
    /// The output in which it occurred.
    pub what: &'static str,
    /// Whether the instruction set's own arithmetic was used, instead of f32 throughout.
    pub own: bool,
}

impl Outcome {
    fn hold(&mut self, what: &'static str, got: &[f64], exact: &[f64], allowed: &[f64]) {
        for ((&got, &exact), &allowed) in got.iter().zip(exact).zip(allowed) {
            let share = if got == exact { 0.0 } else { (got - exact).abs() / allowed };
            // NaN counts as the largest error.
            if share > self.worst || share.is_nan() {
                (self.worst, self.what) = (if share.is_nan() { f64::INFINITY } else { share }, what);
            }
        }
    }
}

/// The oracle's result, and the allowed error of each element.
pub struct Bounds {
    pub exact: Reference,
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

impl Bounds {
    /// The allowed errors, with unit roundoffs `u` of the type and `e` of f32, and the weights p:
    /// - For rounding the weights and O, an element of O is allowed 2u · Σ p|v| + u · |O|. For 16-bit
    ///   integers, it is also allowed 4u times its column's scale, the median of the column's magnitudes. For
    ///   f32, none of this is allowed.
    /// - A logit of n products has an error of δ = (4 + 2√n) e · scale · Σ|q k|. So O is allowed Σ p δ (|v| +
    ///   |O|), and the LSE Σ p δ.
    /// - Sums over m keys are allowed (16 + √m) e · Σ p|v|, the LSE (16 + √m) e.
    ///
    /// # Errors
    /// The error of [`oracle`].
    pub fn of<T: Element>(p: &Problem, [q, k, v]: &[Vec<T>; 3]) -> Result<Bounds, ProblemError> {
        let exact = oracle(p, q, k, v)?;
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for (batch, head) in (0..p.batch).flat_map(|b| (0..p.heads_q).map(move |h| (b, h))) {
            let rows_of = |tensor, data: &[T], head: usize, rows: usize| -> Vec<Vec<f64>> {
                (0..rows).map(|index| row(p, tensor, data, [batch, head, index])).collect()
            };
            let kv = head / p.group_size();
            let keys = rows_of(Tensor::K, k, kv, p.seq_kv);
            let of_head = Head::new(p, keys, rows_of(Tensor::V, v, kv, p.seq_kv));
            for (index, query) in rows_of(Tensor::Q, q, head, p.seq_q).iter().enumerate() {
                let answer = &exact.out[out.len()..][..p.head_dim_v];
                let (of_out, of_lse) = of_head.allowed(index, query, answer);
                let largest = exact.lse[lse.len()].abs();
                out.extend(of_out);
                lse.push(if largest.is_finite() { of_lse + 4.0 * F32 * largest } else { 0.0 });
            }
        }
        Ok(Bounds { exact, out, lse })
    }
}

/// Keys and values of one head.
struct Head<'a> {
    problem: &'a Problem,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    /// The median of the magnitudes of each column of V.
    scales: Vec<f64>,
}

impl<'a> Head<'a> {
    fn new(problem: &'a Problem, keys: Vec<Vec<f64>>, values: Vec<Vec<f64>>) -> Head<'a> {
        let scale = |d: usize| {
            let mut column: Vec<f64> = values.iter().map(|row| row[d].abs()).collect();
            column.sort_by(f64::total_cmp);
            column.get(column.len() / 2).copied().unwrap_or(0.0)
        };
        let scales = (0..problem.head_dim_v).map(scale).collect();
        Head { problem, keys, values, scales }
    }

    /// The allowed error of a row of O, whose exact value is `exact`, and of its LSE, without the LSE's final
    /// rounding.
    fn allowed(&self, row: usize, query: &[f64], exact: &[f64]) -> (Vec<f64>, f64) {
        let p = self.problem;
        let seen = p.band.keys(row, p.seq_q, p.seq_kv);
        let scale = f64::from(p.softmax_scale());
        let of_key = |key: usize| {
            let products = query.iter().zip(&self.keys[key]).map(|(q, k)| scale * q * k);
            let (logit, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            (logit, (4.0 + 2.0 * (p.head_dim as f64).sqrt()) * F32 * size)
        };
        let logits: Vec<(f64, f64)> = (seen.start..seen.end).map(of_key).collect();
        let largest = logits.iter().fold(f64::NEG_INFINITY, |largest, &(logit, _)| largest.max(logit));
        let weights: Vec<f64> = logits.iter().map(|(logit, _)| (logit - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        // Σ p δ, and for each element of O: Σ p|v| and Σ p δ|v|.
        let mut blur = 0.0;
        let (mut sizes, mut blurs) = (vec![0.0; exact.len()], vec![0.0; exact.len()]);
        for ((key, (_, delta)), weight) in (seen.start..seen.end).zip(&logits).zip(&weights) {
            let weight = weight / sum;
            blur += weight * delta;
            for (d, value) in self.values[key].iter().enumerate() {
                sizes[d] += weight * value.abs();
                blurs[d] += weight * delta * value.abs();
            }
        }
        let sums = (16.0 + (logits.len() as f64).sqrt()) * F32;
        let roundoff = if p.dtypes.q == DType::F32 { 0.0 } else { p.dtypes.out.unit_roundoff() };
        // More than the rounding error of the smallest numbers of the type.
        let least = if p.dtypes.q == DType::F16 { 2f64.powi(-24) } else { 1e-30 };
        let of_out = |d: usize| match logits.len() {
            0 => 0.0,
            _ => {
                let rounded = 2.0 * sizes[d] + exact[d].abs() + 4.0 * self.scales[d];
                roundoff * rounded + sums * sizes[d] + blurs[d] + blur * exact[d].abs() + least
            }
        };
        ((0..exact.len()).map(of_out).collect(), blur + sums)
    }
}

/// O as `[batch, heads_q, seq_q, head_dim_v]`, and the LSE, which is empty if it is not requested.
pub fn attend<T: Element>(
    p: &Problem,
    [q, k, v]: &[Vec<T>; 3],
    plan: &CpuPlan,
    with_lse: bool,
) -> Result<(Vec<f64>, Vec<f64>), CpuError> {
    let mut out = vec![T::from_f32(f32::NAN); p.span(Tensor::Out).map_or(0, |(elements, _)| elements)];
    let mut lse = vec![f32::NAN; if with_lse { p.batch * p.heads_q * p.seq_q } else { 0 }];
    attention(p, q, k, v, &mut out, with_lse.then_some(&mut lse[..]), plan)?;
    let [batches, heads, rows, _] = p.extents(Tensor::Out);
    let mut dense = Vec::new();
    for (batch, head) in (0..batches).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        (0..rows).for_each(|index| dense.extend(row(p, Tensor::Out, &out, [batch, head, index])));
    }
    Ok((dense, lse.into_iter().map(f64::from).collect()))
}

/// A row of a tensor, widened.
fn row<T: Element>(p: &Problem, tensor: Tensor, data: &[T], [batch, head, row]: [usize; 3]) -> Vec<f64> {
    let [.., dim] = p.extents(tensor);
    let origin = p.span(tensor).map_or(0, |(_, origin)| origin) as i64;
    let start = (origin + p.strides(tensor).offset(batch, head, row)) as usize;
    data[start..start + dim].iter().map(|x| f64::from(x.to_f32())).collect()
}

/// The strides of a tensor with `padding` more elements between its rows, perhaps backwards.
fn spread(p: &Problem, tensor: Tensor, padding: i64, backward: bool) -> Strides {
    let [_, heads, rows, dim] = p.extents(tensor);
    let row = dim as i64 + padding;
    let Strides { row: dense, .. } = p.strides(tensor);
    // Rows follow each other within a head (BHSD), or the heads alternate row by row (BSHD).
    let mut strides = if dense == dim as i64 {
        Strides { row, head: row * rows as i64, batch: row * (rows * heads) as i64 }
    } else {
        Strides { row: row * heads as i64, head: row, batch: row * (rows * heads) as i64 }
    };
    if backward {
        strides.row = -strides.row;
    }
    strides
}

/// A standard normal number, by Box and Muller.
fn normal(rng: &mut SmallRng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    (radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()) as f32
}
