//! Batches of sequences of equal length.

use candle::{DType, Device, Tensor};
use candle_flashcore::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_windowed, v3,
};

use crate::operations;
use crate::plain::{self, Options, close, random, tolerance};

const SCALE: f32 = 0.7;

fn options() -> Options {
    Options { scale: SCALE, ..Options::default() }
}

fn expected([q, k, v]: [&Tensor; 3], options: &Options) -> Vec<f64> {
    let one = |b: usize| plain::attention([q, k, v].map(|x| x.get(b).unwrap()).each_ref(), options);
    (0..q.dims()[0]).flat_map(one).collect()
}

fn slopes(heads: usize) -> (Vec<f32>, Tensor) {
    let slopes: Vec<f32> = (0..heads).map(|head| 0.5f32.powi(head as i32 + 1)).collect();
    let tensor = Tensor::from_slice(&slopes, heads, &Device::Cpu).unwrap();
    (slopes, tensor)
}

/// Queries, keys and values of two sequences with grouped heads.
fn inputs(rows: usize, keys: usize, dtype: DType) -> [Tensor; 3] {
    let shapes = [[2, rows, 4, 24], [2, keys, 2, 24], [2, keys, 2, 24]];
    let make = |i: usize| (random(i as u64 + 1, &shapes[i]) * 2.0).unwrap().to_dtype(dtype).unwrap();
    [0, 1, 2].map(make)
}

#[test]
fn every_function_agrees_with_plain_loops() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // The second shape has rows that see no key under a causal mask.
        for (rows, keys) in [(5, 7), (9, 4), (70, 130)] {
            let [q, k, v] = &inputs(rows, keys, dtype);
            let (numbers, slopes) = slopes(4);
            let (left, right) = (Some(3), Some(1));
            let check = |name: &str, options: &Options, found: candle::Result<Tensor>| {
                let found = found.unwrap();
                assert_eq!((found.dims(), found.dtype()), (q.dims(), dtype));
                close(
                    &format!("{name} {dtype:?} {rows}"),
                    &found,
                    &expected([q, k, v], options),
                    tolerance(dtype),
                );
            };
            let causal = Options { window: [None, Some(0)], ..options() };
            check("full", &options(), flash_attn(q, k, v, SCALE, false));
            check("causal", &causal, flash_attn(q, k, v, SCALE, true));
            check("v3", &causal, v3::flash_attn(q, k, v, SCALE, true, true));
            let windowed = Options { window: [left, right], ..options() };
            check("windowed", &windowed, flash_attn_windowed(q, k, v, SCALE, left, right));
            check("v3 windowed", &windowed, v3::flash_attn_windowed(q, k, v, SCALE, left, right, false));
            let one_sided = Options { window: [Some(2), None], ..options() };
            check("left", &one_sided, flash_attn_windowed(q, k, v, SCALE, Some(2), None));
            let wide = Options { window: [None, None], ..options() };
            check("wide", &wide, flash_attn_windowed(q, k, v, SCALE, Some(1000), Some(usize::MAX)));
            let alibi = Options { slopes: Some(numbers.clone()), ..causal.clone() };
            check("alibi", &alibi, flash_attn_alibi(q, k, v, &slopes, SCALE, true));
            check("v3 alibi", &alibi, v3::flash_attn_alibi(q, k, v, &slopes, SCALE, true, true));
            let both = Options { slopes: Some(numbers.clone()), ..windowed.clone() };
            check("alibi windowed", &both, flash_attn_alibi_windowed(q, k, v, &slopes, SCALE, left, right));
            let found = v3::flash_attn_alibi_windowed(q, k, v, &slopes, SCALE, left, right, true);
            check("v3 alibi windowed", &both, found);
            let capped = Options { softcap: Some(1.5), ..both.clone() };
            let slopes = Some(&slopes);
            let found = flash_attn_alibi_windowed_softcap(q, k, v, slopes, SCALE, left, right, 1.5);
            check("softcap", &capped, found);
            let found = flash_attn_alibi_windowed_softcap(q, k, v, None, SCALE, left, right, 0.0);
            check("softcap 0", &windowed, found);
        }
    }
}

#[test]
fn outputs_are_those_of_candles_operations() {
    let [q, k, v] = inputs(6, 9, DType::F32);
    let options = Options { window: [None, Some(0)], ..options() };
    let one =
        |b: usize| operations::eager([&q, &k, &v].map(|x| x.get(b).unwrap()).each_ref(), &options).unwrap();
    let expected = Tensor::stack(&[one(0), one(1)], 0).unwrap();
    let found = flash_attn(&q, &k, &v, SCALE, true).unwrap();
    let difference = (found - expected).unwrap().abs().unwrap().max_all().unwrap();
    assert!(difference.to_scalar::<f32>().unwrap() < 2e-6);
}

/// Slices of a fused projection, tensors `[batch, head, row, dim]`, a broadcast batch, and a last dimension
/// that is strided.
#[test]
fn strides_do_not_change_the_result() {
    let fused = random(3, &[2, 6, 8, 16]);
    let part = |start: usize, heads: usize| fused.narrow(2, start, heads).unwrap();
    let (q, k, v) = (part(0, 4), part(4, 2), part(6, 2));
    let dense = |x: &Tensor| x.force_contiguous().unwrap();
    let reference = flash_attn(&dense(&q), &dense(&k), &dense(&v), SCALE, true).unwrap();
    let equal = |found: Tensor| {
        let of = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(of(&found), of(&reference));
    };
    equal(flash_attn(&q, &k, &v, SCALE, true).unwrap());
    let by_head = |x: &Tensor| x.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
    equal(flash_attn(&by_head(&q), &by_head(&k), &by_head(&v), SCALE, true).unwrap());
    let by_dim = |x: &Tensor| x.transpose(1, 3).unwrap().contiguous().unwrap().transpose(1, 3).unwrap();
    equal(flash_attn(&by_dim(&q), &by_dim(&k), &by_dim(&v), SCALE, true).unwrap());

    let one = |x: &Tensor| x.narrow(0, 1, 1).unwrap();
    let shared = |x: &Tensor| one(x).broadcast_as((2, 6, 2, 16)).unwrap();
    let repeated = |x: &Tensor| dense(&shared(x));
    let found = flash_attn(&q, &shared(&k), &shared(&v), SCALE, false).unwrap();
    let expected = flash_attn(&q, &repeated(&k), &repeated(&v), SCALE, false).unwrap();
    assert_eq!(
        found.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
        expected.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    );
}

#[test]
fn values_may_have_another_head_dim() {
    let (q, k, v) = (random(1, &[1, 4, 2, 24]), random(2, &[1, 4, 1, 24]), random(3, &[1, 4, 1, 8]));
    let found = flash_attn(&q, &k, &v, SCALE, false).unwrap();
    assert_eq!(found.dims(), [1, 4, 2, 8]);
    close("head dims", &found, &expected([&q, &k, &v], &options()), tolerance(DType::F32));
}

#[test]
fn rows_without_keys_are_zero_and_tensors_may_be_empty() {
    let none = |shape: [usize; 4]| Tensor::zeros(&shape, DType::F32, &Device::Cpu).unwrap();
    let q = random(1, &[1, 3, 2, 8]);
    let found = flash_attn(&q, &none([1, 0, 2, 8]), &none([1, 0, 2, 8]), 1.0, false).unwrap();
    assert_eq!(found.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0; 48]);
    let k = random(2, &[1, 3, 2, 8]);
    assert_eq!(flash_attn(&none([1, 0, 2, 8]), &k, &k, 1.0, true).unwrap().dims(), [1, 0, 2, 8]);
    let empty = none([0, 3, 2, 8]);
    assert_eq!(flash_attn(&empty, &empty, &empty, 1.0, true).unwrap().dims(), [0, 3, 2, 8]);
}
