//! Lengths, sinks, biases, masks and programs through the façade, against the oracle.

#[path = "common/draw.rs"]
mod draw;

use draw::draw;
use flashcore::{
    Attention, AttentionError, Band, DType, Device, ElementType, Layout, LengthValues, Problem, TableView,
    TensorView, attention, library as lib,
};
use oracle::{Reference, oracle_with};
use problem::{Expr, LengthArray, Lengths, Operand, Operands, Program, Programs, SideLengths, Table};

const BATCH: usize = 2;
const HEADS: usize = 4;
const ROWS: usize = 19;
const KEYS: usize = 33;
const DIM: usize = 16;

/// The inputs of even problems, `[batch, sequence, heads, dim]`.
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Inputs {
    fn new() -> Inputs {
        let (q, kv) = (BATCH * ROWS * HEADS * DIM, BATCH * KEYS * 2 * DIM);
        Inputs { q: draw(q, 1), k: draw(kv, 2), v: draw(kv, 3) }
    }

    fn call(&self) -> Attention<'_, f32> {
        let view = |data, shape| TensorView::dense(data, shape, Layout::Bshd).unwrap();
        let kv = [BATCH, 2, KEYS, DIM];
        attention(view(&self.q, [BATCH, HEADS, ROWS, DIM]), view(&self.k, kv), view(&self.v, kv))
            .device(Device::Cpu)
    }

    fn operands(&self) -> Operands<'_> {
        Operands::qkv(&self.q, &self.k, &self.v)
    }
}

fn problem([batch, rows, keys]: [usize; 3]) -> Problem {
    let mut problem = Problem::new(batch, HEADS, rows, DIM, DType::F32);
    problem.heads_kv = 2;
    problem.seq_kv = keys;
    problem = problem.with_layout(Layout::Bshd);
    problem.out = Layout::Bhsd.strides(HEADS, rows, DIM);
    problem
}

fn compare(call: Attention<'_, f32>, exact: &Reference) {
    let output = call.run().unwrap();
    assert_eq!(output.data.len(), exact.out.len());
    for (i, (ours, exact)) in output.data.iter().zip(&exact.out).enumerate() {
        // The oracle leaves rows of no sequence NaN; the façade returns 0.
        let exact = if exact.is_nan() { 0.0 } else { *exact };
        assert!((f64::from(*ours) - exact).abs() < 2e-6, "element {i}: {ours} {exact}");
    }
    for (i, (ours, exact)) in output.lse.iter().zip(&exact.lse).enumerate() {
        let exact = if exact.is_nan() { f64::NEG_INFINITY } else { *exact };
        let equal = f64::from(*ours) == exact || (f64::from(*ours) - exact).abs() < 1e-5;
        assert!(equal, "lse {i}: {ours} {exact}");
    }
}

/// The oracle's result for the problem of [`Inputs`] with a change.
fn exact(operands: &Operands<'_>, change: impl FnOnce(&mut Problem)) -> Reference {
    let mut problem = problem([BATCH, ROWS, KEYS]);
    change(&mut problem);
    oracle_with(&problem, operands).unwrap()
}

/// Programs as the façade must state them.
fn stated(score: Option<&str>, mask: Option<&str>, tables: &[Table]) -> Programs {
    let parse = |text: &str| text.parse::<Program>().unwrap();
    Programs {
        score: score.map(parse),
        mask: mask.map(parse),
        tables: tables.to_vec(),
        ..Programs::default()
    }
}

#[test]
fn sinks_enter_the_denominator() {
    let (inputs, sinks) = (Inputs::new(), draw(HEADS, 4));
    let operands = inputs.operands().with(Operand::Sinks, &sinks);
    let band = Band::window(3, 0);
    let exact = exact(&operands, |p| (p.score.sink, p.band) = (true, band));
    compare(inputs.call().sink(&sinks).band(band), &exact);
}

#[test]
fn slopes_are_per_head_or_per_batch_entry_and_head() {
    let inputs = Inputs::new();
    let text = "s - t0[b, h] * float(abs(q + k_len - q_len - k))";
    for (len, stride) in [(HEADS, 0), (BATCH * HEADS, HEADS as i64)] {
        let slopes = draw(len, 5);
        let table = Table { dtype: ElementType::F32, extents: vec![BATCH, HEADS], strides: vec![stride, 1] };
        let operands = inputs.operands().with(Operand::Table(0), &slopes);
        let exact = exact(&operands, |p| p.programs = stated(Some(text), None, &[table]));
        compare(inputs.call().alibi(&slopes), &exact);
    }
}

#[test]
fn a_bias_and_a_mask_broadcast() {
    let inputs = Inputs::new();
    let (bias, mask) = (draw(HEADS * KEYS, 6), draw(BATCH * ROWS * KEYS, 7));
    let mask: Vec<bool> = mask.into_iter().map(|x| x > 0.3).collect();
    let (rows, keys) = (ROWS as i64, KEYS as i64);
    let tables = [
        Table {
            dtype: ElementType::F32,
            extents: vec![BATCH, HEADS, ROWS, KEYS],
            strides: vec![0, keys, 0, 1],
        },
        Table {
            dtype: ElementType::U8,
            extents: vec![BATCH, HEADS, ROWS, KEYS],
            strides: vec![rows * keys, 0, keys, 1],
        },
    ];
    let bytes: Vec<u8> = mask.iter().map(|&x| x.into()).collect();
    let programs = stated(Some("s + t0[b, h, q, k]"), Some("n1[b, h, q, k] != 0"), &tables);
    let operands = inputs.operands().with(Operand::Table(0), &bias).with(Operand::Table(1), &bytes);
    let exact = exact(&operands, |p| (p.programs, p.band) = (programs, Band::CAUSAL));
    let call = inputs.call().causal().bias(TableView::dense(&bias[..], &[HEADS, 1, KEYS]).unwrap());
    compare(call.mask(TableView::dense(&mask[..], &[BATCH, 1, ROWS, KEYS]).unwrap()), &exact);
}

#[test]
fn a_score_program_comes_before_slopes_and_bias() {
    let inputs = Inputs::new();
    let (slopes, bias, own) = (draw(HEADS, 8), draw(KEYS, 9), draw(HEADS, 10));
    let tables = [
        Table::dense(ElementType::F32, &[HEADS]),
        Table { dtype: ElementType::F32, extents: vec![BATCH, HEADS], strides: vec![0, 1] },
        Table { dtype: ElementType::F32, extents: vec![BATCH, HEADS, ROWS, KEYS], strides: vec![0, 0, 0, 1] },
    ];
    let text = "(s * t0[h] * f0 - t1[b, h] * float(abs(q + k_len - q_len - k))) + t2[b, h, q, k]";
    let mut programs = stated(Some(text), Some("(q / i0 == k / i0)"), &tables);
    (programs.floats, programs.ints) = (vec![1.5], vec![7]);
    let tables = (0..).zip([&own, &slopes, &bias]).map(|(i, table)| (Operand::Table(i), table.into()));
    let mut operands = inputs.operands();
    operands.extend(tables);
    let exact = exact(&operands, |p| p.programs = programs);
    let program = lib::score() * Expr::load(0, true, [lib::head()]) * lib::float(0);
    let call = inputs
        .call()
        .bias(TableView::dense(&bias[..], &[KEYS]).unwrap())
        .alibi(&slopes)
        .score(program)
        .mask_program(lib::block_diagonal(lib::int(0)))
        .tables([TableView::dense(&own[..], &[HEADS]).unwrap()])
        .parameters(&[1.5], &[7]);
    compare(call, &exact);
}

#[test]
fn packed_and_padded_sequences() {
    let (starts_q, starts_k, used) = ([0, 7, 7, 30], [0, 12, 20, 50], [12, 0, 17]);
    let (q, kv) = (draw(30 * HEADS * DIM, 11), draw(50 * 2 * DIM, 12));
    let lengths = LengthValues {
        cumulative_q: &starts_q,
        cumulative_kv: &starts_k,
        used_kv: &used,
        ..LengthValues::default()
    };
    let view = |data, heads, rows| TensorView::dense(data, [1, heads, rows, DIM], Layout::Bshd).unwrap();
    let call = attention(view(&q, HEADS, 30), view(&kv, 2, 50), view(&kv, 2, 50)).device(Device::Cpu);
    let mut problem = problem([3, 23, 30]).with_band(Band::CAUSAL);
    problem.lengths = Lengths {
        q: SideLengths { packed: Some(30), used: false },
        kv: SideLengths { packed: Some(50), used: true },
        left_padded: false,
    };
    problem.out = Layout::Bhsd.strides(HEADS, 30, DIM);
    let operands = Operands::qkv(&q, &kv, &kv)
        .with(Operand::Lengths(LengthArray::CumulativeQ), &starts_q)
        .with(Operand::Lengths(LengthArray::CumulativeKv), &starts_k)
        .with(Operand::Lengths(LengthArray::UsedKv), &used);
    let exact_packed = oracle_with(&problem, &operands).unwrap();
    compare(call.causal().lengths(lengths), &exact_packed);

    let inputs = Inputs::new();
    let lengths =
        LengthValues { used_q: &[19, 5], used_kv: &[33, 20], left_pad: &[0, 9], ..LengthValues::default() };
    let operands = inputs
        .operands()
        .with(Operand::Lengths(LengthArray::UsedQ), lengths.used_q)
        .with(Operand::Lengths(LengthArray::UsedKv), lengths.used_kv)
        .with(Operand::Lengths(LengthArray::LeftPad), lengths.left_pad);
    let even = |p: &mut Problem| {
        let used = SideLengths { packed: None, used: true };
        p.lengths = Lengths { q: used, kv: used, left_padded: true };
    };
    compare(inputs.call().lengths(lengths), &exact(&operands, even));
}

/// Keys beyond a length and hidden keys may hold NaN.
#[test]
fn what_is_not_seen_may_be_nan() {
    let mut inputs = Inputs::new();
    let lengths = LengthValues { used_kv: &[20, 0], ..LengthValues::default() };
    let clean = inputs.call().lengths(lengths).run().unwrap();
    for batch in 0..BATCH {
        let first = (batch * KEYS + if batch == 0 { 20 } else { 0 }) * 2 * DIM;
        let end = (batch + 1) * KEYS * 2 * DIM;
        inputs.k[first..end].fill(f32::NAN);
        inputs.v[first..end].fill(f32::INFINITY);
    }
    let dirty = inputs.call().lengths(lengths).run().unwrap();
    assert_eq!(clean, dirty);
    assert!(clean.data[HEADS * ROWS * DIM..].iter().all(|&x| x == 0.0));
    assert!(clean.lse[HEADS * ROWS..].iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
fn a_row_that_sees_nothing_is_zero_and_its_lse_the_sink() {
    let (inputs, sinks) = (Inputs::new(), [0.5, -1.0, 2.0, 0.0]);
    let nothing = || inputs.call().mask_program(Expr::from(false));
    let out = nothing().run().unwrap();
    assert!(out.data.iter().all(|&x| x == 0.0) && out.lse.iter().all(|&x| x == f32::NEG_INFINITY));
    let out = nothing().sink(&sinks).run().unwrap();
    assert!(out.data.iter().all(|&x| x == 0.0));
    for (i, lse) in out.lse.iter().enumerate() {
        assert_eq!(*lse, sinks[i / ROWS % HEADS]);
    }
}

#[test]
fn refusals_name_the_argument_the_value_and_what_is_accepted() {
    let inputs = Inputs::new();
    let numbers = draw(64, 13);
    let table = |shape: &[usize]| TableView::dense(&numbers[..], shape).unwrap();
    let told = |call: Attention<'_, f32>| call.run().unwrap_err().to_string();
    assert_eq!(
        told(inputs.call().sink(&numbers[..3])),
        "invalid value '3' for the number of elements of sink: expected heads_q = 4"
    );
    assert_eq!(
        told(inputs.call().alibi(&numbers[..5])),
        "invalid value '5' for the number of slopes of alibi: expected heads_q = 4, or batch · heads_q = 8"
    );
    assert_eq!(
        told(inputs.call().bias(table(&[2, 7]))),
        "invalid value '[2, 7]' for the shape of bias: expected one that broadcasts to [batch, heads_q, seq_q, \
         seq_kv] = [2, 4, 19, 33]"
    );
    assert_eq!(
        told(inputs.call().mask(table(&[1]))),
        "invalid value 'f32' for the element type of mask: expected bool, u8 or i32"
    );
    let whole = [1i32];
    assert_eq!(
        told(inputs.call().bias(TableView::dense(&whole[..], &[1]).unwrap())),
        "invalid value 'i32' for the element type of bias: expected f32, f16 or bf16"
    );
    assert_eq!(
        told(inputs.call().score(lib::score().ge(0.0))),
        "invalid score program: its result is a bool; expected a float"
    );
    assert_eq!(
        told(inputs.call().score(Expr::load(0, true, [lib::query()])).tables([table(&[3])])),
        "invalid score program: it reads t0 at 0 to 18 in dimension 0, which has 3 elements"
    );
    assert_eq!(
        told(inputs.call().score(lib::score() + lib::float(0))),
        "invalid score program: the program reads float parameter 0 (f0), but 0 were given"
    );
    assert_eq!(
        told(inputs.call().mask_program(lib::score().ge(0.0))),
        "invalid mask program: a mask cannot read the score"
    );
    let mixed = told(inputs.call().score(lib::score() + lib::causal()));
    assert_eq!(mixed, "invalid score program: + takes two values of one type, not a float and a bool");
    let lengths = |used_kv| LengthValues { used_kv, ..LengthValues::default() };
    assert_eq!(
        told(inputs.call().lengths(lengths(&[1, 34]))),
        "invalid value '34' for used_kv[1]: expected 0 to 33"
    );
    assert_eq!(
        told(inputs.call().lengths(lengths(&[1]))),
        "invalid value '1' for the number of elements of used_kv: expected 2"
    );
    let packed = LengthValues { cumulative_q: &[0, 3], ..LengthValues::default() };
    assert_eq!(
        told(inputs.call().lengths(packed)),
        "invalid value '2' for the batch of q: expected 1, since cumulative_q packs all sequences"
    );
    let counts = |cumulative_q, cumulative_kv| {
        let view = || TensorView::dense(&numbers[..16], [1, 1, 2, 8], Layout::Bhsd).unwrap();
        let lengths = LengthValues { cumulative_q, cumulative_kv, ..LengthValues::default() };
        attention(view(), view(), view()).lengths(lengths).run().unwrap_err().to_string()
    };
    assert_eq!(
        counts(&[0, 1, 2], &[0, 2]),
        "invalid value '1' for the number of sequences of cumulative_kv: expected 2, the number of sequences \
         of cumulative_q"
    );
    assert_eq!(
        counts(&[0, 1, 2], &[]),
        "invalid value '1' for the batch of k: expected 2, the number of sequences of cumulative_q"
    );
    let error = TableView::strided(&numbers[..], &[2], &[-1]).unwrap_err();
    assert!(matches!(error, AttentionError::Table { .. }), "{error}");
    let many = inputs.call().score(lib::score()).tables((0..9).map(|_| table(&[1])));
    assert_eq!(told(many), "invalid value '9' for the number of tables: expected at most 8");
}

/// A mask and a window that contradict hide every key.
#[test]
fn contradicting_masks_hide_everything() {
    let inputs = Inputs::new();
    let out = inputs.call().causal().mask_program(lib::key().gt(lib::level())).run().unwrap();
    assert!(out.data.iter().all(|&x| x == 0.0) && out.lse.iter().all(|&x| x == f32::NEG_INFINITY));
}
