//! Latent attention, whose keys lie in two caches.

use candle::{DType, Device, Result, Tensor};
use mistralrs_paged_attn::{
    concat_and_cache_mla, context_attention_fwd_mla, flashinfer_mla_decode, gather_mla_cache,
};

use crate::plain::{self, Options, close, random, tolerance};

const CKV: usize = 32;
const KPE: usize = 8;
const PAGE: usize = 4;
const BLOCKS: usize = 9;
const SCALE: f32 = 0.3;
/// Sequences of 5, 4 and 1 rows.
const ROWS: [&[[usize; 2]]; 3] =
    [&[[7, 0], [7, 1], [7, 2], [7, 3], [2, 0]], &[[4, 0], [4, 1], [4, 2], [4, 3]], &[[0, 0]]];

struct Latent {
    caches: [Tensor; 2],
    /// `[row, 1, ckv + kpe]` of each sequence.
    keys: Vec<Tensor>,
}

fn ints(values: &[i32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

fn latent(dtype: DType) -> Latent {
    let nan = |dim: usize| Tensor::full(f32::NAN, (BLOCKS, PAGE, dim), &Device::Cpu).unwrap();
    let caches = [CKV, KPE].map(|dim| nan(dim).to_dtype(dtype).unwrap());
    let slots: Vec<i64> =
        ROWS.iter().copied().flatten().map(|[block, row]| (block * PAGE + row) as i64).collect();
    let rows = random(1, &[slots.len(), CKV + KPE]).to_dtype(dtype).unwrap();
    let [ckv, kpe] = [rows.narrow(1, 0, CKV).unwrap(), rows.narrow(1, CKV, KPE).unwrap()];
    let slots = Tensor::new(slots, &Device::Cpu).unwrap();
    concat_and_cache_mla(&ckv, &kpe, &caches[0], &caches[1], &slots).unwrap();
    let cut = |start, len| rows.narrow(0, start, len).unwrap().unsqueeze(1).unwrap();
    Latent { caches, keys: vec![cut(0, 5), cut(5, 4), cut(9, 1)] }
}

fn values(keys: &Tensor) -> Tensor {
    keys.narrow(2, 0, CKV).unwrap()
}

fn decode(latent: &Latent, q: &Tensor, starts: &[i32], blocks: &[i32], last: &[i32]) -> Result<Tensor> {
    let [ckv, kpe] = &latent.caches;
    let none = &ints(&[0; 3]);
    let (q_nope, q_pe) = (q.narrow(2, 0, CKV)?, q.narrow(2, CKV, KPE)?);
    let (starts, blocks, last) = (ints(starts), ints(blocks), ints(last));
    flashinfer_mla_decode(&q_nope, &q_pe, ckv, kpe, &starts, &blocks, &last, none, none, none, none, SCALE)
}

#[test]
fn decode_agrees_with_plain_loops() {
    for dtype in [DType::F32, DType::F16] {
        let latent = latent(dtype);
        let q = random(2, &[3, 5, CKV + KPE]).to_dtype(dtype).unwrap();
        let found = decode(&latent, &q, &[0, 2, 3, 4], &[7, 2, 4, 0], &[1, 4, 1]).unwrap();
        let options = Options { scale: SCALE, ..Options::default() };
        let of_sequence = |(i, keys): (usize, &Tensor)| {
            plain::attention([&q.narrow(0, i, 1).unwrap(), keys, &values(keys)], &options)
        };
        let expected: Vec<f64> = latent.keys.iter().enumerate().flat_map(of_sequence).collect();
        close("decode", &found, &expected, tolerance(dtype));
        let none = decode(&latent, &q, &[0, 0, 0, 0], &[], &[0, 0, 0]).unwrap();
        assert_eq!(
            none.abs().unwrap().sum_all().unwrap().to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap(),
            0.0
        );
    }
}

#[test]
fn lists_of_blocks_outside_of_the_cache_are_refused() {
    let latent = latent(DType::F32);
    let q = random(2, &[3, 5, CKV + KPE]);
    let text = |starts: &[i32], blocks: &[i32], last: &[i32]| {
        decode(&latent, &q, starts, blocks, last).unwrap_err().to_string()
    };
    let (blocks, last) = ([7, 2, 4, 0], [1, 4, 1]);
    for starts in [[0, 2, 3, 5], [-1, 2, 3, 4], [0, 3, 2, 4], [i32::MIN, i32::MAX, 3, 4]] {
        assert!(text(&starts, &blocks, &last).contains("paged_kv_indptr"), "{starts:?}");
    }
    for last in [[0, 4, 1], [5, 4, 1], [-1, 4, 1]] {
        assert!(text(&[0, 2, 3, 4], &blocks, &last).contains("paged_kv_last_page_len"), "{last:?}");
    }
    for block in [BLOCKS as i32, -1, i32::MAX] {
        let text = text(&[0, 2, 3, 4], &[7, block, 4, 0], &last);
        assert!(text.contains("paged_kv_indices"), "{text}");
    }
    assert!(text(&[0, 2, 3], &blocks, &last).contains("paged_kv_indptr"));
}

#[test]
fn new_rows_see_the_cached_rows_of_their_sequence() {
    const NOPE: usize = 16;
    let latent = latent(DType::F32);
    let [ckv, kpe] = &latent.caches;
    // New rows of the three sequences, the second of which has none.
    let new = [2, 0, 3];
    let (q_nope, q_pe) = (random(3, &[5, 4, NOPE]), random(4, &[5, 4, KPE]));
    let (ckv_new, kpe_new) = (random(5, &[5, CKV]), random(6, &[5, KPE]));
    let w_uk = random(7, &[4, NOPE, CKV]);
    let table = Tensor::new(&[[7i32, 2], [4, -1], [0, -1]], &Device::Cpu).unwrap();
    let attend = |table: &Tensor, cached: &[i32], new: &[i32]| {
        let (cached, new) = (ints(cached), ints(new));
        let (of_q, of_new) = ([&q_nope, &q_pe], [&ckv_new, &kpe_new]);
        context_attention_fwd_mla(
            of_q[0], of_q[1], of_new[0], of_new[1], ckv, kpe, table, &cached, &new, &w_uk, SCALE,
        )
    };
    let found = attend(&table, &[5, 4, 1], &new).unwrap();
    let absorbed = q_nope.transpose(0, 1).unwrap().contiguous().unwrap().matmul(&w_uk).unwrap();
    let q = Tensor::cat(&[&absorbed.transpose(0, 1).unwrap(), &q_pe], 2).unwrap();
    let new_keys = Tensor::cat(&[&ckv_new, &kpe_new], 1).unwrap().unsqueeze(1).unwrap();
    let options = Options { scale: SCALE, window: [None, Some(0)], ..Options::default() };
    let mut expected = Vec::new();
    for (sequence, start, len) in [(0, 0, 2), (2, 2, 3)] {
        let cut = |x: &Tensor| x.narrow(0, start, len).unwrap();
        let keys = Tensor::cat(&[&latent.keys[sequence], &cut(&new_keys)], 0).unwrap();
        expected.extend(plain::attention([&cut(&q), &keys, &values(&keys)], &options));
    }
    close("prefill", &found, &expected, 5e-5);

    for (cached, new, part) in [
        ([5, 4, 1], [2, 0, 2], "query_lens"),
        ([5, 4, 1], [6, -1, 0], "query_lens"),
        ([9, 4, 1], [2, 0, 3], "cu_seq_lens"),
        ([5, 5, 1], [2, 0, 3], "block_table"),
    ] {
        let text = attend(&table, &cached, &new).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn gathered_rows_are_those_that_were_written() {
    let latent = latent(DType::F16);
    let [ckv, kpe] = &latent.caches;
    let table = Tensor::new(&[[7i32, 2], [4, -1], [0, -1]], &Device::Cpu).unwrap();
    let tokens = ints(&[0, 0, 0, 0, 0, 1, 1, 1, 1, 2]);
    let (ckv, kpe) = gather_mla_cache(ckv, kpe, &table, &ints(&[0, 5, 9, 10]), &tokens).unwrap();
    let found = Tensor::cat(&[ckv, kpe], 1).unwrap().unsqueeze(1).unwrap().to_dtype(DType::F32).unwrap();
    let expected = Tensor::cat(&latent.keys, 0).unwrap().to_dtype(DType::F32).unwrap();
    assert_eq!(found.to_vec3::<f32>().unwrap(), expected.to_vec3::<f32>().unwrap());
}
