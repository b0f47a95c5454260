//! Decodes the operands of branches and calls.

use ptx::{Operand, Type};

use super::operands::{Operands, Result};
use super::{Decoder, Inst};

impl Decoder<'_> {
    pub(super) fn label(&self, operand: &Operand) -> Result<u32> {
        let target = match operand {
            Operand::Label(label) => self.labels.get(label.0 as usize).copied(),
            _ => None,
        };
        match target {
            Some(pc) if pc != super::NOWHERE => Ok(pc),
            _ => self.malformed("a branch names a label that is not in the function"),
        }
    }

    pub(super) fn indexed_branch(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        self.sources(out, o, 0, &[Type::U32])?;
        let Operand::Labels(labels) = o.get(1)? else {
            return self.malformed("brx.idx has no list of labels");
        };
        let start = self.targets.len() as u32;
        for label in labels {
            let pc = self.label(&Operand::Label(*label))?;
            self.targets.push(pc);
        }
        out.list = (start, labels.len() as u16);
        Ok(())
    }

    pub(super) fn decode_call(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        match (o.get(0)?, o.get(1)?, o.get(2)?) {
            (Operand::List(results), Operand::Function(name), Operand::List(arguments)) => {
                if !self.is_defined(name) {
                    let special = self.system_call(name, results, arguments)?;
                    let guard = out.guard;
                    *out = Inst { guard, ..Inst::special(out.line, special) };
                    return Ok(());
                }
                out.target = self.call(name, results, arguments)?;
                Ok(())
            }
            _ => self.unsupported("indirect calls"),
        }
    }
}
