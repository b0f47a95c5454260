//! Tests of kernels written in Triton and compiled by Triton. Their last two parameters are pointers to
//! scratch memory, which these kernels do not use.

use ptx::{Arg, Dim3};

use super::reference::{self, Heads};
use super::{Case, Data, assert_close, bf16s, brains, draw, f16s, f32s, floats, halves, integers, read};

/// A Triton kernel named `kernel`, with its scalars and without scratch memory.
pub(super) fn case(
    file: &str,
    (grid, threads, shared): (Dim3, u32, u32),
    data: Vec<(&'static str, Data)>,
    scalars: &[Arg],
) -> Case {
    let scalars = scalars.iter().cloned().chain([Arg::Null, Arg::Null]).collect();
    Case { file: file.to_owned(), entry: "kernel", grid, block: Dim3(threads, 1, 1), shared, data, scalars }
}

#[test]
fn flash() {
    flash_on(&["80", "89"], 16384, 1);
}

/// Causal attention with a ragged tail and more keys than queries.
pub(super) fn flash_on(targets: &[&str], shared: u32, seed: u32) {
    let (heads, seq_q, seq_kv, dim) = (2, 100, 130, 64);
    let [q, k, v] = [(seq_q, 0), (seq_kv, 1), (seq_kv, 2)].map(|(seq, i)| draw(heads * seq * dim, seed + i));
    let case = case(
        "triton_flash",
        (Dim3(2, heads as u32, 1), 128, shared),
        vec![
            ("q", halves(&q)),
            ("k", halves(&k)),
            ("v", halves(&v)),
            ("out", Data::Out(2 * heads * seq_q * dim)),
            ("lse", Data::Out(4 * heads * seq_q)),
        ],
        &[Arg::I32(seq_q as i32), Arg::I32(seq_kv as i32), Arg::F32(0.125)],
    );
    let expected = reference::attention(&q, &k, &v, &Heads { heads, dim, scale: 0.125, causal: true });
    case.check_on(targets, |buffers| {
        assert_close("out", &f16s(&buffers[3]), &expected.out, 1e-3);
        assert_close("lse", &f32s(&buffers[4]), &expected.lse, 1e-5);
    });
}

#[test]
fn matmul() {
    matmul_on(&["80", "89"], 16384, 4);
}

/// A product of bf16. The strides of the operands are compiled as multiples of 16.
pub(super) fn matmul_on(targets: &[&str], shared: u32, seed: u32) {
    let (m, n, depth) = (100, 80, 96);
    let (a, b) = (draw(m * depth, seed), draw(depth * n, seed + 1));
    let case = case(
        "triton_matmul",
        (Dim3(2, 2, 1), 128, shared),
        vec![("a", brains(&a)), ("b", brains(&b)), ("c", Data::Out(2 * m * n))],
        &[Arg::I32(m as i32), Arg::I32(n as i32), Arg::I32(depth as i32)],
    );
    let expected = reference::matmul(&a, depth, n, |col, k| b[k * n + col]);
    // The tolerance is half a unit in the last place of bf16 below 16.
    case.check_on(targets, |buffers| assert_close("c", &bf16s(&buffers[2]), &expected, 16.0 / 512.0));
}

#[test]
fn softmax() {
    let (rows, cols) = (3, 301);
    let x = draw(rows * cols, 6);
    let case = case(
        "triton_softmax",
        (Dim3(rows as u32, 1, 1), 128, 16),
        vec![("x", floats(&x)), ("y", Data::Out(4 * rows * cols))],
        &[Arg::I32(cols as i32)],
    );
    let expected = reference::softmax(&x, cols);
    case.check(|buffers| assert_close("y", &f32s(&buffers[1]), &expected, 1e-7));
}

#[test]
fn layernorm() {
    let (rows, cols) = (2, 608);
    let (x, weight, bias) = (draw(rows * cols, 7), draw(cols, 8), draw(cols, 9));
    let case = case(
        "triton_layernorm",
        (Dim3(rows as u32, 1, 1), 128, 16),
        vec![
            ("x", halves(&x)),
            ("weight", floats(&weight)),
            ("bias", floats(&bias)),
            ("y", Data::Out(2 * rows * cols)),
        ],
        &[Arg::I32(cols as i32), Arg::F32(1e-5)],
    );
    let expected = reference::layernorm(&x, &weight, &bias);
    // The tolerance is half a unit in the last place of f16 below 4, plus a margin for f32.
    case.check(|buffers| assert_close("y", &f16s(&buffers[3]), &expected, 4.0 / 4096.0 + 1e-5));
}

#[test]
fn transpose() {
    // Both extents are compiled as multiples of 16. Neither is a multiple of the tile's 32.
    let (rows, cols) = (48, 80);
    let x = draw(rows * cols, 10);
    let case = case(
        "triton_transpose",
        (Dim3(2, 3, 1), 128, 4096),
        vec![("x", floats(&x)), ("y", Data::Out(4 * rows * cols))],
        &[Arg::I32(rows as i32), Arg::I32(cols as i32)],
    );
    case.check(|buffers| assert_close("y", &f32s(&buffers[1]), &reference::transpose(&x, rows), 0.0));
}

#[test]
fn histogram() {
    let values: Vec<i32> = (0..700).map(|i| i * i % 97).collect();
    let case = case(
        "triton_histogram",
        (Dim3(2, 1, 1), 128, 4096),
        vec![("values", integers(&values)), ("bins", Data::InOut(vec![0; 4 * 64]))],
        &[Arg::I32(values.len() as i32)],
    );
    let mut expected = vec![0; 64];
    values.iter().for_each(|v| expected[*v as usize % 64] += 1);
    case.check(|buffers| assert_eq!(read(&buffers[1], i32::from_le_bytes), expected));
}

#[test]
fn scan() {
    let values: Vec<i32> = (0..700).map(|i| i * i % 37 - 11).collect();
    let case = case(
        "triton_scan",
        (Dim3(2, 1, 1), 128, 16),
        vec![("x", integers(&values)), ("y", Data::Out(4 * values.len()))],
        &[Arg::I32(values.len() as i32)],
    );
    let expected = reference::prefix_sums(&values, 512);
    case.check(|buffers| assert_eq!(read(&buffers[1], i32::from_le_bytes), expected));
}

#[test]
fn split_reduce() {
    let (heads, splits, dim) = (3, 10, 64);
    let (parts, tops) = (draw(heads * splits * dim, 11), draw(heads * splits, 12));
    let sums: Vec<f32> = draw(heads * splits, 13).iter().map(|x| x + 2.0).collect();
    let case = case(
        "triton_split_reduce",
        (Dim3(heads as u32, 1, 1), 64, 512),
        vec![
            ("acc", floats(&parts)),
            ("top", floats(&tops)),
            ("total", floats(&sums)),
            ("out", Data::Out(4 * heads * dim)),
        ],
        &[Arg::I32(splits as i32)],
    );
    let expected = reference::merge(&parts, &tops, &sums, splits, dim);
    case.check(|buffers| assert_close("out", &f32s(&buffers[3]), &expected, 1e-6));
}
