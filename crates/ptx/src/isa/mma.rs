//! Matrix products of a warp (PTX ISA, "Matrix multiply-accumulate operation using mma instruction").

use std::fmt;

use super::requirement::{BASE, need, need_specific};
use super::signature::matrix_product;
use super::syntax::{names, start};
use crate::verify::rules::ensure;
use crate::{Requirement, Type};

/// Shape of a matrix product, M×N×K.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "self-evident")]
pub struct MmaShape {
    pub m: u16,
    pub n: u16,
    pub k: u16,
}

impl MmaShape {
    /// m16n8k16.
    pub const M16N8K16: MmaShape = MmaShape { m: 16, n: 8, k: 16 };
    /// m16n16k16.
    pub const M16N16K16: MmaShape = MmaShape { m: 16, n: 16, k: 16 };
    /// m16n8k8.
    pub const M16N8K8: MmaShape = MmaShape { m: 16, n: 8, k: 8 };
    /// m16n8k32.
    pub const M16N8K32: MmaShape = MmaShape { m: 16, n: 8, k: 32 };
}

impl fmt::Display for MmaShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m{}n{}k{}", self.m, self.n, self.k)
    }
}

/// Order of a matrix operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MatrixOrder {
    Row,
    Col,
}

/// The bit operation of a single-bit product. The result counts the one bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum BitOp {
    Xor,
    And,
}

/// `mma.sync.aligned`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mma {
    /// Shape.
    pub shape: MmaShape,
    /// Order of A; row except for m8n8k4 of f16.
    pub a_order: MatrixOrder,
    /// Order of B; col except for m8n8k4 of f16.
    pub b_order: MatrixOrder,
    /// Type of D.
    pub d: Type,
    /// Type of A.
    pub a: Type,
    /// Type of B.
    pub b: Type,
    /// Type of C.
    pub c: Type,
    /// `.satfinite` (integers).
    pub satfinite: bool,
    /// `.kind::f8f6f4` is written (sm_120a).
    pub kind_f8f6f4: bool,
    /// `.xor.popc` or `.and.popc` (b1).
    pub bits: Option<BitOp>,
}

impl Mma {
    /// `mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>`.
    pub const fn new(shape: MmaShape, d: Type, a: Type, b: Type, c: Type) -> Mma {
        Mma {
            shape,
            a_order: MatrixOrder::Row,
            b_order: MatrixOrder::Col,
            d,
            a,
            b,
            c,
            satfinite: false,
            kind_f8f6f4: false,
            bits: None,
        }
    }

    /// Registers per thread of (A, B, C, D): 32-bit registers, or 64-bit ones for f64.
    pub fn registers(&self) -> [usize; 4] {
        let MmaShape { m, n, k } = self.shape;
        let count = |rows: u16, cols: u16, ty: Type| {
            let bits = u32::from(rows) * u32::from(cols) * ty.bits().max(1);
            (bits / 32 / ty.bits().max(32)).max(1) as usize
        };
        // `bits` of tf32 is 32, the width of the register that holds an element.
        // m8n8k4 of f16 (Volta) computes four products per warp, which takes twice the registers of one tile.
        if (m, n, k) == (8, 8, 4) && self.a == Type::F16 {
            let acc = |ty: Type| if ty == Type::F32 { 8 } else { 4 };
            return [2, 2, acc(self.c), acc(self.d)];
        }
        [count(m, k, self.a), count(k, n, self.b), count(m, n, self.c), count(m, n, self.d)]
    }
}

names! {
    MatrixOrder { Row = "row", Col = "col" }
    BitOp { Xor = "xor", And = "and" }
}

start! {
    Mma = Mma::new(MmaShape::M16N8K16, Type::F32, Type::F16, Type::F16, Type::F32);
}

instructions! { ($) mma mma_list

    /// `{d…}, {a…}, {b…}, {c…}`. PTX ISA, "mma".
    Mma(mma: Mma) => {
        text: |m| {
            m.head("mma")?;
            m.aligned()?;
            m.flag(&mut mma.kind_f8f6f4, "kind::f8f6f4")?;
            m.shape(&mut mma.shape)?;
            m.one(&mut mma.a_order, "`.row` or `.col` for A", MatrixOrder::NAMES)?;
            m.one(&mut mma.b_order, "`.row` or `.col` for B", MatrixOrder::NAMES)?;
            m.flag(&mut mma.satfinite, "satfinite")?;
            m.ty(&mut mma.d)?;
            m.ty(&mut mma.a)?;
            m.ty(&mut mma.b)?;
            m.ty(&mut mma.c)?;
            m.maybe(&mut mma.bits, BitOp::NAMES)?;
            if mma.bits.is_some() { m.word("popc") } else { Ok(()) }
        },
        operands: matrix_product([mma.a, mma.b, mma.c, mma.d], mma.registers()),
        accepts: product(&mma),
        needs: product_requirement(&mma),
    }
}

/// The requirement of a product (PTX ISA, "Matrix multiply-accumulate operation using mma instruction",
/// target notes).
fn product_requirement(mma: &Mma) -> Requirement {
    let MmaShape { m, n, k } = mma.shape;
    if mma.kind_f8f6f4 {
        return need_specific(87, 120);
    }
    match (mma.a, m, n, k) {
        (Type::F16, 8, 8, 4) | (Type::F16, 16, 8, 8) => BASE,
        (Type::F16 | Type::Bf16 | Type::Tf32, ..) => need(70, 80),
        (Type::B1, ..) if mma.bits == Some(BitOp::And) => need(71, 80),
        (Type::F64, 8, ..) => need(70, 80),
        (Type::F64, ..) => need(78, 90),
        (Type::E4m3 | Type::E5m2, _, _, 16) => need(87, 89),
        (Type::E4m3 | Type::E5m2, ..) if mma.d == Type::F16 => need(87, 89),
        (Type::E4m3 | Type::E5m2, ..) => need(84, 89),
        (_, 8, ..) => BASE,
        _ => need(70, 80),
    }
}

/// Shapes of `mma` with the types that they accept.
struct Family {
    shapes: &'static [(u16, u16, u16)],
    inputs: &'static [Type],
    sums: &'static [Type],
}

/// The products of `mma` (PTX ISA, "Matrix multiply-accumulate operation using mma instruction").
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
        ".b1 needs .xor.popc or .and.popc, and no other type takes them".into()
    })?;
    ensure(!mma.satfinite || family.sums == [Type::S32] && mma.bits.is_none(), || {
        ".satfinite is for integer mma".into()
    })?;
    ensure(!mma.kind_f8f6f4 || matches!(mma.a, Type::E4m3 | Type::E5m2), || {
        ".kind::f8f6f4 is for fp8 inputs".into()
    })
}
