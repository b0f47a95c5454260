//! Multiplication, division, carries and related operations (PTX ISA, "Integer arithmetic" and
//! "Extended-precision").

use super::IntType;

/// `mul.lo`.
pub fn mul_lo(ty: IntType, a: u64, b: u64) -> u64 {
    ty.write(ty.read(a).wrapping_mul(ty.read(b)))
}

/// `mul.hi`: the upper half of the double-width product.
pub fn mul_hi(ty: IntType, a: u64, b: u64) -> u64 {
    // The product of two u64 can exceed i128. The wrapped product has the same bits.
    let product = ty.read(a).wrapping_mul(ty.read(b));
    if ty.is_signed() {
        ty.write(product >> ty.bits())
    } else {
        ty.write((product as u128 >> ty.bits()) as i128)
    }
}

/// `mul.wide`: the product in twice the width of a 16- or 32-bit type.
pub fn mul_wide(ty: IntType, a: u64, b: u64) -> u64 {
    let unused = 64 - (2 * ty.bits()).min(64);
    (ty.read(a).wrapping_mul(ty.read(b)) as u64) << unused >> unused
}

/// `mad.hi.sat.s32`, the only saturating form of `mad`.
pub fn mad_hi_sat_s32(a: u64, b: u64, c: u64) -> u64 {
    let ty = IntType::S32;
    ty.saturate(((ty.read(a) * ty.read(b)) >> 32) + ty.read(c))
}

/// Exact product of the low 24 bits of two 32-bit operands: 48 bits.
fn product24(ty: IntType, a: u64, b: u64) -> i128 {
    let low =
        |x: u64| if ty.is_signed() { i128::from((x as i32) << 8 >> 8) } else { i128::from(x & 0xFF_FFFF) };
    low(a) * low(b)
}

/// `mul24.lo`: bits 31..0 of the 48-bit product.
pub fn mul24_lo(ty: IntType, a: u64, b: u64) -> u64 {
    ty.write(product24(ty, a, b))
}

/// `mul24.hi`: bits 47..16 of the 48-bit product.
pub fn mul24_hi(ty: IntType, a: u64, b: u64) -> u64 {
    ty.write(product24(ty, a, b) >> 16)
}

/// `mad24.hi.sat.s32`.
pub fn mad24_hi_sat_s32(a: u64, b: u64, c: u64) -> u64 {
    let ty = IntType::S32;
    ty.saturate((product24(ty, a, b) >> 16) + ty.read(c))
}

/// `div`. PTX leaves division by zero unspecified. NVIDIA's code gives all ones, and so does this function.
/// The smallest signed number divided by −1 wraps to itself.
pub fn div(ty: IntType, a: u64, b: u64) -> u64 {
    match ty.read(b) {
        0 => ty.write(-1),
        divisor => ty.write(ty.read(a) / divisor),
    }
}

/// `rem`, with the sign of the dividend. A zero divisor gives all ones, as for [`div`].
pub fn rem(ty: IntType, a: u64, b: u64) -> u64 {
    match ty.read(b) {
        0 => ty.write(-1),
        divisor => ty.write(ty.read(a) % divisor),
    }
}

/// `add.sat.s32`.
pub fn add_sat(ty: IntType, a: u64, b: u64) -> u64 {
    ty.saturate(ty.read(a) + ty.read(b))
}

/// `sub.sat.s32`.
pub fn sub_sat(ty: IntType, a: u64, b: u64) -> u64 {
    ty.saturate(ty.read(a) - ty.read(b))
}

/// `sad`: c + |a − b|, wrapping.
pub fn sad(ty: IntType, a: u64, b: u64, c: u64) -> u64 {
    ty.write(ty.read(c) + (ty.read(a) - ty.read(b)).abs())
}

/// `abs`. The smallest number stays unchanged.
pub fn abs(ty: IntType, a: u64) -> u64 {
    ty.write(ty.read(a).abs())
}

/// `min`.
pub fn min(ty: IntType, a: u64, b: u64) -> u64 {
    ty.write(ty.read(a).min(ty.read(b)))
}

/// `max`.
pub fn max(ty: IntType, a: u64, b: u64) -> u64 {
    ty.write(ty.read(a).max(ty.read(b)))
}

/// A result, and the carry flag CC.CF after the instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The low bits.
    pub value: u64,
    /// CC.CF: 0 or 1.
    pub carry: u64,
}

/// `add.cc` (`carry` = 0) and `addc.cc`: a + b + carry of a 32- or 64-bit type.
pub fn add_carry(ty: IntType, a: u64, b: u64, carry: u64) -> Carried {
    let mask = u64::MAX >> (64 - ty.bits());
    let sum = u128::from(a & mask) + u128::from(b & mask) + u128::from(carry & 1);
    Carried { value: sum as u64 & mask, carry: (sum >> ty.bits()) as u64 }
}

/// `sub.cc` (`borrow` = 0) and `subc.cc`: a − (b + borrow). CC.CF then holds the borrow-out (PTX ISA,
/// "sub.cc").
pub fn sub_borrow(ty: IntType, a: u64, b: u64, borrow: u64) -> Carried {
    let mask = u64::MAX >> (64 - ty.bits());
    let difference = i128::from(a & mask) - i128::from(b & mask) - i128::from(borrow & 1);
    Carried { value: difference as u64 & mask, carry: u64::from(difference < 0) }
}

/// `mad.lo.cc` and `madc.lo.cc`: the low half of a·b, plus c and the carry.
pub fn mad_lo_carry(ty: IntType, a: u64, b: u64, c: u64, carry: u64) -> Carried {
    add_carry(ty, mul_lo(ty, a, b), c, carry)
}

/// `mad.hi.cc` and `madc.hi.cc`: the high half of a·b, plus c and the carry.
pub fn mad_hi_carry(ty: IntType, a: u64, b: u64, c: u64, carry: u64) -> Carried {
    add_carry(ty, mul_hi(ty, a, b), c, carry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_and_wide_products() {
        assert_eq!(mul_hi(IntType::U64, u64::MAX, u64::MAX), u64::MAX - 1);
        assert_eq!(mul_hi(IntType::S64, u64::MAX, u64::MAX), 0, "(−1)·(−1) = 1");
        assert_eq!(mul_hi(IntType::S32, 0x8000_0000, 2), 0xFFFF_FFFF);
        assert_eq!(mul_hi(IntType::U32, 0x8000_0000, 2), 1);
        assert_eq!(mul_wide(IntType::S32, 0xFFFF_FFFF, 5), (-5i64) as u64);
        assert_eq!(mul_wide(IntType::U16, 0xFFFF, 0xFFFF), 0xFFFE_0001);
        assert_eq!(mul_wide(IntType::S16, 0xFFFF, 3), 0xFFFF_FFFD, "32 bits of −3");
        assert_eq!(mul24_lo(IntType::U32, 0xFF00_0003, 5), 15);
        assert_eq!(mul24_hi(IntType::S32, 0x00FF_FFFF, 0x0001_0000), 0xFFFF_FFFF);
    }

    #[test]
    fn division_at_the_edges() {
        assert_eq!(div(IntType::S32, 0x8000_0000, 0xFFFF_FFFF), 0x8000_0000);
        assert_eq!(rem(IntType::S32, 0x8000_0000, 0xFFFF_FFFF), 0);
        assert_eq!(rem(IntType::S32, (-7i32) as u32 as u64, 2), 0xFFFF_FFFF);
        assert_eq!(div(IntType::U16, 7, 0), 0xFFFF);
        assert_eq!(div(IntType::U64, u64::MAX, 2), u64::MAX / 2);
    }

    /// Compares 128-bit arithmetic built from 64- and 32-bit pieces with that of the CPU.
    #[test]
    fn carries_chain_into_long_arithmetic() {
        let mut x = 0x0123_4567_89AB_CDEF_u128;
        for _ in 0..500 {
            x = x.wrapping_mul(0xDA94_2042_E4DD_58B5_1234_5678_9ABC_DEF1).wrapping_add(0x1357_9BDF);
            let y = x.rotate_left(61) ^ 0x5555;
            let (xs, ys) = ([x as u64, (x >> 64) as u64], [y as u64, (y >> 64) as u64]);
            let low = add_carry(IntType::U64, xs[0], ys[0], 0);
            let high = add_carry(IntType::U64, xs[1], ys[1], low.carry);
            assert_eq!(u128::from(high.value) << 64 | u128::from(low.value), x.wrapping_add(y));
            let low = sub_borrow(IntType::U64, xs[0], ys[0], 0);
            let high = sub_borrow(IntType::U64, xs[1], ys[1], low.carry);
            assert_eq!(u128::from(high.value) << 64 | u128::from(low.value), x.wrapping_sub(y));
            assert_eq!(high.carry == 1, x < y);
            let lo = mad_lo_carry(IntType::U64, xs[0], ys[0], xs[1], 0);
            let hi = mad_hi_carry(IntType::U64, xs[0], ys[0], 0, lo.carry);
            let expected = u128::from(xs[0]) * u128::from(ys[0]) + u128::from(xs[1]);
            assert_eq!(u128::from(hi.value) << 64 | u128::from(lo.value), expected);
        }
    }

    #[test]
    fn saturation_and_differences() {
        assert_eq!(add_sat(IntType::S32, 0x7FFF_FFFF, 1), 0x7FFF_FFFF);
        assert_eq!(sub_sat(IntType::S32, 0x8000_0000, 1), 0x8000_0000);
        assert_eq!(sad(IntType::S32, 0xFFFF_FFFF, 4, 10), 15);
        assert_eq!(sad(IntType::U32, 0xFFFF_FFFF, 4, 0), 0xFFFF_FFFB);
        assert_eq!(abs(IntType::S16, 0x8000), 0x8000);
        assert_eq!(min(IntType::S64, u64::MAX, 0), u64::MAX);
        assert_eq!(mad_hi_sat_s32(0x7FFF_FFFF, 0x7FFF_FFFF, 0x7FFF_FFFF), 0x7FFF_FFFF);
        assert_eq!(mad24_hi_sat_s32(0x7F_FFFF, 0x7F_FFFF, 0x7FFF_FFFF), 0x7FFF_FFFF);
    }
}
