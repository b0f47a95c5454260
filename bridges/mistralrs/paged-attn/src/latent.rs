//! Latent attention (MLA): all heads share a key of two parts, `ckv`, which is the value too, and `kpe`,
//! which carries the position.

use candle::{D, DType, Result, Tensor, bail};
use flashcore::Band;
use flashcore::gpu::{LengthArray, Operand};
use flashcore::raw::CallOptions;

use crate::blocks::{counted, gathered, integers, slots};
use crate::cache::{RowWrite, in_place};
use crate::op::Attention;
use crate::paged::page_operands;
use crate::side::{SideOperand, with_dense_rows};

/// The extents of a latent cache.
struct Extents {
    blocks: usize,
    page: usize,
    ckv: usize,
    kpe: usize,
}

fn extents(ckv_cache: &Tensor, kpe_cache: &Tensor) -> Result<Extents> {
    let (blocks, page, ckv) = ckv_cache.dims3()?;
    let (kpe_blocks, kpe_page, kpe) = kpe_cache.dims3()?;
    if (blocks, page) != (kpe_blocks, kpe_page) || ckv_cache.dtype() != kpe_cache.dtype() {
        bail!(
            "ckv_cache {:?} of {:?} and kpe_cache {:?} of {:?} do not fit each other",
            ckv_cache.shape(),
            ckv_cache.dtype(),
            kpe_cache.shape(),
            kpe_cache.dtype()
        )
    }
    Ok(Extents { blocks, page, ckv, kpe })
}

/// Writes rows to their slots of a latent cache, as [`reshape_and_cache`](crate::reshape_and_cache).
///
/// * `ckv`: `[tokens, kv_lora_rank]`, and `ckv_cache`: `[blocks, page, kv_lora_rank]`.
/// * `k_pe`: `[tokens, kpe_head_dim]`, and `kpe_cache`: `[blocks, page, kpe_head_dim]`.
/// * `slot_mapping`: `[tokens]`, i64, u32 or i32.
///
/// # Errors
/// As that function.
pub fn concat_and_cache_mla(
    ckv: &Tensor,
    k_pe: &Tensor,
    ckv_cache: &Tensor,
    kpe_cache: &Tensor,
    slot_mapping: &Tensor,
) -> Result<()> {
    let Extents { blocks, page, ckv: ckv_dim, kpe: kpe_dim } = extents(ckv_cache, kpe_cache)?;
    let caches = [
        in_place("ckv_cache", ckv_cache, &[blocks, page, 1, ckv_dim])?,
        in_place("kpe_cache", kpe_cache, &[blocks, page, 1, kpe_dim])?,
    ];
    let new = [ckv.unsqueeze(1)?, k_pe.unsqueeze(1)?];
    RowWrite { new, caches, slots: slot_mapping.clone(), factors: None }.run()
}

/// Attention of each sequence's last row on a latent cache: the logits are
/// `sm_scale · (q_nope · ckv + q_pe · kpe)`, and the values are `ckv`.
///
/// * `q_nope`: `[sequences, heads, kv_lora_rank]`, with the keys' projection absorbed.
/// * `q_pe`: `[sequences, heads, kpe_head_dim]`.
/// * `paged_kv_indptr`: `[sequences + 1]`, the first entry of each sequence in `paged_kv_indices`, the
///   blocks.
/// * `paged_kv_last_page_len`: `[sequences]`, the rows in the last block.
///
/// The other arrays are FlashInfer's plan. They are not read. The blocks of the sequences are copied, because
/// a key lies in two tensors.
///
/// The result is `[sequences, heads, kv_lora_rank]`.
///
/// # Errors
/// When tensors do not fit each other, and on the CPU when the arrays do not describe blocks of the cache.
#[allow(clippy::too_many_arguments, reason = "the signature of mistralrs-paged-attn")]
pub fn flashinfer_mla_decode(
    q_nope: &Tensor,
    q_pe: &Tensor,
    ckv_cache: &Tensor,
    kpe_cache: &Tensor,
    paged_kv_indptr: &Tensor,
    paged_kv_indices: &Tensor,
    paged_kv_last_page_len: &Tensor,
    request_indices: &Tensor,
    kv_tile_indices: &Tensor,
    o_indptr: &Tensor,
    kv_chunk_size: &Tensor,
    sm_scale: f32,
) -> Result<Tensor> {
    let _ = (request_indices, kv_tile_indices, o_indptr, kv_chunk_size);
    let Extents { blocks, page, ckv, .. } = extents(ckv_cache, kpe_cache)?;
    let sequences = q_nope.dim(0)?;
    let entries = paged_kv_indices.dims1()?;
    for (name, array, expected) in [
        ("paged_kv_indptr", paged_kv_indptr, sequences + 1),
        ("paged_kv_last_page_len", paged_kv_last_page_len, sequences),
    ] {
        if array.dims() != [expected] {
            bail!("shape mismatch {name} {:?}, expected {:?}", array.shape(), [expected])
        }
    }
    if q_nope.device().is_cpu() {
        check_pages(paged_kv_indptr, paged_kv_last_page_len, entries, page)?;
        check_blocks(paged_kv_indices, blocks)?;
    }
    if entries == 0 {
        return q_nope.zeros_like();
    }
    let device = q_nope.device();
    let number = |number: usize| Tensor::new(number as i64, device);
    let starts = paged_kv_indptr.to_dtype(DType::I64)?;
    let first = starts.narrow(0, 0, sequences)?;
    let pages = (starts.narrow(0, 1, sequences)? - &first)?;
    let before_last = pages.broadcast_sub(&number(1)?)?.broadcast_mul(&number(page)?)?;
    let used = (before_last + paged_kv_last_page_len.to_dtype(DType::I64)?)?;
    let used = used.broadcast_maximum(&number(0)?)?.to_dtype(DType::U32)?;
    // The blocks that are listed become a cache, whose page table counts through it.
    let table = first.unsqueeze(1)?.broadcast_add(&counted(entries, device)?.unsqueeze(0)?)?;
    let table = table.broadcast_minimum(&number(entries - 1)?)?.to_dtype(DType::U32)?;
    let blocks = paged_kv_indices.to_dtype(DType::U32)?;
    let parts = [ckv_cache.index_select(&blocks, 0)?, kpe_cache.index_select(&blocks, 0)?];
    let keys = Tensor::cat(&parts, D::Minus1)?.unsqueeze(2)?;
    let side = page_operands(sequences, &table, &used)?;
    let q = Tensor::cat(&[q_nope, q_pe], D::Minus1)?.unsqueeze(1)?;
    attend("flashinfer-mla-decode", &q, &keys, ckv, sm_scale, side)?.squeeze(1)
}

/// Rejects lists of blocks that are not within `entries` or whose last page has other than 1 to `page` rows.
fn check_pages(starts: &Tensor, last: &Tensor, entries: usize, page: usize) -> Result<()> {
    let (starts, last) = (integers("paged_kv_indptr", starts)?, integers("paged_kv_last_page_len", last)?);
    for (index, (start, &last)) in starts.windows(2).zip(&last).enumerate() {
        if start[0] < 0 || start[1] < start[0] || start[1] > entries as i64 {
            bail!(
                "paged_kv_indptr {start:?} at index {index}: expected ascending numbers from 0 to {entries}"
            )
        }
        if start[1] > start[0] && !(1..=page as i64).contains(&last) {
            bail!("paged_kv_last_page_len {last} at index {index}: expected 1 to {page}, the rows of a page")
        }
    }
    Ok(())
}

/// Rejects blocks that the cache does not have. candle takes the largest u32 for a row of zeros.
fn check_blocks(list: &Tensor, blocks: usize) -> Result<()> {
    let list = integers("paged_kv_indices", list)?;
    match list.iter().position(|block| !(0..blocks as i64).contains(block)) {
        Some(i) => {
            bail!("paged_kv_indices has block {} at index {i}, expected 0 to {}", list[i], blocks as i64 - 1)
        }
        None => Ok(()),
    }
}

/// Attention of `q` on keys whose first `dim_v` columns are the values.
fn attend(
    name: &'static str,
    q: &Tensor,
    keys: &Tensor,
    dim_v: usize,
    scale: f32,
    side: Vec<SideOperand>,
) -> Result<Tensor> {
    let options = CallOptions { scale: Some(scale), band: Band::CAUSAL, ..CallOptions::default() };
    let (q, keys) = (with_dense_rows(q)?, with_dense_rows(keys)?);
    let values = keys.narrow(D::Minus1, 0, dim_v)?;
    q.apply_op3_no_bwd(&keys, &values, &Attention { name, options, side, lse: None })
}

/// The cached rows of all sequences, packed: `[tokens, kv_lora_rank]` and `[tokens, kpe_head_dim]`.
///
/// * `block_table`: `[sequences, blocks]`.
/// * `cu_seq_lens`: `[sequences + 1]`; reading it waits for a GPU.
/// * `token_to_seq`: `[tokens]`. Only the number of its elements is used.
///
/// # Errors
/// When tensors do not fit each other, or a sequence has a row outside of the cache.
pub fn gather_mla_cache(
    ckv_cache: &Tensor,
    kpe_cache: &Tensor,
    block_table: &Tensor,
    cu_seq_lens: &Tensor,
    token_to_seq: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let Extents { blocks, page, .. } = extents(ckv_cache, kpe_cache)?;
    let slots = slots(block_table, cu_seq_lens, [blocks, page])?;
    if token_to_seq.dims() != slots.dims() {
        bail!("shape mismatch token_to_seq {:?}, expected {:?}", token_to_seq.shape(), slots.shape())
    }
    Ok((gathered(ckv_cache, &slots)?, gathered(kpe_cache, &slots)?))
}

/// Causal attention of new rows on the cached rows of their sequences and on each other.
///
/// * `q_nope`: `[tokens, heads, qk_nope_head_dim]`, and `w_uk`: `[heads, qk_nope_head_dim, kv_lora_rank]`,
///   the projection that is absorbed.
/// * `q_pe`: `[tokens, heads, kpe_head_dim]`.
/// * `ckv_new`, `kpe_new`: the new rows, `[tokens, kv_lora_rank]` and `[tokens, kpe_head_dim]`.
/// * `block_tables`: `[sequences, blocks]`.
/// * `context_lens`, `query_lens`: `[sequences]`, cached and new rows; reading them waits for a GPU.
///
/// The result is `[tokens, heads, kv_lora_rank]`.
///
/// # Errors
/// When tensors do not fit each other, or a sequence has a row outside of the cache.
#[allow(clippy::too_many_arguments, reason = "the signature of mistralrs-paged-attn")]
pub fn context_attention_fwd_mla(
    q_nope: &Tensor,
    q_pe: &Tensor,
    ckv_new: &Tensor,
    kpe_new: &Tensor,
    ckv_cache: &Tensor,
    kpe_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    query_lens: &Tensor,
    w_uk: &Tensor,
    softmax_scale: f32,
) -> Result<Tensor> {
    let Extents { blocks, page, ckv, .. } = extents(ckv_cache, kpe_cache)?;
    let (tokens, _, _) = q_nope.dims3()?;
    let device = q_nope.device();
    let [cached, new] =
        [("context_lens", context_lens), ("query_lens", query_lens)].map(|(name, lengths)| {
            let lengths = integers(name, lengths)?;
            match lengths.iter().find(|length| !(0..=i64::from(i32::MAX)).contains(*length)) {
                Some(length) => bail!("{name} has the length {length}, expected 0 or more"),
                None => Ok(lengths),
            }
        });
    let (cached, new) = (cached?, new?);
    if cached.len() != new.len() || new.iter().sum::<i64>() != tokens as i64 {
        bail!(
            "query_lens {new:?} beside {} context_lens: expected numbers that add up to {tokens}",
            cached.len()
        )
    }
    let starts = |lengths: &[i64]| {
        let ends = lengths.iter().scan(0, |sum, length| {
            *sum += length;
            Some(*sum as u32)
        });
        Tensor::from_iter(std::iter::once(0).chain(ends), device)
    };
    let slots = slots(block_tables, &starts(&cached)?, [blocks, page])?;
    let rows = |cache: &Tensor, new: &Tensor| Tensor::cat(&[&gathered(cache, &slots)?, new], 0);
    let both = Tensor::cat(&[rows(ckv_cache, ckv_new)?, rows(kpe_cache, kpe_new)?], 1)?;
    let keys = both.index_select(&Tensor::from_iter(in_sequence(&cached, &new), device)?, 0)?.unsqueeze(1)?;
    let lengths: Vec<i64> = cached.iter().zip(&new).map(|(cached, new)| cached + new).collect();
    let lengths_of = |array, name, lengths: &[i64]| {
        SideOperand::integers(Operand::Lengths(array), name, &starts(lengths)?)
    };
    let side = vec![
        lengths_of(LengthArray::CumulativeQ, "query_lens", &new)?,
        lengths_of(LengthArray::CumulativeKv, "context_lens", &lengths)?,
    ];
    let absorbed = q_nope.transpose(0, 1)?.contiguous()?.matmul(&w_uk.contiguous()?)?.transpose(0, 1)?;
    let q = Tensor::cat(&[&absorbed.contiguous()?, &q_pe.contiguous()?], D::Minus1)?;
    attend("context-attention-fwd-mla", &q, &keys, ckv, softmax_scale, side)
}

/// The rows of each sequence, cached ones first, among all cached rows and the new rows behind them.
fn in_sequence(cached: &[i64], new: &[i64]) -> Vec<i64> {
    let (mut of_cached, mut of_new): (i64, i64) = (0, cached.iter().sum());
    let mut rows = Vec::new();
    for (cached, new) in cached.iter().zip(new) {
        rows.extend(of_cached..of_cached + cached);
        rows.extend(of_new..of_new + new);
        of_cached += cached;
        of_new += new;
    }
    rows
}
