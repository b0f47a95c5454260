//! Copies to shared memory that complete on an mbarrier: `cp.async.bulk`, `cp.async.bulk.tensor`, `st.async`,
//! `red.async` (PTX ISA, "Asynchronous operations"). A copy completes at some time between its issue and the
//! first unsuccessful wait on its mbarrier. Until the phase has completed and a thread has observed the
//! completion, no thread may access the memory that the copy writes.

use std::borrow::Cow;
use std::rc::Rc;

use ptx::{AtomicOp, BulkRoute, Op, Space, TensorMapSpec, Type};

use super::Env;
use super::access::{Site, addresses, based, plain};
use super::map_image::{is_changed, map_index, spec_of};
use super::mbarrier::Cause;
use super::registers::{for_lanes, gather};
use super::tensor_map::{Piece, pieces};
use super::units::{Flight, Payload, inside};
use super::warp::Warp;
use crate::decode::Inst;
use crate::memory::{Chunk, GlobalMemory, RANK_SHIFT, Region, load_bytes, resolve, store_bytes};
use crate::order::{Access, Epoch, FLIGHT, ProxySpace, Strength, Touch};
use crate::report::{HazardKind, Schedule};
use crate::semantics::atomic::reduce;
use crate::trace::{Detail, MbarrierPlace};

/// A tensor map and coordinates in it.
pub(super) struct Box<'a> {
    pub spec: Cow<'a, TensorMapSpec>,
    pub coordinates: Vec<i32>,
}

impl<'a> Env<'a> {
    /// Executes `cp.async.bulk` and the related copies to shared memory.
    pub(super) fn bulk(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        for_lanes(mask, |lane| match inst.op {
            Op::CpAsyncBulk(copy) if copy.route.has_mbarrier() => {
                let ctas = self.ctas_of(warp, inst, lane, copy.multicast);
                self.bulk_copy(warp, inst, lane, copy.route, ctas, None);
            }
            Op::CpReduceAsyncBulk(r) if r.route.has_mbarrier() => {
                self.bulk_copy(warp, inst, lane, r.route, None, Some((r.op, r.ty)));
            }
            Op::CpAsyncBulkTensor(copy) if copy.route.has_mbarrier() => {
                let ctas = self.ctas_of(warp, inst, lane, copy.multicast);
                self.tensor_load(warp, inst, lane, ctas);
            }
            Op::CpAsyncBulk(_) => self.bulk_store(warp, inst, lane, None),
            Op::CpReduceAsyncBulk(r) => self.bulk_store(warp, inst, lane, Some((r.op, r.ty))),
            Op::CpAsyncBulkTensor(_) => self.tensor_store(warp, inst, lane, None),
            Op::CpReduceAsyncBulkTensor(r) => self.tensor_store(warp, inst, lane, Some(r.op)),
            _ => {}
        });
    }

    /// The CTAs of a multicast; `None` for a copy to the CTA that the address names.
    fn ctas_of(&mut self, warp: &Warp, inst: &Inst, lane: usize, multicast: bool) -> Option<u32> {
        let mask = multicast.then(|| warp.registers.lane(inst.s[1], lane) as u32 & 0xffff)?;
        let present = (1u32 << self.facts.ctas.len()) - 1;
        if mask == 0 || mask & !present != 0 {
            let ctas = self.facts.ctas.len();
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                format!("the multicast mask {mask:#06x} does not fit a cluster of {ctas} CTAs")
            });
        }
        Some(mask & present)
    }

    fn bulk_copy(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        route: BulkRoute,
        ctas: Option<u32>,
        reduce: Option<(AtomicOp, Type)>,
    ) {
        let bytes = warp.registers.lane(inst.s[0], lane) as u32;
        let from = based(&warp.registers, inst.source.0, inst.source.1)[lane];
        let to = resolve(addresses(&warp.registers, inst)[lane]).1;
        if !self.check_size(warp, inst, lane, bytes)
            || self.bulk_range(warp, inst, lane, to, bytes, 16).is_none()
        {
            return;
        }
        let payload = if route.source() == Space::Global {
            let site = Site { inst, space: Space::Global, bytes: 16, strength: Strength::Weak };
            let Some((index, pieces)) = self.global_pieces(warp, &site, lane, resolve(from).1, bytes) else {
                return;
            };
            Payload::Global(index, Rc::new(pieces))
        } else {
            let Some(offset) = self.bulk_range(warp, inst, lane, resolve(from).1, bytes, 16) else { return };
            // "The destination has to be in the shared memory of a different CTA" (PTX ISA, "cp.async.bulk").
            if reduce.is_none() && to >> RANK_SHIFT == self.rank(warp) as u64 {
                let place = Some((Space::Shared, to));
                self.report(HazardKind::OutOfBounds, inst, warp.index, lane, place, || {
                    "a copy from .shared::cta to .shared::cluster goes to its own CTA".into()
                });
            }
            Payload::Shared(offset)
        };
        self.depart_to(warp, inst, lane, ctas, (bytes, 16), &payload, reduce);
    }

    /// Splits `bytes` bytes of a buffer into pieces of 16.
    pub(super) fn global_pieces(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        bytes: u32,
    ) -> Option<(usize, Vec<Piece>)> {
        let (_, offset) = self.global_region(warp, site, lane, address)?;
        let last = address + u64::from(bytes) - 16;
        self.global_region(warp, site, lane, last)?;
        let index = GlobalMemory::index(address)?;
        let piece = |at: u32| Piece { shared: at, global: offset as u64 + u64::from(at), inside: (0, 16) };
        Some((index, (0..bytes).step_by(16).map(piece).collect()))
    }

    pub(super) fn check_size(&mut self, warp: &Warp, inst: &Inst, lane: usize, bytes: u32) -> bool {
        if bytes.is_multiple_of(16) {
            return bytes > 0;
        }
        self.report(HazardKind::Misaligned, inst, warp.index, lane, None, || {
            format!("a bulk copy of {bytes} bytes, which is not a multiple of 16")
        });
        false
    }

    /// Checks a range that a bulk copy reads or writes, and returns its offset in the shared memory of the
    /// cluster.
    pub(super) fn bulk_range(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        address: u64,
        bytes: u32,
        align: u32,
    ) -> Option<usize> {
        let site = Site { inst, space: Space::Shared, bytes: 16, strength: Strength::Weak };
        if !address.is_multiple_of(u64::from(align)) {
            self.report(
                HazardKind::Misaligned,
                inst,
                warp.index,
                lane,
                Some((Space::Shared, address)),
                || format!("a bulk copy to or from address {address:#x}, which is not a multiple of {align}"),
            );
            return None;
        }
        let offset = self.shared_offset(warp, &site, lane, address)?;
        // A range must lie in one CTA, because the memory behind it belongs to another CTA of the cluster.
        let size = self.facts.context.program.layout.shared_extent as usize;
        if offset % self.facts.span + bytes as usize > size {
            let place = Some((Space::Shared, address));
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, place, || {
                format!("a bulk copy of {bytes} bytes to or from {address:#x}, beyond the {size} bytes of shared memory")
            });
            return None;
        }
        Some(offset)
    }

    /// The tensor map that the instruction names, and the coordinates.
    pub(super) fn tensor_box(&mut self, warp: &Warp, inst: &Inst, lane: usize) -> Option<Box<'a>> {
        let context = self.facts.context;
        let address = based(&warp.registers, inst.source.0, inst.source.1)[lane];
        let image = match resolve(address) {
            (Space::Param, at) => {
                context.parameters.bytes.get(at as usize..).and_then(|bytes| bytes.first_chunk().copied())
            }
            (Space::Global, at) => context.global.image(at),
            _ => None,
        };
        let original = |image: &[u8; 128]| context.maps.get(map_index(image)?);
        let Some((image, spec)) = image.and_then(|image| Some((image, original(&image)?))) else {
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                format!("the address {address:#x} is not that of a tensor map among the parameters or in global memory")
            });
            return None;
        };
        if let (Space::Global, at) = resolve(address) {
            self.check_map_use(warp, inst, lane, (at, &image));
        }
        let spec = if is_changed(&image) {
            match self.changed_map(&image, spec) {
                Ok(spec) => Cow::Owned(spec),
                Err(what) => {
                    self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                        format!("the changed tensor map is not valid: {what}")
                    });
                    return None;
                }
            }
        } else {
            Cow::Borrowed(spec)
        };
        self.check_grid_wait(warp, inst, lane, GlobalMemory::base(spec.buffer));
        let slots = context.program.slots(inst);
        let coordinates: Vec<i32> = slots.iter().map(|s| warp.registers.lane(*s, lane) as i32).collect();
        if coordinates.len() != spec.extents.len() {
            let (given, has) = (coordinates.len(), spec.extents.len());
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                format!("{given} coordinates for a tensor map of {has} dimensions")
            });
            return None;
        }
        Some(Box { spec, coordinates })
    }

    /// A tensor map that the kernel has changed. The host compares others with their buffers.
    fn changed_map(&self, image: &[u8; 128], original: &TensorMapSpec) -> Result<TensorMapSpec, String> {
        let global = self.facts.context.global;
        let locate = |address: u64| {
            let (region, offset) = global.find(address)?;
            let offset = u64::try_from(offset).ok().filter(|offset| *offset < region.bytes as u64)?;
            Some((GlobalMemory::index(address)?, offset))
        };
        let spec = spec_of(image, original, locate)?;
        let (needed, region) = (u128::from(spec.offset) + spec.reach(), &global.regions[spec.buffer]);
        if needed > region.bytes as u128 {
            return Err(format!("it reaches byte {needed} of {}, which has {}", region.name, region.bytes));
        }
        Ok(spec)
    }

    /// The pieces of a box that lie inside its buffer. Only a map whose addresses wrap can exceed the buffer.
    /// The extents of other maps were compared with the buffer before the launch.
    pub(super) fn in_buffer(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        spec: &TensorMapSpec,
        mut pieces: Vec<Piece>,
    ) -> Vec<Piece> {
        let size = self.facts.context.global.regions[spec.buffer].bytes as u64;
        let mut beyond = None;
        for piece in pieces.iter_mut().filter(|piece| spec.wraps && piece.inside.0 < piece.inside.1) {
            let [from, to] = [piece.inside.0, piece.inside.1].map(|at| piece.global.wrapping_add(at.into()));
            if from > to || to > size {
                beyond = beyond.or(Some(from));
                piece.inside = (0, 0);
            }
        }
        if let Some(at) = beyond {
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                let name = &self.facts.context.global.regions[spec.buffer].name;
                format!("the box reaches byte {} of {name}, which has {size} bytes", at as i64)
            });
        }
        pieces
    }

    fn tensor_load(&mut self, warp: &Warp, inst: &Inst, lane: usize, ctas: Option<u32>) {
        let Some(Box { spec, coordinates }) = self.tensor_box(warp, inst, lane) else { return };
        let to = resolve(addresses(&warp.registers, inst)[lane]).1;
        // A box must lie at a multiple of 128 bytes (PTX ISA, "cp.async.bulk.tensor"). The range is checked
        // first, because a box larger than shared memory can have more pieces than host memory holds.
        let (bytes, align) = (spec.box_bytes(), 128);
        if self.bulk_range(warp, inst, lane, to, bytes, align).is_none() {
            return;
        }
        if ctas.is_none() {
            let signal = resolve(based(&warp.registers, inst.signal.0, inst.signal.1)[lane]).1;
            self.check_one_cta(warp, inst, lane, to, signal);
        }
        let pieces = pieces(&spec, &coordinates, inside(to));
        let pieces = self.in_buffer(warp, inst, lane, &spec, pieces);
        let payload = Payload::Global(spec.buffer, Rc::new(pieces));
        self.depart_to(warp, inst, lane, ctas, (bytes, align), &payload, None);
    }

    /// Starts a copy to the CTA that the address names, or to each of `ctas`.
    #[allow(clippy::too_many_arguments, reason = "what a copy is")]
    fn depart_to(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        ctas: Option<u32>,
        (bytes, align): (u32, u32),
        payload: &Payload,
        reduce: Option<(AtomicOp, Type)>,
    ) {
        let to = resolve(addresses(&warp.registers, inst)[lane]).1;
        let signal = resolve(based(&warp.registers, inst.signal.0, inst.signal.1)[lane]).1;
        let counter = self.log.counter(inst);
        counter.bulk_copies += 1;
        counter.bulk_bytes += u64::from(bytes);
        let at_rank = |address: u64, rank: u64| rank << RANK_SHIFT | inside(address);
        let ranks: Vec<u64> = match ctas {
            Some(mask) => (0..16).filter(|r| mask >> r & 1 == 1).collect(),
            None => vec![to >> RANK_SHIFT],
        };
        if let Some(recorder) = &mut self.log.recorder {
            let at = MbarrierPlace::new(inside(signal));
            recorder.note(Detail::Bulk { at, bytes, copies: ranks.len() as u8 });
        }
        self.log.toll += ranks.len() as u64 * copy_toll(bytes);
        for rank in ranks {
            let mbarrier = if ctas.is_some() { at_rank(signal, rank) } else { signal };
            let offset = self.bulk_range(warp, inst, lane, at_rank(to, rank), bytes, align);
            if let Some(offset) = offset {
                self.depart(warp, inst, lane, (offset, bytes), mbarrier, payload.clone(), reduce);
            }
        }
    }

    /// Checks that the destination of a copy and its mbarrier lie in one CTA (PTX ISA,
    /// "cp.async.bulk.tensor", `.cta_group::1`, and "st.async").
    fn check_one_cta(&mut self, warp: &Warp, inst: &Inst, lane: usize, to: u64, signal: u64) -> bool {
        let same = to >> RANK_SHIFT == signal >> RANK_SHIFT;
        if !same {
            self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                "the destination and the mbarrier lie in different CTAs".into()
            });
        }
        same
    }

    /// Executes `st.async` and `red.async`.
    pub(super) fn store_async(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let (ty, vector, reduce) = match inst.op {
            Op::StAsync(st) => (st.ty, st.vector, None),
            Op::RedAsync(red) => (red.ty, 1, Some((red.op, red.ty))),
            _ => return,
        };
        let bytes = ty.bytes() * u32::from(vector);
        let to = addresses(&warp.registers, inst).map(|a| resolve(a).1);
        let signals = based(&warp.registers, inst.signal.0, inst.signal.1).map(|a| resolve(a).1);
        let mut chunks: [Chunk; 32] = [[0; 8]; 32];
        for (element, slot) in self.facts.context.program.slots(inst).iter().enumerate() {
            gather(&warp.registers, *slot, &mut chunks, element, ty);
        }
        let site = Site { inst, space: Space::Shared, bytes, strength: Strength::Weak };
        self.log.count_shared(inst, mask, &to, bytes);
        for_lanes(mask, |lane| {
            if !self.check_one_cta(warp, inst, lane, to[lane], signals[lane]) {
                return;
            }
            if let Some(recorder) = &mut self.log.recorder {
                let at = MbarrierPlace::new(inside(signals[lane]));
                recorder.note(Detail::Bulk { at, bytes, copies: 1 });
            }
            if let Some(offset) = self.shared_offset(warp, &site, lane, to[lane]) {
                let payload = Payload::Values(chunks[lane]);
                self.depart(warp, inst, lane, (offset, bytes), signals[lane], payload, reduce);
            }
        });
    }

    /// Starts a copy to one CTA.
    #[allow(clippy::too_many_arguments, reason = "what a copy is")]
    pub(super) fn depart(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        (offset, bytes): (usize, u32),
        mbarrier: u64,
        payload: Payload,
        reduce: Option<(AtomicOp, Type)>,
    ) {
        let proxy = (!matches!(payload, Payload::Values(_))).then_some(ProxySpace::Shared);
        let site = Site { inst, space: Space::Shared, bytes: 8, strength: Strength::Cta };
        if self.shared_offset(warp, &site, lane, mbarrier).is_none()
            || !self.check_made(warp, inst, lane, mbarrier)
        {
            return;
        }
        let Some((actor, phase)) = self.mbarriers.actor(mbarrier) else { return };
        if self.facts.context.options.checks.races {
            self.check_source(warp, inst, lane, (actor, phase), &payload, bytes);
            let touch = if reduce.is_some() { Touch::Reduce } else { Touch::Bulk };
            let access = Access { actor, epoch: FLIGHT, proxy, touch, ..plain(warp, &site, lane) };
            if let Some((c, at)) = self.shared.shadow.write(offset, bytes as usize, &access) {
                let place = (Space::Shared, self.facts.shared_address(at.max(offset)));
                self.report_conflict(inst, warp.index, lane, true, &c, place);
            }
        }
        self.copies.note_sender(actor, (warp.index, lane));
        self.mbarriers.depart(mbarrier);
        let flight =
            Flight { pc: inst.pc, warp: warp.index, lane, mbarrier, actor, offset, bytes, payload, reduce };
        let now = match self.facts.context.options.schedule {
            Schedule::Late => false,
            Schedule::Early => true,
            Schedule::Random | Schedule::Lagging => rand::Rng::random(&mut self.rng),
        };
        if now { self.land_flight(&flight) } else { self.copies.depart(flight) }
    }

    /// Checks that the asynchronous proxy may see the data that the copy reads. The phase cannot complete
    /// before the read, so a thread that has observed the completion may overwrite the source.
    fn check_source(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        (actor, phase): (usize, Epoch),
        payload: &Payload,
        bytes: u32,
    ) {
        let site = Site { inst, space: Space::Shared, bytes: 16, strength: Strength::Weak };
        let proxy = Some(match payload {
            Payload::Global(..) => ProxySpace::Global,
            _ => ProxySpace::Shared,
        });
        let access = Access { actor, epoch: phase, proxy, touch: Touch::Bulk, ..plain(warp, &site, lane) };
        match payload {
            Payload::Shared(offset) => {
                let verdict = self.shared.shadow.read(*offset, bytes as usize, &access);
                let address = self.facts.shared_address(*offset);
                self.judge_shared_read(verdict, inst, warp.index, lane, address);
            }
            Payload::Global(index, pieces) if self.facts.context.global.regions[*index].watched() => {
                for (offset, bytes) in pieces.iter().flat_map(Piece::spans) {
                    let address = GlobalMemory::base(*index) + offset;
                    if let Some(c) = self.order.grid.shadow.read(address, bytes, &access) {
                        self.report_conflict(inst, warp.index, lane, false, &c, (Space::Global, address));
                    }
                }
            }
            Payload::Global(..) | Payload::Values(_) | Payload::Response(_) => {}
        }
    }

    /// Completes the copies on an mbarrier.
    pub(super) fn land_on(&mut self, mbarrier: u64) {
        self.copies.take(mbarrier).iter().for_each(|flight| self.land_flight(flight));
        self.land_commits(Some(mbarrier));
    }

    /// The lines of the copies in flight to an mbarrier.
    pub(super) fn lines_of_flights(&self, mbarrier: u64) -> String {
        let mut lines: Vec<u32> = self.copies.instructions(mbarrier).map(|pc| self.line(pc)).collect();
        lines.sort_unstable();
        lines.dedup();
        lines.iter().map(|line| format!("line {line}")).collect::<Vec<_>>().join(", ")
    }

    fn land_flight(&mut self, flight: &Flight) {
        let inst = &self.facts.context.program.code[flight.pc as usize];
        let cause = Cause { inst, warp: flight.warp, lane: flight.lane };
        match &flight.payload {
            Payload::Global(index, pieces) => {
                for piece in pieces.iter() {
                    let chunk = self.fetch(cause, *index, piece);
                    store_bytes(&mut self.shared.bytes, flight.offset + piece.shared as usize, 16, &chunk);
                }
            }
            Payload::Shared(from) => {
                let bytes = self.shared.bytes[*from..from + flight.bytes as usize].to_vec();
                self.combine(flight, &bytes);
            }
            Payload::Values(chunk) => {
                let bytes: Vec<u8> = chunk.iter().flat_map(|w| w.to_le_bytes()).collect();
                self.combine(flight, &bytes[..flight.bytes as usize]);
            }
            Payload::Response(bytes) => self.combine(flight, bytes),
        }
        let epoch = self.mbarriers.actor(flight.mbarrier).map_or(1, |(_, epoch)| epoch);
        if self.facts.context.options.checks.races {
            let thread = (self.facts.home() + flight.actor as u32, flight.lane);
            let touch = if flight.reduce.is_some() { Touch::Reduce } else { Touch::Bulk };
            self.shared.shadow.land(flight.offset, flight.bytes as usize, thread, epoch, touch);
        }
        self.complete_bytes(cause, flight.mbarrier, flight.bytes, true);
    }

    fn combine(&mut self, flight: &Flight, bytes: &[u8]) {
        let target = &mut self.shared.bytes[flight.offset..flight.offset + bytes.len()];
        match flight.reduce {
            None => target.copy_from_slice(bytes),
            Some((op, ty)) => reduce(op, ty, target, bytes),
        }
    }

    /// Loads 16 bytes of a buffer. Bytes outside the tensor are zero.
    fn fetch(&mut self, cause: Cause, index: usize, piece: &Piece) -> Chunk {
        let region = &self.facts.context.global.regions[index];
        let (from, to) = piece.inside;
        if (from, to) == (0, 16) && piece.global.is_multiple_of(16) {
            self.check_fetch(cause, index, region, piece.global as usize, 16);
            return region.load(piece.global as usize, 16);
        }
        let mut bytes = [0u8; 32];
        for at in from..to {
            let offset = piece.global.wrapping_add(u64::from(at)) as usize;
            self.check_fetch(cause, index, region, offset, 1);
            bytes[usize::from(at)] = region.load(offset, 1)[0] as u8;
        }
        load_bytes(&bytes, 0, 32)
    }

    #[inline(always)]
    fn check_fetch(&mut self, cause: Cause, index: usize, region: &Region, offset: usize, bytes: usize) {
        let context = self.facts.context;
        if context.options.checks.uninitialised && region.written.is_some_and(|w| !w.all(offset, bytes)) {
            let place = Some((Space::Global, GlobalMemory::base(index) + offset as u64));
            self.report(HazardKind::UninitialisedRead, cause.inst, cause.warp, cause.lane, place, || {
                "copies global memory that was never written".into()
            });
        }
        if context.apart && context.options.checks.races && region.watched() {
            let granule = context.program.granules[1] as usize;
            let other =
                region.note_read(offset..offset + bytes, granule, self.facts.cluster as u32, cause.inst.pc);
            let address = GlobalMemory::base(index) + offset as u64;
            self.report_foreign(cause.inst, cause.warp, cause.lane, "reads", other, address);
        }
    }

    /// Reports copies to or from the shared memory of a CTA that are still in flight when the CTA exits.
    pub(super) fn check_flights_of(&mut self, rank: usize) {
        let range = rank * self.facts.span..(rank + 1) * self.facts.span;
        let late = self.copies.touching(&range);
        let late: Vec<_> =
            late.map(|(f, at, verb)| (f.pc, f.warp, f.lane, self.facts.shared_address(at), verb)).collect();
        for (pc, warp, lane, address, verb) in late {
            let inst = &self.facts.context.program.code[pc as usize];
            self.report(HazardKind::AsyncNotWaited, inst, warp, lane, Some((Space::Shared, address)), || {
                format!("the CTA of rank {rank} exits while a copy still {verb} its shared memory: no thread waited")
            });
        }
    }

    /// Completes all copies at the end of the run.
    pub(super) fn land_flights(&mut self) {
        while let Some(flight) = self.copies.pop() {
            self.land_flight(&flight);
        }
        self.land_commits(None);
        let surplus: Vec<(u64, u32, i64)> = self.mbarriers.unbalanced().filter(|m| m.2 < 0).collect();
        for (address, line, bytes) in surplus {
            let place = Some(self.facts.place(Space::Shared, address));
            self.log.findings.report(HazardKind::TransactionMismatch, line, None, || {
                let message = format!("{} more bytes arrived at this mbarrier than it expected", -bytes);
                (Vec::new(), place, message)
            });
        }
    }
}

/// Cost of a bulk copy in warp instructions: the copy moves and checks sixteen bytes at a time.
pub(super) const fn copy_toll(bytes: u32) -> u64 {
    bytes as u64 / 16
}
