//! Decodes operand elements to an integer significand and an exponent.

use super::super::round::{Decoded, Format, Rounding};
use super::Input;
use super::recipe::{Order, Recipe};

/// The format of a floating-point input.
pub fn format(input: Input) -> Format {
    match input {
        Input::F16 => Format::F16,
        Input::Bf16 => Format::BF16,
        Input::Tf32 => Format::TF32,
        Input::E4m3 => Format::E4M3,
        Input::E5m2 => Format::E5M2,
        Input::F64 | Input::S8 | Input::U8 | Input::Bits(_) => Format::F64,
    }
}

/// Element `k` of the run of elements that a register holds, as bits of [`format()`].
#[inline(always)]
pub fn element(input: Input, register: u32, k: usize) -> u32 {
    match input {
        Input::F16 | Input::Bf16 => register >> (16 * (k % 2)) & 0xFFFF,
        // The tensor core ignores the 13 low bits of the f32 register that holds a tf32.
        Input::Tf32 => register >> 13,
        Input::E4m3 | Input::E5m2 | Input::S8 | Input::U8 => register >> (8 * (k % 4)) & 0xFF,
        Input::Bits(_) => register >> (k % 32) & 1,
        Input::F64 => 0,
    }
}

/// Bits of an element in the multiplier's format. fp8 is widened to f16 where the recipe multiplies in f16.
#[inline(always)]
pub fn widen(recipe: &Recipe, input: Input, bits: u32) -> u32 {
    match (recipe.order, input) {
        (Order::SplitPairs, Input::E5m2) => bits << 8,
        (Order::SplitPairs, Input::E4m3) => u32::from(E4M3_AS_F16[bits as usize & 0xFF]),
        _ => bits,
    }
}

/// Every e4m3 value as an exact f16.
static E4M3_AS_F16: std::sync::LazyLock<[u16; 256]> = std::sync::LazyLock::new(|| {
    std::array::from_fn(|bits| match Format::E4M3.decode(bits as u64) {
        Decoded::Finite(value) => value.round_to(Format::F16, Rounding::NearestEven) as u16,
        Decoded::Infinity { .. } | Decoded::Nan => 0x7FFF,
    })
});
