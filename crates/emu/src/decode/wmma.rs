//! Decodes the operands of `wmma`, and computes the memory accesses of its loads and stores.

use ptx::{MatrixOrder, Op, Space, Type, WmmaAccess, WmmaMatrix};

use super::operands::{Operands, Result};
use super::{Class, Decoder, Inst};
use crate::numerics::tensor::Shape;
use crate::numerics::tensor::wmma::{FragmentAccess, FragmentLayout, Matrix};

/// The memory accesses of a `wmma.load` or `wmma.store`.
#[derive(Clone, Debug)]
pub(crate) struct Fragment {
    pub access: WmmaAccess,
    pub layout: FragmentLayout,
    /// Whether consecutive elements of a line are consecutive in memory.
    pub along: bool,
    pub accesses: Vec<FragmentAccess>,
}

impl Fragment {
    /// `None` for elements smaller than a byte, and for shapes that PTX does not have.
    pub fn new(access: WmmaAccess) -> Option<Fragment> {
        let ptx::MmaShape { m, n, k } = access.shape;
        let exists = matches!((m, n, k), (16, 16, 8 | 16) | (32, 8, 16) | (8, 32, 16) | (8, 8, 4));
        if !exists || !matches!(access.ty.bits(), 8 | 16 | 32 | 64) {
            return None;
        }
        let matrix = match access.matrix {
            WmmaMatrix::A => Matrix::A,
            WmmaMatrix::B => Matrix::B,
            WmmaMatrix::Accumulator => Matrix::Accumulator,
        };
        let shape = Shape { m: m.into(), n: n.into(), k: k.into() };
        let layout = FragmentLayout::new(matrix, shape, access.ty.bits() as usize, access.registers());
        let along = (access.order == MatrixOrder::Row) == layout.lines_are_rows;
        let accesses = layout.accesses(along, by_rows(&access));
        Some(Fragment { access, layout, along, accesses })
    }

    /// The number of 8×8 transpositions in registers that the accesses need.
    pub fn transposes(&self) -> usize {
        self.layout.transposes(self.along, by_rows(&self.access))
    }

    /// Bytes that a lane moves in one access.
    pub fn bytes(&self, access: &FragmentAccess) -> u32 {
        access.elements as u32 * self.access.ty.bytes()
    }

    /// Bytes from the base to element `place` of `line`, where consecutive rows or columns are `stride`
    /// elements apart.
    pub fn offset(&self, (line, place): (usize, usize), stride: u64) -> u64 {
        let (major, minor) = if self.along { (line, place) } else { (place, line) };
        (major as u64)
            .wrapping_mul(stride)
            .wrapping_add(minor as u64)
            .wrapping_mul(self.access.ty.bytes().into())
    }
}

/// Whether the load is an LDSM instruction in machine code.
fn by_rows(access: &WmmaAccess) -> bool {
    access.space == Space::Shared && access.matrix != WmmaMatrix::Accumulator
}

impl Decoder<'_> {
    pub(super) fn wmma(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        let start = self.pool.len() as u32;
        match out.op {
            Op::Wmma(w) => {
                if !crate::exec::wmma_supported(&w) {
                    return self.unsupported(format!("{w}"));
                }
                let [a, b, c, d] = w.registers();
                let class = if w.a == Type::F64 { Type::F64 } else { Type::B32 };
                for (position, count) in [d, a, b, c].into_iter().enumerate() {
                    self.fragment(o.get(position)?, count, class)?;
                }
            }
            Op::WmmaLoad(m) => {
                self.fragment_access(out, o, m, 1)?;
                self.fragment(o.get(0)?, m.registers(), element(m.ty))?;
            }
            Op::WmmaStore(m) => {
                self.fragment_access(out, o, m, 0)?;
                self.fragment(o.get(1)?, m.registers(), element(m.ty))?;
            }
            _ => {}
        }
        out.list = (start, (self.pool.len() as u32 - start) as u16);
        Ok(())
    }

    fn fragment_access(&mut self, out: &mut Inst, o: &Operands, m: WmmaAccess, at: usize) -> Result<()> {
        let Some(fragment) = Fragment::new(m) else {
            return self.unsupported(format!("{}", out.op));
        };
        self.address(out, o.get(at)?, m.space)?;
        out.s[0] = match o.list.get(2) {
            Some(stride) => self.source(stride, Type::U32)?,
            None => self.constant(Class::W32, m.default_stride().into())?,
        };
        let narrowest = fragment.accesses.iter().map(|a| fragment.bytes(a)).min().unwrap_or(1);
        self.note_access(m.space, narrowest);
        out.target = self.fragments.len() as u32;
        self.fragments.push(fragment);
        Ok(())
    }
}

/// The type of a fragment's registers.
fn element(ty: Type) -> Type {
    if ty == Type::F64 { Type::F64 } else { Type::B32 }
}
