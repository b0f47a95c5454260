//! The registers that an instruction reads and writes.

use ptx::Op;
use smallvec::SmallVec;

use super::{Inst, Program, Slot};

pub(super) type Slots = SmallVec<[Slot; 8]>;

/// The slots that an instruction reads: those whose value it passes on, and those on which it depends.
pub(super) struct Uses {
    pub data: Slots,
    pub effect: Slots,
}

/// The slots that an instruction reads, without its guard. With `follow_loads`, a plain store passes its
/// values on; the run looks at them when it knows the memory that they are stored to.
pub(super) fn uses(inst: &Inst, list: &[Slot], follow_loads: bool) -> Uses {
    let sources = || inst.s.iter().copied().filter(|s| s.is_some());
    let mut uses = Uses { data: Slots::new(), effect: Slots::new() };
    match inst.op {
        Op::Mov(_) => {
            uses.data.extend(sources());
            if inst.d[0].is_some() {
                uses.data.extend_from_slice(list);
            }
        }
        Op::St(_) if follow_loads => uses.data.extend_from_slice(list),
        Op::St(_) | Op::Red(_) | Op::Stmatrix(_) | Op::WmmaStore(_) => {
            uses.effect.extend(sources());
            uses.effect.extend_from_slice(list);
        }
        Op::Atom(a) if a.vector > 1 => {
            uses.effect.extend_from_slice(&list[usize::from(a.vector)..]);
        }
        Op::Mma(m) => {
            let [_, _, _, results] = m.registers();
            uses.effect.extend_from_slice(&list[results..]);
        }
        Op::Wmma(w) => {
            let [_, _, _, results] = w.registers();
            uses.effect.extend_from_slice(&list[results..]);
        }
        // Whether D is read depends on the predicate, so `Env::check_registers` looks at D.
        Op::Wgmma(w) => {
            uses.effect.extend(sources());
            uses.effect.extend_from_slice(&list[w.d_registers()..]);
        }
        Op::CpAsyncBulk(_)
        | Op::CpReduceAsyncBulk(_)
        | Op::CpAsyncBulkTensor(_)
        | Op::CpReduceAsyncBulkTensor(_)
        | Op::StAsync(_)
        | Op::RedAsync(_)
        | Op::Tcgen05St(_)
        | Op::Tcgen05Mma(_) => {
            uses.effect.extend(sources());
            uses.effect.extend_from_slice(list);
        }
        Op::Shfl(_) | Op::Vote(_) | Op::Match(..) | Op::Redux { .. } => {
            uses.data.push(inst.s[0]);
            uses.effect.extend_from_slice(&inst.s[1..]);
        }
        _ if passes_on(&inst.op) => uses.data.extend(sources()),
        _ => uses.effect.extend(sources()),
    }
    uses.effect.extend([inst.base, inst.source.0, inst.signal.0]);
    uses.data.retain(|s| s.is_some());
    uses.effect.retain(|s| s.is_some());
    uses
}

/// The slots that an instruction writes.
pub(super) fn defines(inst: &Inst, list: &[Slot]) -> Slots {
    let mut slots = Slots::from_slice(&inst.d);
    match inst.op {
        Op::Ld(_) | Op::Ldmatrix(_) | Op::WmmaLoad(_) | Op::Tcgen05Ld(_) | Op::QueryCancel(_) => {
            slots.extend_from_slice(list);
        }
        Op::Mov(_) if !inst.d[0].is_some() => slots.extend_from_slice(list),
        Op::Atom(a) if a.vector > 1 => slots.extend_from_slice(&list[..usize::from(a.vector)]),
        Op::Mma(m) => {
            let [_, _, _, results] = m.registers();
            slots.extend_from_slice(&list[..results]);
        }
        Op::Wmma(w) => {
            let [_, _, _, results] = w.registers();
            slots.extend_from_slice(&list[..results]);
        }
        Op::Wgmma(w) => slots.extend_from_slice(&list[..w.d_registers()]),
        _ => {}
    }
    slots.retain(|s| s.is_some());
    slots
}

/// Whether an operation is lane-wise: an undefined operand makes its result undefined.
pub(super) fn passes_on(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(..)
            | Op::Binary(..)
            | Op::Ternary(..)
            | Op::Carry(..)
            | Op::Setp { .. }
            | Op::Set { .. }
            | Op::Selp(_)
            | Op::Slct { .. }
            | Op::Testp(..)
            | Op::Lop3(_)
            | Op::Shf(..)
            | Op::Bfe(_)
            | Op::Bfi(_)
            | Op::Prmt(_)
            | Op::Bmsk(_)
            | Op::Szext(..)
            | Op::Fns
            | Op::Dp4a(..)
            | Op::Dp2a(..)
            | Op::Cvt(_)
            | Op::CvtPack { .. }
            | Op::Cvta { .. }
            | Op::Mapa { .. }
            | Op::Getctarank { .. }
    )
}

/// The pool slots of an instruction; empty for `brx.idx`, whose list holds branch targets.
pub(super) fn operand_list<'p>(program: &'p Program, inst: &Inst) -> &'p [Slot] {
    if matches!(inst.op, Op::BrxIdx { .. }) { &[] } else { program.slots(inst) }
}
