//! The matrix products that instructions name.

use ptx::{BitOp, Mma, Rounding, Type, Wgmma, Wmma};

use crate::numerics::tensor::wmma::WmmaKind;
use crate::numerics::tensor::{Accumulator, BitProduct, Input, MmaKind, Shape};

/// The element type of A or B.
fn input(ty: Type) -> Option<Input> {
    Some(match ty {
        Type::F16 => Input::F16,
        Type::Bf16 => Input::Bf16,
        Type::Tf32 => Input::Tf32,
        Type::E4m3 => Input::E4m3,
        Type::E5m2 => Input::E5m2,
        Type::S8 => Input::S8,
        Type::U8 => Input::U8,
        Type::F64 => Input::F64,
        _ => return None,
    })
}

/// The product that an `mma` computes; `None` if the emulator does not implement it.
pub(crate) fn of_mma(m: &Mma) -> Option<MmaKind> {
    let accumulator = match m.d {
        Type::F16 => Accumulator::F16,
        Type::F32 => Accumulator::F32,
        Type::F64 => Accumulator::F64,
        Type::S32 => Accumulator::S32 { saturate: m.satfinite },
        _ => return None,
    };
    let shape = Shape { m: m.shape.m.into(), n: m.shape.n.into(), k: m.shape.k.into() };
    let plain = m.c == m.d && m.a_order == ptx::MatrixOrder::Row && m.b_order == ptx::MatrixOrder::Col;
    if !plain {
        return None;
    }
    let element = |ty| match (ty, m.bits) {
        (Type::B1, Some(BitOp::Xor)) => Some(Input::Bits(BitProduct::Xor)),
        (Type::B1, Some(BitOp::And)) => Some(Input::Bits(BitProduct::And)),
        _ => input(ty),
    };
    MmaKind::new(shape, element(m.a)?, element(m.b)?, accumulator).ok()
}

/// The product of 16 rows and 8 columns into which a wgmma is split; `None` if the emulator does not
/// implement it.
pub(crate) fn of_wgmma(w: &Wgmma) -> Option<MmaKind> {
    let accumulator = match w.d {
        Type::F16 => Accumulator::F16,
        Type::F32 => Accumulator::F32,
        Type::S32 => Accumulator::S32 { saturate: w.satfinite },
        _ => return None,
    };
    let columns = usize::from(w.shape.n);
    let step = if matches!(w.d, Type::S32) && columns > 32 { 16 } else { 8 };
    if w.shape.m != 64 || !(8..=256).contains(&columns) || columns % step != 0 && columns != 24 {
        return None;
    }
    let shape = Shape { m: 16, n: 8, k: w.shape.k.into() };
    let exact = w.shape.k * w.a.bits() as u16 == 256;
    // Only `.and` exists for single bits.
    let input = |ty| if ty == Type::B1 { Some(Input::Bits(BitProduct::And)) } else { input(ty) };
    if exact { MmaKind::new(shape, input(w.a)?, input(w.b)?, accumulator).ok() } else { None }
}

/// The product of a `wmma`; `None` if the emulator does not implement it. For C in f16 and D in f32,
/// C is widened first. For C in f32 and D in f16, the result is rounded last, as in ptxas's code. In
/// both cases the sums are f32.
pub(crate) fn of_wmma(w: &Wmma) -> Option<WmmaKind> {
    let accumulator = match (w.c, w.d) {
        (Type::F16, Type::F16) => Accumulator::F16,
        (Type::F16 | Type::F32, Type::F16 | Type::F32) => Accumulator::F32,
        (Type::F64, Type::F64) if matches!(w.rounding, None | Some(Rounding::Rn)) => Accumulator::F64,
        (Type::S32, Type::S32) => Accumulator::S32 { saturate: w.satfinite },
        _ => return None,
    };
    let shape = Shape { m: w.shape.m.into(), n: w.shape.n.into(), k: w.shape.k.into() };
    let same = w.a == w.b && w.bits.is_none();
    if same { WmmaKind::new(shape, input(w.a)?, accumulator) } else { None }
}
