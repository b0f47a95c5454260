//! Tests of 8-bit inputs with descale factors against the oracle, and of quantisation.

use crate::data::{Data, inputs, slices};
use flashcore_cpu::{
    CpuError, CpuPlan, Isa, Quantization, Quantized, attention_with, quantize, quantized_problem,
};
use half::bf16;
use oracle::{Reference, oracle_with};
use problem::{
    Band, DType, DTypes, E4m3, E5m2, Element, Elements, Layout, LengthArray, Operand, OperandMap, Operands,
    Problem, ProblemError, ScaleLayout, Scales, SideLengths, Tensor,
};
use rand::{Rng, SeedableRng, rngs::SmallRng};

/// Random elements of a tensor.
fn random(dtype: DType, elements: usize, rng: &mut SmallRng) -> Data {
    fn of<T: Element>(elements: usize, rng: &mut SmallRng) -> Vec<T> {
        (0..elements).map(|_| T::from_f32(rng.random_range(-2.0..2.0))).collect()
    }
    match dtype {
        DType::E4m3 => of::<E4m3>(elements, rng).into(),
        DType::E5m2 => of::<E5m2>(elements, rng).into(),
        DType::F16 => of::<half::f16>(elements, rng).into(),
        _ => of::<bf16>(elements, rng).into(),
    }
}

struct Case {
    problem: Problem,
    inputs: OperandMap<Data>,
}

impl Case {
    /// Draws Q, K, V and the descale factors.
    fn draw(problem: Problem, seed: u64) -> Case {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut inputs = OperandMap::default();
        for spec in problem.operands() {
            let drawn = match spec.operand {
                Operand::Q | Operand::K | Operand::V => {
                    random(spec.dtype.float().unwrap(), spec.elements, &mut rng)
                }
                Operand::Descale(tensor) => {
                    let low = if tensor == Tensor::V { -1.5 } else { 0.2 };
                    (0..spec.elements).map(|_| rng.random_range(low..1.5)).collect::<Vec<f32>>().into()
                }
                _ => continue,
            };
            inputs.insert(spec.operand, drawn);
        }
        Case { problem, inputs }
    }

    /// The case with one more input.
    fn with(mut self, operand: Operand, data: impl Into<Data>) -> Case {
        self.inputs.insert(operand, data.into());
        self
    }

    /// The factors of a tensor; empty if it has none.
    fn factors(&mut self, tensor: Tensor) -> &mut [f32] {
        match self.inputs.get_mut(Operand::Descale(tensor)) {
            Some(Data::F32(factors)) => factors,
            _ => &mut [],
        }
    }

    fn run(&self, plan: &CpuPlan) -> (Vec<f64>, Vec<f64>) {
        fn of<O: Element>(case: &Case, plan: &CpuPlan) -> (Vec<f64>, Vec<f64>) {
            let mut out = vec![O::from_f32(f32::NAN); case.problem.span(Tensor::Out).unwrap().0];
            let mut lse = vec![f32::NAN; case.problem.lse_len()];
            let inputs = inputs(&slices(&case.inputs));
            attention_with(&case.problem, &inputs, &mut out, Some(&mut lse), plan).unwrap();
            let wide = out.iter().map(|x| f64::from(x.to_f32())).collect();
            (wide, lse.into_iter().map(f64::from).collect())
        }
        match self.problem.dtypes.out {
            DType::F16 => of::<half::f16>(self, plan),
            DType::F32 => of::<f32>(self, plan),
            _ => of::<bf16>(self, plan),
        }
    }

    /// Compares plans of every instruction set with the oracle. O is dense in `[batch, head, row, dim]`.
    ///
    /// A weight is rounded to bf16 or more (2⁻⁹), and O to its type: the error of an element is below the sum
    /// of both times the largest value.
    fn check(&self) {
        let operands = slices(&self.inputs);
        let want: Reference = oracle_with(&self.problem, &operands).unwrap();
        let factors = operands.floats(Operand::Descale(Tensor::V));
        let largest = factors.iter().fold(1.0f32, |m, x| m.max(x.abs())) * 2.0;
        let unit = self.problem.dtypes.out.unit_roundoff() + DType::Bf16.unit_roundoff();
        let allowed = f64::from(largest) * (unit + 1e-5);
        for isa in Isa::available().into_iter().chain(Isa::PORTABLE) {
            let plan = CpuPlan::widest(isa, 2, 40, 24);
            for plan in [plan, CpuPlan { splits: 3, ..plan }] {
                let (out, lse) = self.run(&plan);
                for (name, got, want, allowed) in
                    [("O", &out, &want.out, allowed), ("LSE", &lse, &want.lse, 1e-4)]
                {
                    for (i, (&got, &want)) in got.iter().zip(want.iter()).enumerate() {
                        let same = got == want || got.is_nan() && want.is_nan();
                        let near = want.is_finite() && (got - want).abs() <= allowed;
                        assert!(same || near, "{name}[{i}] = {got}, not {want} ± {allowed:.1e}, {plan:?}");
                    }
                }
            }
        }
    }
}

fn types(text: &str) -> DTypes {
    text.parse().unwrap()
}

fn base(text: &str) -> Problem {
    Problem::new(2, 4, 70, 32, types(text)).with_heads_kv(2, Layout::Bhsd).with_seq_kv(150, Layout::Bhsd)
}

/// Factors per KV head, one for a whole tensor, and per block of rows.
fn layouts() -> [Scales; 4] {
    let per_head = Some(ScaleLayout::per_head(2));
    let tensor = Some(ScaleLayout::TENSOR);
    let block = |seq, rows| Some(ScaleLayout::per_block(2, seq, rows));
    [
        Scales::default(),
        Scales { q: per_head, k: per_head, v: per_head },
        Scales { q: tensor, k: None, v: Some(ScaleLayout { batch: 0, head: 1, ..ScaleLayout::TENSOR }) },
        Scales { q: block(70, 64), k: block(150, 128), v: block(150, 64) },
    ]
}

#[test]
fn every_type_and_layout_of_factors() {
    for (i, text) in
        ["e4m3", "e5m2:f16", "e4m3/e5m2/e4m3:f32", "e5m2/e4m3/f16", "e4m3/e4m3/bf16"].iter().enumerate()
    {
        for mut scales in layouts() {
            let problem = base(text).with_lse(true);
            if !problem.dtypes.v.is_fp8() {
                scales.v = None;
            }
            Case::draw(Problem { scales, ..problem }, i as u64).check();
        }
    }
}

#[test]
fn features_take_eight_bit_inputs() {
    for (i, scales) in layouts().into_iter().enumerate() {
        let mut problem = base("e4m3").with_softcap(3.0).with_band(Band::window(40, 5)).with_lse(true);
        problem.score.sink = true;
        problem.score.scale = Some(-0.2);
        problem.scales = scales;
        let sinks = vec![0.5, -1.0, 2.0, f32::NEG_INFINITY];
        Case::draw(problem, i as u64).with(Operand::Sinks, sinks).check();
    }
}

#[test]
fn no_key_and_rows_that_see_nothing() {
    for scales in layouts() {
        let problem = base("e4m3").with_lse(true);
        let empty = Problem { scales, ..problem.clone().with_seq_kv(0, Layout::Bhsd) };
        let mut empty = Case::draw(empty, 1);
        empty.check();
        // Inputs without elements may be missing.
        empty.inputs.remove(Operand::K);
        empty.inputs.remove(Operand::V);
        empty.check();
        let causal = problem.with_seq_kv(30, Layout::Bhsd).with_band(Band::CAUSAL);
        let mut case = Case::draw(Problem { scales, ..causal }, 1);
        case.factors(Tensor::Q).iter_mut().take(1).for_each(|factor| *factor = f32::NAN);
        case.check();
    }
}

/// Only rows of sequences are decoded: those of a packed tensor, and the used ones.
#[test]
fn lengths_take_eight_bit_inputs() {
    for scales in layouts() {
        let mut problem = base("e5m2").with_lse(true).with_band(Band::CAUSAL);
        problem.batch = 2;
        problem.lengths.kv = SideLengths { packed: None, used: true };
        problem.scales = scales;
        Case::draw(problem, 3).with(Operand::Lengths(LengthArray::UsedKv), vec![150, 33]).check();
    }
}

#[test]
fn bad_numbers_have_defined_results() {
    let with = |change: &dyn Fn(&mut Case), scales: Scales| {
        let mut case = Case::draw(Problem { scales, ..base("e4m3").with_band(Band::CAUSAL) }, 5);
        change(&mut case);
        case.check();
    };
    for scales in layouts().into_iter().skip(1) {
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            with(&|case| case.factors(Tensor::Q)[0] = bad, scales);
            with(&|case| case.factors(Tensor::V)[0] = if bad == 0.0 { f32::NAN } else { bad }, scales);
            with(&|case| case.factors(Tensor::K).iter_mut().take(1).for_each(|x| *x = bad), scales);
        }
        for code in [0x7f, 0xff, 0x7e, 0xfe] {
            with(
                &|case| {
                    let Data::E4m3(keys) = &mut case.inputs[Operand::K] else { unreachable!() };
                    keys[100 * 32 + 3] = E4m3::from_bits(code);
                },
                scales,
            );
        }
    }
    let mut infinite = Case::draw(base("e5m2"), 5);
    let Data::E5m2(values) = &mut infinite.inputs[Operand::V] else { unreachable!() };
    values[32] = E5m2::from_bits(0x7c);
    infinite.check();
}

#[test]
fn wrong_types_and_factors_are_named() {
    let mut case = Case::draw(base("e4m3"), 1);
    let plan = CpuPlan::for_problem(&case.problem);
    let mut out = vec![bf16::ZERO; case.problem.span(Tensor::Out).unwrap().0];
    let refused = |case: &Case, problem: &Problem, out: &mut [bf16]| {
        let inputs = inputs(&slices(&case.inputs));
        attention_with(problem, &inputs, out, None, &plan).unwrap_err()
    };
    let typed = |argument, dtype, expected| {
        CpuError::Problem(ProblemError::OperandType { argument, dtype, expected })
    };
    let other = base("e4m3/e4m3/e5m2");
    let expected = typed("v", "e4m3", "e5m2");
    assert_eq!(refused(&case, &other, &mut out), expected);
    let wide = base("e4m3:f32");
    let expected = typed("out", "bf16", "f32");
    assert_eq!(refused(&case, &wide, &mut out), expected);
    let scaled = Problem { scales: layouts()[1], ..base("e4m3") };
    let factors = [(Tensor::Q, 4), (Tensor::K, 3)];
    let factors = factors.map(|(tensor, len)| (Operand::Descale(tensor), vec![1.0f32; len].into()));
    case.inputs.extend(factors);
    let expected = ProblemError::Lengths { argument: "descale_k", len: 3, expected: 4 };
    assert_eq!(refused(&case, &scaled, &mut out), CpuError::Problem(expected));
}

/// The error of quantised attention, relative to the largest output.
fn error(problem: &Problem, [q, k, v]: [&[f32]; 3], options: [&Quantization; 3]) -> f64 {
    let exact = oracle::oracle(problem, q, k, v).unwrap();
    let [q, k, v]: [Quantized; 3] = [
        quantize(problem, Tensor::Q, q, options[0]).unwrap(),
        quantize(problem, Tensor::K, k, options[1]).unwrap(),
        quantize(problem, Tensor::V, v, options[2]).unwrap(),
    ];
    let narrow = Problem {
        dtypes: DTypes { out: DType::F32, ..DTypes::uniform(DType::E4m3) },
        out: Layout::Bhsd.strides(problem.heads_q, problem.seq_q, problem.head_dim_v),
        ..quantized_problem(problem, DType::E4m3, [&q, &k, &v])
    };
    let quantized = [(Tensor::Q, &q), (Tensor::K, &k), (Tensor::V, &v)];
    let factors = quantized.map(|(tensor, x)| (Operand::Descale(tensor), Elements::F32(&x.factors)));
    let codes = quantized.map(|(tensor, x)| (tensor.into(), Elements::E4m3(bytemuck::cast_slice(&x.codes))));
    let operands: Operands<'_> = codes.into_iter().chain(factors).collect();
    let found = oracle_with(&narrow, &operands).unwrap();
    let mut out = vec![0.0f32; narrow.span(Tensor::Out).unwrap().0];
    let codes = quantized.map(|(tensor, x)| (tensor.into(), x.input(DType::E4m3)));
    let factors = factors.map(|(operand, elements)| (operand, elements.into()));
    let inputs = codes.into_iter().chain(factors).collect();
    attention_with(&narrow, &inputs, &mut out, None, &CpuPlan::for_problem(&narrow)).unwrap();
    let size = exact.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    for (a, b) in out.iter().zip(&found.out) {
        assert!((f64::from(*a) - b).abs() <= 0.01 * size, "{a} {b}");
    }
    let worst = exact.out.iter().zip(&found.out).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
    worst / size
}

/// Random draws. `shift` is added to one head dim of K.
fn draws(problem: &Problem, shift: f32) -> [Vec<f32>; 3] {
    let mut rng = SmallRng::seed_from_u64(9);
    [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
        let dim = problem.extents(tensor)[3];
        let of = |i: usize| if i % dim == 9 && tensor == Tensor::K { shift } else { 0.0 };
        (0..problem.span(tensor).unwrap().0).map(|i| rng.random_range(-1.0..1.0f32) + of(i)).collect()
    })
}

#[test]
fn smoothing_lowers_the_error_of_a_shifted_head_dim() {
    let problem = Problem::new(1, 4, 100, 64, DType::F32).with_heads_kv(2, Layout::Bshd);
    let data = draws(&problem, 40.0);
    let data = data.each_ref().map(Vec::as_slice);
    let plain = Quantization::per_head(DType::E4m3);
    let smooth = Quantization { smooth_keys: true, ..plain };
    let with = |q: &Quantization, k: &Quantization| error(&problem, data, [q, k, &plain]);
    let (a, b) = (with(&plain, &plain), with(&plain, &smooth));
    assert!(b < 0.5 * a, "plain {a:.3}, smooth {b:.3}");
}

/// A rotation of both Q and K does not change their products. The error stays about the same as without
/// rotation, because e4m3 has a relative precision.
#[test]
fn rotated_queries_and_keys_have_the_same_products() {
    let problem = Problem::new(1, 4, 100, 64, DType::F32).with_heads_kv(2, Layout::Bshd);
    let data = draws(&problem, 0.0);
    let data = data.each_ref().map(Vec::as_slice);
    let plain = Quantization::per_head(DType::E4m3);
    let rotated = Quantization { hadamard: Some(1), ..plain };
    let with = |q: &Quantization, k: &Quantization| error(&problem, data, [q, k, &plain]);
    let (a, c) = (with(&plain, &plain), with(&rotated, &rotated));
    assert!(c < 1.5 * a, "plain {a:.3}, rotated {c:.3}");
    let blocks = Quantization { rows: Some(64), ..rotated };
    let by_block = with(&blocks, &blocks);
    assert!(by_block < 1.5 * c, "rotated {c:.3}, by block {by_block:.3}");
    // Rotating only one of the two gives another product.
    let one_side = with(&plain, &rotated);
    assert!(one_side > 2.0 * c, "rotated {c:.3}, one side {one_side:.3}");
}

#[test]
fn codes_and_factors_of_a_head() {
    let problem = Problem::new(1, 2, 3, 4, DType::F32).with_heads_kv(1, Layout::Bhsd);
    let mut q = vec![0.5f32; 24];
    q[17] = -896.0;
    let of = quantize(&problem, Tensor::Q, &q, &Quantization::per_head(DType::E4m3)).unwrap();
    // Both query heads share the KV head's factor, 896 / 448.
    assert_eq!((of.factors, of.layout), (vec![2.0], ScaleLayout::per_head(1)));
    assert_eq!(
        (E4m3::from_bits(of.codes[17]).to_f32(), E4m3::from_bits(of.codes[0]).to_f32()),
        (-448.0, 0.25)
    );
    let zeros = quantize(&problem, Tensor::V, &[0.0f32; 12], &Quantization::per_head(DType::E5m2)).unwrap();
    assert_eq!((zeros.codes, zeros.factors), (vec![0; 12], vec![1.0]));
    let empty = Problem { seq_kv: 0, ..problem.clone() };
    let none = quantize::<f32>(&empty, Tensor::K, &[], &Quantization::per_head(DType::E4m3)).unwrap();
    assert_eq!((none.codes, none.factors), (vec![], vec![1.0]));
    let refused = |tensor, options| quantize(&problem, tensor, &q, &options).unwrap_err();
    let plain = Quantization::per_head(DType::E4m3);
    assert!(matches!(
        refused(Tensor::Q, Quantization { dtype: DType::F16, ..plain }),
        CpuError::Problem(ProblemError::Quantization { option: "dtype", .. })
    ));
    assert!(matches!(
        refused(Tensor::Q, Quantization { rows: Some(100), ..plain }),
        CpuError::Problem(ProblemError::Quantization { option: "rows", .. })
    ));
    let capped = problem.clone().with_softcap(5.0);
    let smooth = Quantization { smooth_keys: true, ..plain };
    assert!(matches!(
        quantize(&capped, Tensor::K, &q, &smooth).unwrap_err(),
        CpuError::Problem(ProblemError::Quantization { option: "smooth_keys", .. })
    ));
}
