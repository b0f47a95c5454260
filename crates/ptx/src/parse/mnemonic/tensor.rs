//! Matrix instructions.

use super::super::Failure;
use super::super::modifiers::Modifiers;
use crate::*;

fn aligned(m: &mut Modifiers<'_>) -> Result<(), Failure> {
    m.require("sync")?;
    m.require("aligned")
}

pub(super) fn matrix_access(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    aligned(m)?;
    let shape = m.one("a shape such as `.m8n8`", MatrixShape::from_name)?;
    let count = m.one("`.x1`, `.x2` or `.x4`", |word| match word {
        "x1" => Some(1),
        "x2" => Some(2),
        "x4" => Some(4),
        _ => None,
    })?;
    let access = MatrixAccess { shape, count, trans: m.take("trans"), space: m.space(), ty: m.ty()? };
    Ok(if m.base == "ldmatrix" { Op::Ldmatrix(access) } else { Op::Stmatrix(access) })
}

pub(super) fn movmatrix(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    aligned(m)?;
    for word in ["m8n8", "trans", "b16"] {
        m.require(word)?;
    }
    Ok(Op::Movmatrix)
}

/// `m16n8k16` to its three extents.
fn shape(word: &str) -> Option<MmaShape> {
    let (m, rest) = word.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some(MmaShape { m: m.parse().ok()?, n: n.parse().ok()?, k: k.parse().ok()? })
}

fn order(word: &str) -> Option<MatrixOrder> {
    match word {
        "row" => Some(MatrixOrder::Row),
        "col" => Some(MatrixOrder::Col),
        _ => None,
    }
}

pub(super) fn mma(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    aligned(m)?;
    Ok(Op::Mma(Mma {
        shape: m.one("a shape such as `.m16n8k16`", shape)?,
        a_order: m.one("`.row` or `.col` for A", order)?,
        b_order: m.one("`.row` or `.col` for B", order)?,
        satfinite: m.take("satfinite"),
        kind_f8f6f4: m.take("kind::f8f6f4"),
        d: m.ty()?,
        a: m.ty()?,
        b: m.ty()?,
        c: m.ty()?,
    }))
}
