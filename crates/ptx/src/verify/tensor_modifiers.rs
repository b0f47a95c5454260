//! Which shapes and types the matrix instructions have.

use crate::{MatrixAccess, MatrixOrder, MatrixShape, Mma, MmaShape, Op, Space, Type};

use super::modifiers::ensure;

pub(super) fn check(op: &Op) -> Result<(), String> {
    match op {
        Op::Ldmatrix(m) => matrix("ldmatrix", m, &[MatrixShape::M8N8, MatrixShape::M16N16]),
        Op::Stmatrix(m) => matrix("stmatrix", m, &[MatrixShape::M8N8, MatrixShape::M16N8]),
        Op::Mma(mma) => product(mma),
        _ => Ok(()),
    }
}

fn matrix(name: &str, m: &MatrixAccess, shapes: &[MatrixShape]) -> Result<(), String> {
    ensure(shapes.contains(&m.shape), || format!("{name} has no shape .{}", m.shape.name()))?;
    let most = if m.shape == MatrixShape::M16N16 { 2 } else { 4 };
    ensure(matches!(m.count, 1 | 2 | 4) && m.count <= most, || {
        format!("{name} has no .x{} of that shape", m.count)
    })?;
    let ty = if m.shape == MatrixShape::M8N8 { Type::B16 } else { Type::B8 };
    ensure(m.ty == ty, || format!("{name}.{} is for .{ty}", m.shape.name()))?;
    ensure(m.trans || m.shape == MatrixShape::M8N8, || format!("{name} of bytes must say .trans"))?;
    ensure(matches!(m.space, Space::Shared | Space::Generic), || format!("{name} works on .shared"))
}

/// A shape of `mma` with the types it takes.
struct Family {
    shapes: &'static [(u16, u16, u16)],
    inputs: &'static [Type],
    sums: &'static [Type],
}

/// PTX ISA, "Matrix multiply-accumulate operation using mma instruction".
const FAMILIES: [Family; 8] = [
    Family {
        shapes: &[(8, 8, 4), (16, 8, 8), (16, 8, 16)],
        inputs: &[Type::F16],
        sums: &[Type::F16, Type::F32],
    },
    Family { shapes: &[(16, 8, 8), (16, 8, 16)], inputs: &[Type::Bf16], sums: &[Type::F32] },
    Family { shapes: &[(16, 8, 4), (16, 8, 8)], inputs: &[Type::Tf32], sums: &[Type::F32] },
    Family {
        shapes: &[(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)],
        inputs: &[Type::F64],
        sums: &[Type::F64],
    },
    Family {
        shapes: &[(16, 8, 16), (16, 8, 32)],
        inputs: &[Type::E4m3, Type::E5m2],
        sums: &[Type::F16, Type::F32],
    },
    Family {
        shapes: &[(8, 8, 16), (16, 8, 16), (16, 8, 32)],
        inputs: &[Type::U8, Type::S8],
        sums: &[Type::S32],
    },
    Family {
        shapes: &[(8, 8, 32), (16, 8, 32), (16, 8, 64)],
        inputs: &[Type::U4, Type::S4],
        sums: &[Type::S32],
    },
    Family { shapes: &[(8, 8, 128), (16, 8, 128), (16, 8, 256)], inputs: &[Type::B1], sums: &[Type::S32] },
];

fn product(mma: &Mma) -> Result<(), String> {
    let MmaShape { m, n, k } = mma.shape;
    let family = FAMILIES.iter().find(|f| f.inputs.contains(&mma.a));
    let family = family.ok_or_else(|| format!("mma has no inputs of .{}", mma.a))?;
    ensure(family.inputs.contains(&mma.b), || format!("mma does not multiply .{} by .{}", mma.a, mma.b))?;
    ensure(family.shapes.contains(&(m, n, k)), || format!("mma of .{} has no shape .m{m}n{n}k{k}", mma.a))?;
    let volta = mma.a == Type::F16 && (m, n, k) == (8, 8, 4);
    let sums = family.sums.contains(&mma.c) && family.sums.contains(&mma.d) && (volta || mma.c == mma.d);
    ensure(sums, || format!("mma of .{} does not add .{} to .{}", mma.a, mma.c, mma.d))?;
    let ordered = mma.a_order == MatrixOrder::Row && mma.b_order == MatrixOrder::Col;
    ensure(volta || ordered, || format!("mma.m{m}n{n}k{k} of .{} is .row.col", mma.a))?;
    ensure((mma.a == Type::B1) == mma.bits.is_some(), || {
        ".xor.popc and .and.popc belong to .b1, and one of them must be there".into()
    })?;
    ensure(!mma.satfinite || family.sums == [Type::S32] && mma.bits.is_none(), || {
        ".satfinite is for integer mma".into()
    })?;
    ensure(!mma.kind_f8f6f4 || matches!(mma.a, Type::E4m3 | Type::E5m2), || {
        ".kind::f8f6f4 is for fp8 inputs".into()
    })
}
