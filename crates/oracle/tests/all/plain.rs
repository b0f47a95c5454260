//! The oracle against three nested loops that share nothing with it: neither bands, lengths and programs of
//! `problem`, nor a line of the oracle. Each case states the problem twice, as a [`Problem`] and as
//! [`Plain`].
//!
//! Faults of the kinds that an oracle could have are put into the loops, and the comparison must see each.

use flashcore_oracle::oracle_with;
use problem::{
    Band, Corner, DType, Dropout, E4m3, Elements, LengthArray, Operand, Operands, Pages, Pass, Problem,
    ScaleLayout, Storage, Table,
};

/// The extents of all cases.
const BATCH: usize = 3;
const HEADS_Q: usize = 6;
const HEADS_KV: usize = 2;
const ROWS: usize = 9;
const KEYS: usize = 13;
const DIM: usize = 5;
const DIM_V: usize = 4;

/// One problem in plain terms. Positions count within a sequence.
struct Plain {
    /// For each batch entry: the first row and the number of rows of Q, then the same of K and V. Rows count
    /// from the start of the tensor, `ROWS` or `KEYS` to a batch entry.
    sequences: [[usize; 4]; BATCH],
    /// Rows of a head of Q and of K that lie together: those of a batch entry, of all if they are packed, or
    /// of a page.
    rows: [usize; 2],
    /// The pages of each batch entry's keys; empty if keys are not in pages.
    pages: [&'static [usize]; BATCH],
    /// Whether query `i` of `n` sees key `j` of `m`: `sees(i, j, n, m)`.
    sees: fn(i64, i64, i64, i64) -> bool,
    scale: f64,
    cap: f64,
    /// A logit per query head.
    sinks: [f64; HEADS_Q],
    /// A factor on the scores of each query head, before the cap.
    temperature: [f64; HEADS_Q],
    /// The state of dropout with a probability of 1/4.
    dropout: Option<[i32; 4]>,
    /// A number that is added to the logit of query head `h`, query `i` and key `j`.
    bias: fn(usize, usize, usize) -> f64,
    /// Descale factors of each batch entry and KV head, of Q, K and V.
    factors: [[[f64; HEADS_KV]; BATCH]; 3],
    /// The O and the LSE from which a row continues: those of row `index` of all.
    before: fn(usize) -> Option<([f64; DIM_V], f64)>,
}

const ALL: Plain = Plain {
    sequences: [[0, ROWS, 0, KEYS], [ROWS, ROWS, KEYS, KEYS], [2 * ROWS, ROWS, 2 * KEYS, KEYS]],
    rows: [ROWS, KEYS],
    pages: [&[]; BATCH],
    sees: |_, _, _, _| true,
    scale: 0.25,
    cap: f64::INFINITY,
    sinks: [f64::NEG_INFINITY; HEADS_Q],
    temperature: [1.0; HEADS_Q],
    dropout: None,
    bias: |_, _, _| 0.0,
    factors: [[[1.0; HEADS_KV]; BATCH]; 3],
    before: |_| None,
};

/// Faults of an oracle.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The band is that of the next query.
    NextRow,
    /// The band is aligned to the other corner.
    OtherCorner,
    /// The last key of each sequence is lost.
    LostKey,
    /// Query head `h` reads KV head `h % HEADS_KV`.
    InterleavedHeads,
    /// Each value is that of the key before.
    StaleValue,
    /// The scale is missing.
    NoScale,
    /// The cap is missing.
    NoCap,
    /// The scale is applied after the cap.
    ScaledAfterCap,
    /// The sinks are missing.
    NoSink,
    /// The sink of the first head serves all heads.
    FirstSink,
    /// A head has the temperature of its KV head.
    SharedTemperature,
    /// The mask is that of the first batch entry.
    FirstMask,
    /// The softmax's denominator has only the weights that are kept.
    DroppedSum,
    /// Weights that are kept are not divided by 1 − p.
    NoDropoutScale,
    /// A row continues from its earlier LSE without the O.
    NoOutBefore,
    /// A row continues from the result of the next one.
    NextBefore,
    /// The bias is capped with the logit.
    CappedBias,
    /// All batch entries have the lengths of the first.
    FirstLengths,
    /// A factor is that of the next KV head.
    NextFactor,
    /// The factors of V are applied to the logits too.
    FactorTwice,
    /// All batch entries have the pages of the first.
    FirstPages,
    /// The LSE is a logarithm to base 2.
    BaseTwo,
    /// The softmax's denominator lacks the last key that the row sees.
    ShortSum,
}

impl Fault {
    const ALL: [Fault; 23] = [
        Fault::NextRow,
        Fault::OtherCorner,
        Fault::LostKey,
        Fault::InterleavedHeads,
        Fault::StaleValue,
        Fault::NoScale,
        Fault::NoCap,
        Fault::ScaledAfterCap,
        Fault::NoSink,
        Fault::FirstSink,
        Fault::SharedTemperature,
        Fault::FirstMask,
        Fault::DroppedSum,
        Fault::NoDropoutScale,
        Fault::NoOutBefore,
        Fault::NextBefore,
        Fault::CappedBias,
        Fault::FirstLengths,
        Fault::NextFactor,
        Fault::FactorTwice,
        Fault::FirstPages,
        Fault::BaseTwo,
        Fault::ShortSum,
    ];
}

/// Q, K and V as `[batch][head][row][dim]`.
struct Tensors {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

/// Every row of every sequence: its place among the rows of O, O and the LSE.
fn attend(p: &Plain, x: &Tensors, fault: Option<Fault>) -> Vec<(usize, Vec<f64>, f64)> {
    let has = |of: Fault| fault == Some(of);
    let mut all = Vec::new();
    for b in 0..BATCH {
        for h in 0..HEADS_Q {
            let [q_start, n, k_start, m] = p.sequences[b];
            let (n, mut m) =
                if has(Fault::FirstLengths) { (p.sequences[0][1], p.sequences[0][3]) } else { (n, m) };
            m -= usize::from(has(Fault::LostKey) && m > 0);
            let kv = if has(Fault::InterleavedHeads) { h % HEADS_KV } else { h / (HEADS_Q / HEADS_KV) };
            let factor_head = if has(Fault::NextFactor) { (kv + 1) % HEADS_KV } else { kv };
            let pages = p.pages[if has(Fault::FirstPages) { 0 } else { b }];
            let row_of = |j: usize| match pages.get((k_start + j) / p.rows[1]) {
                Some(page) if !p.pages[b].is_empty() => page * p.rows[1] + (k_start + j) % p.rows[1],
                _ => k_start + j,
            };
            let factors = [0, 1, 2].map(|tensor: usize| p.factors[tensor][b][factor_head]);
            for i in 0..n {
                let mut dropped = vec![1.0; m];
                if let Some(state) = p.dropout {
                    let of_batch = if has(Fault::FirstMask) { 0 } else { b };
                    Dropout::new(0.25, state).factors(of_batch * HEADS_Q + h, i, 0..m, &mut dropped);
                }
                let (mut sum, mut out, mut last) = (0.0, vec![0.0; DIM_V], 0.0);
                for (j, &z) in dropped.iter().enumerate() {
                    let row = i as i64 + i64::from(has(Fault::NextRow));
                    let shift = if has(Fault::OtherCorner) { n as i64 - m as i64 } else { 0 };
                    if !(p.sees)(row + shift, j as i64, n as i64, m as i64) {
                        continue;
                    }
                    let query = &x.q[at(q_start + i, h, HEADS_Q, p.rows[0]) * DIM..][..DIM];
                    let key = &x.k[at(row_of(j), kv, HEADS_KV, p.rows[1]) * DIM..][..DIM];
                    let mut logit: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                    logit *= factors[0] * factors[1] * if has(Fault::FactorTwice) { factors[2] } else { 1.0 };
                    let scale = if has(Fault::NoScale) { 1.0 } else { p.scale };
                    let scale = scale * p.temperature[if has(Fault::SharedTemperature) { kv } else { h }];
                    let bias = (p.bias)(h, i, j);
                    let capped = |x: f64| match p.cap.is_finite() && !has(Fault::NoCap) {
                        true => p.cap * (x / p.cap).tanh(),
                        false => x,
                    };
                    logit = match fault {
                        Some(Fault::ScaledAfterCap) => capped(logit) * scale + bias,
                        Some(Fault::CappedBias) => capped(logit * scale + bias),
                        _ => capped(logit * scale) + bias,
                    };
                    let weight = logit.exp();
                    let of = if has(Fault::StaleValue) { j.max(1) - 1 } else { j };
                    let value = &x.v[at(row_of(of), kv, HEADS_KV, p.rows[1]) * DIM_V..][..DIM_V];
                    let z = f64::from(z) * if has(Fault::NoDropoutScale) { 0.75 } else { 1.0 };
                    out.iter_mut().zip(value).for_each(|(out, v)| *out += z * weight * v * factors[2]);
                    let counted = if has(Fault::DroppedSum) && z == 0.0 { 0.0 } else { weight };
                    (sum, last) = (sum + counted, weight);
                }
                sum -= if has(Fault::ShortSum) { last } else { 0.0 };
                sum += match fault {
                    Some(Fault::NoSink) => 0.0,
                    Some(Fault::FirstSink) => p.sinks[0].exp(),
                    _ => p.sinks[h].exp(),
                };
                let index = at(q_start + i, h, HEADS_Q, p.rows[0]);
                if let Some((before, lse)) = (p.before)(index + usize::from(has(Fault::NextBefore))) {
                    let weight = if has(Fault::NoOutBefore) { 0.0 } else { lse.exp() };
                    out.iter_mut().zip(before).for_each(|(out, x)| *out += weight * x);
                    sum += lse.exp();
                }
                out.iter_mut().for_each(|x| *x = if sum == 0.0 { 0.0 } else { *x / sum });
                let lse = if has(Fault::BaseTwo) { sum.log2() } else { sum.ln() };
                all.push((index, out, lse));
            }
        }
    }
    all
}

/// The row of `[batch][head][row]` that is `row` of all rows of one head.
fn at(row: usize, head: usize, heads: usize, rows: usize) -> usize {
    ((row / rows) * heads + head) * rows + row % rows
}

/// Numbers between −1 and 1 that have four significant bits, so that every element type holds them.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) % 31) as f32 / 16.0 - 15.0 / 16.0
    };
    (0..len).map(next).collect()
}

/// Compares the oracle with the loops. Returns the largest difference of an output or an LSE.
fn difference(name: &str, p: &Plain, problem: &Problem, others: &Operands<'_>, fault: Option<Fault>) -> f64 {
    let [q, k, v] = [(HEADS_Q * ROWS * DIM, 1), (HEADS_KV * KEYS * DIM, 2), (HEADS_KV * KEYS * DIM_V, 3)]
        .map(|(elements, seed)| numbers(BATCH * elements, seed));
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect();
    let plain = Tensors { q: wide(&q), k: wide(&k), v: wide(&v) };
    let codes = |x: &[f32]| x.iter().map(|&x| E4m3::from_f32(x)).collect::<Vec<E4m3>>();
    let (q8, k8, v8) = (codes(&q), codes(&k), codes(&v));
    let mut inputs = match problem.dtypes.q {
        DType::E4m3 => Operands::qkv(&q8, &k8, &v8),
        _ => Operands::qkv(&q, &k, &v),
    };
    inputs.extend(others.iter().map(|(operand, &elements)| (operand, elements)));
    let exact = oracle_with(problem, &inputs).unwrap_or_else(|error| panic!("{name}: {error}"));
    let rows = attend(p, &plain, fault);
    let mut most: f64 = 0.0;
    for (row, out, lse) in &rows {
        let found = &exact.out[row * DIM_V..][..DIM_V];
        out.iter().zip(found).for_each(|(x, y)| most = most.max(distance(*x, *y)));
        most = most.max(distance(*lse, exact.lse[*row]));
    }
    // Rows of no sequence are NaN, and the loops do not have them.
    let computed = exact.lse.iter().filter(|x| !x.is_nan()).count();
    if computed == rows.len() { most } else { f64::INFINITY }
}

/// Equal infinities have distance 0; an infinity or NaN beside a number is infinitely far away.
fn distance(x: f64, y: f64) -> f64 {
    if x == y {
        return 0.0;
    }
    let distance = (x - y).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

/// A problem of the cases' extents with the scale of [`ALL`].
fn problem(dtype: DType) -> Problem {
    let mut problem = Problem::new(BATCH, HEADS_Q, ROWS, DIM, dtype);
    (problem.heads_kv, problem.seq_kv, problem.head_dim_v) = (HEADS_KV, KEYS, DIM_V);
    problem.score.scale = Some(0.25);
    problem.with_layout(problem::Layout::Bhsd)
}

/// A case: its name, the problem in plain terms, the problem, and its inputs beside Q, K and V.
type Case = (&'static str, Plain, Problem, Operands<'static>);

fn cases() -> Vec<Case> {
    let plain = || problem(DType::F32);
    let mut cases: Vec<Case> = vec![("all keys", ALL, plain(), Operands::default())];
    let band = |name, sees, band| (name, Plain { sees, ..ALL }, plain().with_band(band), Operands::default());
    cases.push(band("causal", |i, j, n, m| j <= i + m - n, Band::CAUSAL));
    cases.push(band("causal, top left", |i, j, _, _| j <= i, Band::CAUSAL_TOP_LEFT));
    let window = Band { corner: Corner::BottomRight, before: Some(3), after: Some(1) };
    cases.push(band("window", |i, j, n, m| (i + m - n - 3..=i + m - n + 1).contains(&j), window));
    let window = Band { corner: Corner::TopLeft, before: Some(2), after: Some(0) };
    cases.push(band("window, top left", |i, j, _, _| (i - 2..=i).contains(&j), window));
    cases.push(("cap", Plain { cap: 0.5, ..ALL }, plain().with_softcap(0.5), Operands::default()));

    // Sinks, and a window that some rows see nothing through.
    let mut problem = plain().with_band(Band { corner: Corner::TopLeft, before: None, after: Some(0) });
    problem.score.sink = true;
    let sinks = [-1.0, 0.5, 2.0, -3.0, 1.0, 0.25];
    let p = Plain { sees: |i, j, _, _| j <= i, sinks, ..ALL };
    let values: &[f32] = &[-1.0, 0.5, 2.0, -3.0, 1.0, 0.25];
    cases.push(("sinks", p, problem, Operands::default().with(Operand::Sinks, values)));

    // A temperature, before a cap.
    let mut problem = plain().with_softcap(0.5);
    problem.score.temperature = true;
    let p = Plain { cap: 0.5, temperature: [0.5, 2.0, 0.0, 1.5, 0.25, 4.0], ..ALL };
    let values: &[f32] = &[0.5, 2.0, 0.0, 1.5, 0.25, 4.0];
    cases.push(("temperature", p, problem, Operands::default().with(Operand::Temperature, values)));

    // Dropout, with a causal mask.
    let mut problem = plain().with_band(Band::CAUSAL);
    problem.dropout = Some(0.25);
    let p = Plain { sees: |i, j, n, m| j <= i + m - n, dropout: Some([1, -2, 3, 4]), ..ALL };
    let values: &[i32] = &[1, -2, 3, 4];
    cases.push(("dropout", p, problem, Operands::default().with(Operand::RngState, values)));

    // A result over other keys. Some rows have no key there, some none here, and some neither.
    let before = |index: usize| {
        let x = index as f64;
        let lse = if index % 4 == 1 { f64::NEG_INFINITY } else { 0.25 * (x % 13.0) - 1.0 };
        Some(([0.5 * (x % 7.0), -0.25, 0.125 * (x % 5.0), 1.0], lse))
    };
    let rows: Vec<_> = (0..BATCH * HEADS_Q * ROWS).filter_map(before).collect();
    let out: Vec<f32> = rows.iter().flat_map(|(out, _)| out.map(|x| x as f32)).collect();
    let lse: Vec<f32> = rows.iter().map(|&(_, lse)| lse as f32).collect();
    let operands =
        Operands::default().with(Operand::OutBefore, &*out.leak()).with(Operand::LseBefore, &*lse.leak());
    let problem = plain().with_band(Band::window(0, 0));
    let mut problem = problem.with_pass(Pass::Forward { lse: true, continues: true, invariant: None });
    problem.band.corner = Corner::TopLeft;
    problem.programs.mask = Some("q % 3 != 0".parse().unwrap());
    let p = Plain { sees: |i, j, _, _| i == j && i % 3 != 0, before, ..ALL };
    cases.push(("an earlier result", p, problem, operands));

    // A bias by head, query and key as a program with a table, on top of a cap.
    let mut problem = plain().with_softcap(0.5);
    problem.programs.score = Some("s + t0[h] * float(q - k)".parse().unwrap());
    problem.programs.tables = vec![Table::dense(problem::ElementType::F32, &[HEADS_Q])];
    let bias =
        |h: usize, i: usize, j: usize| [0.5, 0.25, 0.125, 1.0, -0.5, 0.0625][h] * (i as f64 - j as f64);
    let slopes: &[f32] = &[0.5, 0.25, 0.125, 1.0, -0.5, 0.0625];
    let p = Plain { cap: 0.5, bias, ..ALL };
    cases.push(("cap and bias", p, problem, Operands::default().with(Operand::Table(0), slopes)));

    // A mask as a program.
    let mut problem = plain();
    problem.programs.mask = Some("(q + k) % 3 != 0".parse().unwrap());
    let p = Plain { sees: |i, j, _, _| (i + j) % 3 != 0, ..ALL };
    cases.push(("mask", p, problem, Operands::default()));

    // Used lengths and left padding, with a causal mask.
    let mut problem = plain().with_band(Band::CAUSAL);
    (problem.lengths.q.used, problem.lengths.kv.used, problem.lengths.left_padded) = (true, true, true);
    let (used_q, used_kv, left): (&[i32], &[i32], &[i32]) = (&[4, 0, 9], &[7, 13, 6], &[2, 0, 6]);
    let lengths = Operands::default()
        .with(Operand::Lengths(LengthArray::UsedQ), used_q)
        .with(Operand::Lengths(LengthArray::UsedKv), used_kv)
        .with(Operand::Lengths(LengthArray::LeftPad), left);
    let sequences = [[0, 4, 2, 5], [ROWS, 0, KEYS, 13], [2 * ROWS, 9, 2 * KEYS + 6, 0]];
    let p = Plain { sequences, sees: |i, j, n, m| j <= i + m - n, ..ALL };
    cases.push(("used lengths", p, problem, lengths));

    // Pages of three rows, with left padding. The last entry of the table stands for the last page.
    let mut problem = plain();
    (problem.lengths.kv.used, problem.lengths.left_padded) = (true, true);
    problem.storage = Storage::Pages(Pages { rows: 3, count: 13, per_sequence: 5 });
    let strides = |dim| problem::Layout::Bhsd.strides(HEADS_KV, 3, dim);
    (problem.k, problem.v) = (strides(DIM), strides(DIM_V));
    let (used, left): (&[i32], &[i32]) = (&[7, 13, 6], &[4, 0, 1]);
    let table: &[i32] = &[-5, 8, 2, 99, 99, 4, 0, 11, 3, 13, 1, 9, -1, -1, -1];
    let operands = Operands::default()
        .with(Operand::Lengths(LengthArray::UsedKv), used)
        .with(Operand::Lengths(LengthArray::LeftPad), left)
        .with(Operand::PageTable, table);
    let sequences = [[0, ROWS, 4, 3], [ROWS, ROWS, 0, 13], [2 * ROWS, ROWS, 1, 5]];
    let pages: [&[usize]; BATCH] = [&[12, 8, 2], &[4, 0, 11, 3, 12], &[1, 9]];
    cases.push(("pages", Plain { sequences, rows: [ROWS, 3], pages, ..ALL }, problem, operands));

    // Packed sequences. The first row of Q belongs to none.
    let mut problem = plain().with_band(Band::CAUSAL);
    let rows = [BATCH * ROWS, BATCH * KEYS];
    (problem.lengths.q.packed, problem.lengths.kv.packed) = (Some(rows[0]), Some(rows[1]));
    (problem.seq_q, problem.seq_kv) = (rows[0], rows[1]);
    let (ends_q, ends_k): (&[i32], &[i32]) = (&[1, 8, 9, 27], &[0, 13, 13, 39]);
    let ends = Operands::default()
        .with(Operand::Lengths(LengthArray::CumulativeQ), ends_q)
        .with(Operand::Lengths(LengthArray::CumulativeKv), ends_k);
    let sequences = [[1, 7, 0, 13], [8, 1, 13, 0], [9, 18, 13, 26]];
    let p = Plain { sequences, rows, sees: |i, j, n, m| j <= i + m - n, ..ALL };
    cases.push(("packed", p, problem.with_layout(problem::Layout::Bhsd), ends));

    // Descale factors of 8-bit inputs.
    let mut problem = self::problem(DType::E4m3).with_dtypes("e4m3:f32".parse().unwrap());
    problem.scales.q = Some(ScaleLayout::TENSOR);
    problem.scales.k = Some(ScaleLayout::per_head(HEADS_KV));
    problem.scales.v = Some(ScaleLayout::per_head(HEADS_KV));
    let (of_q, of_k, of_v): (&[f32], &[f32], &[f32]) =
        (&[0.5], &[1.0, 2.0, 0.5, 4.0, 0.25, 1.5], &[2.0, -1.0, 0.5, 3.0, 1.5, 0.75]);
    let pairs = |x: &[f32]| [0, 1, 2].map(|b: usize| [0, 1].map(|h: usize| f64::from(x[2 * b + h])));
    let factors = [[[0.5; HEADS_KV]; BATCH], pairs(of_k), pairs(of_v)];
    let operands = Operands::default()
        .with(Operand::Descale(problem::Tensor::Q), of_q)
        .with(Operand::Descale(problem::Tensor::K), of_k)
        .with(Operand::Descale(problem::Tensor::V), of_v);
    cases.push(("factors", Plain { factors, ..ALL }, problem, operands));
    cases
}

#[test]
fn the_oracle_agrees_with_three_loops() {
    for (name, p, problem, others) in cases() {
        let most = difference(name, &p, &problem, &others, None);
        assert!(most < 1e-12, "{name}: {most:e}");
    }
}

/// A fault of the oracle would show in some case.
#[test]
fn faults_are_seen() {
    for fault in Fault::ALL {
        let seen: Vec<&str> = cases()
            .into_iter()
            .filter(|(name, p, problem, others)| difference(name, p, problem, others, Some(fault)) > 1e-3)
            .map(|(name, ..)| name)
            .collect();
        assert!(!seen.is_empty(), "no case sees {fault:?}");
    }
}

/// A NaN in a key that a row does not see does not reach the row.
#[test]
fn hidden_keys_do_not_matter() {
    let problem = Problem::new(1, 1, 3, 2, DType::F32).with_band(Band::CAUSAL);
    let (q, v) = ([1.0f32; 6], [1.0f32, 2.0, 3.0, 4.0, f32::NAN, f32::INFINITY]);
    let k = [0.0f32, 0.0, 0.0, 0.0, f32::NAN, 0.0];
    let inputs: Operands<'_> = Operands::qkv(&q, &k, &v);
    let out = oracle_with(&problem, &inputs).unwrap();
    assert_eq!(out.out[..4], [1.0, 2.0, 2.0, 3.0]);
    assert!(out.out[4].is_nan() && out.lse[2].is_nan());
    assert!(matches!(inputs[Operand::V], Elements::F32(_)));
}
