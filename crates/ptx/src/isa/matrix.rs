//! Loads, stores and transposition of 8×8 matrices by a warp (PTX ISA, "ldmatrix", "stmatrix", "movmatrix").

use smallvec::smallvec;

use super::requirement::{need, need_specific, when};
use super::signature::{address, read, uniform, write};
use super::syntax::{Syntax, names, start};
use crate::verify::rules::ensure;
use crate::{SlotKind, Space, Type};

/// Shape of one matrix of `ldmatrix`/`stmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MatrixShape {
    M8N8,
    M16N8,
    M16N16,
    M8N16,
}

/// `ldmatrix.sync.aligned.<shape>.<num>{.trans}{.shared}.<type>` and `stmatrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixAccess {
    /// Shape of one matrix.
    pub shape: MatrixShape,
    /// `.x1`, `.x2`, `.x4`.
    pub count: u8,
    /// `.trans`.
    pub trans: bool,
    /// `Shared`, or `Generic` when no space is written.
    pub space: Space,
    /// `.b16`, `.b8`.
    pub ty: Type,
}

impl MatrixAccess {
    /// 32-bit registers per thread.
    pub const fn registers(&self) -> usize {
        match self.shape {
            // A 16×16 matrix of bytes takes two registers per thread, every other matrix one.
            MatrixShape::M16N16 => self.count as usize * 2,
            _ => self.count as usize,
        }
    }
}

names! {
    MatrixShape { M8N8 = "m8n8", M16N8 = "m16n8", M16N16 = "m16n16", M8N16 = "m8n16" }
}

start! {
    MatrixAccess = MatrixAccess {
        shape: MatrixShape::M8N8,
        count: 1,
        trans: false,
        space: Space::Generic,
        ty: Type::B16,
    };
}

instructions! { ($) matrix matrix_list

    /// `{r…}, [row]`. PTX ISA, "ldmatrix".
    Ldmatrix(access: MatrixAccess) => {
        text: |m| { m.head("ldmatrix")?; modifiers(m, access) },
        operands: smallvec![write(SlotKind::Vector(Type::B32, access.registers())), address(access.space)],
        accepts: matrix_access("ldmatrix", &access, &[MatrixShape::M8N8, MatrixShape::M16N16]),
        needs: when(access.shape != MatrixShape::M8N8, need_specific(86, 100)),
        accesses: |_position| Some(16),
    }

    /// `[row], {r…}`. PTX ISA, "stmatrix".
    Stmatrix(access: MatrixAccess) => {
        text: |m| { m.head("stmatrix")?; modifiers(m, access) },
        operands: smallvec![address(access.space), read(SlotKind::Vector(Type::B32, access.registers()))],
        accepts: matrix_access("stmatrix", &access, &[MatrixShape::M8N8, MatrixShape::M16N8]),
        needs: if access.shape == MatrixShape::M8N8 { need(78, 90) } else { need_specific(86, 100) },
        accesses: |_position| Some(16),
    }

    /// `d, a`: the transpose of an 8×8 matrix of b16. PTX ISA, "movmatrix".
    Movmatrix => {
        text: |m| {
            m.head("movmatrix")?;
            m.aligned()?;
            ["m8n8", "trans", "b16"].into_iter().try_for_each(|word| m.word(word))
        },
        operands: uniform(Type::B32, 1),
        needs: need(78, 75),
    }
}

fn modifiers<S: Syntax>(m: &mut S, access: &mut MatrixAccess) -> Result<(), S::Stop> {
    m.aligned()?;
    m.one(&mut access.shape, "a shape such as `.m8n8`", MatrixShape::NAMES)?;
    m.one(&mut access.count, "`.x1`, `.x2` or `.x4`", &[(1, "x1"), (2, "x2"), (4, "x4")])?;
    m.flag(&mut access.trans, "trans")?;
    m.space(&mut access.space)?;
    m.ty(&mut access.ty)
}

fn matrix_access(name: &str, m: &MatrixAccess, shapes: &[MatrixShape]) -> Result<(), String> {
    ensure(shapes.contains(&m.shape), || format!("{name} has no shape .{}", m.shape.name()))?;
    let most = if m.shape == MatrixShape::M16N16 { 2 } else { 4 };
    ensure(matches!(m.count, 1 | 2 | 4) && m.count <= most, || {
        format!("{name} has no .x{} of that shape", m.count)
    })?;
    let ty = if m.shape == MatrixShape::M8N8 { Type::B16 } else { Type::B8 };
    ensure(m.ty == ty, || format!("{name}.{} is for .{ty}", m.shape.name()))?;
    ensure(m.trans || m.shape == MatrixShape::M8N8, || format!("{name} of bytes needs .trans"))?;
    ensure(matches!(m.space, Space::Shared | Space::Generic), || format!("{name} works on .shared"))
}
