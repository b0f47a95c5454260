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

const SHAPE: &str = "a shape such as `.m16n8k16`";

/// `m16n8k16` to its three extents.
fn shape(word: &str) -> Option<MmaShape> {
    let (m, rest) = word.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some(MmaShape { m: m.parse().ok()?, n: n.parse().ok()?, k: k.parse().ok()? })
}

pub(super) fn mma(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    aligned(m)?;
    Ok(Op::Mma(Mma {
        shape: m.one(SHAPE, shape)?,
        a_order: m.one("`.row` or `.col` for A", MatrixOrder::from_name)?,
        b_order: m.one("`.row` or `.col` for B", MatrixOrder::from_name)?,
        satfinite: m.take("satfinite"),
        kind_f8f6f4: m.take("kind::f8f6f4"),
        bits: bit_op(m)?,
        d: m.ty()?,
        a: m.ty()?,
        b: m.ty()?,
        c: m.ty()?,
    }))
}

/// `.xor.popc`, `.and.popc`, or nothing.
fn bit_op(m: &mut Modifiers<'_>) -> Result<Option<BitOp>, Failure> {
    let op = m.find(BitOp::from_name);
    if op.is_some() {
        m.require("popc")?;
    }
    Ok(op)
}

pub(super) fn wmma(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.take("mma") {
        return wmma_product(m).map(Op::Wmma);
    }
    let is_load = m.take("load");
    if !is_load {
        m.one("`.load`, `.store` or `.mma`", |word| (word == "store").then_some(()))?;
    }
    let matrix =
        m.one("the matrix: `.a`, `.b` or `.c` to load, `.d` to store", |word| match (word, is_load) {
            ("a", true) => Some(WmmaMatrix::A),
            ("b", true) => Some(WmmaMatrix::B),
            ("c", true) | ("d", false) => Some(WmmaMatrix::Accumulator),
            _ => None,
        })?;
    aligned(m)?;
    let access = WmmaAccess {
        matrix,
        order: m.one("`.row` or `.col`", MatrixOrder::from_name)?,
        shape: m.one(SHAPE, shape)?,
        space: m.space(),
        ty: m.ty()?,
    };
    Ok(if is_load { Op::WmmaLoad(access) } else { Op::WmmaStore(access) })
}

/// Products of f16 name the types of D and C alone.
fn wmma_product(m: &mut Modifiers<'_>) -> Result<Wmma, Failure> {
    aligned(m)?;
    let bits = bit_op(m)?;
    let a_order = m.one("`.row` or `.col` for A", MatrixOrder::from_name)?;
    let b_order = m.one("`.row` or `.col` for B", MatrixOrder::from_name)?;
    let shape = m.one(SHAPE, shape)?;
    let (rounding, satfinite) = (m.find(super::arith::rounding), m.take("satfinite"));
    let (d, second) = (m.ty()?, m.ty()?);
    let (a, b, c) = match m.find(Type::from_name) {
        Some(third) => (second, third, m.ty()?),
        None => (Type::F16, Type::F16, second),
    };
    Ok(Wmma { a_order, b_order, shape, rounding, d, a, b, c, satfinite, bits })
}

pub(super) fn wgmma(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    aligned(m)?;
    if m.take("fence") {
        return Ok(Op::WgmmaFence);
    }
    if m.take("commit_group") {
        return Ok(Op::WgmmaCommitGroup);
    }
    if m.take("wait_group") {
        return Ok(Op::WgmmaWaitGroup);
    }
    m.require("mma_async")?;
    if m.take("sp") {
        return Err(Failure::at(m.offset, "sparse `wgmma` (`.sp`) is not supported"));
    }
    let shape = m.one(SHAPE, shape)?;
    let (d, a, b) = (m.ty()?, m.ty()?, m.ty()?);
    if a == Type::B1 {
        m.require("and")?;
        m.require("popc")?;
    }
    let satfinite = m.take("satfinite");
    Ok(Op::Wgmma(Wgmma { shape, d, a, b, a_source: WgmmaSource::Shared, satfinite }))
}
