//! Decodes the operands of `mov`: registers, packed vectors, addresses of variables.

use ptx::{BinaryOp, Op, Operand, Space, Type};

use super::operands::{Operands, Result, is_clock};
use super::{CLOCK, Class, Decoder, Inst, Slot};

impl Decoder<'_> {
    pub(super) fn mov(&mut self, out: &mut Inst, o: &Operands, ty: Type) -> Result<()> {
        let (d, a) = (o.get(0)?, o.get(1)?);
        if ty == Type::B128 {
            return self.wide_mov(out, d, a);
        }
        match (d, a) {
            (d, Operand::Vector(parts)) => {
                out.d[0] = self.destination(d, ty)?;
                self.vector(out, parts, ty.bits() / parts.len().max(1) as u32)
            }
            (Operand::Vector(parts), a) => {
                out.s[0] = self.source(a, ty)?;
                self.vector(out, parts, ty.bits() / parts.len().max(1) as u32)
            }
            (d, Operand::Symbol(name, offset)) => {
                out.d[0] = self.destination(d, ty)?;
                self.symbol_address(out, name, *offset)
            }
            (d, Operand::Special(special)) if is_clock(*special) => {
                out.target = CLOCK;
                out.d[0] = self.destination(d, ty)?;
                Ok(())
            }
            _ => self.lanewise(out, o, ty, &[ty]),
        }
    }

    /// `mov.b128`: packs, unpacks or copies two halves.
    fn wide_mov(&mut self, out: &mut Inst, d: &Operand, a: &Operand) -> Result<()> {
        let bits = |parts: &[Operand]| Type::B128.bits() / parts.len().max(1) as u32;
        match (d, a) {
            (d, Operand::Vector(parts)) => {
                out.d = self.halves(d)?;
                self.vector(out, parts, bits(parts))
            }
            (Operand::Vector(parts), a) => {
                [out.s[0], out.s[1]] = self.halves(a)?;
                self.vector(out, parts, bits(parts))
            }
            (d, a) => {
                out.d = self.halves(d)?;
                [out.s[0], out.s[1]] = self.halves(a)?;
                Ok(())
            }
        }
    }

    /// Appends the parts of a packed register, `bits` bits each, to the pool.
    fn vector(&mut self, out: &mut Inst, parts: &[Operand], bits: u32) -> Result<()> {
        let ty = match bits {
            8 | 16 => Type::B16,
            32 => Type::B32,
            64 => Type::B64,
            _ => {
                return self
                    .malformed("the number of packed parts does not divide the width of the register");
            }
        };
        let start = self.pool.len() as u32;
        for part in parts {
            let slot = if *part == Operand::Sink { Slot::NONE } else { self.source(part, ty)? };
            self.pool.push(slot);
        }
        out.list = (start, parts.len() as u16);
        Ok(())
    }

    /// `mov d, symbol`: a constant, except for local variables, whose addresses are relative to the frame
    /// pointer.
    fn symbol_address(&mut self, out: &mut Inst, name: &str, offset: i64) -> Result<()> {
        if let Some(at) = self.layout.frames[self.current].offset_of(name) {
            // Local memory is small, so that the lower half is the whole address.
            out.op = Op::Binary(BinaryOp::Add, Type::U64, ptx::FloatMods::NONE);
            out.s[0] = self.frame_pointer;
            out.s[1] = self.constant(Class::W64, u64::from(at).wrapping_add_signed(offset))?;
            return Ok(());
        }
        let (class, entry) = (out.d[0].class, &self.functions[self.current].name);
        let param = || self.layout.entry_param(entry, name).map(|at| (Space::Param, at));
        match self.layout.symbol(name).or_else(param) {
            Some((space, address)) => {
                let address = address.wrapping_add_signed(offset);
                out.s[0] = match space {
                    Space::Shared => self.shared_address(class, address)?,
                    _ => self.constant(class, address)?,
                };
                Ok(())
            }
            None => self.unsupported(format!("the address of `{name}`")),
        }
    }
}
