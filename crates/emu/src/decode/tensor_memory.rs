//! Decodes the operands of the instructions of tensor memory.

use ptx::{Imm, Op, Operand, Space, TensorCopyShape, TensorMove, TensorMoveShape, TensorProduct, Type};

use super::operands::{Operands, Result};
use super::{Decoder, Inst};

impl Decoder<'_> {
    /// The address of tensor memory is the instruction's address; other addresses are stated below.
    pub(super) fn tensor_memory(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        (self.asynchronous, self.tensor) = (true, true);
        match out.op {
            Op::Tcgen05Alloc { .. } => {
                self.note_access(Space::Shared, 4);
                self.address(out, o.get(0)?, Space::Shared)?;
                self.sources(out, o, 1, &[Type::U32])
            }
            Op::Tcgen05Dealloc { .. } => self.sources(out, o, 0, &[Type::B32, Type::U32]),
            Op::Tcgen05Ld(moved) => {
                self.address(out, o.get(1)?, Space::Shared)?;
                self.registers(out, o.get(0)?, &moved)?;
                self.distance(out, o, &moved, 2)
            }
            Op::Tcgen05St(moved) => {
                let halves = usize::from(moved.shape == TensorMoveShape::TwoHalves);
                self.address(out, o.get(0)?, Space::Shared)?;
                self.registers(out, o.get(1 + halves)?, &moved)?;
                self.distance(out, o, &moved, 1)
            }
            Op::Tcgen05Commit { space, multicast, .. } => {
                self.note_access(Space::Shared, 8);
                self.address(out, o.get(0)?, space)?;
                if multicast { self.sources(out, o, 1, &[Type::B16]) } else { Ok(()) }
            }
            Op::Tcgen05Cp { shape, unpack, .. } => {
                if unpack.is_some() || shape == TensorCopyShape::Rows4Bits256 {
                    return self.unsupported(format!("`{}`", out.op));
                }
                self.note_access(Space::Shared, 16);
                self.address(out, o.get(0)?, Space::Shared)?;
                self.sources(out, o, 1, &[Type::B64])
            }
            Op::Tcgen05Shift { .. } => self.unsupported(format!("`{}`", out.op)),
            Op::Tcgen05Mma(product) => self.tensor_product(out, o, &product),
            _ => Ok(()),
        }
    }

    fn registers(&mut self, out: &mut Inst, operand: &Operand, moved: &TensorMove) -> Result<()> {
        let start = self.pool.len() as u32;
        self.fragment(operand, moved.registers(), Type::B32)?;
        out.list = (start, moved.registers() as u16);
        Ok(())
    }

    /// The constant of `.16x32bx2` is stored in `target`.
    fn distance(&mut self, out: &mut Inst, o: &Operands, moved: &TensorMove, at: usize) -> Result<()> {
        out.target = 0;
        if moved.shape != TensorMoveShape::TwoHalves {
            return Ok(());
        }
        match o.get(at)? {
            Operand::Imm(Imm::Int(n)) if (0..512).contains(n) => out.target = *n as u32,
            _ => return self.malformed("the distance of the halves is not a constant below 512"),
        }
        Ok(())
    }

    /// The address of D is the instruction's address, that of A is `source`, that of A's scales `signal`. The
    /// descriptors of A and B, the instruction descriptor and the predicate are sources. The list has the
    /// lanes that keep D, or the base of the address of B's scales, whose offset is in `target`. Without
    /// scales, `target` is `scale-input-d`.
    fn tensor_product(&mut self, out: &mut Inst, o: &Operands, product: &TensorProduct) -> Result<()> {
        self.note_access(Space::Shared, 16);
        self.address(out, o.get(0)?, Space::Shared)?;
        if product.a_in_tensor_memory {
            let (base, offset, _) = self.resolve(o.get(1)?, Space::Shared)?;
            out.source = (base, offset);
        } else {
            out.s[0] = self.source(o.get(1)?, Type::B64)?;
            out.source = (self.constant(super::Class::W64, 0)?, 0);
        }
        out.s[1] = self.source(o.get(2)?, Type::B64)?;
        out.s[2] = self.source(o.get(3)?, Type::B32)?;
        let start = self.pool.len() as u32;
        out.target = 0;
        if product.kind.has_block_scales() {
            let (base, offset, _) = self.resolve(o.get(4)?, Space::Shared)?;
            out.signal = (base, offset);
            let (base, offset, _) = self.resolve(o.get(5)?, Space::Shared)?;
            self.pool.push(base);
            out.target = offset as u32;
        } else if product.masks_lanes {
            self.fragment(o.get(4)?, product.mask_registers(), Type::B32)?;
        }
        out.list = (start, (self.pool.len() as u32 - start) as u16);
        let adds = o.get(product.adds_position())?;
        out.negated = if matches!(adds, Operand::Not(_)) { 8 } else { 0 };
        out.s[3] = self.source(adds, Type::Pred)?;
        match o.list.get(product.adds_position() + 1) {
            None => Ok(()),
            Some(Operand::Imm(Imm::Int(n @ 0..=15))) if !product.stationary => {
                out.target = *n as u32;
                Ok(())
            }
            Some(_) if product.stationary => self.unsupported("tcgen05.mma.ws with a zero-column mask"),
            Some(_) => self.malformed("scale-input-d is not a constant from 0 to 15"),
        }
    }
}
