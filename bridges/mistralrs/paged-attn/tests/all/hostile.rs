//! Bad arguments give an error that names the argument, and leave the cache as it was.

use std::collections::HashMap;

use candle::{DType, Device, Result, Tensor};
use mistralrs_paged_attn::{
    copy_blocks, flash_attn_sinks, flash_attn_sinks_varlen, gather_kv_cache, paged_attention,
    reshape_and_cache, swap_blocks,
};

use crate::filled::{Filled, empty};
use crate::plain::random;

fn refused<T>(result: Result<T>, part: &str) {
    let text = result.err().expect("an error").to_string();
    assert!(text.contains(part), "{text:?} does not contain {part:?}");
}

fn ints(values: &[u32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

fn filled() -> Filled {
    Filled::new([DType::F32, DType::F32], &[9, 3], [2, 16, 8])
}

#[test]
fn tables_and_lengths_outside_of_the_cache() {
    let cache = filled();
    let q = random(1, &[2, 4, 16]);
    let call = |table: &Tensor, lengths: &Tensor, longest: usize| {
        let (keys, values) = (&cache.key_cache, &cache.value_cache);
        paged_attention(&q, None, None, keys, values, table, lengths, None, longest, 1.0, 1.0, None)
    };
    let table = |rows: &[[u32; 3]]| ints(rows.as_flattened()).reshape(((), 3)).unwrap();
    let (good, lengths) = (table(&[[0, 1, 9], [2, 9, 9]]), ints(&[9, 3]));
    call(&good, &lengths, 9).unwrap();
    for block in [6, 1 << 31, u32::MAX] {
        refused(call(&table(&[[0, block, 0], [2, 0, 0]]), &lengths, 9), "page_table");
    }
    for length in [25, 1 << 31, u32::MAX] {
        refused(call(&good, &ints(&[length, 3]), usize::MAX), "seqused_k");
    }
    refused(call(&good, &lengths, 8), "seqused_k");
    refused(call(&good, &ints(&[9]), 9), "context_lens");
    refused(call(&table(&[[0, 1, 2]]), &lengths, 9), "block_tables");
    refused(call(&good.to_dtype(DType::F32).unwrap(), &lengths, 9), "block_tables");
    refused(call(&good, &lengths.to_dtype(DType::I64).unwrap(), 9), "context_lens");
}

#[test]
fn tensors_of_other_shapes() {
    let cache = filled();
    let (keys, values) = (&cache.key_cache, &cache.value_cache);
    let (table, lengths) = (&cache.table, &cache.lengths);
    let attend =
        |q: &Tensor, keys: &Tensor, values: &Tensor, slopes: Option<&Tensor>, sinks: Option<&Tensor>| {
            paged_attention(q, None, None, keys, values, table, lengths, slopes, 9, 1.0, 1.0, sinks)
        };
    let q = &random(1, &[2, 4, 16]);
    refused(attend(&random(1, &[2, 16]), keys, values, None, None), "q of rank 3");
    refused(attend(&random(1, &[2, 4, 8]), keys, values, None, None), "head_dim");
    refused(attend(&random(1, &[2, 3, 16]), keys, values, None, None), "heads");
    refused(attend(q, values, keys, None, None), "rank");
    refused(attend(q, keys, &values.narrow(0, 0, 1).unwrap(), None, None), "value_cache");
    refused(attend(q, &keys.transpose(1, 2).unwrap(), values, None, None), "key_cache");
    refused(attend(q, keys, values, Some(&random(1, &[3])), None), "alibi_slopes");
    refused(attend(q, keys, values, None, Some(&random(1, &[5]))), "sinks");
    let [keys, values] = &empty(DType::F8E4M3, [6, 2, 16, 8]);
    refused(attend(q, keys, values, None, None), "k_scale");

    let [q, k] = &[random(1, &[1, 2, 4, 8]), random(2, &[1, 2, 4, 8])];
    refused(flash_attn_sinks(&random(1, &[2, 4, 8]), k, k, None, 1.0, 0), "q of rank 4");
    refused(flash_attn_sinks(q, k, k, Some(&random(1, &[3])), 1.0, 0), "sinks");
    let packed = &random(3, &[4, 2, 8]);
    let varlen =
        |of_q: &Tensor, of_k: &Tensor| flash_attn_sinks_varlen(q, packed, packed, None, of_q, of_k, 1.0, 0);
    varlen(&ints(&[0, 4]), &ints(&[0, 4])).unwrap();
    refused(varlen(&ints(&[0]), &ints(&[0, 4])), "cu_seqlens_q");
    refused(varlen(&ints(&[0, 5]), &ints(&[0, 4])), "seqused_q");
    refused(varlen(&ints(&[0, 4]), &ints(&[0, 5])), "cu_seqlens_k");
}

#[test]
fn slots_outside_of_the_cache() {
    let cache = filled();
    let (keys, values) = (&cache.key_cache, &cache.value_cache);
    let before = keys.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let rows = &random(1, &[2, 2, 16]);
    let write = |slots: &[i64]| {
        let slots = Tensor::new(slots, &Device::Cpu).unwrap();
        reshape_and_cache(rows, rows, None, None, keys, values, &slots)
    };
    for slot in [48, i64::MAX] {
        refused(write(&[0, slot]), "slot_mapping");
    }
    refused(write(&[0]), "slot_mapping");
    let slots = &Tensor::new(&[0i64, 1], &Device::Cpu).unwrap();
    let call =
        |k: &Tensor, v: &Tensor, slots: &Tensor| reshape_and_cache(k, v, None, None, keys, values, slots);
    refused(call(rows, &random(1, &[3, 2, 16]), slots), "shape mismatch k");
    refused(call(&random(1, &[2, 2, 8]), rows, slots), "key");
    refused(call(rows, &rows.to_dtype(DType::F16).unwrap(), slots), "value");
    refused(call(rows, rows, &slots.to_dtype(DType::F32).unwrap()), "slot_mapping");
    let own = keys.flatten_all().unwrap().narrow(0, 0, 64).unwrap().reshape((2, 2, 16)).unwrap();
    refused(call(&own, rows, slots), "key_cache");
    let after = keys.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(before.iter().zip(&after).all(|(before, after)| before.to_bits() == after.to_bits()));
}

#[test]
fn blocks_outside_of_the_cache() {
    let mut cache = filled();
    let (keys, values) = (cache.key_cache.clone(), cache.value_cache.clone());
    let gather = |table: &[[u32; 2]], starts: &[u32]| {
        let table = ints(table.as_flattened()).reshape(((), 2)).unwrap();
        gather_kv_cache(&keys, &values, None, None, &table, &ints(starts), DType::F32)
    };
    gather(&[[0, 1], [2, 9]], &[0, 9, 12]).unwrap();
    refused(gather(&[[0, 1], [6, 9]], &[0, 9, 12]), "block_table");
    for starts in [[0, 17, 20], [1, 9, 12], [0, 9, 8], [0, 9, u32::MAX]] {
        refused(gather(&[[0, 1], [2, 9]], &starts), "cu_seq_lens");
    }
    refused(gather(&[[0, 1], [2, 9]], &[0, 9]), "cu_seq_lens");
    for (from, to) in [(0, 6), (6, 0), (usize::MAX, 0)] {
        let map = HashMap::from([(from, vec![to])]);
        refused(copy_blocks(vec![&mut cache.key_cache], vec![&mut cache.value_cache], &map), "block");
        // SAFETY: nothing is copied.
        refused(unsafe { swap_blocks(keys.clone(), &values, HashMap::from([(from, to)])) }, "block");
    }
    refused(copy_blocks(vec![&mut cache.key_cache], vec![], &HashMap::new()), "caches");
    copy_blocks(vec![], vec![], &HashMap::new()).unwrap();
}
