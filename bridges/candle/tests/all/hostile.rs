//! Bad arguments give an error that names the argument.

use candle::{DType, Device, Result, Tensor, Var};
use candle_flashcore::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed_softcap, flash_attn_varlen,
    flash_attn_varlen_paged_windowed,
};

use crate::plain::random;

fn refused(result: Result<Tensor>, parts: &[&str]) {
    let text = result.unwrap_err().to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} does not contain {part:?}");
    }
}

fn ints(values: &[u32]) -> Tensor {
    Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap()
}

#[test]
fn tensors_that_do_not_fit() {
    let x = &random(1, &[2, 4, 2, 8]);
    let other = |shape: &[usize]| random(2, shape);
    let call = |q: &Tensor, k: &Tensor, v: &Tensor| flash_attn(q, k, v, 1.0, true);
    refused(call(&other(&[4, 2, 8]), x, x), &["q of rank 4", "[4, 2, 8]"]);
    refused(call(x, &other(&[2, 2, 4, 2, 8]), x), &["k of rank 4"]);
    refused(call(x, &other(&[1, 4, 2, 8]), x), &["k has batch = 1", "2"]);
    refused(call(x, &other(&[2, 4, 2, 9]), x), &["k has head_dim = 9", "8"]);
    refused(call(x, x, &other(&[2, 5, 2, 8])), &["v has sequence length = 5", "4"]);
    refused(call(x, x, &other(&[2, 4, 1, 8])), &["v has heads = 1", "2"]);
    let three = &other(&[2, 4, 3, 8]);
    refused(call(x, three, three), &["heads"]);
    let half = &x.to_dtype(DType::F16).unwrap();
    refused(call(x, half, x), &["q, k and v of one dtype", "F16"]);
    let double = &x.to_dtype(DType::F64).unwrap();
    refused(call(double, double, double), &["f32/f16/bf16", "F64"]);
    let none = &Tensor::zeros((2, 4, 0, 8), DType::F32, &Device::Cpu).unwrap();
    refused(call(x, none, none), &["heads"]);
}

#[test]
fn numbers_and_slopes_that_do_not_fit() {
    let x = &random(1, &[1, 4, 2, 8]);
    refused(flash_attn(x, x, x, f32::NAN, true), &["scale", "NaN"]);
    for softcap in [-1.0, f32::NAN] {
        refused(flash_attn_alibi_windowed_softcap(x, x, x, None, 1.0, None, None, softcap), &["softcap"]);
    }
    let call = |slopes: &Tensor| flash_attn_alibi(x, x, x, slopes, 1.0, true);
    refused(call(&random(2, &[3])), &["shape mismatch alibi_slopes", "[3]", "[2]"]);
    refused(call(&random(2, &[1, 2])), &["shape mismatch alibi_slopes"]);
    refused(call(&random(2, &[2]).to_dtype(DType::BF16).unwrap()), &["DType mismatch alibi_slopes", "BF16"]);
    refused(call(&Var::from_tensor(&random(2, &[2])).unwrap()), &["alibi_slopes.detach()"]);
}

#[test]
fn lengths_that_do_not_fit() {
    let x = &random(1, &[6, 2, 8]);
    let call = |of_q: &[u32], of_k: &[u32], longest: usize| {
        flash_attn_varlen(x, x, x, &ints(of_q), &ints(of_k), longest, longest, 1.0, true)
    };
    refused(call(&[0], &[0], 6), &["seqlens_q", "len >= 2"]);
    refused(call(&[0, 6], &[0, 3, 6], 6), &["seqlens_q and seqlens_k", "2 <> 3"]);
    refused(call(&[0, 4, 2], &[0, 3, 6], 6), &["cu_seqlens_q"]);
    refused(call(&[0, 3, 6], &[0, 3, 7], 6), &["cu_seqlens_k"]);
    refused(call(&[0, 3, 6], &[0, 3, u32::MAX], 6), &["cu_seqlens_k"]);
    refused(call(&[0, 3, 1 << 31], &[0, 3, 6], 6), &["cu_seqlens_q"]);
    refused(call(&[0, 3, 6], &[0, 3, 6], 2), &["cu_seqlens_q"]);
    let floats = &random(2, &[3]);
    refused(flash_attn_varlen(x, x, x, floats, floats, 6, 6, 1.0, true), &["seqlens_q", "u32 or i32", "F32"]);
    let four = &random(1, &[1, 6, 2, 8]);
    let starts = &ints(&[0, 6]);
    refused(flash_attn_varlen(four, x, x, starts, starts, 6, 6, 1.0, true), &["q of rank 3"]);
}

#[test]
fn pages_that_do_not_fit() {
    let (q, pool) = (&random(1, &[3, 2, 8]), &random(2, &[4, 4, 2, 8]));
    let call = |of_k: &[u32], table: &Tensor, ranges: Option<&Tensor>, page: usize| {
        let (of_q, of_k) = (&ints(&[0, 1, 3]), &ints(of_k));
        flash_attn_varlen_paged_windowed(
            q,
            pool,
            pool,
            of_q,
            of_k,
            table,
            ranges,
            2,
            8,
            1.0,
            None,
            Some(0),
            page,
            None,
        )
    };
    let table = &ints(&[0, 1, 2, 3]).reshape((2, 2)).unwrap();
    assert_eq!(call(&[0, 5, 13], table, None, 4).unwrap().dims(), [3, 2, 8]);
    refused(call(&[0, 5, 13], table, None, 8), &["page_block_size 8", "[4, 4, 2, 8]"]);
    refused(
        call(&[0, 5, 13], &ints(&[0, 1, 2, 3]), None, 4),
        &["block_table must have the shape (2, pages)"],
    );
    refused(call(&[0, 5, 13], &ints(&[0, 1, 2, 9]).reshape((2, 2)).unwrap(), None, 4), &["page_table", "9"]);
    let floats = &random(1, &[2, 2]);
    refused(call(&[0, 5, 13], floats, None, 4), &["block_table", "u32 or i32", "F32"]);
    refused(call(&[0, 5, 3], table, None, 4), &["seqused_k"]);
    refused(call(&[0, 5, 15], table, None, 4), &["seqused_k", "10"]);
    refused(call(&[0, 5, u32::MAX], table, None, 4), &["seqused_k"]);
    refused(call(&[0, 5, 13], table, Some(table), 4), &["mm_prefix_ranges must be i32"]);
    let ranges = &Tensor::zeros((2, 1, 3), DType::I32, &Device::Cpu).unwrap();
    refused(
        call(&[0, 5, 13], table, Some(ranges), 4),
        &["mm_prefix_ranges shape must be (2, max_ranges, 2)"],
    );
    let most = &Tensor::zeros((2, 256, 2), DType::I32, &Device::Cpu).unwrap();
    assert!(call(&[0, 5, 13], table, Some(most), 4).is_ok());
    let many = &Tensor::zeros((2, 5000, 2), DType::I32, &Device::Cpu).unwrap();
    refused(call(&[0, 5, 13], table, Some(many), 4), &["mm_prefix_ranges has 5000 ranges", "256"]);
}
