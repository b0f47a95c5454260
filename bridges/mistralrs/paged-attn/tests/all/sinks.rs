//! Prompts with sinks.

use candle::{DType, Device, Tensor};
use mistralrs_paged_attn::{flash_attn_sinks, flash_attn_sinks_varlen};

use crate::plain::{self, Options, close, random, tolerance};

const SCALE: f32 = 0.4;
const SINKS: [f32; 6] = [0.3, -1.0, 2.0, 0.0, 0.7, 1.5];

fn options(window: usize, has_sinks: bool) -> Options {
    Options {
        scale: SCALE,
        window: [window.checked_sub(1), Some(0)],
        sinks: has_sinks.then(|| SINKS.to_vec()),
        ..Options::default()
    }
}

/// `[row, head, dim]` of a sequence in `[head, row, dim]`.
fn by_row(x: &Tensor) -> Tensor {
    x.transpose(0, 1).unwrap()
}

#[test]
fn prompts_agree_with_plain_loops() {
    let sinks = &Tensor::new(&SINKS, &Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let draw = |seed, shape: &[usize]| random(seed, shape).to_dtype(dtype).unwrap();
        let (q, k, v) = (draw(1, &[2, 6, 7, 24]), draw(2, &[2, 2, 9, 24]), draw(3, &[2, 2, 9, 24]));
        for (window, has_sinks) in [(0, true), (3, true), (0, false), (100, true)] {
            let sinks = has_sinks.then(|| sinks.to_dtype(dtype).unwrap());
            let found = flash_attn_sinks(&q, &k, &v, sinks.as_ref(), SCALE, window).unwrap();
            assert_eq!(found.dims(), q.dims());
            let mut options = options(window, has_sinks);
            options.sinks = sinks.map(|sinks| sinks.to_dtype(DType::F32).unwrap().to_vec1().unwrap());
            let of = |b: usize| {
                let one = |x: &Tensor| by_row(&x.get(b).unwrap());
                plain::attention([&one(&q), &one(&k), &one(&v)], &options)
            };
            let expected = [of(0), of(1)].concat();
            close("prompt", &found.transpose(1, 2).unwrap(), &expected, tolerance(dtype));
        }
    }
}

#[test]
fn padded_queries_and_packed_keys_agree_with_plain_loops() {
    let sinks = &Tensor::new(&SINKS, &Device::Cpu).unwrap();
    let (q, k, v) = (random(1, &[3, 6, 5, 16]), random(2, &[12, 3, 16]), random(3, &[12, 3, 16]));
    let ints = |numbers: &[u32]| Tensor::new(numbers, &Device::Cpu).unwrap();
    let (starts_q, starts_k) = ([0u32, 5, 5, 7], [0u32, 6, 8, 12]);
    for window in [0, 2] {
        let (of_q, of_k) = (ints(&starts_q), ints(&starts_k));
        let found = flash_attn_sinks_varlen(&q, &k, &v, Some(sinks), &of_q, &of_k, SCALE, window).unwrap();
        let mut expected = Vec::new();
        for b in 0..3 {
            let rows = (starts_q[b + 1] - starts_q[b]) as usize;
            let keys = |x: &Tensor| {
                x.narrow(0, starts_k[b] as usize, (starts_k[b + 1] - starts_k[b]) as usize).unwrap()
            };
            let queries = by_row(&q.get(b).unwrap()).narrow(0, 0, rows).unwrap();
            expected.extend(plain::attention([&queries, &keys(&k), &keys(&v)], &options(window, true)));
            expected.resize((b + 1) * 5 * 6 * 16, 0.0);
        }
        close("varlen", &found.transpose(1, 2).unwrap(), &expected, tolerance(DType::F32));
    }
}
