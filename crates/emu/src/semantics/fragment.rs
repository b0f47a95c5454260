//! The memory accesses of the loads and stores of `wmma`.

use ptx::{MatrixOrder, Space, WmmaAccess, WmmaMatrix};

use crate::numerics::tensor::Shape;
use crate::numerics::tensor::wmma::{FragmentAccess, FragmentLayout, Matrix};

/// The accesses of a `wmma.load` or `wmma.store`.
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
