//! Whole blocks and gathered rows of a cache, by candle's operations.

use std::collections::HashMap;

use candle::{DType, Device, Result, Tensor, bail};

use crate::cache::{in_place, standard};

/// The cached rows of all sequences, packed: keys and values as `[tokens, kv_heads, head_size]`.
///
/// * `block_table`: `[sequences, blocks]`, u32 or i32.
/// * `cu_seq_lens`: `[sequences + 1]`, u32 or i32; reading it waits for a GPU.
/// * `k_scale`, `v_scale`: the factors of a cache in F8E4M3.
///
/// # Errors
/// When tensors do not fit each other, or a sequence has a row outside of the cache.
pub fn gather_kv_cache(
    key_cache: &Tensor,
    value_cache: &Tensor,
    k_scale: Option<&Tensor>,
    v_scale: Option<&Tensor>,
    block_table: &Tensor,
    cu_seq_lens: &Tensor,
    out_dtype: DType,
) -> Result<(Tensor, Tensor)> {
    if !matches!(out_dtype, DType::F16 | DType::BF16 | DType::F32) {
        bail!("gather_kv_cache only supports f16, bf16 and f32 output, got {out_dtype:?}")
    }
    let [k, v] = standard(key_cache, value_cache)?;
    let (blocks, page, ..) = k.dims4()?;
    let slots = slots(block_table, cu_seq_lens, [blocks, page])?;
    let gather = |cache: &Tensor, factor: Option<&Tensor>| {
        let rows = gathered(cache, &slots)?;
        if cache.dtype() != DType::F8E4M3 {
            return rows.to_dtype(out_dtype);
        }
        let rows = rows.to_dtype(DType::F32)?;
        let rows = match factor {
            Some(factor) => rows.broadcast_mul(&factor.reshape(((), 1))?)?,
            None => rows,
        };
        rows.to_dtype(out_dtype)
    };
    Ok((gather(&k, k_scale)?, gather(&v, v_scale)?))
}

/// The rows of a cache `[block, row, …]` in some slots.
pub(crate) fn gathered(cache: &Tensor, slots: &Tensor) -> Result<Tensor> {
    let rows = cache.flatten(0, 1)?;
    if slots.elem_count() == 0 { rows.narrow(0, 0, 0) } else { rows.index_select(slots, 0) }
}

/// The slots of all rows of all sequences, one sequence after the other.
pub(crate) fn slots(
    block_table: &Tensor,
    cu_seq_lens: &Tensor,
    [blocks, page]: [usize; 2],
) -> Result<Tensor> {
    let (sequences, width) = block_table.dims2()?;
    if cu_seq_lens.dims() != [sequences + 1] {
        bail!("shape mismatch cu_seq_lens {:?}, expected {:?}", cu_seq_lens.shape(), [sequences + 1])
    }
    let (table, starts) = (integers("block_table", block_table)?, integers("cu_seq_lens", cu_seq_lens)?);
    let most = width.saturating_mul(page) as i64;
    let mut slots = Vec::new();
    for (sequence, start) in starts.windows(2).enumerate() {
        let length = start[1] - start[0];
        if starts[0] != 0 || !(0..=most).contains(&length) {
            bail!(
                "cu_seq_lens {:?} at index {sequence}: expected ascending numbers from 0, in steps of at most \
                 {most}, the rows of a sequence in block_table",
                start
            )
        }
        for row in 0..length as usize {
            let block = table[sequence * width + row / page];
            if !(0..blocks as i64).contains(&block) {
                let (at, most) = ([sequence, row / page], blocks as i64 - 1);
                bail!(
                    "block_table has block {block} at {at:?}, expected 0 to {most}, the blocks of the cache"
                )
            }
            slots.push(block * page as i64 + (row % page) as i64);
        }
    }
    Tensor::from_iter(slots, block_table.device())
}

/// The elements of an array of integers, on the host.
pub(crate) fn integers(name: &str, tensor: &Tensor) -> Result<Vec<i64>> {
    let flat = tensor.flatten_all()?;
    match tensor.dtype() {
        DType::U32 => Ok(flat.to_vec1::<u32>()?.into_iter().map(i64::from).collect()),
        DType::I32 => Ok(flat.to_vec1::<i32>()?.into_iter().map(i64::from).collect()),
        DType::I64 => flat.to_vec1(),
        dtype => bail!("{name} must be u32, i32 or i64, got {dtype:?}"),
    }
}

/// Copies blocks within each cache, the block of each key of the map to all blocks of its value.
///
/// # Errors
/// When a block is outside of a cache, before a block is copied.
pub fn copy_blocks(
    key_caches: Vec<&mut Tensor>,
    value_caches: Vec<&mut Tensor>,
    block_mapping: &HashMap<usize, Vec<usize>>,
) -> Result<()> {
    if key_caches.len() != value_caches.len() {
        bail!("{} key caches, but {} value caches", key_caches.len(), value_caches.len())
    }
    let caches: Vec<&Tensor> = key_caches.into_iter().chain(value_caches).map(|cache| &*cache).collect();
    let pairs = || block_mapping.iter().flat_map(|(from, all)| all.iter().map(move |to| (*from, *to)));
    for cache in &caches {
        for (from, to) in pairs() {
            check_block("a source", from, cache)?;
            check_block("a destination", to, cache)?;
        }
    }
    for cache in caches {
        for (from, to) in pairs() {
            cache.slice_set(&cache.narrow(0, from, 1)?.copy()?, 0, to)?;
        }
    }
    Ok(())
}

/// Copies blocks of `src`, the keys of the map, to blocks of `dst`, from and to any device.
///
/// # Errors
/// When a block is outside of its cache, before a block is copied, and when the caches have one storage.
///
/// # Safety
/// There is no condition: candle locks the storage of `dst`. The function is unsafe in
/// `mistralrs-paged-attn`.
#[allow(unsafe_code, reason = "the signature of mistralrs-paged-attn")]
pub unsafe fn swap_blocks(src: Tensor, dst: &Tensor, block_mapping: HashMap<usize, usize>) -> Result<()> {
    for (&from, &to) in &block_mapping {
        check_block("a source", from, &src)?;
        check_block("a destination", to, dst)?;
    }
    for (from, to) in block_mapping {
        dst.slice_set(&src.narrow(0, from, 1)?.to_device(dst.device())?, 0, to)?;
    }
    Ok(())
}

fn check_block(what: &str, block: usize, cache: &Tensor) -> Result<()> {
    let blocks = cache.dim(0)?;
    if block >= blocks {
        bail!("{what} is block {block}, expected less than {blocks}, the blocks of the cache")
    }
    Ok(())
}

/// The magnitude that the largest element gets in a cache in 8 bits. F8E4M3 ends at 448.
const LARGEST: f64 = 240.0;

/// Raises the factors of a cache in 8 bits to those of new keys and values, whose largest element becomes
/// 240.
///
/// # Errors
/// When a factor is not one f32.
pub fn kv_scale_update(key: &Tensor, value: &Tensor, k_scales: &Tensor, v_scales: &Tensor) -> Result<()> {
    for (name, rows, factor) in [("k_scales", key, k_scales), ("v_scales", value, v_scales)] {
        if factor.elem_count() != 1 || factor.dtype() != DType::F32 {
            bail!("{name} must be one f32, got {:?} of {:?}", factor.shape(), factor.dtype())
        }
        if rows.elem_count() == 0 {
            continue;
        }
        let factor = in_place(name, factor, &[1])?;
        let largest = rows.flatten_all()?.abs()?.max_keepdim(0)?.to_dtype(DType::F32)?;
        factor.slice_set(&factor.maximum(&(largest / LARGEST)?)?, 0, 0)?;
    }
    Ok(())
}

/// An array of numbers from 0, as an index of blocks or rows.
pub(crate) fn counted(count: usize, device: &Device) -> Result<Tensor> {
    Tensor::arange(0, count as i64, device)
}
