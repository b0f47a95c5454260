//! Tests of kernels compiled from CUDA C++ by NVRTC.

use ptx::{Arg, Dim3};

use super::reference::{self, Heads};
use super::{Case, Data, assert_close, draw, f16s, f32s, floats, halves, integers, read, words};

/// The kernel `entry` of the file of that name, without dynamic shared memory.
pub(super) fn case(
    entry: &'static str,
    grid: Dim3,
    block: Dim3,
    data: Vec<(&'static str, Data)>,
    scalars: &[Arg],
) -> Case {
    let (file, scalars) = (format!("cuda_{entry}"), scalars.to_vec());
    Case { file, entry, grid, block, shared: 0, data, scalars }
}

/// An attention kernel for two heads with head_dim 64, whose CTAs have 128 threads and `tile` queries each.
fn attention(entry: &'static str, tile: usize, shared: u32, [seq_q, seq_kv]: [usize; 2]) {
    let (heads, d) = (2, 64);
    let [q, k, v] = [(seq_q, 1), (seq_kv, 2), (seq_kv, 3)].map(|(seq, seed)| draw(heads * seq * d, seed));
    for causal in [false, true] {
        let out = Data::Out(2 * heads * seq_q * d);
        let data = vec![("q", halves(&q)), ("k", halves(&k)), ("v", halves(&v)), ("out", out)];
        let [seq_q, seq_kv] = [seq_q as i32, seq_kv as i32];
        let scalars = [Arg::I32(seq_q), Arg::I32(seq_kv), Arg::F32(0.125), Arg::I32(i32::from(causal))];
        let grid = Dim3((seq_q as u32).div_ceil(tile as u32), heads as u32, 1);
        let case = Case { shared, ..case(entry, grid, Dim3(128, 1, 1), data, &scalars) };
        let expected = reference::attention(&q, &k, &v, &Heads { heads, dim: d, scale: 0.125, causal });
        case.check(|buffers| assert_close(entry, &f16s(&buffers[3]), &expected.out, 1e-3));
    }
}

#[test]
fn flash() {
    attention("flash", 64, 3 * 64 * 72 * 2, [100, 130]);
}

#[test]
fn wmma_attention() {
    attention("wmma_attention", 32, 0, [50, 70]);
}

#[test]
fn matmul() {
    let (m, n, depth) = (70, 90, 96);
    let (a, b) = (draw(m * depth, 4), draw(n * depth, 5));
    let case = case(
        "matmul",
        Dim3(2, 2, 1),
        Dim3(128, 1, 1),
        vec![("a", halves(&a)), ("b", halves(&b)), ("c", Data::Out(4 * m * n))],
        &[Arg::I32(m as i32), Arg::I32(n as i32), Arg::I32(depth as i32)],
    );
    let expected = reference::matmul(&a, depth, n, |col, k| b[col * depth + k]);
    case.check(|buffers| assert_close("matmul", &f32s(&buffers[2]), &expected, 2e-5));
}

#[test]
fn softmax() {
    let (rows, cols) = (3, 301);
    let x = draw(rows * cols, 6);
    let case = case(
        "softmax",
        Dim3(rows as u32, 1, 1),
        Dim3(128, 1, 1),
        vec![("x", floats(&x)), ("y", Data::Out(4 * rows * cols))],
        &[Arg::I32(cols as i32)],
    );
    let expected = reference::softmax(&x, cols);
    case.check(|buffers| assert_close("softmax", &f32s(&buffers[1]), &expected, 1e-7));
}

#[test]
fn layernorm() {
    let (rows, cols) = (3, 600);
    let (x, weight, bias) = (draw(rows * cols, 7), draw(cols, 8), draw(cols, 9));
    let case = case(
        "layernorm",
        Dim3(rows as u32, 1, 1),
        Dim3(96, 1, 1),
        vec![
            ("x", floats(&x)),
            ("weight", floats(&weight)),
            ("bias", floats(&bias)),
            ("y", Data::Out(4 * rows * cols)),
        ],
        &[Arg::I32(cols as i32 / 4), Arg::F32(1e-5)],
    );
    let expected = reference::layernorm(&x, &weight, &bias);
    case.check(|buffers| assert_close("layernorm", &f32s(&buffers[3]), &expected, 1e-5));
}

#[test]
fn transpose() {
    let (rows, cols) = (45, 70);
    let x = draw(rows * cols, 10);
    let case = case(
        "transpose",
        Dim3(3, 2, 1),
        Dim3(32, 8, 1),
        vec![("in", floats(&x)), ("out", Data::Out(4 * rows * cols))],
        &[Arg::I32(rows as i32), Arg::I32(cols as i32)],
    );
    let expected = reference::transpose(&x, rows);
    case.check(|buffers| assert_close("transpose", &f32s(&buffers[1]), &expected, 0.0));
}

#[test]
fn histogram() {
    let data: Vec<u32> = (0..700u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let case = case(
        "histogram",
        Dim3(3, 1, 1),
        Dim3(96, 1, 1),
        vec![("words", Data::In(words(&data, u32::to_le_bytes))), ("bins", Data::InOut(vec![0; 1024]))],
        &[Arg::I32(data.len() as i32)],
    );
    let mut expected = vec![0u32; 256];
    data.iter().flat_map(|w| w.to_le_bytes()).for_each(|b| expected[usize::from(b)] += 1);
    case.check(|buffers| assert_eq!(read(&buffers[1], u32::from_le_bytes), expected));
}

#[test]
fn scan() {
    let data: Vec<i32> = (0..700).map(|i| i * i % 37 - 11).collect();
    let case = case(
        "scan",
        Dim3(3, 1, 1),
        Dim3(256, 1, 1),
        vec![("in", integers(&data)), ("out", Data::Out(4 * data.len()))],
        &[Arg::I32(data.len() as i32)],
    );
    let expected = reference::prefix_sums(&data, 256);
    case.check(|buffers| assert_eq!(read(&buffers[1], i32::from_le_bytes), expected));
}

/// The CTAs communicate: the last CTA to arrive merges the partial results that the others left in global
/// memory.
#[test]
fn split_reduce() {
    let (heads, splits, seq_kv) = (2, 3, 200);
    let (q, k, v) = (draw(heads * 64, 11), draw(heads * seq_kv * 64, 12), draw(heads * seq_kv * 64, 13));
    let case = case(
        "split_reduce",
        Dim3(splits as u32, heads as u32, 1),
        Dim3(64, 1, 1),
        vec![
            ("q", floats(&q)),
            ("k", floats(&k)),
            ("v", floats(&v)),
            ("partial", Data::Out(4 * heads * splits * 66)),
            ("counters", Data::InOut(vec![0; 4 * heads])),
            ("out", Data::Out(4 * heads * 64)),
        ],
        &[Arg::I32(seq_kv as i32), Arg::F32(0.125)],
    );
    let one_row = Heads { heads, dim: 64, scale: 0.125, causal: false };
    let expected = reference::attention(&q, &k, &v, &one_row).out;
    case.check(|buffers| assert_close("split_reduce", &f32s(&buffers[5]), &expected, 1e-5));
}

/// Calls, a jump table, local arrays, votes, matches and conversions cause no hazard, and the integer results
/// equal those of Rust.
#[test]
fn dispatch() {
    let data: Vec<i32> = (0..100).map(|i| i * 7 % 41 - 9).collect();
    let case = case(
        "dispatch",
        Dim3(2, 1, 1),
        Dim3(64, 1, 1),
        vec![
            ("in", integers(&data)),
            ("out", Data::Out(4 * data.len())),
            ("wide", Data::Out(8 * data.len())),
        ],
        &[Arg::I32(data.len() as i32)],
    );
    let bias = [0.5f32, -0.25, 1.0 / 3.0, 2.0];
    let expected: Vec<f64> = data
        .iter()
        .map(|&x| {
            let f = bias[(x & 3) as usize] * x as f32;
            let w = f64::from(f);
            w + w.mul_add(2.0, 1.0)
                + w.sin()
                + w.tanh()
                + w.abs().sqrt()
                + (i64::from(x) * 0x1_2345_6789) as f64
        })
        .collect();
    case.check(|buffers| {
        let wide: Vec<f64> = read(&buffers[2], f64::from_le_bytes);
        // The reference is computed in f64; the kernel computes the sine and the power of arguments up to 80
        // in f32.
        assert_close("dispatch", &wide, &expected, 1e-3);
    });
}
