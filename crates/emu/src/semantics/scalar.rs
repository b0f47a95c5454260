//! Evaluates every lane-wise operation on the bits of one lane, with [`numerics`](crate::numerics).

use ptx::{
    BinaryOp, BoolOp, CarryOp, CmpOp, Cvt, CvtRounding, CvtSaturation, DotHalf, FloatMods, Op, Precision,
    PrmtMode, ShfMode, ShiftDirection, TernaryOp, TestpOp, Type, UnaryOp,
};

use crate::numerics::approx::{DivApprox, Function, PackedFunction, div_f32, f32_function, packed_function};
use crate::numerics::convert::{
    Conversion, FloatType, NumberType, Precision as Target, convert_halves, pack_pair,
};
use crate::numerics::float::compare::{self, Comparison, Property};
use crate::numerics::float::lanes::Packed;
use crate::numerics::float::{self, Extremum, ExtremumModifiers, Modifiers, Operation};
use crate::numerics::integer::IntType;
use crate::numerics::integer::arithmetic::{self as int, Carried};
use crate::numerics::integer::bits::{self, Overlong, Permute};
use crate::numerics::integer::packed::{self, Half};
use crate::numerics::round::{Format, Rounding};

/// The result of an operation on one lane; `None` when there is no such operation.
pub(crate) fn evaluate(op: &Op, [a, b, c, d]: [u64; 4]) -> Option<u64> {
    let word = |f: u32| Some(u64::from(f));
    Some(match *op {
        Op::Unary(op, ty, mods) => return unary(op, ty, mods, a),
        Op::Binary(op, ty, mods) => return binary(op, ty, mods, a, b),
        Op::Ternary(op, ty, mods) => return ternary(op, ty, mods, [a, b, c]),
        Op::Set { cmp, combine: with, to, ty, ftz } => {
            let one = match to {
                Type::F32 => 0x3f80_0000,
                Type::F16 | Type::F16x2 => 0x3c00,
                Type::Bf16 | Type::Bf16x2 => 0x3f80,
                _ if is_pair(ty) => 0xffff,
                _ => u64::MAX >> (64 - to.bits()),
            };
            let set = |a, b| {
                let holds = u32::from(compare(cmp, ty, ftz, a, b)?);
                let holds = with.map_or(holds, |op| combine(op, holds, c as u32 & 1)) & 1;
                Some(u64::from(holds) * one)
            };
            let low = set(a, b)?;
            if is_pair(ty) { low | set(a >> 16, b >> 16)? << 16 } else { low }
        }
        Op::Setp { cmp, ty, ftz, .. } => u64::from(compare(cmp, ty, ftz, a, b)?),
        Op::Selp(_) => {
            if c & 1 == 1 {
                a
            } else {
                b
            }
        }
        Op::Slct { cond, ftz, .. } => {
            let takes_a = match cond {
                Type::S32 => c as u32 as i32 >= 0,
                _ => compare::compare(Comparison::Ge, Format::F32, ftz, c, 0),
            };
            if takes_a { a } else { b }
        }
        Op::Testp(op, ty) => u64::from(compare::test(property(op), format(ty)?, a)),
        Op::Lop3(_) => return word(bits::lop3(a as u32, b as u32, c as u32, d as u8)),
        Op::Shf(ShiftDirection::Left, mode) => {
            return word(bits::shf_l(overlong(mode), a as u32, b as u32, c as u32));
        }
        Op::Shf(ShiftDirection::Right, mode) => {
            return word(bits::shf_r(overlong(mode), a as u32, b as u32, c as u32));
        }
        Op::Bfe(ty) => bits::bfe(int_type(ty)?, a, b, c),
        Op::Bfi(ty) => bits::bfi(int_type(ty)?, a, b, c, d),
        Op::Prmt(mode) => return word(bits::prmt(permute(mode), a as u32, b as u32, c as u32)),
        Op::Bmsk(mode) => return word(bits::bmsk(overlong(mode), a as u32, b as u32)),
        Op::Szext(mode, ty) => return word(bits::szext(int_type(ty)?, overlong(mode), a as u32, b as u32)),
        Op::Fns => return word(bits::fns(a as u32, b as u32, c as i32)),
        Op::Dp4a(x, y) => {
            return word(packed::dp4a(byte_type(x), byte_type(y), a as u32, b as u32, c as u32));
        }
        Op::Dp2a(half, x, y) => {
            let wide = if x.is_signed() { IntType::S16 } else { IntType::U16 };
            let half = if half == DotHalf::Lo { Half::Low } else { Half::High };
            return word(packed::dp2a(half, wide, byte_type(y), a as u32, b as u32, c as u32));
        }
        Op::Cvt(cvt) => return convert(&cvt, a, b),
        Op::CvtPack { to, .. } => {
            return word(packed::saturated(to.bits(), to.is_signed(), a as i32, b as i32, c as u32));
        }
        _ => return None,
    })
}

/// The integer type. `.bN` counts as unsigned.
pub(crate) fn int_type(ty: Type) -> Option<IntType> {
    Some(match ty {
        Type::U8 | Type::B8 => IntType::U8,
        Type::S8 => IntType::S8,
        Type::U16 | Type::B16 => IntType::U16,
        Type::S16 => IntType::S16,
        Type::U32 | Type::B32 => IntType::U32,
        Type::S32 => IntType::S32,
        Type::U64 | Type::B64 => IntType::U64,
        Type::S64 => IntType::S64,
        _ => return None,
    })
}

/// The 8-bit integer type with the signedness of a type.
fn byte_type(ty: Type) -> IntType {
    if ty.is_signed() { IntType::S8 } else { IntType::U8 }
}

fn format(ty: Type) -> Option<Format> {
    Some(match ty {
        Type::F16 | Type::F16x2 => Format::F16,
        Type::Bf16 | Type::Bf16x2 => Format::BF16,
        Type::F32 | Type::F32x2 => Format::F32,
        Type::F64 => Format::F64,
        _ => return None,
    })
}

pub(crate) fn is_pair(ty: Type) -> bool {
    matches!(ty, Type::F16x2 | Type::Bf16x2)
}

fn rounding(precision: Precision) -> Option<Rounding> {
    Some(match precision {
        Precision::Unspecified => Rounding::NearestEven,
        Precision::Rounded(mode) => direction(mode),
        Precision::Approx | Precision::Full => return None,
    })
}

fn direction(mode: ptx::Rounding) -> Rounding {
    match mode {
        ptx::Rounding::Rn => Rounding::NearestEven,
        ptx::Rounding::Rz => Rounding::Zero,
        ptx::Rounding::Rm => Rounding::Down,
        ptx::Rounding::Rp => Rounding::Up,
    }
}

/// Applies a scalar function to a value, or to both halves of a pair.
fn each<const N: usize>(ty: Type, operands: [u64; N], f: impl Fn([u64; N]) -> u64) -> u64 {
    match ty {
        Type::F32x2 => f(operands.map(|x| x & 0xffff_ffff)) | f(operands.map(|x| x >> 32)) << 32,
        _ if is_pair(ty) => u64::from(float::halves(operands.map(|x| x as u32), f)),
        _ => f(operands),
    }
}

fn unary(op: UnaryOp, ty: Type, mods: FloatMods, a: u64) -> Option<u64> {
    if ty == Type::Pred {
        return (op == UnaryOp::Not).then_some(!a & 1);
    }
    if let Some(int) = int_type(ty) {
        return Some(match op {
            UnaryOp::Abs => int::abs(int, a),
            UnaryOp::Neg => int.write(-int.read(a)),
            UnaryOp::Not => int.write(!int.read(a)),
            UnaryOp::Cnot => u64::from(int.write(int.read(a)) == 0),
            UnaryOp::Popc => bits::popc(a),
            UnaryOp::Clz => bits::clz(int, a),
            UnaryOp::Brev => bits::brev(int, a),
            UnaryOp::Bfind => bits::bfind(int, a),
            UnaryOp::BfindShiftamt => bits::bfind_shiftamt(int, a),
            _ => return None,
        });
    }
    let format = format(ty)?;
    let modifiers = Modifiers { ftz: mods.ftz, sat: mods.sat, relu: mods.relu };
    let exact = |operation| {
        let rounding = rounding(mods.precision)?;
        Some(float::arithmetic(operation, format, rounding, modifiers, [a, 0, 0]))
    };
    match op {
        UnaryOp::Abs => Some(each(ty, [a], |[a]| float::abs(format, mods.ftz, a))),
        UnaryOp::Neg => Some(each(ty, [a], |[a]| float::neg(format, mods.ftz, a))),
        UnaryOp::Rcp if rounding(mods.precision).is_some() => exact(Operation::Rcp),
        UnaryOp::Sqrt if rounding(mods.precision).is_some() => exact(Operation::Sqrt),
        _ => approximate(op, ty, mods, a),
    }
}

/// The approximated function of an operation on f32.
pub(crate) fn function_of(op: UnaryOp) -> Option<Function> {
    Some(match op {
        UnaryOp::Ex2 => Function::Ex2,
        UnaryOp::Lg2 => Function::Lg2,
        UnaryOp::Rcp => Function::Rcp,
        UnaryOp::Rsqrt => Function::Rsqrt,
        UnaryOp::Sqrt => Function::Sqrt,
        UnaryOp::Sin => Function::Sin,
        UnaryOp::Cos => Function::Cos,
        UnaryOp::Tanh => Function::Tanh,
        _ => return None,
    })
}

fn approximate(op: UnaryOp, ty: Type, mods: FloatMods, a: u64) -> Option<u64> {
    let lanes = [a as u32; 32];
    let mut result = [0; 32];
    match ty {
        Type::F32 => {
            f32_function(function_of(op)?, mods.ftz, 1, &mut result, &lanes);
            Some(u64::from(result[0]))
        }
        Type::F64 => {
            // With `.ftz`, the instruction reads and writes the upper 32 bits only, of which it guarantees 20
            // bits of mantissa (PTX ISA, "rcp.approx.ftz.f64" and "rsqrt.approx.ftz.f64"). This is the true
            // value, cut off, as an H200 returned it for the few values that were compared.
            let upper = |bits: u64| if mods.ftz { flushed_f64(bits) & !0xffff_ffff } else { bits };
            let x = f64::from_bits(upper(a));
            let value = match op {
                UnaryOp::Rcp => 1.0 / x,
                UnaryOp::Rsqrt => 1.0 / x.sqrt(),
                _ => return None,
            };
            Some(match (value.is_nan(), mods.ftz) {
                (true, true) => 0x7fff_ffff_0000_0000,
                (true, false) => float::nan(Format::F64),
                (false, _) => upper(value.to_bits()),
            })
        }
        _ => {
            let function = match op {
                UnaryOp::Ex2 => PackedFunction::Ex2,
                UnaryOp::Tanh => PackedFunction::Tanh,
                _ => return None,
            };
            let packed = if matches!(ty, Type::F16 | Type::F16x2) { Packed::F16x2 } else { Packed::Bf16x2 };
            packed_function(function, packed, 1, &mut result, &lanes);
            Some(u64::from(if is_pair(ty) { result[0] } else { result[0] & 0xffff }))
        }
    }
}

fn binary(op: BinaryOp, ty: Type, mods: FloatMods, a: u64, b: u64) -> Option<u64> {
    if ty == Type::Pred {
        return Some(match op {
            BinaryOp::And => a & b,
            BinaryOp::Or => a | b,
            BinaryOp::Xor => a ^ b,
            _ => return None,
        });
    }
    if matches!(ty, Type::U16x2 | Type::S16x2) {
        let half = if ty == Type::S16x2 { IntType::S16 } else { IntType::U16 };
        let f: fn(i64, i64) -> i64 = match op {
            BinaryOp::Add => |x, y| x + y,
            BinaryOp::Min => i64::min,
            BinaryOp::Max => i64::max,
            _ => return None,
        };
        let least = if mods.relu { 0 } else { i64::MIN };
        return Some(u64::from(packed::halves(half, a as u32, b as u32, |x, y| f(x, y).max(least))));
    }
    match int_type(ty) {
        Some(ty) => integer(op, ty, mods, a, b),
        None => floating(op, ty, mods, a, b),
    }
}

fn integer(op: BinaryOp, ty: IntType, mods: FloatMods, a: u64, b: u64) -> Option<u64> {
    Some(match op {
        BinaryOp::Add if mods.sat => int::add_sat(ty, a, b),
        BinaryOp::Sub if mods.sat => int::sub_sat(ty, a, b),
        BinaryOp::Add => ty.write(ty.read(a) + ty.read(b)),
        BinaryOp::Sub => ty.write(ty.read(a) - ty.read(b)),
        BinaryOp::MulLo => int::mul_lo(ty, a, b),
        BinaryOp::MulHi => int::mul_hi(ty, a, b),
        BinaryOp::MulWide => int::mul_wide(ty, a, b),
        BinaryOp::Mul24Lo => int::mul24_lo(ty, a, b),
        BinaryOp::Mul24Hi => int::mul24_hi(ty, a, b),
        BinaryOp::Div => int::div(ty, a, b),
        BinaryOp::Rem => int::rem(ty, a, b),
        BinaryOp::Min | BinaryOp::Max => {
            let extremum = if op == BinaryOp::Min { int::min } else { int::max };
            let result = extremum(ty, a, b);
            if mods.relu { int::max(ty, result, 0) } else { result }
        }
        BinaryOp::And => a & b,
        BinaryOp::Or => a | b,
        BinaryOp::Xor => a ^ b,
        BinaryOp::Shl => bits::shl(ty, a, b as u32),
        BinaryOp::Shr => bits::shr(ty, a, b as u32),
        BinaryOp::Mul | BinaryOp::Copysign => return None,
    })
}

fn floating(op: BinaryOp, ty: Type, mods: FloatMods, a: u64, b: u64) -> Option<u64> {
    let format = format(ty)?;
    let operation = match op {
        BinaryOp::Add => Operation::Add,
        BinaryOp::Sub => Operation::Sub,
        BinaryOp::Mul => Operation::Mul,
        BinaryOp::Div => match mods.precision {
            Precision::Approx => {
                return Some(div_f32(DivApprox::Approx, mods.ftz, a as u32, b as u32).into());
            }
            Precision::Full => return Some(div_f32(DivApprox::Full, mods.ftz, a as u32, b as u32).into()),
            _ => Operation::Div,
        },
        BinaryOp::Min | BinaryOp::Max => {
            let which = if op == BinaryOp::Min { Extremum::Min } else { Extremum::Max };
            let modifiers = ExtremumModifiers { ftz: mods.ftz, nan: mods.nan, xorsign_abs: mods.xorsign_abs };
            return Some(each(ty, [a, b], |[a, b]| float::extremum(which, format, modifiers, a, b)));
        }
        BinaryOp::Copysign => return Some(float::copysign(format, a, b)),
        _ => return None,
    };
    let modifiers = Modifiers { ftz: mods.ftz, sat: mods.sat, relu: mods.relu };
    let rounding = rounding(mods.precision)?;
    Some(each(ty, [a, b], |[a, b]| float::arithmetic(operation, format, rounding, modifiers, [a, b, 0])))
}

fn ternary(op: TernaryOp, ty: Type, mods: FloatMods, [a, b, c]: [u64; 3]) -> Option<u64> {
    if let TernaryOp::Min | TernaryOp::Max = op {
        let format = format(ty)?;
        let [a, b, c] = if mods.abs { [a, b, c].map(|x| float::abs(format, mods.ftz, x)) } else { [a, b, c] };
        let op = if op == TernaryOp::Min { BinaryOp::Min } else { BinaryOp::Max };
        return floating(op, ty, mods, floating(op, ty, mods, a, b)?, c);
    }
    let Some(int) = int_type(ty) else {
        let format = format(ty)?;
        let rounding = rounding(mods.precision)?;
        let modifiers = Modifiers { ftz: mods.ftz, sat: mods.sat, relu: mods.relu };
        return matches!(op, TernaryOp::Fma | TernaryOp::Mad).then(|| {
            each(ty, [a, b, c], |operands| {
                float::arithmetic(Operation::Fma, format, rounding, modifiers, operands)
            })
        });
    };
    let add = |product: u64| int.write(int.read(product) + int.read(c));
    Some(match op {
        TernaryOp::MadLo => add(int::mul_lo(int, a, b)),
        TernaryOp::MadHi if mods.sat => int::mad_hi_sat_s32(a, b, c),
        TernaryOp::MadHi => add(int::mul_hi(int, a, b)),
        TernaryOp::MadWide => {
            let unused = 64 - (2 * int.bits()).min(64);
            int::mul_wide(int, a, b).wrapping_add(c) << unused >> unused
        }
        TernaryOp::Mad24Lo => add(int::mul24_lo(int, a, b)),
        TernaryOp::Mad24Hi if mods.sat => int::mad24_hi_sat_s32(a, b, c),
        TernaryOp::Mad24Hi => add(int::mul24_hi(int, a, b)),
        TernaryOp::Sad => int::sad(int, a, b, c),
        TernaryOp::Fma | TernaryOp::Mad | TernaryOp::Min | TernaryOp::Max => return None,
    })
}

/// An addition or subtraction with carry.
pub(crate) fn carry(op: CarryOp, ty: Type, [a, b, c]: [u64; 3], carry: u64) -> Carried {
    use CarryOp::{
        AddCc, Addc, AddcCc, MadHiCc, MadLoCc, MadcHi, MadcHiCc, MadcLo, MadcLoCc, SubCc, Subc, SubcCc,
    };
    let ty = int_type(ty).unwrap_or(IntType::U32);
    match op {
        AddCc => int::add_carry(ty, a, b, 0),
        Addc | AddcCc => int::add_carry(ty, a, b, carry),
        SubCc => int::sub_borrow(ty, a, b, 0),
        Subc | SubcCc => int::sub_borrow(ty, a, b, carry),
        MadLoCc => int::mad_lo_carry(ty, a, b, c, 0),
        MadcLo | MadcLoCc => int::mad_lo_carry(ty, a, b, c, carry),
        MadHiCc => int::mad_hi_carry(ty, a, b, c, 0),
        MadcHi | MadcHiCc => int::mad_hi_carry(ty, a, b, c, carry),
    }
}

/// The result of a comparison. Of pairs, it compares the low halves.
pub(crate) fn compare(cmp: CmpOp, ty: Type, ftz: bool, a: u64, b: u64) -> Option<bool> {
    if let Some(ty) = int_type(ty) {
        let ordering = ty.read(a).cmp(&ty.read(b));
        return Some(match cmp {
            CmpOp::Eq => ordering.is_eq(),
            CmpOp::Ne => ordering.is_ne(),
            CmpOp::Lt | CmpOp::Lo => ordering.is_lt(),
            CmpOp::Le | CmpOp::Ls => ordering.is_le(),
            CmpOp::Gt | CmpOp::Hi => ordering.is_gt(),
            CmpOp::Ge | CmpOp::Hs => ordering.is_ge(),
            _ => return None,
        });
    }
    let comparison = match cmp {
        CmpOp::Eq => Comparison::Eq,
        CmpOp::Ne => Comparison::Ne,
        CmpOp::Lt => Comparison::Lt,
        CmpOp::Le => Comparison::Le,
        CmpOp::Gt => Comparison::Gt,
        CmpOp::Ge => Comparison::Ge,
        CmpOp::Equ => Comparison::Equ,
        CmpOp::Neu => Comparison::Neu,
        CmpOp::Ltu => Comparison::Ltu,
        CmpOp::Leu => Comparison::Leu,
        CmpOp::Gtu => Comparison::Gtu,
        CmpOp::Geu => Comparison::Geu,
        CmpOp::Num => Comparison::Num,
        CmpOp::Nan => Comparison::Nan,
        CmpOp::Lo | CmpOp::Ls | CmpOp::Hi | CmpOp::Hs => return None,
    };
    let [a, b] = if is_pair(ty) { [a & 0xffff, b & 0xffff] } else { [a, b] };
    Some(compare::compare(comparison, format(ty)?, ftz, a, b))
}

/// Combines predicates bit by bit.
pub(crate) fn combine(op: BoolOp, a: u32, b: u32) -> u32 {
    match op {
        BoolOp::And => a & b,
        BoolOp::Or => a | b,
        BoolOp::Xor => a ^ b,
    }
}

fn number_type(ty: Type) -> Option<NumberType> {
    if let Some(int) = int_type(ty) {
        return Some(NumberType::Int(int));
    }
    Some(NumberType::Float(match ty {
        Type::F16 | Type::F16x2 => FloatType::F16,
        Type::Bf16 | Type::Bf16x2 => FloatType::Bf16,
        Type::Tf32 => FloatType::Tf32,
        Type::F32 => FloatType::F32,
        Type::F64 => FloatType::F64,
        Type::E4m3 | Type::E4m3x2 => FloatType::E4m3,
        Type::E5m2 | Type::E5m2x2 => FloatType::E5m2,
        _ => return None,
    }))
}

fn convert(cvt: &Cvt, a: u64, b: u64) -> Option<u64> {
    let (rounding, precision) = match cvt.rounding {
        None => (Rounding::NearestEven, Target::Destination),
        Some(CvtRounding::Float(mode)) => (direction(mode), Target::Destination),
        Some(CvtRounding::Integer(mode)) => (direction(mode), Target::Integral),
        Some(CvtRounding::Rna) => (Rounding::NearestAway, Target::Destination),
    };
    let conversion = Conversion {
        rounding,
        precision,
        ftz: cvt.ftz,
        sat: cvt.saturation == CvtSaturation::Sat,
        relu: cvt.relu,
        satfinite: cvt.saturation == CvtSaturation::SatFinite,
        ..Conversion::new(number_type(cvt.to)?, number_type(cvt.from)?)
    };
    let pair = |ty| matches!(ty, Type::F16x2 | Type::Bf16x2 | Type::E4m3x2 | Type::E5m2x2);
    Some(match (cvt.packed(), pair(cvt.from) && pair(cvt.to)) {
        (true, _) => u64::from(pack_pair(&conversion, a as u32, b as u32)),
        (_, true) => u64::from(convert_halves(&conversion, a as u32)),
        _ => conversion.apply(a),
    })
}

fn property(op: TestpOp) -> Property {
    match op {
        TestpOp::Finite => Property::Finite,
        TestpOp::Infinite => Property::Infinite,
        TestpOp::Number => Property::Number,
        TestpOp::NotANumber => Property::NotANumber,
        TestpOp::Normal => Property::Normal,
        TestpOp::Subnormal => Property::Subnormal,
    }
}

fn overlong(mode: ShfMode) -> Overlong {
    match mode {
        ShfMode::Clamp => Overlong::Clamp,
        ShfMode::Wrap => Overlong::Wrap,
    }
}

fn permute(mode: PrmtMode) -> Permute {
    match mode {
        PrmtMode::Generic => Permute::Generic,
        PrmtMode::F4e => Permute::Forward4Extract,
        PrmtMode::B4e => Permute::Backward4Extract,
        PrmtMode::Rc8 => Permute::Replicate8,
        PrmtMode::Ecl => Permute::EdgeClampLeft,
        PrmtMode::Ecr => Permute::EdgeClampRight,
        PrmtMode::Rc16 => Permute::Replicate16,
    }
}

/// The bits of an f64, with zero of the same sign in the place of a subnormal number.
fn flushed_f64(bits: u64) -> u64 {
    if f64::from_bits(bits).is_subnormal() { bits & 1 << 63 } else { bits }
}
