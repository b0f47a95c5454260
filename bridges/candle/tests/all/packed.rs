//! Packed sequences, with keys in rows and in pages.

use candle::{DType, Device, Tensor};
use candle_flashcore::{
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed,
    v3,
};

use crate::plain::{self, Options, close, random, tolerance};

const SCALE: f32 = 0.9;
const STARTS_Q: [u32; 5] = [0, 3, 3, 8, 10];
const STARTS_K: [u32; 5] = [0, 5, 9, 12, 20];

fn ints(values: &[u32]) -> Tensor {
    Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap()
}

/// The output of each sequence, and 0 for rows of no sequence.
fn expected([q, k, v]: [&Tensor; 3], options: &[Options; 4]) -> Vec<f64> {
    let mut out = Vec::new();
    for (i, options) in options.iter().enumerate() {
        let part = |x: &Tensor, starts: [u32; 5]| {
            x.narrow(0, starts[i] as usize, (starts[i + 1] - starts[i]) as usize).unwrap()
        };
        out.extend(plain::attention([&part(q, STARTS_Q), &part(k, STARTS_K), &part(v, STARTS_K)], options));
    }
    let (_, heads, _) = q.dims3().unwrap();
    out.resize(q.dims()[0] * heads * v.dims()[2], 0.0);
    out
}

fn inputs(dtype: DType) -> [Tensor; 3] {
    let shapes = [[11, 4, 16], [20, 2, 16], [20, 2, 16]];
    [0, 1, 2].map(|i| (random(i as u64 + 7, &shapes[i]) * 2.0).unwrap().to_dtype(dtype).unwrap())
}

#[test]
fn every_function_agrees_with_plain_loops() {
    let numbers = [0.5f32, 0.25, 0.125, 0.0625];
    let slopes = Tensor::from_slice(&numbers, 4, &Device::Cpu).unwrap();
    let (starts_q, starts_k) = (&ints(&STARTS_Q), &ints(&STARTS_K).to_dtype(DType::I32).unwrap());
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let [q, k, v] = &inputs(dtype);
        let check = |name: &str, options: Options, found: candle::Result<Tensor>| {
            let all = [0; 4].map(|_| options.clone());
            close(
                &format!("{name} {dtype:?}"),
                &found.unwrap(),
                &expected([q, k, v], &all),
                tolerance(dtype),
            );
        };
        let options = Options { scale: SCALE, ..Options::default() };
        let causal = Options { window: [None, Some(0)], ..options.clone() };
        let (left, right) = (Some(2), Some(1));
        let windowed = Options { window: [left, right], ..options.clone() };
        check("full", options.clone(), flash_attn_varlen(q, k, v, starts_q, starts_k, 5, 8, SCALE, false));
        check("causal", causal.clone(), flash_attn_varlen(q, k, v, starts_q, starts_k, 6, 9, SCALE, true));
        let found = v3::flash_attn_varlen(q, k, v, starts_q, starts_k, 5, 8, SCALE, true, true);
        check("v3", causal.clone(), found);
        let found = flash_attn_varlen_windowed(q, k, v, starts_q, starts_k, 5, 8, SCALE, left, right);
        check("windowed", windowed.clone(), found);
        let found =
            v3::flash_attn_varlen_windowed(q, k, v, starts_q, starts_k, 5, 8, SCALE, left, right, true);
        check("v3 windowed", windowed.clone(), found);
        let alibi = Options { slopes: Some(numbers.to_vec()), ..causal };
        let found = flash_attn_varlen_alibi(q, k, v, &slopes, starts_q, starts_k, 5, 8, SCALE, true);
        check("alibi", alibi.clone(), found);
        let found =
            v3::flash_attn_varlen_alibi(q, k, v, &slopes, starts_q, starts_k, 5, 8, SCALE, true, false);
        check("v3 alibi", alibi, found);
        let both = Options { slopes: Some(numbers.to_vec()), ..windowed.clone() };
        let found =
            flash_attn_varlen_alibi_windowed(q, k, v, &slopes, starts_q, starts_k, 5, 8, SCALE, left, right);
        check("alibi windowed", both.clone(), found);
        let found = v3::flash_attn_varlen_alibi_windowed(
            q, k, v, &slopes, starts_q, starts_k, 5, 8, SCALE, left, right, false,
        );
        check("v3 alibi windowed", both.clone(), found);
        let capped = Options { softcap: Some(1.25), ..both };
        let found = flash_attn_varlen_alibi_windowed_softcap(
            q,
            k,
            v,
            Some(&slopes),
            starts_q,
            starts_k,
            5,
            8,
            SCALE,
            left,
            right,
            1.25,
        );
        check("softcap", capped, found);
        let found = flash_attn_varlen_alibi_windowed_softcap(
            q, k, v, None, starts_q, starts_k, 5, 8, SCALE, left, right, 0.0,
        );
        check("no softcap", windowed, found);
    }
}

/// Scatters rows of keys to pages of 4 in an order of their own, and computes on those.
#[test]
fn pages_hold_the_keys_of_rows() {
    const PAGE: usize = 4;
    const TABLE: [[u32; 2]; 4] = [[6, 1], [3, 3], [0, 7], [2, 5]];
    let [q, k, v] = inputs(DType::F32);
    let pool = |x: &Tensor| {
        let mut pages = vec![Tensor::full(f32::NAN, (2, 16), &Device::Cpu).unwrap(); 8 * PAGE];
        for (i, table) in TABLE.iter().enumerate() {
            for row in STARTS_K[i]..STARTS_K[i + 1] {
                let at = (row - STARTS_K[i]) as usize;
                pages[table[at / PAGE] as usize * PAGE + at % PAGE] = x.get(row as usize).unwrap();
            }
        }
        Tensor::stack(&pages, 0).unwrap().reshape((8, PAGE, 2, 16)).unwrap()
    };
    let table = Tensor::new(&TABLE, &Device::Cpu).unwrap();
    let (starts_q, starts_k) = (ints(&STARTS_Q), ints(&STARTS_K));
    let (pool_k, pool_v) = (pool(&k), pool(&v));
    let run = |ranges: Option<&Tensor>, window: [Option<usize>; 2], softcap| {
        flash_attn_varlen_paged_windowed(
            &q, &pool_k, &pool_v, &starts_q, &starts_k, &table, ranges, 5, 8, SCALE, window[0], window[1],
            PAGE, softcap,
        )
        .unwrap()
    };
    let ranges = [[[1, 3], [0, 0]], [[0, 4], [2, 3]], [[-2, 1], [2, 2]], [[5, 7], [0, 8]]];
    let tensor = Tensor::new(&ranges, &Device::Cpu).unwrap();
    let options = Options { scale: SCALE, ..Options::default() };
    for (window, softcap) in [([None, None], None), ([None, Some(0)], Some(2.0)), ([Some(1), Some(0)], None)]
    {
        let options = Options { window, softcap, ..options.clone() };
        let all = [0; 4].map(|_| options.clone());
        close("pages", &run(None, window, softcap), &expected([&q, &k, &v], &all), 2e-5);
        let all = ranges.map(|ranges| Options { ranges: ranges.to_vec(), ..options.clone() });
        let expected = expected([&q, &k, &v], &all);
        close("ranges", &run(Some(&tensor), window, softcap), &expected, 2e-5);
        if window != [None, None] {
            let changed = plain::distance(&run(None, window, softcap), &expected);
            assert!(changed > 1e-2, "the ranges change nothing: {changed}");
        }
    }
}
