//! Executes `atom` and `red`, lane by lane.

use ptx::{Atomic, AtomicOp, MemSem, Op, Space, Type};

use super::Env;
use super::access::{Site, addresses, mix, plain};
use super::registers::for_lanes;
use super::run::Flow;
use super::units::{Observation, Publication};
use super::warp::{Split, Warp};
use crate::decode::{Inst, strength};
use crate::memory::{Chunk, Region, load_bytes, resolve, store_bytes};
use crate::order::{Access, Touch, Verdict};
use crate::report::HazardKind;
use crate::semantics::atomic;
use crate::trace::atomic_passes;

/// The memory that an atomic acts on.
#[derive(Clone, Copy)]
enum Target<'a> {
    Shared,
    Global(&'a Region<'a>),
}

impl<'a> Env<'a> {
    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        a: &Atomic,
        mask: u32,
    ) -> Flow {
        let places = addresses(&warp.registers, inst).map(|address| match inst.space {
            Space::Generic => resolve(address),
            Space::SharedCluster => (Space::Shared, address),
            space => (space, address),
        });
        let all_bytes = a.ty.bytes() * u32::from(a.vector);
        self.count_atomic(warp, inst, mask, &places, all_bytes);
        // The order of each lane is checked separately, at the cost of about one warp instruction per lane.
        self.log.toll += u64::from(mask.count_ones());
        // Atomics without modifiers are relaxed and of gpu scope.
        let sem = if a.sem == MemSem::Default { MemSem::Relaxed } else { a.sem };
        if a.vector > 1 {
            self.vector_atomic(warp, (inst, a), mask, &places, sem);
            split.polls = 0;
            return Flow::Next;
        }
        let mut old = [0u64; 32];
        let mut changed = false;
        for_lanes(mask, |lane| {
            let (space, address) = places[lane];
            let site = Site { inst, space, bytes: a.ty.bytes(), strength: strength(sem, a.scope) };
            let operands = [0, 1].map(|i| warp.registers.lane(inst.s[i], lane));
            let Some((before, after)) = self.atomic_lane(warp, &site, (a, operands), lane, address) else {
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
        let mut found = u64::from(inst.pc);
        for_lanes(mask, |l| found = mix(mix(found, places[l].1), old[l]));
        self.poll(warp, split, found)
    }

    /// An atomic of several elements: each element is an operation of its own, while the address is a
    /// multiple of all bytes (PTX ISA, "atom" and "red"). The slots of results come before those of operands.
    fn vector_atomic(
        &mut self,
        warp: &mut Warp,
        (inst, a): (&Inst, &Atomic),
        mask: u32,
        places: &[(Space, u64); 32],
        sem: MemSem,
    ) {
        let strength = strength(sem, a.scope);
        let count = usize::from(a.vector);
        let slots = self.facts.context.program.slots(inst);
        let (results, operands) = slots.split_at(slots.len() - count);
        let mut old = [[0u64; 32]; 8];
        for_lanes(mask, |lane| {
            let (space, address) = places[lane];
            let bytes = a.ty.bytes() * u32::from(a.vector);
            let all = Site { inst, space, bytes, strength };
            if self.atomic_target(warp, &all, lane, address).is_none() {
                return;
            }
            let site = Site { bytes: a.ty.bytes(), ..all };
            let mut at = address;
            for (&slot, old) in operands.iter().zip(&mut old) {
                let operands = [warp.registers.lane(slot, lane), 0];
                if let Some((before, _)) = self.atomic_lane(warp, &site, (a, operands), lane, at) {
                    old[lane] = before;
                }
                at += u64::from(a.ty.bytes());
            }
        });
        for (&slot, old) in results.iter().zip(&old) {
            warp.registers.set_any(slot, mask, old);
        }
    }

    fn count_atomic(&mut self, warp: &Warp, inst: &Inst, mask: u32, places: &[(Space, u64); 32], bytes: u32) {
        let flat = places.map(|(_, address)| address);
        let shared = places[mask.trailing_zeros() as usize].0 == Space::Shared;
        let counter = self.log.counter(inst);
        if shared {
            counter.shared(mask, bytes, atomic_passes(mask, &flat, bytes));
        } else {
            counter.global(mask, &flat, bytes);
        }
        match &mut self.log.recorder {
            Some(recorder) if shared => recorder.shared_atomic(warp.index, inst.number, mask, &flat, bytes),
            Some(recorder) => recorder.global(warp.index, inst.number, mask, &flat, bytes),
            None => {}
        }
    }

    /// The read-modify-write of one lane. Returns the value before and after.
    fn atomic_lane(
        &mut self,
        warp: &mut Warp,
        site: &Site,
        (a, operands): (&Atomic, [u64; 2]),
        lane: usize,
        address: u64,
    ) -> Option<(u64, u64)> {
        let (target, offset) = self.atomic_target(warp, site, lane, address)?;
        let bytes = site.bytes as usize;
        let replaced = match target {
            Target::Global(region) => region.load(offset, bytes),
            Target::Shared => load_bytes(&self.shared.bytes, offset, bytes),
        };
        let before = u64::from(replaced[0]) | u64::from(replaced[1]) << 32;
        // A compare-and-swap that fails is a read: an atomic is a write only "if it results in a write" (PTX
        // ISA, "Operation Types").
        let mask = u64::MAX >> (64 - a.ty.bits());
        let writes = a.op != AtomicOp::Cas || before & mask == operands[0] & mask;
        self.check_atomic(warp, site, (target, offset), lane, address, writes);
        let joint = self.joint_operand(a, target, operands[0]);
        // In global memory, additions of f32 flush subnormal numbers (PTX ISA, "atom" and "red"; an H200
        // too).
        let flushes = matches!(target, Target::Global(_)) && a.ty == Type::F32;
        let after = atomic::updated(a.op, a.ty, before, [joint, operands[1]], flushes);
        let acquires = matches!(a.sem, MemSem::Acquire | MemSem::AcqRel);
        let releases = matches!(a.sem, MemSem::Release | MemSem::AcqRel);
        let observation = if acquires { Observation::Acquire } else { Observation::Relaxed };
        let publication = if releases { Publication::UpdateRelease } else { Publication::Update };
        if observes(site.inst) {
            self.observe(warp, site, lane, address, observation);
        }
        if !writes {
            if matches!(target, Target::Global(region) if !region.writable()) {
                self.report_read_only(site.inst, warp.index, lane, address);
            }
            return Some((before, before));
        }
        let mut chunk: Chunk = [0; 8];
        (chunk[0], chunk[1]) = (after as u32, (after >> 32) as u32);
        if matches!(target, Target::Global(_)) {
            self.note_replaced(warp, site, lane, address, (replaced, observes(site.inst)));
        }
        match target {
            Target::Global(region) if region.writable() => region.store(offset, bytes, &chunk),
            Target::Global(_) => self.report_read_only(site.inst, warp.index, lane, address),
            Target::Shared => store_bytes(&mut self.shared.bytes, offset, bytes, &chunk),
        }
        self.publish(warp, site, lane, address, publication);
        Some((before, after))
    }

    /// The value to add. In a sketch, it includes the additions of the clusters that are left out.
    fn joint_operand(&self, a: &Atomic, target: Target, own: u64) -> u64 {
        let counts = matches!(target, Target::Global(_)) && a.op == AtomicOp::Add && !a.ty.is_float();
        if counts { own.wrapping_mul(self.facts.context.stands_for) } else { own }
    }

    fn atomic_target(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
    ) -> Option<(Target<'a>, usize)> {
        match site.space {
            Space::Shared => Some((Target::Shared, self.shared_offset(warp, site, lane, address)?)),
            Space::Global => {
                let (region, offset) = self.global_region(warp, site, lane, address)?;
                Some((Target::Global(region), offset))
            }
            space => {
                let place = Some((space, address));
                self.report(HazardKind::OutOfBounds, site.inst, warp.index, lane, place, || {
                    "an atomic on memory that is neither shared nor global".into()
                });
                None
            }
        }
    }

    fn check_atomic(
        &mut self,
        warp: &Warp,
        site: &Site,
        (target, offset): (Target, usize),
        lane: usize,
        address: u64,
        writes: bool,
    ) {
        let checks = self.facts.context.options.checks;
        let bytes = site.bytes as usize;
        // If nothing reads the result, nothing can depend on what the atomic observed.
        let touch = if observes(site.inst) && !site.inst.unread { Touch::Atomic } else { Touch::Update };
        let access = Access { touch, ..plain(warp, site, lane) };
        let (written, conflict) = match target {
            Target::Shared => {
                let written = self.shared.shadow.is_written(offset, bytes);
                let conflict = if writes {
                    self.shared.shadow.write(offset, bytes, &access)
                } else {
                    match self.shared.shadow.read(offset, bytes, &access) {
                        Verdict::Conflict(c) => Some((c, offset)),
                        Verdict::Fine | Verdict::Uninitialised => None,
                    }
                };
                (written, conflict.map(|(c, at)| (c, self.facts.shared_address(at.max(offset)))))
            }
            Target::Global(region) => {
                let written = region.written.is_none_or(|w| w.all(offset, bytes));
                let shadow = &mut self.order.grid.shadow;
                let conflict = if writes {
                    shadow.write(address, bytes as u64, &access)
                } else {
                    shadow.read(address, bytes as u64, &access)
                };
                (written, conflict.map(|c| (c, address)))
            }
        };
        if checks.uninitialised && !written {
            let place = Some((site.space, address));
            self.report(HazardKind::UninitialisedRead, site.inst, warp.index, lane, place, || {
                "an atomic on memory that was never written".into()
            });
        }
        if let Some((c, at)) = conflict.filter(|_| checks.races) {
            self.report_conflict(site.inst, warp.index, lane, writes, &c, (site.space, at));
        }
    }
}

/// Whether an atomic observes the value that it replaces. `red` reads memory, but observes nothing (PTX ISA,
/// "Release and Acquire Patterns").
fn observes(inst: &Inst) -> bool {
    matches!(inst.op, Op::Atom(_))
}
