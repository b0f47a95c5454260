//! Loads, stores and the moves between address spaces.

use ptx::{MemSem, Memory, Space, Type};

use super::Env;
use super::registers::{Registers, for_lanes};
use super::run::Flow;
use super::warp::{Split, Warp};
use crate::decode::{CLOCK, Class, Inst, Slot, strength};
use crate::memory::{CONST_BASE, Chunk, LOCAL_BASE, SHARED_BASE, load_bytes, resolve, store_bytes, window};
use crate::order::{Access, Conflict, Strength, Touch, Verdict};
use crate::report::HazardKind;

/// Base plus offset of each lane.
#[inline(always)]
pub(super) fn addresses(registers: &Registers, inst: &Inst) -> [u64; 32] {
    based(registers, inst.base, inst.offset)
}

#[inline(always)]
pub(super) fn based(registers: &Registers, base: Slot, offset: i64) -> [u64; 32] {
    if base.class == Class::W64 {
        registers.get64(base).map(|a| a.wrapping_add_signed(offset))
    } else {
        registers.get32(base).map(|a| u64::from(a.wrapping_add_signed(offset as i32)))
    }
}

/// The lanes of `mask` whose address is in the space of the first of them, and that space. Their addresses become
/// addresses in it.
fn same_space(space: Space, mask: u32, addresses: &mut [u64; 32]) -> (Space, u32) {
    match space {
        Space::Generic => {}
        Space::SharedCluster => return (Space::Shared, mask),
        _ => return (space, mask),
    }
    let (first, _) = resolve(addresses[mask.trailing_zeros() as usize]);
    let mut lanes = 0;
    for_lanes(mask, |lane| {
        let (space, inside) = resolve(addresses[lane]);
        if space == first {
            lanes |= 1 << lane;
            addresses[lane] = inside;
        }
    });
    (first, lanes)
}

impl Env<'_> {
    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        m: &Memory,
        mask: u32,
    ) -> Flow {
        let bytes = m.bytes();
        let strength = strength(m.sem, m.scope);
        let mut chunks: [Chunk; 32] = [[0; 8]; 32];
        let mut places = addresses(&warp.registers, inst);
        let mut left = mask;
        let mut polled = false;
        while left != 0 {
            let (space, lanes) = same_space(inst.space, left, &mut places);
            left &= !lanes;
            self.count_access(warp, split.pc, inst, space, lanes, &places, bytes);
            for_lanes(lanes, |lane| {
                if let Some(chunk) =
                    self.load_lane(warp, split.pc, inst, space, lane, places[lane], bytes, strength)
                {
                    chunks[lane] = chunk;
                }
            });
            if strength != Strength::Weak && matches!(space, Space::Global | Space::Shared) {
                let acquire = matches!(m.sem, MemSem::Acquire);
                for_lanes(lanes, |lane| self.observe(warp, space, places[lane], lane, strength, acquire));
                polled = true;
            }
        }
        let slots = self.context.program.slots(inst);
        for (element, slot) in slots.iter().enumerate() {
            scatter(&mut warp.registers, *slot, mask, &chunks, element, m.ty);
        }
        if polled {
            split.polls += 1;
            return self.poll(warp, split);
        }
        Flow::Next
    }

    /// After many reads of what does not change: lets the lanes go ahead that wait for these, and other warps run.
    pub(super) fn poll(&mut self, warp: &mut Warp, split: &mut Split) -> Flow {
        if split.polls.is_multiple_of(64) {
            warp.release_parked();
        }
        if split.polls.is_multiple_of(4) { Flow::Yield } else { Flow::Next }
    }

    pub(super) fn store(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, m: &Memory, mask: u32) {
        let bytes = m.bytes();
        let strength = strength(m.sem, m.scope);
        let mut chunks: [Chunk; 32] = [[0; 8]; 32];
        for (element, slot) in self.context.program.slots(inst).iter().enumerate() {
            gather(&warp.registers, *slot, &mut chunks, element, m.ty);
        }
        let mut places = addresses(&warp.registers, inst);
        let mut left = mask;
        split.polls = 0;
        while left != 0 {
            let (space, lanes) = same_space(inst.space, left, &mut places);
            left &= !lanes;
            self.count_access(warp, split.pc, inst, space, lanes, &places, bytes);
            for_lanes(lanes, |lane| {
                self.store_lane(
                    warp,
                    split.pc,
                    inst,
                    space,
                    lane,
                    places[lane],
                    bytes,
                    &chunks[lane],
                    strength,
                );
            });
            if matches!(space, Space::Global | Space::Shared) {
                let release = matches!(m.sem, MemSem::Release);
                if strength != Strength::Weak {
                    for_lanes(lanes, |lane| {
                        self.publish(warp, space, places[lane], lane, strength, release, false)
                    });
                }
            }
        }
    }

    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the parts of one access")]
    fn count_access(
        &mut self,
        warp: &Warp,
        pc: u32,
        inst: &Inst,
        space: Space,
        lanes: u32,
        addresses: &[u64; 32],
        bytes: u32,
    ) {
        let counter = &mut self.counters.instructions[pc as usize];
        match space {
            Space::Shared => counter.shared(lanes, addresses, bytes, false),
            Space::Global => counter.global(lanes, addresses, bytes),
            Space::Local => counter.local_bytes += u64::from(lanes.count_ones() * bytes),
            _ => {}
        }
        let Some(recorder) = &mut self.recorder else { return };
        let (w, number) = (warp.index, inst.number);
        match space {
            Space::Shared => recorder.shared(w, number, lanes, addresses, bytes),
            Space::Local => {
                let offsets = addresses.map(|a| a.wrapping_sub(LOCAL_BASE));
                recorder.local(w, number, lanes, &offsets, bytes);
            }
            Space::Param => recorder.issue(w, number, lanes),
            _ => recorder.global(w, number, lanes, addresses, bytes),
        }
    }

    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the parts of one access")]
    fn load_lane(
        &mut self,
        warp: &Warp,
        pc: u32,
        inst: &Inst,
        space: Space,
        lane: usize,
        address: u64,
        bytes: u32,
        strength: Strength,
    ) -> Option<Chunk> {
        let size = bytes as usize;
        match space {
            Space::Shared => {
                let offset = self.shared_offset(warp, inst, lane, address, size)?;
                if self.context.options.checks.races {
                    let access = plain(warp, pc, lane, strength);
                    let verdict = self.shadow.read(offset, size, &access);
                    self.judge_shared_read(verdict, inst, warp.index, lane, address);
                }
                Some(load_bytes(&self.shared, offset, size))
            }
            Space::Global => {
                let access = plain(warp, pc, lane, strength);
                self.load_global(inst, &access, lane, address, size)
            }
            Space::Local => {
                let offset = self.flat_offset(warp, inst, lane, space, address, size)?;
                if self.context.options.checks.uninitialised && !warp.local.is_written(lane, offset, size) {
                    self.report(
                        HazardKind::UninitialisedRead,
                        inst,
                        warp.index,
                        lane,
                        Some((space, address)),
                        || "reads local memory that the thread has not written".into(),
                    );
                }
                Some(warp.local.load(lane, offset, size))
            }
            _ => {
                let offset = self.flat_offset(warp, inst, lane, space, address, size)?;
                let program = self.context.program;
                let memory = if space == Space::Const { &program.layout.constants } else { &program.params };
                Some(load_bytes(memory, offset, size))
            }
        }
    }

    #[inline(always)]
    pub(super) fn judge_shared_read(
        &mut self,
        verdict: Verdict,
        inst: &Inst,
        warp: usize,
        lane: usize,
        address: u64,
    ) {
        match verdict {
            Verdict::Fine => {}
            Verdict::Uninitialised => {
                if self.context.options.checks.uninitialised {
                    self.report(
                        HazardKind::UninitialisedRead,
                        inst,
                        warp,
                        lane,
                        Some((Space::Shared, address)),
                        || "reads shared memory that no thread has written".into(),
                    );
                }
            }
            Verdict::Conflict(c) => {
                self.report_conflict(inst, warp, lane, false, &c, (Space::Shared, address))
            }
        }
    }

    /// Global memory by one lane.
    pub(super) fn load_global(
        &mut self,
        inst: &Inst,
        access: &Access,
        lane: usize,
        address: u64,
        bytes: usize,
    ) -> Option<Chunk> {
        let offset = self.global_offset(inst, access.warp, lane, address, bytes)?;
        let context = self.context;
        let (region, _) = context.global.find(address)?;
        if context.options.checks.uninitialised && region.written.is_some_and(|w| !w.all(offset, bytes)) {
            self.report(
                HazardKind::UninitialisedRead,
                inst,
                access.warp,
                lane,
                Some((Space::Global, address)),
                || "reads global memory that nothing was written to".into(),
            );
        }
        if context.options.checks.races && region.writable() {
            if let Some(c) = self.order.shadow.read(address, bytes as u64, access) {
                self.report_conflict(inst, access.warp, lane, false, &c, (Space::Global, address));
            }
            if context.apart {
                let granule = context.program.granules[1] as usize;
                let other = region.note_read(offset, bytes, granule, self.cta as u32, access.pc);
                self.report_foreign(inst, access.warp, lane, false, other, address);
            }
        }
        Some(region.load(offset, bytes))
    }

    fn report_foreign(
        &mut self,
        inst: &Inst,
        warp: usize,
        lane: usize,
        writes: bool,
        other: Option<crate::memory::ForeignAccess>,
        address: u64,
    ) {
        let Some(other) = other else { return };
        let other_line = Some(self.line(other.pc));
        let mut threads = vec![self.thread(warp, lane)];
        threads.extend(other.cta.map(|cta| crate::report::ThreadId {
            cta: u64::from(cta),
            warp: 0,
            lane: 0,
        }));
        let place = self.place(Space::Global, address);
        self.findings.report(HazardKind::Race, inst.line, other_line, || {
            let verb = if writes { "writes" } else { "reads" };
            (threads, Some(place), format!("{verb} what another CTA accesses, and nothing orders CTAs"))
        });
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one access")]
    fn store_lane(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        inst: &Inst,
        space: Space,
        lane: usize,
        address: u64,
        bytes: u32,
        chunk: &Chunk,
        strength: Strength,
    ) {
        match space {
            Space::Shared => self.store_shared_lane(warp, pc, inst, lane, address, bytes, chunk, strength),
            Space::Global => {
                let access = plain(warp, pc, lane, strength);
                self.store_global(inst, &access, lane, address, bytes as usize, chunk);
            }
            Space::Local => {
                if let Some(offset) = self.flat_offset(warp, inst, lane, space, address, bytes as usize) {
                    warp.local.store(lane, offset, bytes as usize, chunk);
                }
            }
            _ => self.report(HazardKind::OutOfBounds, inst, warp.index, lane, Some((space, address)), || {
                "stores to read-only memory".into()
            }),
        }
    }

    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the parts of one access")]
    pub(super) fn store_shared_lane(
        &mut self,
        warp: &Warp,
        pc: u32,
        inst: &Inst,
        lane: usize,
        address: u64,
        bytes: u32,
        chunk: &Chunk,
        strength: Strength,
    ) {
        let size = bytes as usize;
        let Some(offset) = self.shared_offset(warp, inst, lane, address, size) else { return };
        if self.context.options.checks.races {
            let access = plain(warp, pc, lane, strength);
            if let Some((c, at)) = self.shadow.write(offset, size, &access) {
                let before = load_bytes(&self.shared, offset, size);
                if !(before == *chunk && same_store(&c, &access)) {
                    let place = (Space::Shared, SHARED_BASE + at.max(offset) as u64);
                    self.report_conflict(inst, warp.index, lane, true, &c, place);
                }
            }
        }
        store_bytes(&mut self.shared, offset, size, chunk);
    }

    pub(super) fn store_global(
        &mut self,
        inst: &Inst,
        access: &Access,
        lane: usize,
        address: u64,
        bytes: usize,
        chunk: &Chunk,
    ) {
        let Some(offset) = self.global_offset(inst, access.warp, lane, address, bytes) else { return };
        let context = self.context;
        let Some((region, _)) = context.global.find(address) else { return };
        if !region.writable() {
            return self.report(
                HazardKind::OutOfBounds,
                inst,
                access.warp,
                lane,
                Some((Space::Global, address)),
                || "stores to a buffer that the launch contract only lets it read".into(),
            );
        }
        if context.options.checks.races {
            if let Some(c) = self.order.shadow.write(address, bytes as u64, access) {
                let before = region.load(offset, bytes);
                if !(before == *chunk && same_store(&c, access)) {
                    self.report_conflict(inst, access.warp, lane, true, &c, (Space::Global, address));
                }
            }
            if context.apart {
                let granule = context.program.granules[1] as usize;
                let other = region.note_write(offset, bytes, granule, self.cta as u32, access.pc);
                self.report_foreign(inst, access.warp, lane, true, other, address);
            }
        }
        region.store(offset, bytes, chunk);
    }

    /// Offset of a good access from the start of shared memory.
    #[inline(always)]
    pub(super) fn shared_offset(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        address: u64,
        bytes: usize,
    ) -> Option<usize> {
        let offset = address.wrapping_sub(SHARED_BASE);
        if offset.saturating_add(bytes as u64) > self.shared.len() as u64 {
            self.out_of_bounds(inst, warp.index, lane, Space::Shared, address, bytes, self.shared.len());
            return None;
        }
        if address & (bytes as u64 - 1) != 0 {
            self.misaligned(inst, warp.index, lane, Space::Shared, address, bytes);
            return None;
        }
        Some(offset as usize)
    }

    /// Offset of a good access from the start of its buffer.
    #[inline(always)]
    pub(super) fn global_offset(
        &mut self,
        inst: &Inst,
        warp: usize,
        lane: usize,
        address: u64,
        bytes: usize,
    ) -> Option<usize> {
        let found = self.context.global.find(address);
        let size = found.map_or(0, |(region, _)| region.bytes);
        match found {
            Some((_, offset)) if offset >= 0 && offset as usize + bytes <= size => {
                if address & (bytes as u64 - 1) != 0 {
                    self.misaligned(inst, warp, lane, Space::Global, address, bytes);
                    return None;
                }
                Some(offset as usize)
            }
            _ => {
                self.out_of_bounds(inst, warp, lane, Space::Global, address, bytes, size);
                None
            }
        }
    }

    fn flat_offset(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        space: Space,
        address: u64,
        bytes: usize,
    ) -> Option<usize> {
        let program = self.context.program;
        let (base, size) = match space {
            Space::Local => (LOCAL_BASE, warp.local.bytes()),
            Space::Const => (CONST_BASE, program.layout.constants.len()),
            _ => (0, program.params.len()),
        };
        let offset = address.wrapping_sub(base);
        if offset.saturating_add(bytes as u64) > size as u64 {
            self.out_of_bounds(inst, warp.index, lane, space, address, bytes, size);
            return None;
        }
        if offset as usize & (bytes - 1) != 0 {
            self.misaligned(inst, warp.index, lane, space, address, bytes);
            return None;
        }
        Some(offset as usize)
    }

    #[cold]
    #[allow(clippy::too_many_arguments, reason = "the parts of one access")]
    fn out_of_bounds(
        &mut self,
        inst: &Inst,
        warp: usize,
        lane: usize,
        space: Space,
        address: u64,
        bytes: usize,
        size: usize,
    ) {
        self.report(HazardKind::OutOfBounds, inst, warp, lane, Some((space, address)), || {
            if size == 0 {
                format!("accesses {bytes} bytes at {address:#x}, where nothing is")
            } else {
                format!("accesses {bytes} bytes outside of {size}")
            }
        });
    }

    #[cold]
    fn misaligned(
        &mut self,
        inst: &Inst,
        warp: usize,
        lane: usize,
        space: Space,
        address: u64,
        bytes: usize,
    ) {
        self.report(HazardKind::Misaligned, inst, warp, lane, Some((space, address)), || {
            format!("accesses {bytes} bytes at address {address:#x}, which is no multiple of {bytes}")
        });
    }

    pub(super) fn mov(&mut self, warp: &mut Warp, inst: &Inst, ty: Type, mask: u32) {
        let slots = self.context.program.slots(inst);
        let registers = &mut warp.registers;
        if inst.target == CLOCK {
            let now = self.steps;
            return registers.set_any(inst.d[0], mask, &[now; 32]);
        }
        if slots.is_empty() {
            match inst.d[0].class {
                Class::W32 => {
                    let value = *registers.get32(inst.s[0]);
                    registers.set32(inst.d[0], mask, &value);
                }
                Class::W64 => {
                    let value = *registers.get64(inst.s[0]);
                    registers.set64(inst.d[0], mask, &value);
                }
                Class::Pred => {
                    let value = registers.get_pred(inst.s[0], inst.negated, 0);
                    registers.set_pred(inst.d[0], mask, value);
                }
                Class::Sink => {}
            }
            return;
        }
        let bits = ty.bits() / slots.len() as u32;
        let part = u64::MAX >> (64 - bits);
        if inst.d[0].is_some() {
            let mut packed = [0u64; 32];
            for (i, slot) in slots.iter().enumerate() {
                let value = registers.get_any(*slot);
                (0..32).for_each(|l| packed[l] |= (value[l] & part) << (bits * i as u32));
            }
            registers.set_any(inst.d[0], mask, &packed);
        } else {
            let whole = registers.get_any(inst.s[0]);
            for (i, slot) in slots.iter().enumerate() {
                registers.set_any(*slot, mask, &whole.map(|v| v >> (bits * i as u32) & part));
            }
        }
    }

    pub(super) fn cvta(&mut self, warp: &mut Warp, inst: &Inst, space: Space, to_space: bool, mask: u32) {
        let a = warp.registers.get_any(inst.s[0]);
        let base = window(space);
        let result = a.map(|v| if to_space { v.wrapping_sub(base) } else { v.wrapping_add(base) });
        warp.registers.set_any(inst.d[0], mask, &result);
    }

    pub(super) fn isspacep(&mut self, warp: &mut Warp, inst: &Inst, space: Space, mask: u32) {
        let a = *warp.registers.get64(inst.s[0]);
        let space = if space == Space::SharedCluster { Space::Shared } else { space };
        let inside = (0..32).fold(0, |set, l| set | u32::from(resolve(a[l]).0 == space) << l);
        warp.registers.set_pred(inst.d[0], mask, inside);
    }
}

/// A plain access of one lane.
#[inline(always)]
pub(super) fn plain(warp: &Warp, pc: u32, lane: usize, strength: Strength) -> Access<'_> {
    Access { view: &warp.view, warp: warp.index, lanes: 1 << lane, pc, strength, touch: Touch::Plain }
}

/// Whether the conflicting write is of another lane of the very same instruction: the caller has seen that the value is
/// the same.
fn same_store(c: &Conflict, a: &Access) -> bool {
    c.wrote && c.agent == a.view.agent() && c.pc == a.pc && c.epoch == a.view.now()
}

/// Element `element` of what each lane loaded, to a register that may be wider.
#[inline(always)]
fn scatter(registers: &mut Registers, slot: Slot, mask: u32, chunks: &[Chunk; 32], element: usize, ty: Type) {
    let bits = ty.bits();
    match (bits, slot.class) {
        (64, _) => {
            let value = std::array::from_fn(|l| {
                u64::from(chunks[l][2 * element]) | u64::from(chunks[l][2 * element + 1]) << 32
            });
            registers.set64(slot, mask, &value);
        }
        (32, Class::W32) => registers.set32(slot, mask, &std::array::from_fn(|l| chunks[l][element])),
        _ => {
            let at = element * bits as usize;
            let raw = |l: usize| u64::from(chunks[l][at / 32]) >> (at % 32) & (u64::MAX >> (64 - bits));
            let value = std::array::from_fn(|l| {
                if ty.is_signed() { ((raw(l) << (64 - bits)) as i64 >> (64 - bits)) as u64 } else { raw(l) }
            });
            // Signed bytes in 16-bit registers keep their upper half clear, as all 16-bit values do.
            let narrow = |v: u64| if slot.class == Class::W32 && bits < 16 { v & 0xffff_ffff } else { v };
            registers.set_any(slot, mask, &value.map(narrow));
        }
    }
}

/// Element `element` of what each lane stores, from a register that may be wider.
#[inline(always)]
fn gather(registers: &Registers, slot: Slot, chunks: &mut [Chunk; 32], element: usize, ty: Type) {
    match ty.bits() {
        64 => {
            let value = registers.get_any(slot);
            for (chunk, v) in chunks.iter_mut().zip(value) {
                chunk[2 * element] = v as u32;
                chunk[2 * element + 1] = (v >> 32) as u32;
            }
        }
        32 if slot.class == Class::W32 => {
            let value = registers.get32(slot);
            chunks.iter_mut().zip(value).for_each(|(chunk, v)| chunk[element] = *v);
        }
        bits => {
            let value = registers.get_any(slot);
            let at = element * bits as usize;
            for (chunk, v) in chunks.iter_mut().zip(value) {
                chunk[at / 32] |= ((v & (u64::MAX >> (64 - bits))) << (at % 32)) as u32;
            }
        }
    }
}
