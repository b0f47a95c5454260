//! Decodes the operands of bulk copies and asynchronous stores.

use ptx::{BulkRoute, FenceSem, Imm, Op, Operand, Space, Type};

use super::operands::{Operands, Result};
use super::{Class, Decoder, Inst, Slot};
use crate::memory::window;
use crate::semantics::atomic::atomic_exists;

impl Decoder<'_> {
    /// The address in shared memory is stored in `base`, the address in global memory or of the tensor map in
    /// `source`. The size is source 0, the mask of a multicast is source 1. Coordinates or values are stored
    /// in the list.
    pub(super) fn bulk(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        self.asynchronous = true;
        self.communicates |= matches!(out.op, Op::CpReduceAsyncBulk(r) if !r.route.has_mbarrier())
            || matches!(out.op, Op::CpReduceAsyncBulkTensor(_));
        match out.op {
            Op::CpAsyncBulk(copy) => {
                self.plain_copy(out, o, copy.route)?;
                if copy.multicast { self.mask(out, o, 4) } else { Ok(()) }
            }
            Op::CpReduceAsyncBulk(reduce) => {
                if !atomic_exists(reduce.op, reduce.ty) {
                    return self.unsupported(out.op.to_string());
                }
                self.plain_copy(out, o, reduce.route)
            }
            Op::CpAsyncBulkTensor(copy) if copy.route.has_mbarrier() => {
                self.address(out, o.get(0)?, copy.route.destination())?;
                self.map(out, o, 1)?;
                out.signal = self.signal(o.get(3)?, copy.route.destination())?;
                if copy.multicast { self.mask(out, o, 4) } else { Ok(()) }
            }
            Op::CpAsyncBulkTensor(_) | Op::CpReduceAsyncBulkTensor(_) => {
                self.map(out, o, 0)?;
                self.address(out, o.get(2)?, Space::Shared)
            }
            Op::CpAsyncBulkPrefetch { .. } => {
                out.source = self.generic(o.get(0)?, Space::Global)?;
                self.sources(out, o, 1, &[Type::U32])
            }
            Op::CpAsyncBulkPrefetchTensor { .. } => self.map(out, o, 0),
            Op::CpAsyncBulkWaitGroup { .. } => self.sources(out, o, 0, &[Type::U32]),
            Op::StAsync(st) => {
                self.note_access(st.space, st.bytes());
                self.store_values(out, o, st.space, st.ty)
            }
            Op::RedAsync(red) => {
                self.note_access(red.space, red.ty.bytes());
                self.store_values(out, o, red.space, red.ty)
            }
            // The dimension of a field is in `target`, the new value is source 0.
            Op::TensormapReplace { field, space } => {
                self.note_access(space, 16);
                self.address(out, o.get(0)?, space)?;
                out.target = match (field.has_dimension(), o.get(1)?) {
                    (true, Operand::Imm(Imm::Int(dimension))) => *dimension as u32,
                    _ => 0,
                };
                self.sources(out, o, 1 + usize::from(field.has_dimension()), &[field.ty()])
            }
            Op::TensormapCopy(_) => {
                self.address(out, o.get(1)?, Space::Shared)?;
                out.source = self.generic(o.get(0)?, Space::Global)?;
                Ok(())
            }
            Op::FenceTensormap(FenceSem::Acquire, _) => self.address(out, o.get(0)?, Space::Generic),
            Op::TryCancel { space, multicast } => {
                (self.cancels, self.communicates) = (true, true);
                self.address(out, o.get(0)?, space)?;
                // The response also goes to the other CTAs.
                out.space = if multicast { Space::SharedCluster } else { out.space };
                out.signal = self.signal(o.get(1)?, space)?;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn plain_copy(&mut self, out: &mut Inst, o: &Operands, route: BulkRoute) -> Result<()> {
        let (to, from) = (o.get(0)?, o.get(1)?);
        match route {
            BulkRoute::CtaToGlobal => {
                self.address(out, from, Space::Shared)?;
                out.source = self.generic(to, Space::Global)?;
            }
            BulkRoute::GlobalToCluster | BulkRoute::GlobalToCta | BulkRoute::CtaToCluster => {
                self.address(out, to, route.destination())?;
                out.source = self.generic(from, route.source())?;
                out.signal = self.signal(o.get(3)?, route.destination())?;
            }
        }
        out.s[0] = self.source(o.get(2)?, Type::U32)?;
        Ok(())
    }

    fn store_values(&mut self, out: &mut Inst, o: &Operands, space: Space, ty: Type) -> Result<()> {
        self.address(out, o.get(0)?, space)?;
        self.elements_typed(out, o.get(1)?, ty)?;
        out.signal = self.signal(o.get(2)?, space)?;
        Ok(())
    }

    fn mask(&mut self, out: &mut Inst, o: &Operands, position: usize) -> Result<()> {
        out.s[1] = self.source(o.get(position)?, Type::B16)?;
        Ok(())
    }

    fn signal(&mut self, operand: &Operand, space: Space) -> Result<(Slot, i64)> {
        let (base, offset, _) = self.resolve(operand, space)?;
        Ok((base, offset))
    }

    /// Resolves a symbol to its generic address. A register already holds the address that the instruction
    /// takes.
    fn generic(&mut self, operand: &Operand, space: Space) -> Result<(Slot, i64)> {
        let (base, offset, found) = self.resolve(operand, space)?;
        Ok((base, if found == Space::Param { offset + window(Space::Param) as i64 } else { offset }))
    }

    /// Decodes the tensor map and the coordinates.
    fn map(&mut self, out: &mut Inst, o: &Operands, position: usize) -> Result<()> {
        out.source = self.generic(o.get(position)?, Space::Generic)?;
        self.elements_typed(out, o.get(position + 1)?, Type::S32)?;
        let wide = self.pool[out.list.0 as usize..].iter().any(|slot| slot.class != Class::W32);
        if wide { self.malformed("a coordinate is not a 32-bit register") } else { Ok(()) }
    }
}
