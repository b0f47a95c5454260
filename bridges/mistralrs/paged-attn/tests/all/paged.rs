//! Attention on a cache in pages.

use candle::{DType, Device, Tensor};
use mistralrs_paged_attn::{gather_kv_cache, paged_attention};

use crate::filled::Filled;
use crate::plain::{self, Options, close, random, tolerance};

const SCALE: f32 = 0.4;

/// The expected rows of all sequences.
fn expected(q: &Tensor, rows: &[[Tensor; 2]], options: &Options) -> Vec<f64> {
    let of_sequence = |(i, [k, v]): (usize, &[Tensor; 2])| {
        if k.dims()[0] == 0 {
            return vec![0.0; q.dims()[1] * v.dims()[2]];
        }
        plain::attention([&q.narrow(0, i, 1).unwrap(), k, v], options)
    };
    rows.iter().enumerate().flat_map(of_sequence).collect()
}

fn attend(q: &Tensor, cache: &Filled, options: &Options) -> candle::Result<Tensor> {
    let numbers = |numbers: &Option<Vec<f32>>| {
        numbers.as_ref().map(|numbers| Tensor::new(&numbers[..], &Device::Cpu).unwrap())
    };
    let [k_scale, v_scale] = [0, 1].map(|i| cache.factors.as_ref().map(|factors| &factors[i]));
    let longest = cache.lengths.to_vec1::<u32>()?.into_iter().max().unwrap();
    paged_attention(
        q,
        k_scale,
        v_scale,
        &cache.key_cache,
        &cache.value_cache,
        &cache.table,
        &cache.lengths,
        numbers(&options.slopes).as_ref(),
        longest as usize,
        options.scale,
        options.softcap.unwrap_or(1.0),
        numbers(&options.sinks).as_ref(),
    )
}

#[test]
fn groups_lengths_and_options_agree_with_plain_loops() {
    const KV_HEADS: usize = 2;
    for (dtype, group, dim, page) in [
        (DType::F32, 1, 20, 16usize),
        (DType::F32, 8, 64, 16),
        (DType::F16, 3, 64, 32),
        (DType::F16, 4, 80, 16),
        (DType::BF16, 8, 128, 8),
        (DType::BF16, 3, 16, 1),
    ] {
        let lengths = [page, 0, page + 1, 1, page.saturating_sub(1), 3 * page + 2];
        let cache = Filled::new([dtype, dtype], &lengths, [KV_HEADS, dim, page]);
        let heads = group * KV_HEADS;
        let q = random(3, &[lengths.len(), heads, dim]).to_dtype(dtype).unwrap();
        let causal = Options { scale: SCALE, window: [None, Some(0)], ..Options::default() };
        let each = |step: f32| Some((0..heads).map(|head| step * (head + 1) as f32).collect::<Vec<f32>>());
        let cases = [
            ("plain", causal.clone()),
            ("softcap", Options { softcap: Some(0.7), ..causal.clone() }),
            ("sinks", Options { sinks: each(0.3), ..causal.clone() }),
            ("alibi", Options { slopes: each(0.05), ..causal.clone() }),
            ("all", Options { softcap: Some(0.7), sinks: each(0.3), slopes: each(0.05), ..causal }),
        ];
        for (name, options) in cases {
            let found = attend(&q, &cache, &options).unwrap();
            assert_eq!((found.dims(), found.dtype()), (q.dims(), dtype));
            let name = format!("{name}, {dtype:?}, groups of {group}");
            close(&name, &found, &expected(&q, &cache.rows, &options), tolerance(dtype));
        }
    }
}

#[test]
fn a_cache_in_eight_bits_is_rounded_once() {
    let cache = Filled::new([DType::BF16, DType::F8E4M3], &[19, 5], [2, 64, 16]);
    let [k_scale, v_scale] = cache.factors.as_ref().unwrap();
    let (keys, values) = (&cache.key_cache, &cache.value_cache);
    let starts = &cache.starts();
    let (k, v) =
        gather_kv_cache(keys, values, Some(k_scale), Some(v_scale), &cache.table, starts, DType::F32)
            .unwrap();
    let rows =
        [(0, 19), (19, 5)].map(|(start, length)| [&k, &v].map(|rows| rows.narrow(0, start, length).unwrap()));
    for (written, rounded) in cache.rows.iter().flatten().zip(rows.iter().flatten()) {
        let written = written.to_dtype(DType::F32).unwrap();
        let off = (rounded - &written).unwrap().abs().unwrap();
        // Half a unit of 3 bits behind the point, and half the least step times the factor.
        let allowed = (written.abs().unwrap() / 16.0).unwrap();
        let most =
            (off - allowed).unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert!(most < 1e-3, "{most}");
    }
    let q = random(3, &[2, 6, 64]).to_dtype(DType::BF16).unwrap();
    let options = Options { scale: SCALE, window: [None, Some(0)], ..Options::default() };
    let found = attend(&q, &cache, &options).unwrap();
    close("8 bits", &found, &expected(&q, &rows, &options), tolerance(DType::BF16));
}

#[test]
fn queries_may_be_strided() {
    let cache = Filled::new([DType::F32, DType::F32], &[9, 3], [2, 16, 8]);
    let q = random(3, &[2, 16, 4]).transpose(1, 2).unwrap();
    let options = Options { scale: SCALE, window: [None, Some(0)], ..Options::default() };
    let found = attend(&q, &cache, &options).unwrap();
    close("strided", &found, &expected(&q, &cache.rows, &options), tolerance(DType::F32));
    let none = q.narrow(0, 0, 0).unwrap();
    let table = cache.table.narrow(0, 0, 0).unwrap();
    let lengths = cache.lengths.narrow(0, 0, 0).unwrap();
    let (keys, values) = (&cache.key_cache, &cache.value_cache);
    let found = paged_attention(&none, None, None, keys, values, &table, &lengths, None, 0, 1.0, 1.0, None);
    assert_eq!(found.unwrap().dims(), [0, 4, 16]);
}
