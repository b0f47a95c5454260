//! Dot products of packed bytes, and minima and maxima of packed halves.

use super::IntType;

/// The `i`-th piece of `ty`'s width in a word.
fn piece(ty: IntType, word: u32, i: u32) -> i64 {
    ty.read(u64::from(word >> (ty.bits() * i))) as i64
}

/// `cvt.pack.sat`: `b` in the lowest bits, `a` above it, each saturated to `bits` bits. The low bits of `c`
/// fill the bits above.
pub fn saturated(bits: u32, signed: bool, a: i32, b: i32, c: u32) -> u32 {
    let (least, most) =
        if signed { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) };
    let element = |x: i32| i64::from(x).clamp(least, most) as u64 & (u64::MAX >> (64 - bits));
    // The decoder has not checked that two elements fit a word.
    let pair = (element(a) << bits | element(b)) as u32;
    if bits < 16 { c << (2 * bits) | pair } else { pair }
}

/// `dp4a`: c plus four byte products, wrapping; `a_type` and `b_type` are u8 or s8.
pub fn dp4a(a_type: IntType, b_type: IntType, a: u32, b: u32, c: u32) -> u32 {
    let sum: i64 = (0..4).map(|i| piece(a_type, a, i) * piece(b_type, b, i)).sum();
    c.wrapping_add(sum as u32)
}

/// The bytes of b that a `dp2a` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// `.lo`: bytes 0 and 1.
    Low,
    /// `.hi`: bytes 2 and 3.
    High,
}

/// `dp2a`: c plus two products of a half and a byte. `a_type` is u16 or s16, `b_type` is u8 or s8.
pub fn dp2a(half: Half, a_type: IntType, b_type: IntType, a: u32, b: u32, c: u32) -> u32 {
    let first = match half {
        Half::Low => 0,
        Half::High => 2,
    };
    let sum: i64 = (0..2).map(|i| piece(a_type, a, i) * piece(b_type, b, first + i)).sum();
    c.wrapping_add(sum as u32)
}

/// Applies `f` to the two halves of each word: `min.u16x2`, `max.s16x2` and similar instructions.
pub fn halves(ty: IntType, a: u32, b: u32, f: impl Fn(i64, i64) -> i64) -> u32 {
    (0..2).fold(0, |word, i| {
        let result = f(piece(ty, a, i), piece(ty, b, i));
        word | (ty.write(i128::from(result)) as u32) << (16 * i)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use IntType::{S8, S16, U8, U16};

    #[test]
    fn what_does_not_fit_a_word_is_cut() {
        assert_eq!(saturated(32, false, 7, -1, 0), 0);
        assert_eq!(saturated(32, true, 7, -1, 0), u32::MAX);
        assert_eq!(saturated(8, false, 300, -1, 0x1234), 0x1234_ff00);
    }

    #[test]
    fn dot_products_extend_by_type() {
        assert_eq!(dp4a(U8, U8, 0xFFFF_FFFF, 0xFFFF_FFFF, 1), 4 * 255 * 255 + 1);
        assert_eq!(dp4a(U8, S8, 0xFFFF_FFFF, 0xFFFF_FFFF, 0) as i32, -4 * 255);
        assert_eq!(dp4a(S8, S8, 0x0102_0304, 0x0506_0708, 0), 5 + 12 + 21 + 32);
        assert_eq!(dp2a(Half::High, S16, U8, 0xFFFF_0002, 0x0305_0000, 10), 10 + 2 * 5 - 3);
        assert_eq!(dp2a(Half::Low, U16, U8, 0xFFFF_0002, 0x0000_0305, 0), 2 * 5 + 0xFFFF * 3);
    }

    #[test]
    fn packed_halves_compare_apart() {
        assert_eq!(halves(S16, 0xFFFF_0005, 0x0001_FFF0, i64::max), 0x0001_0005);
        assert_eq!(halves(U16, 0xFFFF_0005, 0x0001_FFF0, i64::min), 0x0001_0005);
    }
}
