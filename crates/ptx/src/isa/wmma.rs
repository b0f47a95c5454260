//! Matrix products of a warp with fragments of unspecified layout (PTX ISA, "Warp level matrix
//! multiply-accumulate operation using wmma instructions").

use smallvec::smallvec;

use super::requirement::{need, when};
use super::signature::{address, matrix_element, matrix_product, optional, read, value, write};
use super::syntax::{Syntax, start};
use super::{BitOp, MatrixOrder, MmaShape, Rounding};
use crate::verify::rules::ensure;
use crate::{Requirement, SlotKind, Space, Type};

/// The matrix of `D = A·B + C` that a fragment of `wmma` belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WmmaMatrix {
    /// A, M×K.
    A,
    /// B, K×N.
    B,
    /// C and D, M×N: `wmma.load.c` and `wmma.store.d`.
    Accumulator,
}

/// `wmma.load.{a,b,c}.sync.aligned.<order>.<shape>{.space}.<type>` and `wmma.store.d…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WmmaAccess {
    /// The matrix.
    pub matrix: WmmaMatrix,
    /// Whether the rows or the columns of the matrix are contiguous in memory.
    pub order: MatrixOrder,
    /// Shape of the product.
    pub shape: MmaShape,
    /// `Global`, `Shared`, or `Generic` when no space is written.
    pub space: Space,
    /// Type of the elements.
    pub ty: Type,
}

impl WmmaAccess {
    /// Rows and columns of the matrix.
    pub const fn extent(&self) -> (u16, u16) {
        let MmaShape { m, n, k } = self.shape;
        match self.matrix {
            WmmaMatrix::A => (m, k),
            WmmaMatrix::B => (k, n),
            WmmaMatrix::Accumulator => (m, n),
        }
    }

    /// Elements from one row (or column) to the next when the instruction names no stride.
    pub const fn default_stride(&self) -> u16 {
        let (rows, columns) = self.extent();
        match self.order {
            MatrixOrder::Row => columns,
            MatrixOrder::Col => rows,
        }
    }

    /// Registers per thread: 32-bit registers, or 64-bit ones for f64.
    pub fn registers(&self) -> usize {
        fragment(self.matrix, self.shape, self.ty)
    }

    /// Bytes of a fragment per thread.
    fn fragment_bytes(&self) -> u32 {
        self.ty.bytes().clamp(4, 8) * self.registers() as u32
    }

    /// The alignment of the address in bytes: the size of a fragment per thread (PTX ISA, "Matrix storage for
    /// WMMA"), but at most the 32 bytes of the CUDA C++ Programming Guide ("Warp Matrix Functions").
    pub fn address_alignment(&self) -> u32 {
        self.fragment_bytes().min(32)
    }

    /// The alignment of the stride in bytes: the size of a fragment per thread, but at most the 16 bytes of
    /// the CUDA C++ Programming Guide.
    pub fn stride_alignment(&self) -> u32 {
        self.fragment_bytes().min(16)
    }
}

/// `wmma.mma.sync.aligned.<a order>.<b order>.<shape>…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wmma {
    /// Order of A in memory, as in the load of A.
    pub a_order: MatrixOrder,
    /// Order of B in memory.
    pub b_order: MatrixOrder,
    /// Shape.
    pub shape: MmaShape,
    /// Rounding; only f64 may name one.
    pub rounding: Option<Rounding>,
    /// Type of D.
    pub d: Type,
    /// Type of A. The text does not name the inputs when both are f16.
    pub a: Type,
    /// Type of B.
    pub b: Type,
    /// Type of C.
    pub c: Type,
    /// `.satfinite` (integers).
    pub satfinite: bool,
    /// `.xor.popc` or `.and.popc` (b1).
    pub bits: Option<BitOp>,
}

impl Wmma {
    /// m16n16k16 of f16 with f32 sums.
    pub const fn f16(a_order: MatrixOrder, b_order: MatrixOrder) -> Wmma {
        let (shape, a, d) = (MmaShape::M16N16K16, Type::F16, Type::F32);
        Wmma { a_order, b_order, shape, rounding: None, d, a, b: a, c: d, satfinite: false, bits: None }
    }

    /// Registers per thread of (A, B, C, D).
    pub fn registers(&self) -> [usize; 4] {
        let of = |matrix, ty| fragment(matrix, self.shape, ty);
        [
            of(WmmaMatrix::A, self.a),
            of(WmmaMatrix::B, self.b),
            of(WmmaMatrix::Accumulator, self.c),
            of(WmmaMatrix::Accumulator, self.d),
        ]
    }
}

/// Registers of a fragment per thread (PTX ISA, "Matrix fragments for WMMA"). A and B of f16 have eight
/// registers in every shape, because Volta holds each element twice.
fn fragment(matrix: WmmaMatrix, shape: MmaShape, ty: Type) -> usize {
    let MmaShape { m, n, k } = shape;
    let (rows, columns) = match matrix {
        WmmaMatrix::A | WmmaMatrix::B if ty == Type::F16 => return 8,
        WmmaMatrix::A => (m, k),
        WmmaMatrix::B => (k, n),
        WmmaMatrix::Accumulator => (m, n),
    };
    let bits = u32::from(rows) * u32::from(columns) * ty.bits();
    (bits / 32 / ty.bits().max(32)).max(1) as usize
}

start! {
    WmmaAccess = WmmaAccess {
        matrix: WmmaMatrix::Accumulator,
        order: MatrixOrder::Row,
        shape: MmaShape::M16N16K16,
        space: Space::Generic,
        ty: Type::B32,
    };
    Wmma = Wmma::f16(MatrixOrder::Row, MatrixOrder::Row);
}

const LOADED: &[(WmmaMatrix, &str)] =
    &[(WmmaMatrix::A, "a"), (WmmaMatrix::B, "b"), (WmmaMatrix::Accumulator, "c")];
const STORED: &[(WmmaMatrix, &str)] = &[(WmmaMatrix::Accumulator, "d")];

instructions! { ($) wmma wmma_list

    /// `{r…}, [p], stride?`; the stride counts elements. PTX ISA, "wmma.load".
    WmmaLoad(access: WmmaAccess) => {
        text: |m| { m.head("wmma.load")?; access_modifiers(m, access, LOADED) },
        operands: smallvec![
            write(SlotKind::Vector(matrix_element(access.ty), access.registers())),
            address(access.space),
            optional(value(Type::U32))
        ],
        accepts: accessible(&access),
        needs: fragment_requirement(access.shape, access.ty),
        accesses: |_position| Some(access.address_alignment()),
    }

    /// `[p], {r…}, stride?`; the stride counts elements. PTX ISA, "wmma.store".
    WmmaStore(access: WmmaAccess) => {
        text: |m| { m.head("wmma.store")?; access_modifiers(m, access, STORED) },
        operands: smallvec![
            address(access.space),
            read(SlotKind::Vector(matrix_element(access.ty), access.registers())),
            optional(value(Type::U32))
        ],
        accepts: {
            ensure(access.matrix == WmmaMatrix::Accumulator, || "wmma stores D only".into())?;
            accessible(&access)
        },
        needs: fragment_requirement(access.shape, access.ty),
        accesses: |_position| Some(access.address_alignment()),
    }

    /// `{d…}, {a…}, {b…}, {c…}`. PTX ISA, "wmma.mma".
    Wmma(wmma: Wmma) => {
        text: |m| {
            m.head("wmma.mma")?;
            m.maybe(&mut wmma.bits, BitOp::NAMES)?;
            if wmma.bits.is_some() {
                m.word("popc")?;
            }
            m.aligned()?;
            m.one(&mut wmma.a_order, "`.row` or `.col` for A", MatrixOrder::NAMES)?;
            m.one(&mut wmma.b_order, "`.row` or `.col` for B", MatrixOrder::NAMES)?;
            m.shape(&mut wmma.shape)?;
            m.maybe(&mut wmma.rounding, Rounding::NAMES)?;
            // When A and B are f16, the text names only the types of D and C.
            let half_inputs = (wmma.a, wmma.b) == (Type::F16, Type::F16);
            let names_inputs = m.types_left().map_or(!half_inputs, |types| types > 2);
            m.ty(&mut wmma.d)?;
            if names_inputs {
                m.ty(&mut wmma.a)?;
                m.ty(&mut wmma.b)?;
            }
            m.ty(&mut wmma.c)?;
            m.flag(&mut wmma.satfinite, "satfinite")
        },
        operands: matrix_product([wmma.a, wmma.b, wmma.c, wmma.d], wmma.registers()),
        accepts: product(&wmma),
        needs: {
            let and = when(wmma.bits == Some(BitOp::And), need(71, 80));
            fragment_requirement(wmma.shape, wmma.a).and(and)
        },
    }
}

fn access_modifiers<S: Syntax>(
    m: &mut S,
    access: &mut WmmaAccess,
    matrices: &[(WmmaMatrix, &str)],
) -> Result<(), S::Stop> {
    m.one(&mut access.matrix, "the matrix: `.a`, `.b` or `.c` to load, `.d` to store", matrices)?;
    m.aligned()?;
    m.one(&mut access.order, "`.row` or `.col`", MatrixOrder::NAMES)?;
    m.shape(&mut access.shape)?;
    m.space(&mut access.space)?;
    m.ty(&mut access.ty)
}

/// bf16, tf32, f64 and the shape m16n16k8 need sm_80 (PTX ISA, "wmma.load").
fn fragment_requirement(shape: MmaShape, ty: Type) -> Requirement {
    let late = matches!(ty, Type::Bf16 | Type::Tf32 | Type::F64) || shape.k == 8;
    when(late, need(70, 80))
}

/// Input types with the shapes and accumulator types that they support.
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

/// Elements smaller than a byte are contiguous along K: A is row-major, B column-major.
fn ordered(ty: Type, matrix: WmmaMatrix, order: MatrixOrder) -> Result<(), String> {
    let wanted = match matrix {
        WmmaMatrix::A => MatrixOrder::Row,
        WmmaMatrix::B => MatrixOrder::Col,
        WmmaMatrix::Accumulator => return Ok(()),
    };
    ensure(ty.bits() >= 8 || order == wanted, || format!("wmma of .{ty} is .row.col"))
}

fn accessible(m: &WmmaAccess) -> Result<(), String> {
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

fn product(w: &Wmma) -> Result<(), String> {
    let family = FAMILIES.iter().find(|f| f.inputs.contains(&w.a));
    let family = family.ok_or_else(|| format!("wmma has no inputs of .{}", w.a))?;
    ensure(w.a == w.b, || format!("wmma does not multiply .{} by .{}", w.a, w.b))?;
    ensure(family.shapes.contains(&dims(w.shape)), || format!("wmma of .{} has no shape .{}", w.a, w.shape))?;
    let sums = family.sums.contains(&w.c) && family.sums.contains(&w.d);
    ensure(sums, || format!("wmma of .{} does not add .{} to .{}", w.a, w.c, w.d))?;
    ordered(w.a, WmmaMatrix::A, w.a_order)?;
    ordered(w.b, WmmaMatrix::B, w.b_order)?;
    ensure(w.rounding.is_none() || w.a == Type::F64, || "only wmma of .f64 takes a rounding".into())?;
    ensure((w.a == Type::B1) == w.bits.is_some(), || {
        ".b1 needs .xor.popc or .and.popc, and no other type takes them".into()
    })?;
    let saturates = family.sums == [Type::S32] && w.bits.is_none();
    ensure(!w.satfinite || saturates, || ".satfinite is for integer wmma".into())
}
