//! Gathered rows, copied blocks, and factors.

use std::collections::HashMap;

use candle::{DType, Device, Tensor};
use mistralrs_paged_attn::{copy_blocks, gather_kv_cache, kv_scale_update, swap_blocks};

use crate::filled::{Filled, empty};
use crate::plain::random;

fn gathered(cache: &Filled, table: &Tensor, starts: &Tensor) -> [Vec<Vec<Vec<f32>>>; 2] {
    let (keys, values) = (&cache.key_cache, &cache.value_cache);
    let (k, v) = gather_kv_cache(keys, values, None, None, table, starts, DType::F32).unwrap();
    [k, v].map(|rows| rows.to_vec3().unwrap())
}

#[test]
fn gathered_rows_are_those_that_were_written() {
    for dtype in [DType::F32, DType::F16] {
        let cache = Filled::new([dtype, dtype], &[5, 0, 8, 17], [3, 16, 8]);
        let found = gathered(&cache, &cache.table, &cache.starts());
        for (i, found) in found.iter().enumerate() {
            let written: Vec<_> = cache.rows.iter().map(|rows| &rows[i]).collect();
            let written = Tensor::cat(&written, 0).unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(found, &written.to_vec3::<f32>().unwrap());
        }
    }
    let cache = Filled::new([DType::F32, DType::F32], &[1], [3, 16, 8]);
    let none = Tensor::new(&[0u32, 0], &Device::Cpu).unwrap();
    let (keys, values) = (&cache.key_cache, &cache.value_cache);
    let (k, v) = gather_kv_cache(keys, values, None, None, &cache.table, &none, DType::BF16).unwrap();
    assert_eq!((k.dims(), v.dims(), v.dtype()), (&[0, 3, 16][..], &[0, 3, 16][..], DType::BF16));
}

#[test]
fn copied_blocks_hold_the_rows_of_their_sources() {
    let mut cache = Filled::new([DType::F32, DType::F32], &[8], [2, 16, 8]);
    let device = &Device::Cpu;
    let starts = &cache.starts();
    let expected = gathered(&cache, &cache.table, starts);
    let block = cache.table.to_vec2::<u32>().unwrap()[0][0];
    let other = (block + 1) % 4;
    let map = HashMap::from([(block as usize, vec![other as usize])]);
    let found_in = |cache: &Filled, block: u32| {
        gathered(cache, &Tensor::new(&[[block]], device).unwrap(), &cache.starts())
    };
    assert_ne!(found_in(&cache, other), expected);
    copy_blocks(vec![&mut cache.key_cache], vec![&mut cache.value_cache], &map).unwrap();
    assert_eq!(found_in(&cache, other), expected);

    let [keys, values] = empty(DType::F32, [2, 2, 16, 8]);
    for (from, to) in [(&cache.key_cache, &keys), (&cache.value_cache, &values)] {
        // SAFETY: `to` is used by nothing else.
        unsafe { swap_blocks(from.clone(), to, HashMap::from([(block as usize, 1)])).unwrap() };
    }
    let swapped = Filled { key_cache: keys, value_cache: values, ..cache };
    assert_eq!(found_in(&swapped, 1), expected);
}

#[test]
fn factors_grow_to_the_largest_element() {
    let device = &Device::Cpu;
    let [k_scale, v_scale] = [0.0f32, 9.0].map(|factor| Tensor::new(factor, device).unwrap());
    let k = (random(1, &[2, 3, 4]) * 100.0).unwrap();
    let v = (random(2, &[2, 3, 4]) * 100.0).unwrap();
    let largest = k.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
    kv_scale_update(&k, &v, &k_scale, &v_scale).unwrap();
    assert!((k_scale.to_scalar::<f32>().unwrap() - largest / 240.0).abs() < 1e-6);
    assert_eq!(v_scale.to_scalar::<f32>().unwrap(), 9.0, "factors never shrink");
}
