//! Tests of the arithmetic with 16-bit integers. It must be as accurate as f32 sums of weights rounded to the
//! input type. Beyond the error bounds, f32 itself is used. The tests run on [`Isa::Avx512Vnni`] if the
//! processor has it, and on its counterpart in plain Rust.

use flashcore_cpu::{CpuPlan, Element, Isa};
use half::{bf16, f16};
use oracle::oracle;
use problem::{Band, DType, Layout, Problem};
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::SmallRng};

use crate::common::{Inputs, check, run, run_out};

/// The instruction sets that use integers.
fn integers() -> impl Iterator<Item = Isa> {
    [Isa::Avx512Vnni, Isa::PortableIntegers].into_iter().filter(|isa| isa.is_available())
}

pub fn plan(isa: Isa) -> CpuPlan {
    CpuPlan::widest(isa, 2, 100, 72)
}

/// Normal draws: Q and V with these standard deviations, V with this mean.
pub fn normal<T: Element>(p: &Problem, seed: u64, [size_q, size_v, mean_v]: [f64; 3]) -> Inputs<T> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut draw = |elements: &mut [T], size: f64, mean: f64| {
        for x in elements {
            let (radius, angle): (f64, f64) = (rng.random_range(1e-9..1.0), rng.random_range(0.0..6.3));
            *x = T::from_f32((mean + size * (-2.0 * radius.ln()).sqrt() * angle.cos()) as f32);
        }
    };
    let mut inputs = Inputs::random(p, 0, 1.0);
    draw(&mut inputs.q, size_q, 0.0);
    draw(&mut inputs.k, 1.0, 0.0);
    draw(&mut inputs.v, size_v, mean_v);
    inputs
}

/// O of one dense head without a mask in f64, and O of an ideal 16-bit kernel, which rounds only the weights
/// and O to the input type.
fn exact_and_ideal<T: Element>(p: &Problem, inputs: &Inputs<T>) -> [Vec<f64>; 2] {
    let round = |x: f64| f64::from(T::from_f32(x as f32).to_f32());
    let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| f64::from(x.to_f32())).collect() };
    let (q, k, v) = (wide(&inputs.q), wide(&inputs.k), wide(&inputs.v));
    let dim = p.head_dim;
    let (mut exact, mut ideal) = (vec![0.0; q.len()], vec![0.0; q.len()]);
    for (q, (exact, ideal)) in q.chunks(dim).zip(exact.chunks_mut(dim).zip(ideal.chunks_mut(dim))) {
        let dot = |k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * f64::from(p.softmax_scale());
        let logits: Vec<f64> = k.chunks(dim).map(dot).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|l| (l - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (weight, v) in weights.iter().zip(v.chunks(dim)) {
            let rounded = round(*weight);
            for d in 0..dim {
                exact[d] += weight * v[d];
                ideal[d] += rounded * v[d];
            }
        }
        exact.iter_mut().for_each(|x| *x /= sum);
        ideal.iter_mut().for_each(|x| *x = round(*x / sum));
    }
    [exact, ideal]
}

/// Root of the summed squared differences.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

/// O as bits.
fn bits<T: Element>(p: &Problem, inputs: &Inputs<T>, isa: Isa) -> Vec<u64> {
    run_out(p, inputs, &plan(isa)).into_iter().map(f64::to_bits).collect()
}

/// Whether the instruction sets use other numbers than f32, on which they must agree. Some output then
/// differs from the f32 result in its bits.
pub fn differ_from_f32<T: Element>(sets: impl Iterator<Item = Isa>, p: &Problem, inputs: &Inputs<T>) -> bool {
    let differs = |isa: Isa| bits(p, inputs, isa) != bits(p, inputs, isa.wide());
    let all: Vec<bool> = sets.map(differs).collect();
    assert!(all.iter().all(|&x| x == all[0]), "plain Rust disagrees on whether f32 is needed");
    all[0]
}

/// Asserts that a head whose inputs need f32 leaves the other head to the set's own numbers.
pub fn each_head_for_itself_in<T: Element>(sets: impl Iterator<Item = Isa>) {
    let [one, two] = [1, 2].map(|heads| Problem::new(1, heads, 100, 64, T::DTYPE));
    let good = normal::<T>(&one, 1, [1.0, 1.0, 0.0]);
    let mut bad = normal::<T>(&one, 2, [1.0, 1.0, 0.0]);
    bad.k[5] = T::from_f32(f32::INFINITY);
    let join = |a: &[T], b: &[T]| [a, b].concat();
    let both = Inputs { q: join(&good.q, &bad.q), k: join(&good.k, &bad.k), v: join(&good.v, &bad.v) };
    for isa in sets {
        let alone = [bits(&one, &good, isa), bits(&one, &bad, isa.wide())];
        assert!(bits(&two, &both, isa) == alone.concat(), "{isa}");
    }
}

/// Whether 16-bit integers were used.
fn is_narrow<T: Element>(p: &Problem, inputs: &Inputs<T>) -> bool {
    differ_from_f32(integers(), p, inputs)
}

fn accurate<T: Element>(plans: &[CpuPlan], most: f64, [seq, keys, dim]: [usize; 3], sizes: [f64; 3]) {
    let p = Problem::new(1, 1, seq, dim, T::DTYPE).with_seq_kv(keys, Layout::Bhsd);
    let inputs = normal::<T>(&p, if T::DTYPE == DType::F16 { 1 } else { 2 }, sizes);
    let [exact, ideal] = exact_and_ideal(&p, &inputs);
    let of_ideal = distance(&ideal, &exact);
    for plan in plans {
        let ours = distance(&run_out(&p, &inputs, plan), &exact);
        assert!(
            ours <= of_ideal * most,
            "{ours:.3e}, ideal {of_ideal:.3e}: {} {seq} {keys} {dim} {sizes:?} {plan:?}",
            T::DTYPE
        );
        check(&p, &inputs, plan);
    }
}

/// Asserts that the error of each plan is at most `most` times the error of the ideal 16-bit kernel, on
/// inputs of many kinds. The types alternate: any two of lengths, head dimension and sizes have both.
pub fn as_accurate_as_rounding_the_weights_with(plans: &[CpuPlan], most: f64) {
    for (i, (seq, keys)) in [(64, 512), (100, 300), (128, 33)].into_iter().enumerate() {
        for (j, dim) in [16, 64, 100, 128].into_iter().enumerate() {
            for (k, sizes) in [
                [1.0, 1.0, 0.0],
                [0.0, 1.0, 0.0],
                [0.1, 0.01, 0.0],
                [1.6, 1.0, 0.0],
                [1.0, 1.0, 2.0],
                [1.0, 0.03, 0.0],
            ]
            .into_iter()
            .enumerate()
            {
                match (i + j + k) % 2 {
                    0 => accurate::<f16>(plans, most, [seq, keys, dim], sizes),
                    _ => accurate::<bf16>(plans, most, [seq, keys, dim], sizes),
                }
            }
        }
    }
}

#[test]
fn as_accurate_as_rounding_the_weights() {
    let plans: Vec<CpuPlan> = integers().map(plan).collect();
    as_accurate_as_rounding_the_weights_with(&plans, 1.05);
}

#[test]
fn ordinary_inputs_use_16_bits() {
    let p = Problem::new(1, 2, 100, 64, DType::F16).with_band(Band::CAUSAL);
    for sizes in [[1.0, 1.0, 0.0], [1.0, 1e-6, 0.0], [1e-6, 1.0, 0.0], [1.0, 1e4, 0.0]] {
        assert!(is_narrow(&p, &normal::<f16>(&p, 1, sizes)), "{sizes:?}");
    }
    // Other lengths and head dimensions, without a mask.
    for (keys, dim) in [(64, 32), (100, 128), (1000, 64), (2048, 96)] {
        let p = Problem::new(1, 1, 64, dim, DType::F16).with_seq_kv(keys, Layout::Bhsd);
        assert!(is_narrow(&p, &normal::<f16>(&p, 2, [1.0, 1.0, 0.0])), "{keys} {dim}");
    }
    let p = Problem { dtypes: DType::Bf16.into(), ..p };
    assert!(is_narrow(&p, &normal::<bf16>(&p, 1, [6.0, 1.0, 0.0])));
    assert!(is_narrow(&p, &normal::<bf16>(&p, 1, [1e-9, 1e9, 0.0])));
}

#[test]
fn inputs_beyond_the_bounds_are_computed_in_f32() {
    let p = Problem::new(1, 1, 100, 64, DType::F16).with_band(Band::CAUSAL);
    let usual = || normal::<f16>(&p, 1, [1.0, 1.0, 0.0]);
    let row = 40 * 64..41 * 64;
    for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY, f16::MAX] {
        let [mut q, mut k, mut v] = [usual(), usual(), usual()];
        (q.q[70], k.k[70], v.v[70]) = (bad, bad, bad);
        for (name, inputs) in [("q", q), ("k", k), ("v", v)] {
            assert!(!is_narrow(&p, &inputs), "{bad} in {name}");
            integers().for_each(|isa| check(&p, &inputs, &plan(isa)));
        }
    }
    assert!(!is_narrow(&p, &normal::<f16>(&p, 1, [5.0, 1.0, 0.0])), "large logits");
    let mut sink = usual();
    sink.v[row.clone()].fill(f16::from_f32(0.01));
    assert!(!is_narrow(&p, &sink), "a small row of V");
    let mut outlier = usual();
    outlier.v[row].iter_mut().for_each(|x| *x *= f16::from_f32(100.0));
    assert!(!is_narrow(&p, &outlier), "a large row of V");
    let tiny = Problem { dtypes: DType::Bf16.into(), ..p.clone() };
    for sizes in [[1e-30, 1.0, 0.0], [1.0, 1e-30, 0.0], [1e30, 1.0, 0.0], [1.0, 1e30, 0.0]] {
        assert!(!is_narrow(&tiny, &normal::<bf16>(&tiny, 1, sizes)), "{sizes:?}");
    }
    // Fewer rows than a panel.
    let few = Problem::new(1, 1, 63, 64, DType::F16);
    assert!(!is_narrow(&few, &normal::<f16>(&few, 1, [1.0, 1.0, 0.0])));
}

#[test]
fn each_head_for_itself() {
    each_head_for_itself_in::<f16>(integers());
}

#[test]
fn an_lse_is_computed_in_f32() {
    let p = Problem::new(1, 2, 100, 64, DType::F16);
    let inputs = normal::<f16>(&p, 1, [1.0, 1.0, 0.0]);
    assert!(is_narrow(&p, &inputs));
    for isa in integers() {
        assert_eq!(run(&p, &inputs, &plan(isa)), run(&p, &inputs, &plan(isa.wide())));
    }
}

#[test]
fn sums_at_the_limit_do_not_overflow() {
    // All rows are equal and consist of equal numbers, so every product of a window is as large as it can be.
    for (dim, keys) in [(64, 96), (1, 64), (33, 71)] {
        let p = Problem::new(1, 1, 64, dim, DType::Bf16).with_seq_kv(keys, Layout::Bhsd);
        for (q, v) in [(1.0, 1.0), (-3.0, 1.5), (4.0, -1e4)] {
            let fill = |x: f32, rows: usize| vec![bf16::from_f32(x); rows * dim];
            let inputs = Inputs { q: fill(q, 64), k: fill(1.0, keys), v: fill(v, keys) };
            integers().for_each(|isa| check(&p, &inputs, &plan(isa)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Inputs of any size, including those beyond the bounds, with some numbers replaced.
    #[test]
    fn any_inputs(
        heads_kv in 1usize..3, group in 1usize..3, seq_q in 64usize..140, seq_kv in 0usize..200, dim in 1usize..80,
        dim_v in 1usize..80, mask in 0usize..3, seed: u64, block_kv in 1usize..100, half: bool,
        size_q in -8.0f64..3.0, size_v in -8.0f64..4.0, mean_v in -2.0f64..2.0,
        replaced in proptest::collection::vec((0usize..3, any::<prop::sample::Index>(), 0..SPECIAL.len()), 0..3),
    ) {
        let dtype = if half { DType::F16 } else { DType::Bf16 };
        let mut p = Problem::new(2, heads_kv * group, seq_q, dim, dtype);
        (p.heads_kv, p.seq_kv, p.head_dim_v) = (heads_kv, seq_kv, dim_v);
        p = p.with_layout(Layout::Bshd).with_band(Band::NAMED[mask]);
        let sizes = [size_q.exp2(), size_v.exp2(), mean_v];
        for isa in integers() {
            let plan = CpuPlan { block_kv, ..plan(isa) };
            if half {
                check(&p, &with(normal::<f16>(&p, seed, sizes), &replaced), &plan);
            } else {
                check(&p, &with(normal::<bf16>(&p, seed, sizes), &replaced), &plan);
            }
        }
    }
}

/// Numbers that [`with`] puts into tensors.
pub const SPECIAL: [f32; 8] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, 1e-7, 100.0, -3000.0, 6e4];

/// Puts special numbers into Q, K and V. Large numbers are used only if all are finite: they make weights
/// that f32 rounds to 0, and 0 times infinity is NaN.
pub fn with<T: Element>(
    mut inputs: Inputs<T>,
    replaced: &[(usize, prop::sample::Index, usize)],
) -> Inputs<T> {
    let finite = replaced.iter().all(|(.., special)| SPECIAL[*special].is_finite());
    let fits = |special: f32| finite || !special.is_finite() || special.abs() < 100.0;
    for (tensor, index, special) in replaced.iter().filter(|(.., special)| fits(SPECIAL[*special])) {
        let tensor = [&mut inputs.q, &mut inputs.k, &mut inputs.v].into_iter().nth(*tensor).unwrap();
        if !tensor.is_empty() {
            let at = index.index(tensor.len());
            tensor[at] = T::from_f32(SPECIAL[*special]);
        }
    }
    inputs
}

/// The exact half of [`exact_and_ideal`] agrees with [`oracle`].
#[test]
fn the_exact_half_is_the_oracle() {
    let p = Problem::new(1, 1, 20, 8, DType::F16);
    let inputs = normal::<f16>(&p, 3, [1.0, 1.0, 0.0]);
    let want = oracle(&p, &inputs.q, &inputs.k, &inputs.v).unwrap();
    assert!(distance(&want.out, &exact_and_ideal(&p, &inputs)[0]) < 1e-12);
}
