//! `atom` and `red`, lane by lane.

use ptx::{Atomic, AtomicOp, MemSem, Op, Space, Type};

use super::access::{addresses, plain};
use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, Warp};
use super::{Env, alu};
use crate::decode::{Inst, strength};
use crate::memory::{SHARED_BASE, load_bytes, resolve, store_bytes};
use crate::order::{Access, Strength, Touch};
use crate::report::HazardKind;

impl Env<'_> {
    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        a: &Atomic,
        mask: u32,
    ) -> Flow {
        let bytes = a.ty.bytes();
        let places = addresses(&warp.registers, inst).map(|address| match inst.space {
            Space::Generic => resolve(address),
            Space::SharedCluster => (Space::Shared, address),
            space => (space, address),
        });
        self.count_atomic(warp, split.pc, inst, mask, &places, bytes);
        let mut old = [0u64; 32];
        let mut changed = false;
        for_lanes(mask, |lane| {
            let (space, address) = places[lane];
            let operand = warp.registers.lane(inst.s[0], lane);
            let other = warp.registers.lane(inst.s[1], lane);
            let Some((before, after)) =
                self.atomic_lane(warp, split.pc, inst, a, lane, space, address, operand, other)
            else {
                return;
            };
            old[lane] = before;
            changed |= before != after || !matches!(a.op, AtomicOp::Cas | AtomicOp::Exch);
        });
        if matches!(inst.op, Op::Atom(_)) {
            warp.registers.set_any(inst.d[0], mask, &old);
        }
        if changed {
            split.polls = 0;
            return Flow::Next;
        }
        split.polls += 1;
        self.poll(warp, split)
    }

    fn count_atomic(
        &mut self,
        warp: &Warp,
        pc: u32,
        inst: &Inst,
        mask: u32,
        places: &[(Space, u64); 32],
        bytes: u32,
    ) {
        let flat = places.map(|(_, address)| address);
        let shared = places[mask.trailing_zeros() as usize].0 == Space::Shared;
        let counter = &mut self.counters.instructions[pc as usize];
        if shared {
            counter.shared(mask, &flat, bytes, true);
        } else {
            counter.global(mask, &flat, bytes);
        }
        match &mut self.recorder {
            Some(recorder) if shared => recorder.shared_atomic(warp.index, inst.number, mask, &flat, bytes),
            Some(recorder) => recorder.global(warp.index, inst.number, mask, &flat, bytes),
            None => {}
        }
    }

    /// One lane's read-modify-write: the value before and after.
    #[allow(clippy::too_many_arguments, reason = "the parts of one access")]
    fn atomic_lane(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        inst: &Inst,
        a: &Atomic,
        lane: usize,
        space: Space,
        address: u64,
        operand: u64,
        other: u64,
    ) -> Option<(u64, u64)> {
        let bytes = a.ty.bytes() as usize;
        // Atomics are relaxed and of gpu scope where nothing is written.
        let sem = if matches!(a.sem, MemSem::Default) { MemSem::Relaxed } else { a.sem };
        let strong = strength(sem, a.scope);
        let offset = match space {
            Space::Shared => self.shared_offset(warp, inst, lane, address, bytes)?,
            Space::Global => self.global_offset(inst, warp.index, lane, address, bytes)?,
            _ => {
                self.report(HazardKind::OutOfBounds, inst, warp.index, lane, Some((space, address)), || {
                    "an atomic on memory that is neither shared nor global".into()
                });
                return None;
            }
        };
        self.check_atomic(warp, pc, inst, lane, space, address, offset, bytes, strong);
        let region = if space == Space::Global { Some(self.context.global.find(address)?.0) } else { None };
        let chunk = match region {
            Some(region) => region.load(offset, bytes),
            None => load_bytes(&self.shared, offset, bytes),
        };
        let before = u64::from(chunk[0]) | u64::from(chunk[1]) << 32;
        let after = alu::atomic(a.op, a.ty, before, operand, other);
        let chunk = [after as u32, (after >> 32) as u32, 0, 0, 0, 0, 0, 0];
        let (acquire, release) = (
            matches!(a.sem, MemSem::Acquire | MemSem::AcqRel),
            matches!(a.sem, MemSem::Release | MemSem::AcqRel),
        );
        self.observe(warp, space, address, lane, strong, acquire);
        match region {
            Some(region) if region.writable() => region.store(offset, bytes, &chunk),
            Some(_) => {
                self.report(HazardKind::OutOfBounds, inst, warp.index, lane, Some((space, address)), || {
                    "stores to a buffer that the launch contract only lets it read".into()
                })
            }
            None => store_bytes(&mut self.shared, offset, bytes, &chunk),
        }
        self.publish(warp, space, address, lane, strong, release, true);
        Some((before, after))
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one access")]
    fn check_atomic(
        &mut self,
        warp: &Warp,
        pc: u32,
        inst: &Inst,
        lane: usize,
        space: Space,
        address: u64,
        offset: usize,
        bytes: usize,
        strong: Strength,
    ) {
        let checks = self.context.options.checks;
        let access = Access { touch: Touch::Atomic, ..plain(warp, pc, lane, strong) };
        let conflict = match space {
            Space::Shared => {
                if checks.uninitialised && !self.shadow.is_written(offset, bytes) {
                    self.report(
                        HazardKind::UninitialisedRead,
                        inst,
                        warp.index,
                        lane,
                        Some((space, address)),
                        || "an atomic on shared memory that no thread has written".into(),
                    );
                }
                self.shadow.write(offset, bytes, &access).map(|(c, at)| (c, SHARED_BASE + at as u64))
            }
            _ => {
                let written = self.context.global.find(address).and_then(|(region, _)| region.written);
                if checks.uninitialised && written.is_some_and(|w| !w.all(offset, bytes)) {
                    self.report(
                        HazardKind::UninitialisedRead,
                        inst,
                        warp.index,
                        lane,
                        Some((space, address)),
                        || "an atomic on global memory that nothing was written to".into(),
                    );
                }
                self.order.shadow.write(address, bytes as u64, &access).map(|c| (c, address))
            }
        };
        if let Some((c, at)) = conflict.filter(|_| checks.races) {
            self.report_conflict(inst, warp.index, lane, true, &c, (space, at));
        }
    }
}

/// Whether an atomic of this type can be executed.
pub(crate) fn atomic_supported(op: AtomicOp, ty: Type) -> bool {
    use AtomicOp::{Add, Max, Min};
    let small = matches!(ty, Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2);
    match op {
        Add => true,
        Min | Max => !small && !ty.is_float(),
        _ => !ty.is_float(),
    }
}
