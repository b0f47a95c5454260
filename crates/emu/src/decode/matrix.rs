//! Operands of `mma`, `ldmatrix` and `stmatrix`.

use ptx::{Op, Operand, Type};

use super::operands::{Operands, Result};
use super::{Decoder, Inst, Slot};

impl Decoder<'_> {
    pub(super) fn matrix(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        let start = self.pool.len() as u32;
        let (vectors, expected) = match out.op {
            Op::Mma(m) => {
                if !crate::exec::mma_supported(&m) {
                    return self.unsupported(format!("{m:?}"));
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

    /// Registers of a fragment, to the pool.
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
