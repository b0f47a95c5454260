//! Which shapes, types and orders `wmma` has (PTX ISA, "Warp level matrix multiply-accumulate operation using wmma
//! instructions").

use crate::{MatrixOrder, MmaShape, Space, Type, Wmma, WmmaAccess, WmmaMatrix};

use super::modifiers::ensure;

/// Inputs with the shapes and accumulators that they have.
struct Family {
    inputs: &'static [Type],
    shapes: &'static [(u16, u16, u16)],
    sums: &'static [Type],
}

const TALL_TO_WIDE: &[(u16, u16, u16)] = &[(16, 16, 16), (32, 8, 16), (8, 32, 16)];

const FAMILIES: [Family; 7] = [
    Family { inputs: &[Type::F16], shapes: TALL_TO_WIDE, sums: &[Type::F16, Type::F32] },
    Family { inputs: &[Type::Bf16], shapes: TALL_TO_WIDE, sums: &[Type::F32] },
    Family { inputs: &[Type::U8, Type::S8], shapes: TALL_TO_WIDE, sums: &[Type::S32] },
    Family { inputs: &[Type::Tf32], shapes: &[(16, 16, 8)], sums: &[Type::F32] },
    Family { inputs: &[Type::F64], shapes: &[(8, 8, 4)], sums: &[Type::F64] },
    Family { inputs: &[Type::U4, Type::S4], shapes: &[(8, 8, 32)], sums: &[Type::S32] },
    Family { inputs: &[Type::B1], shapes: &[(8, 8, 128)], sums: &[Type::S32] },
];

const fn dims(shape: MmaShape) -> (u16, u16, u16) {
    (shape.m, shape.n, shape.k)
}

/// Elements smaller than a byte lie along K: A by rows, B by columns.
fn ordered(ty: Type, matrix: WmmaMatrix, order: MatrixOrder) -> Result<(), String> {
    let wanted = match matrix {
        WmmaMatrix::A => MatrixOrder::Row,
        WmmaMatrix::B => MatrixOrder::Col,
        WmmaMatrix::Accumulator => return Ok(()),
    };
    ensure(ty.bits() >= 8 || order == wanted, || format!("wmma of .{ty} is .row.col"))
}

pub(super) fn access(m: &WmmaAccess) -> Result<(), String> {
    let (shape, ty) = (m.shape, m.ty);
    let is_sum = m.matrix == WmmaMatrix::Accumulator;
    let types = |f: &Family| if is_sum { f.sums } else { f.inputs };
    let name = if is_sum { "an accumulator" } else { "an input" };
    ensure(FAMILIES.iter().any(|f| types(f).contains(&ty)), || format!("wmma has no .{ty} as {name}"))?;
    let exists = |f: &Family| types(f).contains(&ty) && f.shapes.contains(&dims(shape));
    ensure(FAMILIES.iter().any(exists), || format!("wmma with .{ty} as {name} has no shape .{shape}"))?;
    ordered(ty, m.matrix, m.order)?;
    ensure(matches!(m.space, Space::Shared | Space::Global | Space::Generic), || {
        "wmma works on .shared and .global".into()
    })
}

pub(super) fn store(m: &WmmaAccess) -> Result<(), String> {
    ensure(m.matrix == WmmaMatrix::Accumulator, || "wmma stores D, no inputs".into())?;
    access(m)
}

pub(super) fn product(w: &Wmma) -> Result<(), String> {
    let family = FAMILIES.iter().find(|f| f.inputs.contains(&w.a));
    let family = family.ok_or_else(|| format!("wmma has no inputs of .{}", w.a))?;
    ensure(w.a == w.b, || format!("wmma does not multiply .{} by .{}", w.a, w.b))?;
    ensure(family.shapes.contains(&dims(w.shape)), || format!("wmma of .{} has no shape .{}", w.a, w.shape))?;
    let sums = family.sums.contains(&w.c) && family.sums.contains(&w.d);
    ensure(sums, || format!("wmma of .{} does not add .{} to .{}", w.a, w.c, w.d))?;
    ordered(w.a, WmmaMatrix::A, w.a_order)?;
    ordered(w.b, WmmaMatrix::B, w.b_order)?;
    ensure(w.rounding.is_none() || w.a == Type::F64, || "a rounding is for wmma of .f64".into())?;
    ensure((w.a == Type::B1) == w.bits.is_some(), || {
        ".xor.popc and .and.popc belong to .b1, and one of them must be there".into()
    })?;
    let saturates = family.sums == [Type::S32] && w.bits.is_none();
    ensure(!w.satfinite || saturates, || ".satfinite is for integer wmma".into())
}
