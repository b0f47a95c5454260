//! A cache with sequences of several lengths.

use candle::{DType, Device, Tensor};
use mistralrs_paged_attn::reshape_and_cache;

use crate::plain::random;

/// The cache, and the rows that were written into it.
pub struct Filled {
    pub key_cache: Tensor,
    pub value_cache: Tensor,
    /// Keys and values of each sequence, `[row, head, dim]`.
    pub rows: Vec<[Tensor; 2]>,
    pub table: Tensor,
    pub lengths: Tensor,
    /// The factors of a cache in F8E4M3.
    pub factors: Option<[Tensor; 2]>,
}

/// A standard cache of mistral.rs: keys and values of NaN.
pub fn empty(dtype: DType, [blocks, heads, dim, page]: [usize; 4]) -> [Tensor; 2] {
    let x = 16 / dtype.size_in_bytes();
    let nan = |shape: &[usize]| Tensor::full(f32::NAN, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    [nan(&[blocks, heads, dim / x, page, x]), nan(&[blocks, heads, dim, page])]
}

impl Filled {
    /// Rows in `dtype` for sequences of `lengths`, whose blocks lie in no order. Entries of the table behind
    /// a length are no blocks of the cache.
    pub fn new(dtypes: [DType; 2], lengths: &[usize], [heads, dim, page]: [usize; 3]) -> Filled {
        let [dtype, cached] = dtypes;
        let device = &Device::Cpu;
        let width = lengths.iter().max().unwrap().div_ceil(page) + 1;
        let needed: usize = lengths.iter().map(|length| length.div_ceil(page)).sum();
        let blocks = needed + 3;
        // 7 and the prime 1009 give a permutation of any number of blocks below 1009.
        let mut order: Vec<usize> =
            (1..1009).map(|i| i * 7 % 1009 - 1).filter(|block| *block < blocks).collect();
        let mut table = vec![u32::MAX; lengths.len() * width];
        let (mut rows, mut slots) = (Vec::new(), Vec::new());
        for (sequence, &length) in lengths.iter().enumerate() {
            for page in 0..length.div_ceil(page) {
                table[sequence * width + page] = order.pop().unwrap() as u32;
            }
            let block = |row: usize| table[sequence * width + row / page] as usize;
            slots.extend((0..length).map(|row| (block(row) * page + row % page) as i64));
            let of = |seed: usize| random((sequence * 2 + seed) as u64 + 5, &[length, heads, dim]);
            rows.push([0, 1].map(|seed| of(seed).to_dtype(dtype).unwrap()));
        }
        let factors = (cached == DType::F8E4M3)
            .then(|| [0.5f32, 0.25].map(|factor| Tensor::new(factor, device).unwrap()));
        let [key_cache, value_cache] = empty(cached, [blocks, heads, dim, page]);
        let all = |i: usize| Tensor::cat(&rows.iter().map(|rows| &rows[i]).collect::<Vec<_>>(), 0).unwrap();
        // A row without a slot, as engines pad a batch.
        let padded = |i: usize| Tensor::cat(&[&all(i), &all(i).narrow(0, 0, 1).unwrap()], 0).unwrap();
        slots.push(-1);
        let [k_scale, v_scale] = [0, 1].map(|i| factors.as_ref().map(|factors| &factors[i]));
        let slots = Tensor::new(slots, device).unwrap();
        reshape_and_cache(&padded(0), &padded(1), k_scale, v_scale, &key_cache, &value_cache, &slots)
            .unwrap();
        let table = Tensor::from_vec(table, (lengths.len(), width), device).unwrap();
        let used: Vec<u32> = lengths.iter().map(|&length| length as u32).collect();
        Filled { key_cache, value_cache, rows, table, lengths: Tensor::new(used, device).unwrap(), factors }
    }

    /// Cumulative lengths.
    pub fn starts(&self) -> Tensor {
        let mut starts = vec![0u32];
        starts.extend(self.lengths.to_vec1::<u32>().unwrap().iter().scan(0, |sum, length| {
            *sum += length;
            Some(*sum)
        }));
        Tensor::new(starts, &Device::Cpu).unwrap()
    }
}
