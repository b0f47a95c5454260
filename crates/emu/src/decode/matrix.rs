//! Decodes the operands of `mma`, `wgmma`, `ldmatrix` and `stmatrix`.

use ptx::{Imm, Op, Operand, Type, Wgmma, WgmmaSource};

use super::operands::{Operands, Result};
use super::{Decoder, Inst, Slot};
use crate::semantics::products;

/// Bits of `target` of a wgmma: whether A or B is negated, and whether A or B is MN-major.
pub(crate) mod wgmma_bits {
    pub const NEGATE_A: u32 = 1;
    pub const NEGATE_B: u32 = 2;
    pub const TRANSPOSE_A: u32 = 4;
    pub const TRANSPOSE_B: u32 = 8;
}

impl Decoder<'_> {
    pub(super) fn matrix(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        let start = self.pool.len() as u32;
        let (vectors, expected) = match out.op {
            Op::Mma(m) => {
                if products::of_mma(&m).is_none() {
                    return self.unsupported(format!("`{}`", out.op));
                }
                let [a, b, c, d] = m.registers();
                (0..4, vec![d, a, b, c])
            }
            Op::Ldmatrix(m) => {
                self.check_matrix(&m)?;
                self.note_access(m.space, 16);
                self.address(out, o.get(1)?, m.space)?;
                (0..1, vec![usize::from(m.count)])
            }
            Op::Stmatrix(m) => {
                self.check_matrix(&m)?;
                self.note_access(m.space, 16);
                self.address(out, o.get(0)?, m.space)?;
                (1..2, vec![usize::from(m.count)])
            }
            _ => return Ok(()),
        };
        let class = match out.op {
            Op::Mma(m) if m.a == Type::F64 => Type::F64,
            _ => Type::B32,
        };
        for (position, count) in vectors.zip(expected) {
            self.fragment(o.get(position)?, count, class)?;
        }
        out.list = (start, (self.pool.len() as u32 - start) as u16);
        Ok(())
    }

    /// The registers of D and A are stored in the list, the descriptors of A and B in sources 0 and 1, the
    /// predicate in source 2.
    pub(super) fn warpgroup_matrix(&mut self, out: &mut Inst, o: &Operands, w: &Wgmma) -> Result<()> {
        if products::of_wgmma(w).is_none() {
            return self.unsupported(out.op.to_string());
        }
        self.asynchronous = true;
        let start = self.pool.len() as u32;
        self.fragment(o.get(0)?, w.d_registers(), Type::B32)?;
        match w.a_source {
            WgmmaSource::Registers => self.fragment(o.get(1)?, Wgmma::A_REGISTERS, Type::B32)?,
            WgmmaSource::Shared => out.s[0] = self.source(o.get(1)?, Type::B64)?,
        }
        out.list = (start, (self.pool.len() as u32 - start) as u16);
        out.s[1] = self.source(o.get(2)?, Type::B64)?;
        let scale_d = o.get(3)?;
        out.negated = if matches!(scale_d, Operand::Not(_)) { 4 } else { 0 };
        out.s[2] = self.source(scale_d, Type::Pred)?;
        out.target = 0;
        let mut constants = o.list[4..].iter();
        let mut next = |bit: u32, set: i64, clear: i64| match constants.next() {
            Some(Operand::Imm(Imm::Int(n))) if *n == set => Some(bit),
            Some(Operand::Imm(Imm::Int(n))) if *n == clear => Some(0),
            _ => None,
        };
        let mut wanted = Vec::new();
        if w.has_scales() {
            wanted.extend([(wgmma_bits::NEGATE_A, -1, 1), (wgmma_bits::NEGATE_B, -1, 1)]);
        }
        if w.has_transpose() {
            wanted.extend((w.a_source == WgmmaSource::Shared).then_some((wgmma_bits::TRANSPOSE_A, 1, 0)));
            wanted.push((wgmma_bits::TRANSPOSE_B, 1, 0));
        }
        for (bit, set, clear) in wanted {
            match next(bit, set, clear) {
                Some(bit) => out.target |= bit,
                None => {
                    return self.malformed("a scale of wgmma is not 1 or -1, or a transposition not 0 or 1");
                }
            }
        }
        Ok(())
    }

    /// Appends the registers of a fragment to the pool.
    pub(super) fn fragment(&mut self, operand: &Operand, count: usize, ty: Type) -> Result<()> {
        let single = std::slice::from_ref(operand);
        let parts = if let Operand::Vector(parts) = operand { parts } else { single };
        if parts.len() != count {
            return self.malformed(format!("a fragment has {} registers, not {count}", parts.len()));
        }
        for part in parts {
            let slot = if *part == Operand::Sink { Slot::NONE } else { self.source(part, ty)? };
            self.pool.push(slot);
        }
        Ok(())
    }

    fn check_matrix(&self, m: &ptx::MatrixAccess) -> Result<()> {
        if m.shape == ptx::MatrixShape::M8N8 && m.ty == Type::B16 && matches!(m.count, 1 | 2 | 4) {
            Ok(())
        } else {
            self.unsupported("ldmatrix and stmatrix of other shapes than m8n8 of b16")
        }
    }
}
