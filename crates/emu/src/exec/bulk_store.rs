//! Bulk copies from shared to global memory, and the groups by which threads wait for them (PTX ISA,
//! "cp.async.bulk.commit_group", "cp.async.bulk.wait_group").

use ptx::{AtomicOp, Element, Space, Type};

use super::Env;
use super::access::{Site, addresses, based, plain};
use super::bulk::{Box, copy_toll};
use super::registers::for_lanes;
use super::tensor_map::{Piece, pieces};
use super::units::{Departure, inside};
use super::warp::Warp;
use crate::decode::{Inst, element_width};
use crate::memory::{GlobalMemory, load_bytes, resolve};
use crate::order::{Access, Epoch, ProxySpace, Strength, Touch};
use crate::report::HazardKind;
use crate::semantics::atomic::reduce;
use crate::trace::{Detail, MbarrierPlace};

/// The epoch of the accesses of a group's copies.
fn epoch(group: u32) -> Epoch {
    group + 1
}

impl Env<'_> {
    pub(super) fn bulk_store(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        lane: usize,
        reduce: Option<(AtomicOp, Type)>,
    ) {
        let bytes = warp.registers.lane(inst.s[0], lane) as u32;
        let to = based(&warp.registers, inst.source.0, inst.source.1)[lane];
        if !self.check_size(warp, inst, lane, bytes) {
            return;
        }
        let Some(from) = self.bulk_source(warp, inst, lane, (bytes, 16)) else { return };
        let site = Site { inst, space: Space::Global, bytes: 16, strength: Strength::Weak };
        if let Some((buffer, pieces)) = self.global_pieces(warp, &site, lane, resolve(to).1, bytes) {
            self.send(warp, inst, lane, (from, bytes), (buffer, pieces), reduce);
        }
    }

    pub(super) fn tensor_store(&mut self, warp: &mut Warp, inst: &Inst, lane: usize, op: Option<AtomicOp>) {
        let Some(Box { spec, coordinates }) = self.tensor_box(warp, inst, lane) else { return };
        let bytes = spec.box_bytes();
        let Some(from) = self.bulk_source(warp, inst, lane, (bytes, 128)) else { return };
        if let Some(op) = op
            && !has_tensor_reduction(op, spec.element)
        {
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                let element = element_type(spec.element);
                format!(
                    "a tensor reduction has no .{} of {element}, the elements of the tensor map",
                    op.name()
                )
            });
            return;
        }
        let pieces = pieces(&spec, &coordinates, inside(self.facts.shared_address(from)));
        let pieces = self.in_buffer(warp, inst, lane, &spec, pieces);
        let reduce = op.map(|op| (op, element_type(spec.element)));
        self.send(warp, inst, lane, (from, bytes), (spec.buffer, pieces), reduce);
    }

    /// Checks the source of a lane's copy and returns its offset in shared memory. The check precedes the
    /// creation of the pieces, because a box larger than shared memory can have more pieces than fit in host
    /// memory.
    fn bulk_source(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        (bytes, align): (u32, u32),
    ) -> Option<usize> {
        let from = resolve(addresses(&warp.registers, inst)[lane]).1;
        self.bulk_range(warp, inst, lane, from, bytes, align)
    }

    fn send(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        lane: usize,
        (offset, bytes): (usize, u32),
        (buffer, pieces): (usize, Vec<Piece>),
        reduce: Option<(AtomicOp, Type)>,
    ) {
        self.log.toll += copy_toll(bytes);
        if !self.facts.context.global.regions[buffer].writable() {
            return self.report_read_only(inst, warp.index, lane, GlobalMemory::base(buffer));
        }
        let counter = self.log.counter(inst);
        counter.bulk_copies += 1;
        counter.bulk_bytes += u64::from(bytes);
        if let Some(recorder) = &mut self.log.recorder {
            recorder.note(Detail::Bulk { at: MbarrierPlace::NONE, bytes, copies: 1 });
        }
        let group = warp.bulk.group(lane);
        let departure = Departure { pc: inst.pc, lane, group, offset, buffer, pieces, reduce };
        if self.facts.context.options.checks.races {
            self.check_departure(warp, inst, &departure, bytes);
        }
        warp.bulk.depart(departure);
    }

    fn check_departure(&mut self, warp: &Warp, inst: &Inst, d: &Departure, bytes: u32) {
        let site = Site { inst, space: Space::Shared, bytes: 16, strength: Strength::Weak };
        let read = Access {
            actor: self.facts.actors.bulk_reads(warp.index),
            epoch: epoch(d.group),
            proxy: Some(ProxySpace::Shared),
            touch: Touch::Bulk,
            ..plain(warp, &site, d.lane)
        };
        let verdict = self.shared.shadow.read(d.offset, bytes as usize, &read);
        let address = self.facts.shared_address(d.offset);
        self.judge_shared_read(verdict, inst, warp.index, d.lane, address);
        let actor = self.facts.actors.bulk_writes(warp.index);
        let proxy = Some(ProxySpace::Global);
        let write = match d.reduce {
            None => Access { actor, proxy, ..read },
            Some((_, ty)) => {
                let (touch, strength, width) = (Touch::Update, Strength::Gpu, element_width(ty));
                Access { actor, proxy, touch, strength, width, ..read }
            }
        };
        let context = self.facts.context;
        let region = &context.global.regions[d.buffer];
        for (offset, bytes) in d.pieces.iter().flat_map(Piece::spans) {
            let address = GlobalMemory::base(d.buffer) + offset;
            if let Some(c) = self.order.grid.shadow.write(address, bytes, &write) {
                self.report_conflict(inst, warp.index, d.lane, true, &c, (Space::Global, address));
            }
            if context.apart && d.reduce.is_none() {
                let (granule, cluster) = (context.program.granules[1] as usize, self.facts.cluster as u32);
                let written = offset as usize..(offset + bytes) as usize;
                let other = region.note_write(written, granule, cluster, inst.pc);
                self.report_foreign(inst, warp.index, d.lane, "writes", other, address);
            }
        }
    }

    /// `cp.async.bulk.wait_group`: all but the last `n` groups have read their sources. Without `.read` they
    /// have also written their destinations.
    pub(super) fn bulk_wait(&mut self, warp: &mut Warp, inst: &Inst, read: bool, mask: u32) {
        let keep = warp.registers.lane(inst.s[0], mask.trailing_zeros() as usize) as u32;
        let (reads, writes) =
            (self.facts.actors.bulk_reads(warp.index), self.facts.actors.bulk_writes(warp.index));
        for_lanes(mask, |lane| {
            let done = warp.bulk.due(lane, keep);
            if done == 0 {
                return;
            }
            self.carry_out(warp, |d| d.lane == lane && d.group < done);
            let epoch = epoch(done - 1);
            warp.view.learn(1 << lane, warp.live, (reads, 1 << lane), epoch);
            if !read {
                warp.view.learn(1 << lane, warp.live, (writes, 1 << lane), epoch);
            }
        });
    }

    /// Performs the copies that `due` selects.
    fn carry_out(&mut self, warp: &mut Warp, due: impl Fn(&Departure) -> bool) {
        for d in &warp.bulk.take(due) {
            let region = &self.facts.context.global.regions[d.buffer];
            for piece in &d.pieces {
                let at = d.offset + piece.shared as usize;
                let (from, to) = (usize::from(piece.inside.0), usize::from(piece.inside.1));
                if from >= to {
                    continue;
                }
                let first = piece.global.wrapping_add(from as u64) as usize;
                let source = &self.shared.bytes[at + from..at + to];
                match d.reduce {
                    None if to - from == 16 && first.is_multiple_of(16) => {
                        region.store(first, 16, &load_bytes(&self.shared.bytes, at, 16));
                    }
                    None => {
                        for (i, byte) in source.iter().enumerate() {
                            region.store(first + i, 1, &[u32::from(*byte), 0, 0, 0, 0, 0, 0, 0]);
                        }
                    }
                    Some((op, ty)) => {
                        let mut bytes: Vec<u8> =
                            (first..first + source.len()).map(|o| region.load(o, 1)[0] as u8).collect();
                        reduce(op, ty, &mut bytes, source);
                        for (i, byte) in bytes.iter().enumerate() {
                            region.store(first + i, 1, &[u32::from(*byte), 0, 0, 0, 0, 0, 0, 0]);
                        }
                    }
                }
            }
        }
    }

    /// Reports copies that are in flight when their lanes exit: no thread can wait for them any more.
    pub(super) fn leave_bulk(&mut self, warp: &mut Warp, lanes: u32) {
        let waiting = |d: &Departure| lanes >> d.lane & 1 == 1;
        let unread: Vec<(u32, usize)> =
            warp.bulk.departures().iter().filter(|d| waiting(d)).map(|d| (d.pc, d.lane)).collect();
        for (pc, lane) in unread {
            let inst = &self.facts.context.program.code[pc as usize];
            self.report(HazardKind::AsyncNotWaited, inst, warp.index, lane, None, || {
                "the thread exits while its bulk copy still reads shared memory: no wait_group covers it"
                    .into()
            });
        }
        self.carry_out(warp, waiting);
    }
}

/// Whether tensors of this element have the reduction (PTX ISA, "cp.reduce.async.bulk.tensor").
fn has_tensor_reduction(op: AtomicOp, element: Element) -> bool {
    use Element::{Bf16, F16, F32, I32, I64, U32, U64};
    match op {
        AtomicOp::Add => matches!(element, U32 | I32 | U64 | F32 | F16 | Bf16),
        AtomicOp::Min | AtomicOp::Max => matches!(element, U32 | I32 | U64 | I64 | F16 | Bf16),
        AtomicOp::Inc | AtomicOp::Dec => element == U32,
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => matches!(element, U32 | I32 | U64 | I64),
        AtomicOp::Exch | AtomicOp::Cas => false,
    }
}

fn element_type(element: Element) -> Type {
    match element {
        Element::U8 => Type::U8,
        Element::U16 => Type::U16,
        Element::U32 => Type::U32,
        Element::I32 => Type::S32,
        Element::U64 => Type::U64,
        Element::I64 => Type::S64,
        Element::F16 => Type::F16,
        Element::Bf16 => Type::Bf16,
        Element::F32 => Type::F32,
        Element::F64 => Type::F64,
    }
}
