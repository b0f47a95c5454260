//! Tests of uneven lengths, sinks and programs against the oracle, on every instruction set of this machine.

mod draw;
mod pages;

use std::collections::HashSet;

use flashcore_cpu::{CpuError, CpuPlan, Element, Isa, Lanes, Rows, attention_with};
use half::{bf16, f16};
use oracle::{oracle_with, reference_in_precision_with};
use problem::program::library as lib;
use problem::{
    Band, DType, ElementType, Expr, Layout, LengthArray, Operand, OperandMap, Operands, Pass, Problem,
    ProblemError, Program, SideLengths, Table, Tensor,
};

use crate::common::{Inputs, POISON, close_to, small_plan};
use crate::data::{Data, inputs as kernel_inputs, slices};
use draw::Case;

/// The inputs beside Q, K and V.
type Others = OperandMap<Data>;

/// All inputs of a call.
fn all<'a, T: Element>(inputs: &'a Inputs<T>, others: &'a Others) -> Operands<'a> {
    let mut all = inputs.operands();
    all.extend(slices(others).iter().map(|(operand, &elements)| (operand, elements)));
    all
}

/// Runs a kernel into poisoned buffers. Returns O and the LSE in the order of the reference, NaN for rows
/// that belong to no sequence, which must keep their poison.
fn run<T: Element>(
    problem: &Problem,
    inputs: &Inputs<T>,
    others: &Others,
    plan: &CpuPlan,
    with_lse: bool,
) -> (Vec<f64>, Vec<f64>) {
    let (elements, origin) = problem.span(Tensor::Out).unwrap();
    let [_, heads, rows, dim] = problem.extents(Tensor::Out);
    let (mut out, mut lse) = (vec![T::from_f32(POISON); elements], vec![POISON; problem.lse_len()]);
    let operands = all(inputs, others);
    let lse_out = with_lse.then_some(&mut lse[..]);
    attention_with(problem, &kernel_inputs(&operands), &mut out, lse_out, plan).unwrap();
    let (mut dense, mut dense_lse) =
        (vec![f64::NAN; problem.lse_len() * dim], vec![f64::NAN; problem.lse_len()]);
    for sequence in problem.sequences(&operands).unwrap() {
        for (head, row) in (0..heads).flat_map(|h| (0..sequence.q.len).map(move |r| (h, r))) {
            let row = sequence.q.start + row;
            let start = (origin as i64 + problem.out.offset(sequence.q.batch, head, row)) as usize;
            let index = (sequence.q.batch * heads + head) * rows + row;
            let written = out[start..start + dim].iter().map(|x| f64::from(x.to_f32()));
            assert!(written.clone().all(|x| x != f64::from(POISON)));
            dense[index * dim..][..dim].iter_mut().zip(written).for_each(|(to, x)| *to = x);
            dense_lse[index] = lse[index].into();
            out[start..start + dim].fill(T::from_f32(POISON));
            lse[index] = POISON;
        }
    }
    assert!(out.iter().all(|x| x.to_f32() == POISON), "wrote outside of its rows; {plan:?} {problem:?}");
    assert!(lse.iter().all(|&x| x == POISON), "wrote the LSE of other rows; {plan:?} {problem:?}");
    (dense, dense_lse)
}

/// Compares the results of the plans, with and without an LSE, with those of the oracle.
fn check_plans<T: Element>(problem: &Problem, inputs: &Inputs<T>, others: &Others, plans: &[CpuPlan]) {
    let operands = all(inputs, others);
    let want = oracle_with(problem, &operands).unwrap();
    let naive = reference_in_precision_with(problem, &operands).unwrap();
    for plan in plans {
        let (out, lse) = run(problem, inputs, others, plan, true);
        close_to(problem, plan, (&out, &lse), &want, &naive);
        // 16-bit integers are only used for calls without an LSE.
        let (out, _) = run(problem, inputs, others, plan, false);
        close_to(problem, plan, (&out, &lse), &want, &naive);
    }
}

/// Draws inputs and checks the plans. Elements of K and V become NaN or infinite: all elements outside of
/// sequences and, depending on `bad`, some others.
fn check_case(case: &Case, plans: &[CpuPlan]) {
    fn of<T: Element>(case: &Case, plans: &[CpuPlan]) {
        let mut inputs = Inputs::<T>::random(&case.problem, case.seed, 1.0);
        case.spoil(&mut inputs);
        check_plans(&case.problem, &inputs, &case.others, plans);
    }
    match case.problem.dtypes.q {
        DType::F32 => of::<f32>(case, plans),
        DType::F16 => of::<f16>(case, plans),
        DType::Bf16 => of::<bf16>(case, plans),
        dtype => unreachable!("{dtype} is no type of O"),
    }
}

/// Plans with small blocks: rows as lanes, in one part and in several, and lanes along the head dim.
fn plans(isa: Isa) -> Vec<CpuPlan> {
    let plan = small_plan(isa);
    let mut plans = vec![plan, CpuPlan { splits: 3, rows: Rows::Head, ..plan }];
    if isa.has_dims() {
        plans.push(CpuPlan { lanes: Lanes::Dims, ..plan });
        plans.push(CpuPlan { lanes: Lanes::Dims, rows: Rows::Head, splits: 2, ..plan });
    }
    plans
}

fn everywhere() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().chain(Isa::PORTABLE)
}

/// Every pair of features occurs, with other features drawn at random.
#[test]
fn every_pair_of_features() {
    let isas: Vec<Isa> = everywhere().collect();
    let mut pairs = HashSet::new();
    let programs = || (0..draw::SCORES).flat_map(|score| (0..draw::MASKS).map(move |mask| (score, mask)));
    for (seed, (score, mask)) in (0..4).flat_map(|_| programs()).enumerate() {
        let case = Case::draw(seed as u64, score, mask);
        for (i, a) in case.features.iter().enumerate() {
            pairs.extend(case.features[i + 1..].iter().map(|b| (*a, *b)));
        }
        let all = plans(isas[seed % isas.len()]);
        check_case(&case, &[all[seed / isas.len() % all.len()], CpuPlan::for_problem(&case.problem)]);
    }
    let counts = draw::COUNTS;
    let expected: usize = (0..counts.len()).map(|i| counts[i] * counts[i + 1..].iter().sum::<usize>()).sum();
    assert_eq!(pairs.len(), expected);
}

/// Each program alone, on every instruction set and in every arithmetic, with enough rows for all of them.
#[test]
fn each_program_in_every_arithmetic() {
    for (score, mask) in (0..draw::SCORES).map(|s| (s, 0)).chain((1..draw::MASKS).map(|m| (0, m))) {
        for (isa, dtype) in everywhere().zip([DType::F32, DType::F16, DType::Bf16].into_iter().cycle()) {
            let mut case = Case::plain(dtype, score, mask);
            case.seed = mask as u64;
            check_case(&case, &plans(isa));
        }
    }
}

fn packed(rows: &[i32], keys: &[i32]) -> (Problem, Others) {
    let sums = |lengths: &[i32]| {
        let ends = lengths.iter().scan(0, |end, n| {
            *end += n;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect::<Vec<i32>>()
    };
    let longest = |lengths: &[i32]| lengths.iter().copied().max().unwrap() as usize;
    let mut p = Problem::new(rows.len(), 4, longest(rows), 24, DType::F32);
    (p.heads_kv, p.seq_kv) = (2, longest(keys));
    let total = |lengths: &[i32]| Some(lengths.iter().sum::<i32>() as usize);
    (p.lengths.q.packed, p.lengths.kv.packed) = (total(rows), total(keys));
    let cumulative = [(LengthArray::CumulativeQ, rows), (LengthArray::CumulativeKv, keys)];
    let others = cumulative.map(|(array, lengths)| (Operand::Lengths(array), sums(lengths).into()));
    let strides = |heads: usize, rows: usize| Layout::Bshd.strides(heads, rows, 24);
    (p.q, p.out) = (strides(4, 1), strides(4, 1));
    (p.k, p.v) = (strides(2, 1), strides(2, 1));
    (p, others.into_iter().collect())
}

#[test]
fn packed_sequences_of_all_lengths() {
    let (rows, keys) = ([0, 1, 150, 3, 0, 40, 7], [5, 0, 300, 3, 0, 9, 130]);
    let (p, others) = packed(&rows, &keys);
    for band in [Band::FULL, Band::CAUSAL, Band::CAUSAL_TOP_LEFT, Band::window(20, 3)] {
        let mut p = p.clone().with_band(band);
        for sink in [false, true] {
            p.score.sink = sink;
            let mut others = others.clone();
            if sink {
                others.insert(Operand::Sinks, vec![0.5f32, -3.0, 2.0, -1.0].into());
            }
            for isa in Isa::available() {
                check_plans(&p, &Inputs::<f32>::random(&p, 5, 2.0), &others, &plans(isa));
            }
        }
    }
}

/// A sequence alone gives the same bits as among other sequences.
#[test]
fn neighbours_change_no_bits() {
    let (p, others) = packed(&[60, 150, 3], &[90, 200, 70]);
    let inputs = Inputs::<f32>::random(&p, 6, 2.0);
    let plan = CpuPlan { block_q: 24, ..small_plan(Isa::best()) };
    let all = run(&p, &inputs, &others, &plan, true);
    let mut alone = Problem { batch: 1, seq_q: 150, seq_kv: 200, ..p.clone() };
    alone.lengths = problem::Lengths::EVEN;
    let part = |x: &[f32], from: usize, rows: usize, heads: usize| {
        x[from * heads * 24..][..rows * heads * 24].to_vec()
    };
    let inputs = Inputs {
        q: part(&inputs.q, 60, 150, 4),
        k: part(&inputs.k, 90, 200, 2),
        v: part(&inputs.v, 90, 200, 2),
    };
    let (out, lse) = run(&alone, &inputs, &Others::default(), &plan, true);
    for head in 0..4 {
        assert!(out[head * 150 * 24..][..150 * 24] == all.0[(head * 213 + 60) * 24..][..150 * 24]);
        assert!(lse[head * 150..][..150] == all.1[head * 213 + 60..][..150]);
    }
}

#[test]
fn sinks_of_all_sizes() {
    let mut p = Problem::new(1, 6, 50, 16, DType::F32).with_band(Band::CAUSAL);
    p.seq_kv = 30; // the first rows see no key
    p = p.with_layout(Layout::Bhsd);
    p.score.sink = true;
    let of = |sinks: [f32; 6]| Others::from_iter([(Operand::Sinks, sinks.to_vec().into())]);
    let others = of([0.0, 1e4, -1e4, f32::NEG_INFINITY, f32::NAN, 90.0]);
    for isa in Isa::available() {
        check_plans(&p, &Inputs::<f32>::random(&p, 7, 3.0), &others, &plans(isa));
    }
    let (inputs, others) = (Inputs::<f32>::random(&p, 7, 3.0), of([f32::INFINITY; 6]));
    let (out, lse) = run(&p, &inputs, &others, &small_plan(Isa::best()), true);
    assert!(lse.iter().all(|x| x.is_nan()) && out[25 * 16..50 * 16].iter().all(|x| x.is_nan()));
}

/// Rows that continue from a result over other keys: without a key on either side, and with most of their
/// weight on either side, beside sinks, and with divided keys.
#[test]
fn results_of_other_keys_continue() {
    let mut p = Problem::new(2, 4, 50, 16, DType::F32).with_band(Band::CAUSAL);
    p.seq_kv = 300;
    for keys in [300, 30, 0] {
        p.seq_kv = keys; // of 30 keys, the first rows see none
        let mut p = p.clone().with_layout(Layout::Bhsd);
        p.pass = Pass::Forward { lse: true, continues: true, invariant: None };
        let rows = 2 * 4 * 50;
        let out: Vec<f32> = (0..rows * 16).map(|i| (i % 37) as f32 / 9.0 - 2.0).collect();
        let lse = (0..rows).map(|i| [f32::NEG_INFINITY, -30.0, 0.5, 4.0, 80.0][i % 5]).collect::<Vec<f32>>();
        let mut others =
            Others::from_iter([(Operand::OutBefore, out.into()), (Operand::LseBefore, lse.into())]);
        for sink in [false, true] {
            p.score.sink = sink;
            if sink {
                others.insert(Operand::Sinks, vec![0.5f32, -3.0, 2.0, f32::NEG_INFINITY].into());
            }
            for isa in Isa::available() {
                check_plans(&p, &Inputs::<f32>::random(&p, 5, 2.0), &others, &plans(isa));
            }
        }
    }
}

/// Tables as the inputs beside Q, K and V.
fn tables<const N: usize>(tables: [Data; N]) -> Others {
    (0..).zip(tables).map(|(i, table)| (Operand::Table(i), table)).collect()
}

/// Logits of ±10⁴ from a bias, rows that a bias of −∞ hides, and a row max that rises from block to block.
#[test]
fn large_and_infinite_biases() {
    let mut p = Problem::new(1, 2, 40, 16, DType::F32).with_seq_kv(100, Layout::Bhsd);
    p.programs.score = Some(Program::new(&lib::bias(0)).unwrap());
    p.programs.tables = vec![Table::dense(ElementType::F32, &[1, 2, 40, 100])];
    let bias = |i: usize| {
        let (row, key) = (i / 100 % 40, i % 100);
        match row % 5 {
            0 => f32::NEG_INFINITY,
            1 => key as f32 * 30.0 - 1500.0,
            2 => [-1e4, 1e4][key % 2],
            3 if key > 3 => f32::NEG_INFINITY,
            _ => -1e4,
        }
    };
    let others = tables([(0..8000).map(bias).collect::<Vec<f32>>().into()]);
    for isa in Isa::available() {
        check_plans(&p, &Inputs::<f32>::random(&p, 8, 3.0), &others, &plans(isa));
    }
}

/// Keys in blocks that a mask hides are not read, whether the mask is decided from ranges or from its values.
#[test]
fn what_a_mask_hides_changes_no_bits() {
    let document = lib::document(0);
    let tensor = lib::mask_tensor(1);
    for (mask, name) in [(document, "document"), (tensor, "tensor")] {
        let mut p = Problem::new(1, 3, 90, 16, DType::F16);
        p.programs.mask = Some(Program::new(&mask).unwrap());
        p.programs.tables = vec![
            Table::dense(ElementType::I32, &[1, 90]),
            Table { dtype: ElementType::U8, extents: vec![1, 3, 90, 90], strides: vec![0, 0, 90, 1] },
        ];
        let documents: Vec<i32> = (0..90).map(|i| i / 30).collect();
        let mask: Vec<u8> = (0..90 * 90).map(|i| u8::from(i / 90 / 30 == i % 90 / 30)).collect();
        let others = tables([documents.into(), mask.into()]);
        let clean = Inputs::<f16>::random(&p, 9, 2.0);
        let mut spoiled = clean.clone();
        for head in 0..3 {
            // The second document of three.
            let hidden = (head * 90 + 30) * 16..(head * 90 + 60) * 16;
            spoiled.k[hidden.clone()].fill(f16::NAN);
            spoiled.v[hidden].fill(f16::INFINITY);
        }
        for isa in everywhere() {
            for plan in plans(isa) {
                let of = |inputs| run(&p, inputs, &others, &plan, true);
                let ((out, lse), (other, other_lse)) = (of(&clean), of(&spoiled));
                for row in (0..270).filter(|row| row % 90 / 30 != 1) {
                    // A head with such elements is computed in f32, whose sums differ from those of terms.
                    let same = |a: f64, b: f64| if isa.wide() == isa { a == b } else { (a - b).abs() < 4e-3 };
                    let (a, b) = (&out[row * 16..][..16], &other[row * 16..][..16]);
                    assert!(a.iter().zip(b).all(|(&a, &b)| same(a, b)), "{name} {plan:?} row {row}");
                    assert!(same(lse[row], other_lse[row]), "{name} {plan:?} row {row}");
                }
            }
        }
    }
}

/// Few rows read elements of keys and values in place. With a mask, even one that shows all, they are widened
/// to memory first. Both ways have the same sums.
#[test]
fn elements_in_place_change_no_bits() {
    fn of<T: Element>(dtype: DType, isa: Isa, layout: Layout) {
        let heads = |p: Problem| Problem { heads_kv: 2, ..p };
        let p = heads(Problem::new(2, 8, 2, 96, dtype).with_seq_kv(203, Layout::Bhsd));
        let p = p.with_layout(layout).with_band(Band::CAUSAL);
        let mut masked = p.clone();
        masked.programs.mask = Some(Program::new(&lib::key().ge(0)).unwrap());
        let inputs = Inputs::<T>::random(&p, 12, 2.0);
        for rows in [Rows::Group, Rows::Head] {
            let plan = CpuPlan { lanes: Lanes::Dims, rows, block_kv: 64, ..small_plan(isa) };
            let of = |p| run(p, &inputs, &Others::default(), &plan, true);
            assert!(of(&p) == of(&masked), "{plan:?} {dtype} {layout:?}");
        }
    }
    for isa in Isa::available().into_iter().filter(|isa| isa.has_dims()) {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            of::<f32>(DType::F32, isa, layout);
            of::<f16>(DType::F16, isa, layout);
            of::<bf16>(DType::Bf16, isa, layout);
        }
    }
}

/// Where rows of heads alternate in memory, a thread computes heads in turns. Their bits do not change.
#[test]
fn heads_in_turns_change_no_bits() {
    let (heads, keys, dim) = (8, 203, 32);
    let dense = Problem::new(2, heads, 1, dim, DType::F16).with_seq_kv(keys, Layout::Bhsd);
    let alternating = dense.clone().with_layout(Layout::Bshd);
    let inputs = Inputs::<f16>::random(&dense, 13, 2.0);
    let alternate = |from: &[f16]| {
        let at = |i: usize| (i / dim % heads * keys + i / dim / heads % keys) * dim + i % dim;
        let of_entry = heads * keys * dim;
        (0..from.len()).map(|i| from[i / of_entry * of_entry + at(i % of_entry)]).collect::<Vec<f16>>()
    };
    let in_turns = Inputs { q: inputs.q.clone(), k: alternate(&inputs.k), v: alternate(&inputs.v) };
    for isa in Isa::available().into_iter().filter(|isa| isa.has_dims()) {
        for splits in [1, 3] {
            let plan = CpuPlan { lanes: Lanes::Dims, threads: 1, block_kv: 64, splits, ..small_plan(isa) };
            let of = |p, inputs| run(p, inputs, &Others::default(), &plan, true);
            assert!(of(&dense, &inputs) == of(&alternating, &in_turns), "{plan:?}");
        }
    }
}

#[test]
fn parameters_change_the_answer_and_not_the_plan() {
    let mut p = Problem::new(1, 2, 64, 16, DType::F32);
    let score = lib::score() * lib::float(0);
    let mask: Expr = lib::chunk(lib::int(0));
    p.programs.score = Some(Program::new(&score).unwrap());
    p.programs.mask = Some(Program::new(&mask).unwrap());
    let plan = |p: &Problem| CpuPlan::for_problem(p);
    let of = |floats: f32, ints: i32| {
        let mut p = p.clone();
        (p.programs.floats, p.programs.ints) = (vec![floats], vec![ints]);
        check_plans(&p, &Inputs::<f32>::random(&p, 9, 2.0), &Others::default(), &[plan(&p)]);
        let (out, _) = run(&p, &Inputs::<f32>::random(&p, 9, 2.0), &Others::default(), &plan(&p), true);
        (plan(&p), out)
    };
    let (first, other, third) = (of(0.5, 16), of(2.0, 16), of(0.5, 10));
    assert!(first.0 == other.0 && first.0 == third.0 && first.1 != other.1 && first.1 != third.1);
}

#[test]
fn wrong_operands_are_refused() {
    let refused = |p: &Problem, others: &Others| {
        let inputs = Inputs::<f32>::random(p, 1, 1.0);
        let mut out = vec![POISON; inputs.q.len()];
        let operands = kernel_inputs(&all(&inputs, others));
        let error = attention_with(p, &operands, &mut out, None, &small_plan(Isa::Portable)).unwrap_err();
        assert!(out.iter().all(|&x| x == POISON));
        error
    };
    let lengths = |array, lengths: Vec<i32>| (Operand::Lengths(array), Data::from(lengths));
    let message = |p: &Problem, others: &Others, (operand, data)| {
        let mut others = others.clone();
        others.insert(operand, data);
        refused(p, &others).to_string()
    };
    use LengthArray::{CumulativeKv, CumulativeQ, LeftPad, UsedKv, UsedQ};
    let (p, others) = packed(&[3, 4], &[5, 6]);
    for (wrong, told) in [
        (
            lengths(CumulativeQ, vec![0, 4, 3]),
            "'3' for cu_seqlens_q[2]: expected at least the element before it, 4",
        ),
        (
            lengths(CumulativeQ, vec![0, 4, 8]),
            "'8' for cu_seqlens_q[2]: expected 0 to 7, the rows of the tensor",
        ),
        (
            lengths(CumulativeQ, vec![-1, 4, 7]),
            "'-1' for cu_seqlens_q[0]: expected 0 to 7, the rows of the tensor",
        ),
        (
            lengths(CumulativeKv, vec![0, 0, i32::MAX]),
            "cu_seqlens_k[2]: expected 0 to 11, the rows of the tensor",
        ),
        (
            lengths(CumulativeKv, vec![0, 0, 11]),
            "'11' for cu_seqlens_k[2]: expected at most 6: the element before it (0) plus max_seqlen_k (6)",
        ),
        (lengths(CumulativeKv, vec![0, 5]), "'2' for the number of elements of cu_seqlens_k: expected 3"),
        (lengths(UsedQ, vec![1, 1]), "'2' for the number of elements of seqused_q: expected 0"),
        ((Operand::Sinks, vec![1.0f32].into()), "'1' for the number of elements of sinks: expected 0"),
    ] {
        let error = message(&p, &others, wrong);
        assert!(error.contains(&format!("invalid value {told}")) || error.ends_with(told), "{error}");
    }
    let mut p = Problem::new(2, 4, 8, 24, DType::F32);
    p.lengths.q = SideLengths { packed: None, used: true };
    p.lengths.kv.used = true;
    p.lengths.left_padded = true;
    p.programs.score = Some(Program::new(&lib::alibi(0)).unwrap());
    p.programs.tables = vec![Table::dense(ElementType::F32, &[2, 4])];
    let right: Others = [
        lengths(UsedQ, vec![3, 8]),
        lengths(UsedKv, vec![3, 8]),
        lengths(LeftPad, vec![0, 8]),
        (Operand::Table(0), vec![0.5f32; 8].into()),
    ]
    .into_iter()
    .collect();
    let message = |wrong| message(&p, &right, wrong);
    assert!(message(lengths(UsedQ, vec![9, 1])).contains("'9' for seqused_q[0]: expected 0 to 8"));
    assert!(message(lengths(UsedKv, vec![0, -2])).contains("'-2' for seqused_k[1]: expected 0 to 8"));
    assert!(message(lengths(LeftPad, vec![0, 9])).contains("'9' for leftpad_k[1]: expected 0 to 8"));
    let mut without = right.clone();
    without.remove(Operand::Table(0));
    let error = ProblemError::Lengths { argument: "table_0", len: 0, expected: 8 };
    assert_eq!(refused(&p, &without), CpuError::Problem(error));
    let with = |data| {
        let mut others = right.clone();
        others.insert(Operand::Table(0), data);
        others
    };
    let error = ProblemError::OperandTooShort { argument: "table_0", len: 7, needed: 8 };
    assert_eq!(refused(&p, &with(vec![0.5f32; 7].into())), CpuError::Problem(error));
    let (dtype, expected) = ("i32", "f32");
    let error = ProblemError::OperandType { argument: "table_0", dtype, expected };
    assert_eq!(refused(&p, &with(vec![0i32; 8].into())), CpuError::Problem(error));
}
