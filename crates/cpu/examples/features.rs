//! Times attention with lengths and programs on one core: `cargo run --release -p flashcore-cpu --example
//! features`. Each line has the median of seven calls in ms, and its ratio to the call without the feature.

use std::time::Instant;

use flashcore_cpu::{CpuPlan, Element, Input, attention_with};
use half::bf16;
use problem::program::library as lib;
use problem::{
    Band, DType, ElementType, Elements, Expr, Layout, LengthArray, Operand, Operands, Problem, Program,
    Table, Tensor,
};

const HEADS: usize = 8;
const ROWS: usize = 1024;
const DIM: usize = 64;

/// The median time of a call in milliseconds. `others` are the inputs beside Q, K and V.
fn time<T: Element>(problem: &Problem, others: &Operands<'_>) -> f64 {
    let draw = |tensor, seed: usize| -> Vec<T> {
        let (elements, _) = problem.span(tensor).unwrap();
        (0..elements).map(|i| T::from_f32(((i * 7919 + seed) % 1009) as f32 / 504.5 - 1.0)).collect()
    };
    let (q, k, v) = (draw(Tensor::Q, 1), draw(Tensor::K, 2), draw(Tensor::V, 3));
    let mut out = draw(Tensor::Out, 4);
    let plan = CpuPlan::for_threads(problem, 1);
    let mut inputs = others.map(|_, &elements| Input::from(elements));
    inputs.extend(
        [(Operand::Q, &q), (Operand::K, &k), (Operand::V, &v)].map(|(operand, x)| (operand, x[..].into())),
    );
    let mut call = || {
        let start = Instant::now();
        attention_with(problem, &inputs, &mut out, None, &plan).unwrap();
        start.elapsed().as_secs_f64() * 1e3
    };
    call();
    let mut times: Vec<f64> = (0..7).map(|_| call()).collect();
    times.sort_by(f64::total_cmp);
    times[3]
}

fn main() {
    let dense = Problem::new(1, HEADS, ROWS, DIM, DType::F32);
    let none = Operands::default();
    let base = time::<f32>(&dense, &none);
    let show = |name: &str, ms: f64| println!("{name:32} {ms:8.2} ms  {:5.2}", ms / base);
    show("dense f32", base);
    let with = |score: Option<Expr>, mask: Option<Expr>, tables: &[Table]| {
        let mut p = dense.clone();
        p.programs.score = score.map(|expr| Program::new(&expr).unwrap());
        p.programs.mask = mask.map(|expr| Program::new(&expr).unwrap());
        p.programs.tables = tables.to_vec();
        p
    };
    let causal = dense.clone().with_band(Band::CAUSAL);
    show("causal", time::<f32>(&causal, &none));
    let run = |name: &str, p: &Problem, data: &[Elements<'_>]| {
        let tables = (0..).zip(data).map(|(i, &table)| (Operand::Table(i), table));
        show(name, time::<f32>(p, &tables.collect()));
    };
    let squares = [1, HEADS, ROWS, ROWS];
    let bias: Vec<f32> = (0..HEADS * ROWS * ROWS).map(|i| (i % 977) as f32 / 500.0 - 1.0).collect();
    let narrow: Vec<bf16> = bias.iter().map(|&x| bf16::from_f32(x)).collect();
    let bytes: Vec<u8> = (0..ROWS * ROWS).map(|i| u8::from(i * 31 % 7 != 0)).collect();
    let documents: Vec<i32> = (0..ROWS as i32).map(|i| i / (ROWS as i32 / 8)).collect();
    let of = |table| [table];
    run(
        "bias [1, h, s, s] f32",
        &with(Some(lib::bias(0)), None, &of(Table::dense(ElementType::F32, &squares))),
        &[Elements::F32(&bias)],
    );
    run(
        "bias [1, h, s, s] bf16",
        &with(Some(lib::bias(0)), None, &of(Table::dense(ElementType::Bf16, &squares))),
        &[Elements::Bf16(&narrow)],
    );
    let broadcast =
        Table { dtype: ElementType::U8, extents: squares.to_vec(), strides: vec![0, 0, ROWS as i64, 1] };
    run(
        "boolean mask [1, 1, s, s]",
        &with(None, Some(lib::mask_tensor(0)), &[broadcast]),
        &[Elements::U8(&bytes)],
    );
    run(
        "ALiBi",
        &with(Some(lib::alibi(0)), None, &of(Table::dense(ElementType::F32, &[1, HEADS]))),
        &[Elements::F32(&[0.5; HEADS])],
    );
    run(
        "relative bias",
        &with(
            Some(lib::relative_bias(0, ROWS as i32)),
            None,
            &of(Table::dense(ElementType::F32, &[HEADS, 2 * ROWS])),
        ),
        &[Elements::F32(&bias)],
    );
    run(
        "T5 bias",
        &with(Some(lib::t5_bias(0, 32, 128, true)), None, &of(Table::dense(ElementType::F32, &[HEADS, 32]))),
        &[Elements::F32(&bias)],
    );
    run(
        "8 documents",
        &with(None, Some(lib::document(0)), &of(Table::dense(ElementType::I32, &[1, ROWS]))),
        &[Elements::I32(&documents)],
    );
    run("dilated by 3", &with(None, Some(lib::dilated(3)), &[]), &[]);
    packed();
}

/// One sequence of 2048 tokens and 63 of 100, compared with the sum of their separate times.
fn packed() {
    let lengths: Vec<usize> = std::iter::once(2048).chain([100; 63]).collect();
    let mut sums = vec![0];
    for &length in &lengths {
        sums.push(sums[sums.len() - 1] + length as i32);
    }
    let mut p = Problem::new(64, HEADS, 2048, DIM, DType::F32).with_layout(Layout::Bshd);
    let total = Some(sums[64] as usize);
    (p.lengths.q.packed, p.lengths.kv.packed) = (total, total);
    let cumulative = [LengthArray::CumulativeQ, LengthArray::CumulativeKv];
    let lengths = cumulative.map(|array| (Operand::Lengths(array), (&sums).into()));
    let all = time::<f32>(&p, &lengths.into_iter().collect());
    let alone = |rows, batch| {
        let p = Problem::new(batch, HEADS, rows, DIM, DType::F32).with_layout(Layout::Bshd);
        time::<f32>(&p, &Operands::default())
    };
    let parts = alone(2048, 1) + alone(100, 63);
    println!("packed 2048 + 63 · 100           {all:8.2} ms, parts {parts:.2} ms: {:.2}", all / parts);
}
