//! Elements that a thread moves as 32-bit words.

use problem::DType;
use ptx::{Builder, F32, Global, Half, R32};

/// The 16-bit float of a type; `None` for others.
pub(crate) fn half_of(dtype: DType) -> Option<Half> {
    match dtype {
        DType::F16 => Some(Half::F16),
        DType::Bf16 => Some(Half::Bf16),
        _ => None,
    }
}

/// Loads `bytes` bytes, 4, 8 or 16, at a multiple of their number.
pub(crate) fn load_words(k: &mut Builder, at: Global, bytes: u32) -> Vec<R32> {
    match bytes {
        16 => k.ld_vec::<R32, 4>(at).to_vec(),
        8 => k.ld_vec::<R32, 2>(at).to_vec(),
        _ => vec![k.ld(at)],
    }
}

/// Stores one, two or four words.
pub(crate) fn store_words(k: &mut Builder, at: Global, words: &[R32]) {
    match *words {
        [a, b, c, d] => k.st_vec(at, [a, b, c, d]),
        [a, b] => k.st_vec(at, [a, b]),
        _ => k.st(at, words[0]),
    }
}

/// The elements of words of f16, bf16 or f32, in f32.
pub(crate) fn elements(k: &mut Builder, dtype: DType, words: &[R32]) -> Vec<F32> {
    match half_of(dtype) {
        Some(half) => words.iter().flat_map(|&word| k.unpack(half, word)).collect(),
        None => words.iter().map(|&word| k.from_bits(word)).collect(),
    }
}
