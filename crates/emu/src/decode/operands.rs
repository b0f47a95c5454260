//! Decodes the operands of each operation, in the order that [`ptx::Op`] documents.

use ptx::{
    Address, Base, BinaryOp, CancelQuery, Imm, Instruction, MemSem, Memory, Op, Operand, Scope, Space,
    SpecialReg, TernaryOp, Type, UnaryOp,
};

use super::{Class, Decoder, Inst, Slot};
use crate::EmuError;
use crate::semantics::atomic::atomic_exists;
use crate::semantics::scalar::evaluate;

pub(super) type Result<T> = std::result::Result<T, EmuError>;

/// The integer type with twice the width.
fn wide(ty: Type) -> Type {
    match ty.bits() {
        8 | 16 => Type::B32,
        _ => Type::B64,
    }
}

impl Decoder<'_> {
    pub(super) fn guard(&self, inst: &Instruction) -> Result<Option<(u16, bool)>> {
        let slot = inst.guard.map(|guard| Ok((self.register(guard.reg, Class::Pred)?.index, guard.negated)));
        slot.transpose()
    }

    pub(super) fn instruction(&mut self, inst: &Instruction) -> Result<Inst> {
        let mut out = Inst::new(inst.op, inst.line);
        out.guard = self.guard(inst)?;
        let o = Operands { list: &inst.operands, line: inst.line };
        self.computation(&mut out, &o)?;
        if is_arithmetic(&out.op) && evaluate(&out.op, [0; 4]).is_none() {
            return self.unsupported(format!("`{}`", inst.op));
        }
        Ok(out)
    }

    fn computation(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        use Type::{B32, B64, F32, Pred, U32};
        match out.op {
            Op::Unary(op, ty, _) => {
                let to = match op {
                    UnaryOp::Popc | UnaryOp::Clz | UnaryOp::Bfind | UnaryOp::BfindShiftamt => U32,
                    _ => ty,
                };
                self.lanewise(out, o, to, &[ty])
            }
            Op::Binary(op, ty, _) => match op {
                BinaryOp::MulWide => self.lanewise(out, o, wide(ty), &[ty, ty]),
                BinaryOp::Shl | BinaryOp::Shr => self.lanewise(out, o, ty, &[ty, U32]),
                _ => self.lanewise(out, o, ty, &[ty, ty]),
            },
            Op::Ternary(op, ty, _) => match op {
                TernaryOp::MadWide => self.lanewise(out, o, wide(ty), &[ty, ty, wide(ty)]),
                _ => self.lanewise(out, o, ty, &[ty, ty, ty]),
            },
            Op::Carry(op, ty) => {
                let sources = if carry_sources(op) == 3 { &[ty, ty, ty][..] } else { &[ty, ty] };
                let [reads, writes] = carry_flag(op);
                out.s[3] = if reads { self.carry } else { Slot::NONE };
                out.d[1] = if writes { self.carry } else { Slot::NONE };
                self.lanewise(out, o, ty, sources)
            }
            Op::Setp { combine, ty, .. } => {
                out.d = self.pair(o.get(0)?, Pred, Pred)?;
                let sources: &[Type] = if combine.is_some() { &[ty, ty, Pred] } else { &[ty, ty] };
                self.sources(out, o, 1, sources)
            }
            Op::Set { combine, to, ty, .. } => {
                let sources: &[Type] = if combine.is_some() { &[ty, ty, Pred] } else { &[ty, ty] };
                self.lanewise(out, o, to, sources)
            }
            Op::Selp(ty) => self.lanewise(out, o, ty, &[ty, ty, Pred]),
            Op::Slct { ty, cond, .. } => self.lanewise(out, o, ty, &[ty, ty, cond]),
            Op::Testp(_, ty) => self.lanewise(out, o, Pred, &[ty]),
            Op::Lop3(None) => self.lanewise(out, o, B32, &[B32, B32, B32, B32]),
            Op::Lop3(Some(_)) => self.combined_logic(out, o),
            Op::CvtPack { chained, .. } => {
                self.lanewise(out, o, B32, if chained { &[B32, B32, B32] } else { &[B32, B32] })
            }
            Op::Shf(..) | Op::Prmt(_) | Op::Fns => self.lanewise(out, o, B32, &[B32, B32, B32]),
            Op::Bfe(ty) => self.lanewise(out, o, ty, &[ty, U32, U32]),
            Op::Bfi(ty) => self.lanewise(out, o, ty, &[ty, ty, U32, U32]),
            Op::Bmsk(_) => self.lanewise(out, o, B32, &[B32, B32]),
            Op::Szext(_, ty) => self.lanewise(out, o, ty, &[ty, U32]),
            Op::Dp4a(..) | Op::Dp2a(..) => self.lanewise(out, o, B32, &[B32, B32, B32]),
            Op::Mov(ty) => self.mov(out, o, ty),
            Op::Cvt(cvt) => self.cvt(out, o, cvt),
            Op::Cvta { ty, .. } => self.lanewise(out, o, ty, &[ty]),
            Op::Isspacep(_) => self.lanewise(out, o, Pred, &[B64]),
            Op::Ld(_) | Op::St(_) | Op::Atom(_) | Op::Red(_) => self.memory(out, o),
            Op::Prefetch(space, _) | Op::Discard(space) => self.address(out, o.get(0)?, space),
            Op::CreatePolicy(_) => {
                out.d[0] = self.destination(o.get(0)?, B64)?;
                if o.list.len() > 1 { self.sources(out, o, 1, &[F32]) } else { Ok(()) }
            }
            Op::Ldmatrix(_) | Op::Stmatrix(_) | Op::Mma(_) => self.matrix(out, o),
            Op::WmmaLoad(_) | Op::WmmaStore(_) | Op::Wmma(_) => self.wmma(out, o),
            Op::Movmatrix => self.lanewise(out, o, B32, &[B32]),
            Op::CpAsync(_) | Op::CpAsyncMbarrierArrive { .. } | Op::Mbarrier(_) => self.asynchronous(out, o),
            Op::CpAsyncWaitGroup | Op::Pmevent | Op::Nanosleep | Op::BarWarpSync => {
                self.sources(out, o, 0, &[U32])
            }
            Op::Shfl(_) => {
                out.d = self.pair(o.get(0)?, B32, Pred)?;
                self.sources(out, o, 1, &[B32, B32, B32, B32])
            }
            Op::Vote(mode) => {
                let to = if mode == ptx::VoteMode::Ballot { B32 } else { Pred };
                self.lanewise(out, o, to, &[Pred, B32])
            }
            Op::Match(_, ty) => {
                out.d = self.pair(o.get(0)?, B32, Pred)?;
                self.sources(out, o, 1, &[ty, B32])
            }
            Op::Redux { ty, .. } => self.lanewise(out, o, ty, &[ty, B32]),
            Op::Activemask => self.lanewise(out, o, B32, &[]),
            Op::Elect => {
                out.d = self.pair(o.get(0)?, B32, Pred)?;
                self.sources(out, o, 1, &[B32])
            }
            Op::Bar { kind, .. } => self.barrier(out, o, kind),
            Op::Bra { .. } => {
                out.target = self.label(o.get(0)?)?;
                Ok(())
            }
            Op::BrxIdx { .. } => self.indexed_branch(out, o),
            Op::Call { .. } => self.decode_call(out, o),
            Op::CpAsyncCommitGroup
            | Op::CpAsyncWaitAll
            | Op::Membar(_)
            | Op::Fence(..)
            | Op::FenceMbarrierInit
            | Op::Ret { .. }
            | Op::Exit
            | Op::Trap
            | Op::Brkpt => Ok(()),
            Op::Mapa { ty, .. } => self.lanewise(out, o, ty, &[ty, U32]),
            Op::Getctarank { ty, .. } => self.lanewise(out, o, U32, &[ty]),
            Op::BarrierCluster(_) | Op::FenceProxy(_) | Op::Griddepcontrol(_) => Ok(()),
            Op::FenceTensormap(..) | Op::TensormapReplace { .. } | Op::TensormapCopy(_) => self.bulk(out, o),
            Op::CpAsyncBulk(_)
            | Op::CpReduceAsyncBulk(_)
            | Op::CpAsyncBulkTensor(_)
            | Op::CpReduceAsyncBulkTensor(_)
            | Op::CpAsyncBulkPrefetch { .. }
            | Op::CpAsyncBulkPrefetchTensor { .. }
            | Op::CpAsyncBulkCommitGroup
            | Op::CpAsyncBulkWaitGroup { .. }
            | Op::StAsync(_)
            | Op::RedAsync(_)
            | Op::TryCancel { .. } => self.bulk(out, o),
            Op::QueryCancel(query) => self.query(out, o, query),
            Op::Tcgen05Alloc { .. }
            | Op::Tcgen05Dealloc { .. }
            | Op::Tcgen05Relinquish { .. }
            | Op::Tcgen05Ld(_)
            | Op::Tcgen05St(_)
            | Op::Tcgen05Wait { .. }
            | Op::Tcgen05Fence { .. }
            | Op::Tcgen05Commit { .. }
            | Op::Tcgen05Cp { .. }
            | Op::Tcgen05Shift { .. }
            | Op::Tcgen05Mma(_) => self.tensor_memory(out, o),
            Op::Wgmma(w) => self.warpgroup_matrix(out, o, &w),
            Op::WgmmaFence | Op::WgmmaCommitGroup => Ok(()),
            Op::WgmmaWaitGroup | Op::Setmaxnreg(_) => self.sources(out, o, 0, &[U32]),
        }
    }

    /// Operands in the form `d, sources…`.
    pub(super) fn lanewise(
        &mut self,
        out: &mut Inst,
        o: &Operands,
        to: Type,
        sources: &[Type],
    ) -> Result<()> {
        out.d[0] = self.destination(o.get(0)?, to)?;
        self.sources(out, o, 1, sources)
    }

    pub(super) fn sources(
        &mut self,
        out: &mut Inst,
        o: &Operands,
        first: usize,
        types: &[Type],
    ) -> Result<()> {
        for (i, ty) in types.iter().enumerate() {
            let operand = o.get(first + i)?;
            if matches!(operand, Operand::Not(_)) {
                out.negated |= 1 << i;
            }
            out.s[i] = self.source(operand, *ty)?;
        }
        Ok(())
    }

    /// A result and a response of 128 bits, of which source 0 is the lower half.
    fn query(&mut self, out: &mut Inst, o: &Operands, query: CancelQuery) -> Result<()> {
        match query {
            CancelQuery::IsCanceled => out.d[0] = self.destination(o.get(0)?, Type::Pred)?,
            CancelQuery::FirstCtaid => self.elements(out, o.get(0)?)?,
            _ => out.d[0] = self.destination(o.get(0)?, Type::B32)?,
        }
        let [low, high] = self.halves(o.get(1)?)?;
        (out.s[0], out.s[1]) = (low, high);
        Ok(())
    }

    /// `lop3` with a predicate result. It has five sources, so its truth table is stored in `offset`.
    fn combined_logic(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        out.d = self.pair(o.get(0)?, Type::B32, Type::Pred)?;
        self.sources(out, o, 1, &[Type::B32; 3])?;
        let Operand::Imm(Imm::Int(table)) = o.get(4)? else {
            return self.malformed("the truth table of lop3 is not a constant");
        };
        let predicate = o.get(5)?;
        out.offset = *table;
        out.s[3] = self.source(predicate, Type::Pred)?;
        out.negated = if matches!(predicate, Operand::Not(_)) { 8 } else { 0 };
        Ok(())
    }

    fn register(&self, reg: ptx::Reg, class: Class) -> Result<Slot> {
        let slot = self.any_register(reg)?;
        if slot.class == class {
            return Ok(slot);
        }
        self.malformed("the width of an operand's register differs from that of the instruction")
    }

    /// The slots of the lower and the upper half of a register of 128 bits.
    pub(super) fn halves(&self, operand: &Operand) -> Result<[Slot; 2]> {
        match operand {
            Operand::Reg(reg) if self.is_wide(*reg) => {
                let low = self.registers[self.current][reg.0 as usize];
                Ok([low, Slot { index: low.index + 1, ..low }])
            }
            _ => self.unsupported("an operand of 128 bits that is no register"),
        }
    }

    fn is_wide(&self, reg: ptx::Reg) -> bool {
        let body = self.functions[self.current].body.as_ref();
        body.and_then(|body| body.registers.get(reg.0 as usize)).is_some_and(|r| r.ty == Type::B128)
    }

    /// The slot of a register of any width.
    fn any_register(&self, reg: ptx::Reg) -> Result<Slot> {
        match self.registers[self.current].get(reg.0 as usize) {
            Some(_) if self.is_wide(reg) => self.unsupported("a 128-bit register as an operand here"),
            Some(slot) => Ok(*slot),
            None => self.malformed("an operand is a register that the function does not declare"),
        }
    }

    pub(super) fn destination(&self, operand: &Operand, ty: Type) -> Result<Slot> {
        match operand {
            Operand::Reg(reg) => self.register(*reg, Class::of(ty)),
            Operand::Sink => Ok(Slot::NONE),
            _ => self.malformed("a result is neither a register nor `_`"),
        }
    }

    /// An operand in the form `a|b` or `a`.
    fn pair(&self, operand: &Operand, first: Type, second: Type) -> Result<[Slot; 2]> {
        match operand {
            Operand::Pair(a, b) => {
                let slot =
                    |r: &Option<ptx::Reg>, ty| r.map_or(Ok(Slot::NONE), |r| self.register(r, Class::of(ty)));
                Ok([slot(a, first)?, slot(b, second)?])
            }
            other => Ok([self.destination(other, first)?, Slot::NONE]),
        }
    }

    pub(super) fn source(&mut self, operand: &Operand, ty: Type) -> Result<Slot> {
        let class = Class::of(ty);
        match operand {
            Operand::Reg(reg) | Operand::Not(reg) => self.register(*reg, class),
            Operand::Imm(imm) => self.constant(class, immediate(*imm, ty)),
            Operand::Special(special) => self.special(*special, class),
            Operand::Symbol(name, offset) => {
                let entry = &self.functions[self.current].name;
                if let Some(at) = self.layout.entry_param(entry, name) {
                    return self.constant(class, at.wrapping_add_signed(*offset));
                }
                let Some((space, address)) = self.layout.symbol(name) else {
                    return self.unsupported(format!("the address of `{name}` as an operand here"));
                };
                let address = address.wrapping_add_signed(*offset);
                match space {
                    Space::Shared => self.shared_address(class, address),
                    _ => self.constant(class, address),
                }
            }
            _ => self.malformed("an operand is not one that the instruction takes"),
        }
    }

    fn special(&mut self, special: SpecialReg, class: Class) -> Result<Slot> {
        // Thread and CTA indices may be read with 16 bits (PTX ISA 1.x code). Reads of 64 bits are allowed
        // only for 64-bit special registers.
        if Class::of(special.ty()) != class {
            return self.malformed(format!("{} is read with a width that it does not have", special.name()));
        }
        if let Some(slot) = self.specials.get(&special) {
            return Ok(*slot);
        }
        let slot = self.new_slot(class)?;
        self.specials.insert(special, slot);
        Ok(slot)
    }

    fn cvt(&mut self, out: &mut Inst, o: &Operands, cvt: ptx::Cvt) -> Result<()> {
        out.d[0] = match o.get(0)? {
            // The destination may be wider than the type.
            Operand::Reg(reg) => self.any_register(*reg)?,
            Operand::Sink => Slot::NONE,
            _ => return self.malformed("a result is neither a register nor `_`"),
        };
        for i in 0..if cvt.packed() { 2 } else { 1 } {
            out.s[i] = match o.get(1 + i)? {
                Operand::Reg(reg) => self.any_register(*reg)?,
                other => self.source(other, cvt.from)?,
            };
        }
        Ok(())
    }

    pub(super) fn address(&mut self, out: &mut Inst, operand: &Operand, space: Space) -> Result<()> {
        let (base, offset, space) = self.resolve(operand, space)?;
        (out.base, out.offset, out.space) = (base, offset, space);
        Ok(())
    }

    pub(super) fn resolve(&mut self, operand: &Operand, space: Space) -> Result<(Slot, i64, Space)> {
        let Operand::Address(Address { base, offset }) = operand else {
            return self.malformed("an operand is not an address");
        };
        match base {
            Base::Reg(reg) => {
                let slot = self.any_register(*reg)?;
                if slot.class == Class::Pred {
                    return self.malformed("an address is a predicate");
                }
                Ok((slot, *offset, space))
            }
            Base::Absolute => Ok((self.constant(Class::W64, 0)?, *offset, space)),
            Base::Symbol(name) => {
                if let Some(at) = self.layout.frames[self.current].offset_of(name) {
                    return Ok((self.frame_pointer, i64::from(at).wrapping_add(*offset), Space::Local));
                }
                let zero = self.constant(Class::W64, 0)?;
                let entry = &self.functions[self.current].name;
                if let Some(at) = self.layout.entry_param(entry, name) {
                    return Ok((zero, (at as i64).wrapping_add(*offset), Space::Param));
                }
                match self.layout.symbol(name) {
                    Some((Space::Shared, address)) => Ok((
                        self.shared_address(Class::W64, 0)?,
                        (address as i64).wrapping_add(*offset),
                        Space::Shared,
                    )),
                    Some((at, address)) => Ok((zero, (address as i64).wrapping_add(*offset), at)),
                    None => self.malformed(format!("`{name}` is not declared")),
                }
            }
        }
    }

    fn memory(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        let (space, ty, vector) = match out.op {
            Op::Ld(m) | Op::St(m) => {
                let strong = !matches!(m.sem, MemSem::Default | MemSem::Weak);
                self.communicates |= strong && matches!(m.space, Space::Global | Space::Generic);
                (m.space, m.ty, m.vector)
            }
            Op::Atom(a) | Op::Red(a) => {
                if matches!(a.ty, Type::B128) {
                    return self.unsupported("128-bit atomics");
                }
                if !atomic_exists(a.op, a.ty) {
                    return self.unsupported(format!("`{}`", out.op));
                }
                self.communicates |= matches!(a.space, Space::Global | Space::Generic);
                (a.space, a.ty, a.vector)
            }
            _ => return Ok(()),
        };
        if let (Op::Ld(m) | Op::St(m), Type::B128) = (out.op, ty)
            && matches!(m.sem, MemSem::Default | MemSem::Weak)
            && vector == 1
        {
            return self.wide_access(out, o, m);
        }
        if ty == Type::B128 || ty.bytes() == 0 {
            return self.unsupported(format!("memory accesses of type {ty}"));
        }
        if !matches!(vector, 1 | 2 | 4 | 8) || ty.bytes() * u32::from(vector) > 32 {
            return self.unsupported(format!("memory accesses of {vector} elements of type {ty}"));
        }
        // The elements of an atomic are accesses of their own.
        let is_atomic = matches!(out.op, Op::Atom(_) | Op::Red(_));
        self.note_access(space, if is_atomic { ty.bytes() } else { ty.bytes() * u32::from(vector) });
        let class = Class::of(ty);
        match out.op {
            Op::Ld(_) => {
                self.elements(out, o.get(0)?)?;
                self.check_elements(out, vector)?;
                self.address(out, o.get(1)?, space)
            }
            Op::St(_) => {
                self.address(out, o.get(0)?, space)?;
                self.elements_typed(out, o.get(1)?, ty)?;
                self.check_elements(out, vector)
            }
            Op::Atom(_) if vector > 1 => {
                self.elements(out, o.get(0)?)?;
                self.check_elements(out, vector)?;
                let results = out.list;
                self.address(out, o.get(1)?, space)?;
                self.elements_typed(out, o.get(2)?, ty)?;
                self.check_elements(out, vector)?;
                debug_assert_eq!(out.list.0, results.0 + u32::from(results.1), "two lists in a row");
                out.list = (results.0, 2 * results.1);
                Ok(())
            }
            Op::Atom(a) => {
                out.d[0] = self.destination(o.get(0)?, ty)?;
                self.address(out, o.get(1)?, space)?;
                let sources = if a.op == ptx::AtomicOp::Cas { &[ty, ty][..] } else { &[ty] };
                self.sources(out, o, 2, sources)
            }
            _ if vector > 1 => {
                self.address(out, o.get(0)?, space)?;
                self.elements_typed(out, o.get(1)?, ty)?;
                self.check_elements(out, vector)
            }
            _ => {
                self.address(out, o.get(0)?, space)?;
                debug_assert!(class != Class::Pred);
                self.sources(out, o, 1, &[ty])
            }
        }
    }

    /// A weak access of 128 bits is one of two elements of 64 bits, to the same registers.
    fn wide_access(&mut self, out: &mut Inst, o: &Operands, m: Memory) -> Result<()> {
        let loads = matches!(out.op, Op::Ld(_));
        let halves = Memory { ty: Type::B64, vector: 2, ..m };
        out.op = if loads { Op::Ld(halves) } else { Op::St(halves) };
        out.width = super::element_width(Type::B64);
        self.note_access(m.space, Type::B128.bytes());
        self.address(out, o.get(usize::from(loads))?, m.space)?;
        let slots = self.halves(o.get(usize::from(!loads))?)?;
        out.list = (self.pool.len() as u32, 2);
        self.pool.extend(slots);
        Ok(())
    }

    fn check_elements(&self, out: &Inst, vector: u8) -> Result<()> {
        if out.list.1 == u16::from(vector) {
            Ok(())
        } else {
            self.malformed(format!("{} registers in an access of {vector} elements", out.list.1))
        }
    }

    /// Updates the width of the narrowest access to each space: the granule of the shadows.
    pub(super) fn note_access(&mut self, space: Space, bytes: u32) {
        if !matches!(space, Space::Global | Space::Const | Space::Param | Space::Local) {
            self.granules[0] = self.granules[0].min(bytes);
        }
        if matches!(space, Space::Global | Space::Generic) {
            self.granules[1] = self.granules[1].min(bytes);
        }
    }

    /// Appends the registers that a load fills. They may be wider than the type.
    fn elements(&mut self, out: &mut Inst, operand: &Operand) -> Result<()> {
        let single = std::slice::from_ref(operand);
        let parts = if let Operand::Vector(parts) = operand { parts } else { single };
        let start = self.pool.len() as u32;
        for part in parts {
            let slot = match part {
                Operand::Reg(reg) => self.any_register(*reg)?,
                Operand::Sink => Slot::NONE,
                _ => return self.malformed("a load's result is neither a register nor `_`"),
            };
            self.pool.push(slot);
        }
        out.list = (start, parts.len() as u16);
        Ok(())
    }

    pub(super) fn elements_typed(&mut self, out: &mut Inst, operand: &Operand, ty: Type) -> Result<()> {
        let single = std::slice::from_ref(operand);
        let parts = if let Operand::Vector(parts) = operand { parts } else { single };
        let slots: Result<Vec<Slot>> = parts
            .iter()
            .map(|part| match part {
                Operand::Reg(reg) => self.any_register(*reg),
                other => self.source(other, ty),
            })
            .collect();
        out.list = (self.pool.len() as u32, parts.len() as u16);
        self.pool.extend(slots?);
        Ok(())
    }
}

/// The operands of an instruction. A missing one is an error.
pub(super) struct Operands<'a> {
    pub(super) list: &'a [Operand],
    line: u32,
}

impl Operands<'_> {
    pub(super) fn get(&self, index: usize) -> Result<&Operand> {
        self.list.get(index).ok_or_else(|| EmuError::Malformed {
            line: self.line,
            what: format!("operand {} is missing", index + 1),
        })
    }
}

/// Whether an operation is evaluated lane by lane.
fn is_arithmetic(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(..)
            | Op::Binary(..)
            | Op::Ternary(..)
            | Op::Setp { .. }
            | Op::Set { .. }
            | Op::Slct { .. }
            | Op::Testp(..)
            | Op::Bfe(_)
            | Op::Bfi(_)
            | Op::Szext(..)
            | Op::Dp4a(..)
            | Op::Dp2a(..)
            | Op::Cvt(_)
            | Op::CvtPack { .. }
    )
}

fn carry_sources(op: ptx::CarryOp) -> usize {
    use ptx::CarryOp::{AddCc, Addc, AddcCc, SubCc, Subc, SubcCc};
    if matches!(op, AddCc | Addc | AddcCc | SubCc | Subc | SubcCc) { 2 } else { 3 }
}

/// Whether an operation reads CC.CF, and whether it writes it.
fn carry_flag(op: ptx::CarryOp) -> [bool; 2] {
    use ptx::CarryOp::{AddCc, Addc, MadHiCc, MadLoCc, MadcHi, MadcLo, SubCc, Subc};
    let reads = !matches!(op, AddCc | SubCc | MadLoCc | MadHiCc);
    [reads, !matches!(op, Addc | Subc | MadcLo | MadcHi)]
}

pub(super) fn is_clock(special: SpecialReg) -> bool {
    use SpecialReg::{Clock, Clock64, ClockHi, GlobalTimer, GlobalTimerHi, GlobalTimerLo};
    matches!(special, Clock | ClockHi | Clock64 | GlobalTimer | GlobalTimerLo | GlobalTimerHi)
}

/// The bits of an immediate at the width of the operand's type.
fn immediate(imm: Imm, ty: Type) -> u64 {
    match (imm, ty) {
        (Imm::Int(v), Type::F32) => u64::from((v as f32).to_bits()),
        (Imm::Int(v), Type::F64) => (v as f64).to_bits(),
        (Imm::Int(v), _) if ty.bits() == 16 => v as u64 & 0xffff,
        (Imm::Int(v), Type::Pred) => u64::from(v != 0),
        (Imm::Int(v), _) => v as u64,
        (Imm::F32(bits), Type::F64) => f64::from(f32::from_bits(bits)).to_bits(),
        (Imm::F32(bits), _) => u64::from(bits),
        (Imm::F64(bits), Type::F32) => u64::from((f64::from_bits(bits) as f32).to_bits()),
        (Imm::F64(bits), _) => bits,
    }
}

/// The strength of an access with these modifiers.
pub(crate) fn strength(sem: MemSem, scope: Option<Scope>) -> crate::order::Strength {
    use crate::order::Strength;
    match sem {
        MemSem::Default | MemSem::Weak => Strength::Weak,
        MemSem::Volatile | MemSem::Mmio => Strength::Gpu,
        _ => scope_strength(scope.unwrap_or(Scope::Gpu)),
    }
}

pub(crate) fn scope_strength(scope: Scope) -> crate::order::Strength {
    use crate::order::Strength;
    match scope {
        Scope::Cta => Strength::Cta,
        Scope::Cluster => Strength::Cluster,
        Scope::Gpu | Scope::Sys => Strength::Gpu,
    }
}
