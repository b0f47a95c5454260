//! Executes lane-wise arithmetic. The operations that dominate attention kernels run on whole registers. All
//! other operations run lane by lane through [`scalar`], which implements every operation and is the
//! reference for the fast paths.

use ptx::{BinaryOp, CmpOp, FloatMods, Op, Precision, Rounding, TernaryOp, Type, UnaryOp};

use super::registers::{Registers, for_lanes};
use crate::decode::{Class, Inst};
use crate::numerics::approx::{self, DivApprox};
use crate::numerics::float::lanes::{F32Op, Packed, PackedOp, f32_op, pack, packed_op, unpack};
use crate::numerics::{Lanes32, Lanes64};
use crate::semantics::scalar::{self, function_of};

#[inline(always)]
pub(super) fn execute(r: &mut Registers, inst: &Inst, mask: u32) {
    let done = match inst.op {
        Op::Binary(op, ty, mods) => binary(r, inst, op, ty, mods, mask),
        Op::Ternary(op, ty, mods) => ternary(r, inst, op, ty, mods, mask),
        Op::Unary(op, ty, mods) => unary(r, inst, op, ty, mods, mask),
        Op::Setp { .. } => {
            setp(r, inst, mask);
            true
        }
        Op::Selp(_) => {
            selp(r, inst, mask);
            true
        }
        Op::Cvt(cvt) => convert(r, inst, &cvt, mask),
        Op::Carry(op, ty) => {
            carrying(r, inst, op, ty, mask);
            true
        }
        Op::Lop3(Some(with)) => {
            combined_logic(r, inst, with, mask);
            true
        }
        Op::Lop3(None) => {
            let lut = r.lane(inst.s[3], 0) as u8;
            map3(r, inst, mask, |a, b, c| crate::numerics::integer::bits::lop3(a, b, c, lut));
            true
        }
        _ => false,
    };
    if !done {
        lane_by_lane(r, inst, mask);
    }
}

#[inline(always)]
fn map2(r: &mut Registers, inst: &Inst, mask: u32, f: impl Fn(u32, u32) -> u32) {
    let (a, b) = (*r.get32(inst.s[0]), *r.get32(inst.s[1]));
    let mut d = [0; 32];
    for lane in 0..32 {
        d[lane] = f(a[lane], b[lane]);
    }
    r.set32(inst.d[0], mask, &d);
}

#[inline(always)]
fn map3(r: &mut Registers, inst: &Inst, mask: u32, f: impl Fn(u32, u32, u32) -> u32) {
    let (a, b, c) = (*r.get32(inst.s[0]), *r.get32(inst.s[1]), *r.get32(inst.s[2]));
    let mut d = [0; 32];
    for lane in 0..32 {
        d[lane] = f(a[lane], b[lane], c[lane]);
    }
    r.set32(inst.d[0], mask, &d);
}

#[inline(always)]
fn map2_wide(r: &mut Registers, inst: &Inst, mask: u32, f: impl Fn(u64, u64) -> u64) {
    let (a, b) = (*r.get64(inst.s[0]), *r.get64(inst.s[1]));
    let mut d: Lanes64 = [0; 32];
    for lane in 0..32 {
        d[lane] = f(a[lane], b[lane]);
    }
    r.set_any(inst.d[0], mask, &d);
}

/// Applies a register-wide operation to copies of the sources.
#[inline(always)]
fn into32(r: &mut Registers, inst: &Inst, f: impl FnOnce(&mut Lanes32, [&Lanes32; 3])) {
    if inst.d[0].class != Class::W32 {
        return;
    }
    let source = |i: usize| if inst.s[i].class == Class::W32 { *r.get32(inst.s[i]) } else { [0; 32] };
    let (a, b, c) = (source(0), source(1), source(2));
    f(&mut r.w32[inst.d[0].at()], [&a, &b, &c]);
}

/// Whether the modifiers are plain: round to nearest, and no other modifier except `.ftz`.
fn is_plain(mods: FloatMods) -> bool {
    matches!(mods.precision, Precision::Unspecified | Precision::Rounded(Rounding::Rn))
        && !(mods.sat || mods.relu || mods.nan || mods.xorsign_abs)
}

fn packed_format(ty: Type) -> Option<Packed> {
    match ty {
        Type::F16x2 => Some(Packed::F16x2),
        Type::Bf16x2 => Some(Packed::Bf16x2),
        _ => None,
    }
}

#[inline(always)]
fn binary(r: &mut Registers, inst: &Inst, op: BinaryOp, ty: Type, mods: FloatMods, mask: u32) -> bool {
    match ty {
        Type::F32 if op == BinaryOp::Div => {
            let kind = match mods.precision {
                Precision::Approx => DivApprox::Approx,
                Precision::Full => DivApprox::Full,
                Precision::Unspecified | Precision::Rounded(_) => return false,
            };
            into32(r, inst, |d, [a, b, _]| approx::div_lanes(kind, mods.ftz, mask, d, [a, b]));
            true
        }
        Type::F32 if is_plain(mods) => {
            let op = match op {
                BinaryOp::Add => F32Op::Add,
                BinaryOp::Sub => F32Op::Sub,
                BinaryOp::Mul => F32Op::Mul,
                BinaryOp::Min => F32Op::Min,
                BinaryOp::Max => F32Op::Max,
                _ => return false,
            };
            into32(r, inst, |d, sources| f32_op(op, mods.ftz, mask, d, sources));
            true
        }
        Type::F16x2 | Type::Bf16x2 if is_plain(mods) && !mods.ftz => {
            let op = match op {
                BinaryOp::Add => PackedOp::Add,
                BinaryOp::Sub => PackedOp::Sub,
                BinaryOp::Mul => PackedOp::Mul,
                BinaryOp::Min => PackedOp::Min,
                BinaryOp::Max => PackedOp::Max,
                _ => return false,
            };
            let Some(format) = packed_format(ty) else { return false };
            into32(r, inst, |d, sources| packed_op(format, op, mask, d, sources));
            true
        }
        Type::U32 | Type::S32 | Type::B32 if !(mods.sat || mods.relu) => {
            integer32(r, inst, op, ty.is_signed(), mask)
        }
        Type::U64 | Type::S64 | Type::B64 => integer64(r, inst, op, ty.is_signed(), mask),
        Type::Pred => {
            let (a, b) = (r.get_pred(inst.s[0], inst.negated, 0), r.get_pred(inst.s[1], inst.negated, 1));
            let value = match op {
                BinaryOp::And => a & b,
                BinaryOp::Or => a | b,
                _ => a ^ b,
            };
            r.set_pred(inst.d[0], mask, value);
            true
        }
        _ => false,
    }
}

#[inline(always)]
fn integer32(r: &mut Registers, inst: &Inst, op: BinaryOp, signed: bool, mask: u32) -> bool {
    match op {
        BinaryOp::Add => map2(r, inst, mask, u32::wrapping_add),
        BinaryOp::Sub => map2(r, inst, mask, u32::wrapping_sub),
        BinaryOp::MulLo => map2(r, inst, mask, u32::wrapping_mul),
        BinaryOp::And => map2(r, inst, mask, |a, b| a & b),
        BinaryOp::Or => map2(r, inst, mask, |a, b| a | b),
        BinaryOp::Xor => map2(r, inst, mask, |a, b| a ^ b),
        BinaryOp::Shl => map2(r, inst, mask, |a, b| if b < 32 { a << b } else { 0 }),
        BinaryOp::Shr if signed => map2(r, inst, mask, |a, b| (a as i32 >> b.min(31)) as u32),
        BinaryOp::Shr => map2(r, inst, mask, |a, b| if b < 32 { a >> b } else { 0 }),
        BinaryOp::Min if signed => map2(r, inst, mask, |a, b| (a as i32).min(b as i32) as u32),
        BinaryOp::Max if signed => map2(r, inst, mask, |a, b| (a as i32).max(b as i32) as u32),
        BinaryOp::Min => map2(r, inst, mask, u32::min),
        BinaryOp::Max => map2(r, inst, mask, u32::max),
        BinaryOp::MulWide => {
            let (a, b) = (*r.get32(inst.s[0]), *r.get32(inst.s[1]));
            let d: Lanes64 = std::array::from_fn(|l| {
                if signed {
                    (i64::from(a[l] as i32) * i64::from(b[l] as i32)) as u64
                } else {
                    u64::from(a[l]) * u64::from(b[l])
                }
            });
            r.set64(inst.d[0], mask, &d);
        }
        _ => return false,
    }
    true
}

#[inline(always)]
fn integer64(r: &mut Registers, inst: &Inst, op: BinaryOp, signed: bool, mask: u32) -> bool {
    match op {
        BinaryOp::Add => map2_wide(r, inst, mask, u64::wrapping_add),
        BinaryOp::Sub => map2_wide(r, inst, mask, u64::wrapping_sub),
        BinaryOp::And => map2_wide(r, inst, mask, |a, b| a & b),
        BinaryOp::Or => map2_wide(r, inst, mask, |a, b| a | b),
        BinaryOp::Xor => map2_wide(r, inst, mask, |a, b| a ^ b),
        BinaryOp::Shl | BinaryOp::Shr => {
            let (a, b) = (*r.get64(inst.s[0]), *r.get32(inst.s[1]));
            let d: Lanes64 = std::array::from_fn(|l| match op {
                BinaryOp::Shl => a[l].checked_shl(b[l]).unwrap_or(0),
                _ if signed => (a[l] as i64 >> b[l].min(63)) as u64,
                _ => a[l].checked_shr(b[l]).unwrap_or(0),
            });
            r.set64(inst.d[0], mask, &d);
        }
        _ => return false,
    }
    true
}

#[inline(always)]
fn ternary(r: &mut Registers, inst: &Inst, op: TernaryOp, ty: Type, mods: FloatMods, mask: u32) -> bool {
    match (op, ty) {
        (TernaryOp::Fma | TernaryOp::Mad, Type::F32) if is_plain(mods) => {
            into32(r, inst, |d, sources| f32_op(F32Op::Fma, mods.ftz, mask, d, sources));
            true
        }
        // The two forms of fma with which nvcc's `expf` splits its argument.
        (TernaryOp::Fma, Type::F32) if is_plain(FloatMods { sat: false, ..mods }) => {
            into32(r, inst, |d, sources| f32_op(F32Op::FmaSat, mods.ftz, mask, d, sources));
            true
        }
        (TernaryOp::Fma, Type::F32)
            if mods.precision == Precision::Rounded(Rounding::Rm)
                && is_plain(FloatMods { precision: Precision::Unspecified, ..mods }) =>
        {
            into32(r, inst, |d, sources| f32_op(F32Op::FmaDown, mods.ftz, mask, d, sources));
            true
        }
        (TernaryOp::Fma, Type::F16x2 | Type::Bf16x2)
            if is_plain(FloatMods { relu: false, ..mods }) && !mods.ftz =>
        {
            let op = if mods.relu { PackedOp::FmaRelu } else { PackedOp::Fma };
            let Some(format) = packed_format(ty) else { return false };
            into32(r, inst, |d, sources| packed_op(format, op, mask, d, sources));
            true
        }
        (TernaryOp::MadLo, Type::U32 | Type::S32) if !mods.sat => {
            map3(r, inst, mask, |a, b, c| a.wrapping_mul(b).wrapping_add(c));
            true
        }
        _ => false,
    }
}

#[inline(always)]
fn unary(r: &mut Registers, inst: &Inst, op: UnaryOp, ty: Type, mods: FloatMods, mask: u32) -> bool {
    match (op, ty) {
        (UnaryOp::Not, Type::Pred) => {
            let value = !r.get_pred(inst.s[0], inst.negated, 0);
            r.set_pred(inst.d[0], mask, value);
            true
        }
        (_, Type::F32) if mods.precision == Precision::Approx || op == UnaryOp::Tanh => {
            let Some(function) = function_of(op) else { return false };
            into32(r, inst, |d, [a, ..]| approx::f32_function(function, mods.ftz, mask, d, a));
            true
        }
        (UnaryOp::Ex2 | UnaryOp::Tanh, Type::F16x2 | Type::Bf16x2) => {
            let function = match op {
                UnaryOp::Ex2 => approx::PackedFunction::Ex2,
                _ => approx::PackedFunction::Tanh,
            };
            let Some(format) = packed_format(ty) else { return false };
            into32(r, inst, |d, [a, ..]| approx::packed_function(function, format, mask, d, a));
            true
        }
        _ => false,
    }
}

#[inline(always)]
fn bits(condition: impl Fn(usize) -> bool) -> u32 {
    (0..32).fold(0, |set, l| set | u32::from(condition(l)) << l)
}

/// `lop3` with a predicate: whether the result is not 0 is combined with a predicate.
fn combined_logic(r: &mut Registers, inst: &Inst, with: ptx::BoolOp, mask: u32) {
    let [a, b, c] = [0, 1, 2].map(|i| *r.get32(inst.s[i]));
    let table = inst.offset as u8;
    let d: Lanes32 = std::array::from_fn(|l| crate::numerics::integer::bits::lop3(a[l], b[l], c[l], table));
    let some = (0..32).fold(0, |set, l| set | u32::from(d[l] != 0) << l);
    let p = scalar::combine(with, some, r.get_pred(inst.s[3], inst.negated, 3));
    r.set32(inst.d[0], mask, &d);
    r.set_pred(inst.d[1], mask, p);
}

fn setp(r: &mut Registers, inst: &Inst, mask: u32) {
    let Op::Setp { cmp, combine, ty, ftz } = inst.op else { return };
    let holds = match (ty, cmp) {
        (Type::S32, _) => {
            let (a, b) = (r.get32(inst.s[0]), r.get32(inst.s[1]));
            ordered(cmp, |l| (a[l] as i32).cmp(&(b[l] as i32)))
        }
        (Type::U32 | Type::B32, _) => {
            let (a, b) = (r.get32(inst.s[0]), r.get32(inst.s[1]));
            ordered(cmp, |l| a[l].cmp(&b[l]))
        }
        (Type::F32, _) if !ftz => {
            let (a, b) = (r.get32(inst.s[0]), r.get32(inst.s[1]));
            float_holds(cmp, a, b)
        }
        _ => compared(r, inst, mask, 0),
    };
    // The second result of a pair is that of the high halves.
    let other = if scalar::is_pair(ty) { compared(r, inst, mask, 16) } else { !holds };
    let (p, q) = match combine {
        None => (holds, other),
        Some(op) => {
            let c = r.get_pred(inst.s[2], inst.negated, 2);
            (scalar::combine(op, holds, c), scalar::combine(op, other, c))
        }
    };
    r.set_pred(inst.d[0], mask, p);
    r.set_pred(inst.d[1], mask, q);
}

/// Compares lane by lane what is left of the sources after a shift to the right.
fn compared(r: &Registers, inst: &Inst, mask: u32, shift: u32) -> u32 {
    let Op::Setp { cmp, ty, ftz, .. } = inst.op else { return 0 };
    let mut set = 0;
    for_lanes(mask, |l| {
        let [a, b] = [0, 1].map(|i| r.lane(inst.s[i], l) >> shift);
        set |= u32::from(scalar::compare(cmp, ty, ftz, a, b).unwrap_or(false)) << l;
    });
    set
}

#[inline(always)]
fn ordered(cmp: CmpOp, compare: impl Fn(usize) -> std::cmp::Ordering) -> u32 {
    match cmp {
        CmpOp::Eq => bits(|l| compare(l).is_eq()),
        CmpOp::Ne => bits(|l| compare(l).is_ne()),
        CmpOp::Lt | CmpOp::Lo => bits(|l| compare(l).is_lt()),
        CmpOp::Le | CmpOp::Ls => bits(|l| compare(l).is_le()),
        CmpOp::Gt | CmpOp::Hi => bits(|l| compare(l).is_gt()),
        _ => bits(|l| compare(l).is_ge()),
    }
}

#[inline(always)]
fn float_holds(cmp: CmpOp, a: &Lanes32, b: &Lanes32) -> u32 {
    let x = |l: usize| f32::from_bits(a[l]);
    let y = |l: usize| f32::from_bits(b[l]);
    let nan = |l: usize| x(l).is_nan() || y(l).is_nan();
    match cmp {
        CmpOp::Eq => bits(|l| x(l) == y(l)),
        CmpOp::Ne => bits(|l| x(l) != y(l) && !nan(l)),
        CmpOp::Lt | CmpOp::Lo => bits(|l| x(l) < y(l)),
        CmpOp::Le | CmpOp::Ls => bits(|l| x(l) <= y(l)),
        CmpOp::Gt | CmpOp::Hi => bits(|l| x(l) > y(l)),
        CmpOp::Ge | CmpOp::Hs => bits(|l| x(l) >= y(l)),
        CmpOp::Equ => bits(|l| x(l) == y(l) || nan(l)),
        CmpOp::Neu => bits(|l| x(l) != y(l)),
        CmpOp::Ltu => bits(|l| x(l) < y(l) || nan(l)),
        CmpOp::Leu => bits(|l| x(l) <= y(l) || nan(l)),
        CmpOp::Gtu => bits(|l| x(l) > y(l) || nan(l)),
        CmpOp::Geu => bits(|l| x(l) >= y(l) || nan(l)),
        CmpOp::Num => bits(|l| !nan(l)),
        CmpOp::Nan => bits(nan),
    }
}

fn selp(r: &mut Registers, inst: &Inst, mask: u32) {
    let p = r.get_pred(inst.s[2], inst.negated, 2);
    match inst.d[0].class {
        Class::W32 => {
            let (a, b) = (*r.get32(inst.s[0]), *r.get32(inst.s[1]));
            let d = std::array::from_fn(|l| if p >> l & 1 == 1 { a[l] } else { b[l] });
            r.set32(inst.d[0], mask, &d);
        }
        Class::W64 => {
            let (a, b) = (*r.get64(inst.s[0]), *r.get64(inst.s[1]));
            let d = std::array::from_fn(|l| if p >> l & 1 == 1 { a[l] } else { b[l] });
            r.set64(inst.d[0], mask, &d);
        }
        Class::Pred => {
            let (a, b) = (r.get_pred(inst.s[0], inst.negated, 0), r.get_pred(inst.s[1], inst.negated, 1));
            r.set_pred(inst.d[0], mask, a & p | b & !p);
        }
        Class::Sink => {}
    }
}

/// Fast paths for the conversions that address arithmetic and attention use. The other conversions run lane
/// by lane.
fn convert(r: &mut Registers, inst: &Inst, cvt: &ptx::Cvt, mask: u32) -> bool {
    use Type::{B32, B64, Bf16, Bf16x2, F16, F16x2, F32, S32, S64, U32, U64};
    const NEAREST: Option<ptx::CvtRounding> = Some(ptx::CvtRounding::Float(Rounding::Rn));
    match (cvt.to, cvt.from) {
        (U64 | S64 | B64, U32 | B32) if inst.s[0].class == Class::W32 => {
            let a = r.get32(inst.s[0]).map(u64::from);
            r.set64(inst.d[0], mask, &a);
        }
        (U64 | S64 | B64, S32)
            if inst.s[0].class == Class::W32 && cvt.saturation == ptx::CvtSaturation::None =>
        {
            let a = r.get32(inst.s[0]).map(|v| v as i32 as i64 as u64);
            r.set64(inst.d[0], mask, &a);
        }
        (U32 | S32 | B32, U64 | S64 | B64)
            if inst.s[0].class == Class::W64
                && inst.d[0].class == Class::W32
                && cvt.saturation == ptx::CvtSaturation::None =>
        {
            let a = r.get64(inst.s[0]).map(|v| v as u32);
            r.set32(inst.d[0], mask, &a);
        }
        (F16x2 | Bf16x2, F32)
            if cvt.rounding == NEAREST && !cvt.relu && cvt.saturation == ptx::CvtSaturation::None =>
        {
            let Some(format) = packed_format(cvt.to) else { return false };
            into32(r, inst, |d, [a, b, _]| pack(format, mask, d, [a, b]));
        }
        (F32, F16 | Bf16)
            if cvt.rounding.is_none() && !cvt.relu && cvt.saturation == ptx::CvtSaturation::None =>
        {
            let format = if cvt.from == F16 { Packed::F16x2 } else { Packed::Bf16x2 };
            into32(r, inst, |d, [a, ..]| unpack(format, mask, d, a));
        }
        (F32, S32 | U32)
            if inst.s[0].class == Class::W32
                && cvt.rounding == NEAREST
                && cvt.saturation == ptx::CvtSaturation::None =>
        {
            let signed = cvt.from == S32;
            let a = r.get32(inst.s[0]);
            let d = a.map(|v| if signed { v as i32 as f32 } else { v as f32 }.to_bits());
            r.set32(inst.d[0], mask, &d);
        }
        _ => return false,
    }
    true
}

fn carrying(r: &mut Registers, inst: &Inst, op: ptx::CarryOp, ty: Type, mask: u32) {
    let before = if inst.s[3].is_some() { r.get_pred(inst.s[3], 0, 3) } else { 0 };
    let mut after = 0;
    let mut d: Lanes64 = [0; 32];
    for_lanes(mask, |l| {
        let operands = [0, 1, 2].map(|i| r.lane(inst.s[i], l));
        let carried = scalar::carry(op, ty, operands, u64::from(before >> l & 1));
        d[l] = carried.value;
        after |= (carried.carry as u32) << l;
    });
    r.set_any(inst.d[0], mask, &d);
    r.set_pred(inst.d[1], mask, after);
}

/// Executes an operation that has no fast path.
#[inline(never)]
fn lane_by_lane(r: &mut Registers, inst: &Inst, mask: u32) {
    let mut d: Lanes64 = [0; 32];
    for_lanes(mask, |lane| {
        // A plain loop, because the compiler may leave a closure as a call.
        let mut operands = [0; 4];
        for (i, operand) in operands.iter_mut().enumerate() {
            *operand = r.lane(inst.s[i], lane) ^ u64::from(inst.negated >> i & 1);
        }
        d[lane] = scalar::evaluate(&inst.op, operands).unwrap_or(0);
    });
    if inst.d[0].class == Class::Pred {
        r.set_pred(inst.d[0], mask, bits(|l| d[l] & 1 == 1));
    } else {
        if let Op::Cvt(cvt) = inst.op
            && cvt.to.is_signed()
            && cvt.to.bits() < 64
        {
            // A wider destination register is sign-extended.
            let unused = 64 - cvt.to.bits();
            d = d.map(|v| ((v << unused) as i64 >> unused) as u64);
        }
        r.set_any(inst.d[0], mask, &d);
    }
}
