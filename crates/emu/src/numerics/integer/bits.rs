//! Bit fields, shifts and logic (PTX ISA, "Integer arithmetic", "Logic and shift", "Data movement: prmt").

use super::IntType;

/// How `shf`, `szext` and `bmsk` treat amounts beyond the register's width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overlong {
    /// `.clamp`: the amount is limited to the width of the register.
    Clamp,
    /// `.wrap`: the amount is taken modulo 32.
    Wrap,
}

/// `popc` of a 32- or 64-bit value.
pub fn popc(a: u64) -> u64 {
    u64::from(a.count_ones())
}

/// `clz.b32` or `clz.b64`. For zero the result is the width.
pub fn clz(ty: IntType, a: u64) -> u64 {
    u64::from((a << (64 - ty.bits())).leading_zeros().min(ty.bits()))
}

/// `brev`.
pub fn brev(ty: IntType, a: u64) -> u64 {
    a.reverse_bits() >> (64 - ty.bits())
}

/// `bfind`: position of the most significant bit that is not a sign bit, or 0xFFFFFFFF.
pub fn bfind(ty: IntType, a: u64) -> u64 {
    let value = ty.read(a);
    let magnitude = ty.write(if value < 0 { !value } else { value });
    if magnitude == 0 { 0xFFFF_FFFF } else { u64::from(63 - magnitude.leading_zeros()) }
}

/// `bfind.shiftamt`: the left shift that brings the found bit to the top, or 0xFFFFFFFF.
pub fn bfind_shiftamt(ty: IntType, a: u64) -> u64 {
    match bfind(ty, a) {
        0xFFFF_FFFF => 0xFFFF_FFFF,
        position => u64::from(ty.bits()) - 1 - position,
    }
}

/// `bfe`: the field of `c & 255` bits from bit `b & 255`, sign-extended for signed types.
pub fn bfe(ty: IntType, a: u64, b: u64, c: u64) -> u64 {
    let (position, length) = ((b & 255) as u32, (c & 255) as u32);
    if length == 0 {
        return 0;
    }
    // Reading as i128 supplies the sign bits beyond the register. A field that extends past the register
    // takes them.
    let field = ty.read(a) >> position.min(127);
    let unused = 128 - length.min(128);
    if ty.is_signed() {
        ty.write(field << unused >> unused)
    } else {
        ty.write(((field as u128) << unused >> unused) as i128)
    }
}

/// `bfi`: b, with the field from bit `c & 255` replaced by the low `d & 255` bits of a.
pub fn bfi(ty: IntType, a: u64, b: u64, c: u64, d: u64) -> u64 {
    let (position, length) = ((c & 255) as u32, (d & 255) as u32);
    if position >= ty.bits() || length == 0 {
        return ty.write(i128::from(b));
    }
    let mask = (u64::MAX >> (64 - length.min(64))) << position;
    ty.write(i128::from(b & !mask | a << position & mask))
}

/// `bmsk`: `b` ones from bit `a`.
pub fn bmsk(mode: Overlong, a: u32, b: u32) -> u32 {
    let (a, b) = match mode {
        Overlong::Clamp => (a.min(32), b.min(32)),
        Overlong::Wrap => (a & 31, b & 31),
    };
    let ones = (1u64 << b) - 1;
    (ones << a) as u32
}

/// `szext`: the low `n` bits of a, sign- or zero-extended according to `ty` (s32 or u32).
pub fn szext(ty: IntType, mode: Overlong, a: u32, n: u32) -> u32 {
    let n = match mode {
        Overlong::Clamp if n >= 32 => return a,
        Overlong::Clamp => n,
        Overlong::Wrap => n & 31,
    };
    if n == 0 {
        return 0;
    }
    let up = a << (32 - n);
    if ty.is_signed() { (up as i32 >> (32 - n)) as u32 } else { up >> (32 - n) }
}

/// `shl`: amounts beyond the width give zero.
pub fn shl(ty: IntType, a: u64, amount: u32) -> u64 {
    if amount >= ty.bits() { 0 } else { ty.write(i128::from(a << amount)) }
}

/// `shr`: amounts beyond the width give zero, or all sign bits for signed types.
pub fn shr(ty: IntType, a: u64, amount: u32) -> u64 {
    ty.write(ty.read(a) >> amount.min(ty.bits()))
}

fn funnel_amount(mode: Overlong, c: u32) -> u32 {
    match mode {
        Overlong::Clamp => c.min(32),
        Overlong::Wrap => c & 31,
    }
}

/// `shf.l`: the upper word of `{b, a}` shifted left.
pub fn shf_l(mode: Overlong, a: u32, b: u32, c: u32) -> u32 {
    ((u64::from(b) << 32 | u64::from(a)) << funnel_amount(mode, c) >> 32) as u32
}

/// `shf.r`: the lower word of `{b, a}` shifted right.
pub fn shf_r(mode: Overlong, a: u32, b: u32, c: u32) -> u32 {
    ((u64::from(b) << 32 | u64::from(a)) >> funnel_amount(mode, c)) as u32
}

/// `lop3`: bit by bit, the entry of the table `lut` at `a·4 + b·2 + c`.
#[inline]
pub fn lop3(a: u32, b: u32, c: u32, lut: u8) -> u32 {
    let pick = |i: u32| if lut >> i & 1 == 1 { u32::MAX } else { 0 };
    let by_c = |i: u32| (pick(i) & !c) | (pick(i + 1) & c);
    let by_b = |i: u32| (by_c(i) & !b) | (by_c(i + 2) & b);
    (by_b(0) & !a) | (by_b(4) & a)
}

/// How `prmt` reads its selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Permute {
    /// No mode: four nibbles, each with a byte index and a flag that replicates the sign of that byte.
    Generic,
    /// `.f4e`: four bytes upward from the selected byte.
    Forward4Extract,
    /// `.b4e`: four bytes downward from the selected byte.
    Backward4Extract,
    /// `.rc8`: the selected byte, four times.
    Replicate8,
    /// `.ecl`: byte indices below the selector are clamped to it.
    EdgeClampLeft,
    /// `.ecr`: byte indices above the selector are clamped to it.
    EdgeClampRight,
    /// `.rc16`: the selected half, twice.
    Replicate16,
}

/// `prmt`: four bytes selected from `{b, a}`.
pub fn prmt(mode: Permute, a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    let s = selector & 3;
    let pick = |i: u32| match mode {
        Permute::Generic => {
            let nibble = selector >> (4 * i) & 15;
            let byte = bytes[nibble as usize & 7];
            if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
        }
        Permute::Forward4Extract => bytes[(s + i) as usize],
        Permute::Backward4Extract => bytes[(s + 8 - i) as usize & 7],
        Permute::Replicate8 => bytes[s as usize],
        Permute::EdgeClampLeft => bytes[s.max(i) as usize],
        Permute::EdgeClampRight => bytes[s.min(i) as usize],
        Permute::Replicate16 => bytes[(s & 1) as usize * 2 + (i & 1) as usize],
    };
    u32::from_le_bytes([pick(0), pick(1), pick(2), pick(3)])
}

/// `fns`: the `offset`-th set bit of `mask`, counted upward or downward from bit `base`, or 0xFFFFFFFF.
pub fn fns(mask: u32, base: u32, offset: i32) -> u32 {
    let set = |position: &i64| mask >> position & 1 == 1;
    let base = i64::from(base & 31);
    let found = match offset {
        0 => Some(base).filter(set),
        1.. => (base..32).filter(set).nth(offset as usize - 1),
        _ => (0..=base).rev().filter(set).nth(offset.unsigned_abs() as usize - 1),
    };
    found.map_or(u32::MAX, |position| position as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use IntType::{S32, S64, U32, U64};

    #[test]
    fn fields_follow_the_isa_loops() {
        for &a in &[0x8765_4321_u64, 0x1234_5678, 0xFFFF_FFFF, 0x8000_0000] {
            for pos in [0, 1, 7, 15, 31, 32, 40, 255] {
                for len in [0, 1, 5, 31, 32, 33, 64, 255u64] {
                    for ty in [U32, S32] {
                        let sign = if ty == U32 || len == 0 { 0 } else { a >> (pos + len - 1).min(31) & 1 };
                        let bit = |i: u64| if i < len && pos + i <= 31 { a >> (pos + i) & 1 } else { sign };
                        let expected = (0..32).fold(0, |d, i| d | bit(i) << i);
                        assert_eq!(bfe(ty, a, pos, len), expected, "{ty:?} {a:x} {pos} {len}");
                    }
                    let b = 0xA5A5_5A5A;
                    let inserted = (0..len.min(32))
                        .filter(|i| pos + i <= 31)
                        .fold(b, |f, i| f & !(1 << (pos + i)) | (a >> i & 1) << (pos + i));
                    assert_eq!(bfi(U32, a, b, pos, len), inserted);
                }
            }
        }
        assert_eq!(bfe(S64, 0xF0 << 56, 60, 4), u64::MAX);
        assert_eq!(bfi(U64, 1, 0, 63, 1), 1 << 63);
    }

    #[test]
    fn searching_and_counting() {
        assert_eq!(bfind(U32, 0), 0xFFFF_FFFF);
        assert_eq!(bfind(S32, 0xFFFF_FFFF), 0xFFFF_FFFF);
        assert_eq!((bfind(S32, 0xFFFF_FFF0), bfind(U32, 0x10)), (3, 4));
        assert_eq!(bfind_shiftamt(S64, 1), 63);
        assert_eq!((clz(U32, 0), clz(U64, 1), popc(0xF0F0)), (32, 63, 8));
        assert_eq!(brev(U32, 1), 0x8000_0000);
        // The examples of the PTX ISA, "fns".
        assert_eq!([fns(0xAAAA_AAAA, 3, 1), fns(0xAAAA_AAAA, 3, -1)], [3, 3]);
        assert_eq!([fns(0xAAAA_AAAA, 2, 1), fns(0xAAAA_AAAA, 2, -1)], [3, 1]);
        assert_eq!([fns(0xAAAA_AAAA, 2, 0), fns(1, 31, 5)], [u32::MAX, u32::MAX]);
    }

    #[test]
    fn logic_tables() {
        let (a, b, c) = (0xF0F0_1234, 0xCC55_AA0F, 0xAA00_FF33);
        assert_eq!(lop3(a, b, c, 0x80), a & b & c);
        assert_eq!(lop3(a, b, c, 0xFE), a | b | c);
        assert_eq!(lop3(a, b, c, 0x40), a & b & !c);
        assert_eq!(lop3(a, b, c, 0x1A), (a & b | c) ^ a);
        assert_eq!(lop3(a, b, c, 0x96), a ^ b ^ c);
    }

    #[test]
    fn shifts_clamp_and_wrap() {
        assert_eq!((shl(U32, 1, 32), shr(U32, 1, 99)), (0, 0));
        assert_eq!(shr(S32, 0x8000_0000, u32::MAX), 0xFFFF_FFFF);
        assert_eq!(shf_l(Overlong::Wrap, 0x8000_0000, 1, 1), 3);
        assert_eq!(shf_l(Overlong::Clamp, 5, 1, 40), 5);
        assert_eq!(shf_l(Overlong::Wrap, 5, 1, 32), 1);
        assert_eq!(shf_r(Overlong::Clamp, 5, 9, 32), 9);
        assert_eq!(bmsk(Overlong::Wrap, 1, 2), 6);
        assert_eq!(bmsk(Overlong::Clamp, 32, 3), 0);
        assert_eq!(bmsk(Overlong::Clamp, 4, 40), 0xFFFF_FFF0);
        assert_eq!(szext(S32, Overlong::Wrap, 0x8, 4), 0xFFFF_FFF8);
        assert_eq!(szext(U32, Overlong::Clamp, 0xFFFF_FFFF, 40), 0xFFFF_FFFF);
        assert_eq!(szext(U32, Overlong::Wrap, 0xFFFF_FFFF, 0), 0);
    }

    #[test]
    fn permutations() {
        let (a, b) = (0x8322_1100, 0x7766_5544);
        assert_eq!(prmt(Permute::Generic, a, b, 0x7531), 0x7755_8311);
        assert_eq!(prmt(Permute::Generic, a, b, 0xB000), 0xFF00_0000);
        assert_eq!(prmt(Permute::Forward4Extract, a, b, 3), 0x6655_4483);
        assert_eq!(prmt(Permute::Backward4Extract, a, b, 1), 0x6677_0011, "bytes 1, 0, 7, 6");
        assert_eq!(prmt(Permute::Replicate8, a, b, 2), 0x2222_2222);
        assert_eq!(prmt(Permute::EdgeClampLeft, a, b, 2), 0x8322_2222);
        assert_eq!(prmt(Permute::EdgeClampRight, a, b, 1), 0x1111_1100);
        assert_eq!(prmt(Permute::Replicate16, a, b, 1), 0x8322_8322);
    }
}
