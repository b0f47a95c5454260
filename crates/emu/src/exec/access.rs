//! Executes loads and stores, lane by lane.

use ptx::{MemSem, Memory, Op, Space};
use smallvec::SmallVec;

use super::Env;
use super::registers::{Registers, for_lanes, gather, scatter};
use super::run::Flow;
use super::units::{Follow, Observation, Publication, inside};
use super::warp::{Split, Warp};
use crate::decode::{Class, Inst, SharedVariable, Slot, strength};
use crate::memory::{
    CONST_BASE, Chunk, ForeignAccess, LOCAL_BASE, RANK_SHIFT, Region, SHARED_BASE, load_bytes, resolve,
    store_bytes,
};
use crate::order::{Access, Actors, Conflict, Strength, Touch, Verdict};
use crate::report::{HazardKind, ThreadId};

/// The properties that all lanes of one access share.
#[derive(Clone, Copy)]
pub(super) struct Site<'i> {
    pub inst: &'i Inst,
    pub space: Space,
    /// Bytes per lane.
    pub bytes: u32,
    pub strength: Strength,
}

/// Base plus offset, for each lane.
#[inline(always)]
pub(super) fn addresses(registers: &Registers, inst: &Inst) -> [u64; 32] {
    based(registers, inst.base, inst.offset)
}

#[inline(always)]
pub(super) fn based(registers: &Registers, base: Slot, offset: i64) -> [u64; 32] {
    // Written as loops, because `map` of an array this long is not inlined.
    let mut addresses = [0; 32];
    if base.class == Class::W64 {
        for (address, base) in addresses.iter_mut().zip(registers.get64(base)) {
            *address = base.wrapping_add_signed(offset);
        }
    } else {
        for (address, base) in addresses.iter_mut().zip(registers.get32(base)) {
            *address = u64::from(base.wrapping_add_signed(offset as i32));
        }
    }
    addresses
}

/// The space of the first lane's address, and the lanes of `mask` whose addresses are in that space. Converts
/// their addresses from generic addresses to addresses in the space.
pub(super) fn same_space(space: Space, mask: u32, addresses: &mut [u64; 32]) -> (Space, u32) {
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

impl<'a> Env<'a> {
    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        m: &Memory,
        mask: u32,
    ) -> Flow {
        let strength = strength(m.sem, m.scope);
        let mut chunks: [Chunk; 32] = [[0; 8]; 32];
        let mut places = addresses(&warp.registers, inst);
        let mut left = mask;
        let mut polled = false;
        let mut spaces: SmallVec<[(Space, u32); 1]> = SmallVec::new();
        while left != 0 {
            let (space, lanes) = same_space(inst.space, left, &mut places);
            left &= !lanes;
            spaces.push((space, lanes));
            let site = Site { inst, space, bytes: m.bytes(), strength };
            self.count_access(warp, &site, lanes, &places);
            self.order.stale = 0;
            if !self.load_plain(&site, lanes, &places, &mut chunks) {
                for_lanes(lanes, |lane| {
                    if let Some(chunk) = self.load_lane(warp, &site, lane, places[lane]) {
                        chunks[lane] = chunk;
                    }
                });
            }
            if strength != Strength::Weak && matches!(space, Space::Global | Space::Shared) {
                let kind = if m.sem == MemSem::Acquire { Observation::Acquire } else { Observation::Relaxed };
                for_lanes(lanes & !self.order.stale, |lane| {
                    elements(m).for_each(|at| self.observe(warp, &site, lane, places[lane] + at, kind));
                });
                polled = true;
            }
        }
        let slots = self.facts.context.program.slots(inst);
        for (element, slot) in slots.iter().enumerate() {
            scatter(&mut warp.registers, *slot, mask, &chunks, element, m.ty);
        }
        if !self.facts.context.follow.is_nothing() {
            self.mark_doubted(warp, inst, &spaces, u64::from(m.bytes()), &places);
        }
        if polled {
            let mut found = u64::from(inst.pc);
            for_lanes(mask, |l| {
                found = mix(mix(mix(found, places[l]), chunks[l][0].into()), chunks[l][1].into());
            });
            return self.poll(warp, split, found);
        }
        Flow::Next
    }

    /// Loads the data of all lanes at once from a buffer whose reads need no check and no record. Returns
    /// whether that was possible; otherwise each lane is loaded and checked separately.
    #[inline(always)]
    fn load_plain(&self, site: &Site, lanes: u32, places: &[u64; 32], chunks: &mut [Chunk; 32]) -> bool {
        let context = self.facts.context;
        let differs = context.options.weak || context.launch.overlapping || site.strength != Strength::Weak;
        if site.space != Space::Global || differs || lanes == 0 {
            return false;
        }
        let first = places[lanes.trailing_zeros() as usize];
        let Some((region, offset)) = context.global.find(first).filter(|(region, _)| region.is_plain())
        else {
            return false;
        };
        let bytes = u64::from(site.bytes);
        let (base, size) = (first.wrapping_add_signed(-offset), region.bytes as u64);
        let mut outside = size < bytes;
        for (lane, place) in places.iter().enumerate() {
            let misplaced = place.wrapping_sub(base) > size.wrapping_sub(bytes) || place & (bytes - 1) != 0;
            outside |= lanes >> lane & 1 == 1 && misplaced;
        }
        if outside {
            return false;
        }
        let offset = |lane: usize| (places[lane] - base) as usize;
        if site.bytes == 4 {
            for_lanes(lanes, |lane| chunks[lane][0] = region.word(offset(lane)));
        } else {
            for_lanes(lanes, |lane| chunks[lane] = region.load(offset(lane), site.bytes as usize));
        }
        true
    }

    /// Called after a strong read that returned `found`. After repeated reads of the same value, lanes that
    /// wait for these lanes continue and other warps run, so that one of them may change the value.
    pub(super) fn poll(&mut self, warp: &mut Warp, split: &mut Split, found: u64) -> Flow {
        if std::mem::replace(&mut split.found, found) != found {
            split.polls = 0;
        }
        split.polls += 1;
        if split.polls.is_multiple_of(64) {
            warp.release_parked(false);
        }
        if split.polls.is_multiple_of(4) { Flow::Yield } else { Flow::Next }
    }

    pub(super) fn store(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, m: &Memory, mask: u32) {
        let strength = strength(m.sem, m.scope);
        let mut chunks: [Chunk; 32] = [[0; 8]; 32];
        for (element, slot) in self.facts.context.program.slots(inst).iter().enumerate() {
            gather(&warp.registers, *slot, &mut chunks, element, m.ty);
        }
        let mut places = addresses(&warp.registers, inst);
        let mut left = mask;
        split.polls = 0;
        while left != 0 {
            let (space, lanes) = same_space(inst.space, left, &mut places);
            left &= !lanes;
            let site = Site { inst, space, bytes: m.bytes(), strength };
            self.count_access(warp, &site, lanes, &places);
            let meeting = self.meeting_lanes(&site, lanes, &places);
            let alone = lanes & !meeting;
            for_lanes(alone, |lane| self.store_lane(warp, &site, lane, places[lane], &chunks[lane]));
            for_lanes(meeting, |lane| self.overwrite_shared(warp, &site, lane, places[lane], &chunks[lane]));
            if self.facts.context.follow.follows_loads() {
                self.follow_store(warp, &site, lanes, &places, &chunks);
            }
            if strength != Strength::Weak && matches!(space, Space::Global | Space::Shared) {
                let kind = if m.sem == MemSem::Release { Publication::Release } else { Publication::Store };
                for_lanes(lanes, |lane| {
                    elements(m).for_each(|at| self.publish(warp, &site, lane, places[lane] + at, kind));
                });
            }
        }
    }

    #[inline(always)]
    fn count_access(&mut self, warp: &Warp, site: &Site, lanes: u32, addresses: &[u64; 32]) {
        let Site { inst, space, bytes, .. } = *site;
        match space {
            Space::Shared => self.log.count_shared(inst, lanes, addresses, bytes),
            Space::Global => self.log.counter(inst).global(lanes, addresses, bytes),
            Space::Local => self.log.counter(inst).local_bytes += u64::from(lanes.count_ones() * bytes),
            _ => {}
        }
        let Some(recorder) = &mut self.log.recorder else { return };
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
    pub(super) fn load_lane(&mut self, warp: &Warp, site: &Site, lane: usize, address: u64) -> Option<Chunk> {
        let size = site.bytes as usize;
        match site.space {
            Space::Shared => {
                let offset = self.shared_offset(warp, site, lane, address)?;
                if self.facts.context.options.checks.races {
                    let access = plain(warp, site, lane);
                    let verdict = self.shared.shadow.read(offset, size, &access);
                    if let Verdict::Conflict(c) = &verdict {
                        self.doubt_read(&access, c, Space::Shared, address, size as u64);
                    }
                    self.judge_shared_read(verdict, site.inst, warp.index, lane, address);
                }
                Some(load_bytes(&self.shared.bytes, offset, size))
            }
            Space::Global => self.load_global(warp, site, lane, address),
            Space::Local => {
                let offset = self.flat_offset(warp, site, lane, address)?;
                if self.facts.context.options.checks.uninitialised
                    && !warp.local.is_written(lane, offset, size)
                {
                    let place = Some((Space::Local, address));
                    self.report(HazardKind::UninitialisedRead, site.inst, warp.index, lane, place, || {
                        "reads local memory that the thread has not written".into()
                    });
                }
                Some(warp.local.load(lane, offset, size))
            }
            space => {
                let offset = self.flat_offset(warp, site, lane, address)?;
                let context = self.facts.context;
                let program = context.program;
                let is_map = || context.parameters.maps.iter().any(|map| map.contains(&offset));
                if space == Space::Param && is_map() && !program.changes_maps() {
                    self.report(HazardKind::OutOfBounds, site.inst, warp.index, lane, None, || {
                        "reads the bytes of a tensor map, whose contents are not defined".into()
                    });
                }
                let memory = match space {
                    Space::Const => &program.layout.constants,
                    _ => &context.parameters.bytes,
                };
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
        let place = (Space::Shared, address);
        match verdict {
            Verdict::Fine => {}
            Verdict::Uninitialised => {
                // A run that follows such values finds what depends on them.
                let followed = matches!(self.facts.context.follow, Follow::Copies);
                if self.facts.context.options.checks.uninitialised
                    && !self.log.findings.lost_shared
                    && !followed
                {
                    self.report(HazardKind::UninitialisedRead, inst, warp, lane, Some(place), || {
                        "reads shared memory that no thread has written".into()
                    });
                }
            }
            Verdict::Conflict(c) => self.report_conflict(inst, warp, lane, false, &c, place),
        }
    }

    /// A load from global memory by one lane.
    fn load_global(&mut self, warp: &Warp, site: &Site, lane: usize, address: u64) -> Option<Chunk> {
        let place = self.global_region(warp, site, lane, address)?;
        if self.facts.context.options.checks.races && place.0.watched() {
            self.note_global_read(site, &plain(warp, site, lane), address, site.bytes);
        }
        let newest = self.load_region(warp, site, lane, address, place);
        Some(self.weak_value(warp, site, lane, address, newest))
    }

    /// Records a read of global memory that the kernel may write.
    pub(super) fn note_global_read(&mut self, site: &Site, access: &Access, address: u64, bytes: u32) {
        if let Some(c) = self.order.grid.shadow.read(address, u64::from(bytes), access) {
            let lane = access.lanes.trailing_zeros() as usize;
            self.doubt_read(access, &c, Space::Global, address, u64::from(bytes));
            self.report_conflict(site.inst, access.actor, lane, false, &c, (Space::Global, address));
        }
    }

    /// Loads from a region. The caller has checked the order of the read against other accesses of the CTA.
    pub(super) fn load_region(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        (region, offset): (&Region, usize),
    ) -> Chunk {
        let Site { inst, bytes, .. } = *site;
        let bytes = bytes as usize;
        let context = self.facts.context;
        let place = (Space::Global, address);
        if context.options.checks.uninitialised
            && !self.log.findings.lost_global
            && region.written.is_some_and(|w| !w.all(offset, bytes))
        {
            self.report(HazardKind::UninitialisedRead, inst, warp.index, lane, Some(place), || {
                "reads global memory that was never written".into()
            });
        }
        if context.apart && context.options.checks.races && region.watched() {
            let granule = context.program.granules[1] as usize;
            let other = region.note_read(offset..offset + bytes, granule, self.facts.cluster as u32, inst.pc);
            self.report_foreign(inst, warp.index, lane, "reads", other, address);
        }
        if matches!(inst.op, Op::Ld(m) if m.non_coherent) {
            region.note_incoherent(offset, bytes, context.program.granules[1] as usize, inst.pc);
        }
        region.load(offset, bytes)
    }

    pub(super) fn report_foreign(
        &mut self,
        inst: &Inst,
        warp: usize,
        lane: usize,
        verb: &str,
        other: Option<ForeignAccess>,
        address: u64,
    ) {
        let Some(other) = other else { return };
        let other_line = Some(self.line(other.pc));
        let mut threads = vec![self.thread(warp, lane)];
        threads.extend(other.cta.map(|cta| ThreadId {
            cta: self.facts.context.cta(u64::from(cta), 0),
            warp: 0,
            lane: 0,
        }));
        let place = self.facts.place(Space::Global, address);
        self.log.findings.report(HazardKind::Race, inst.line, other_line, || {
            let message = format!("{verb} memory that another CTA accesses; the CTAs are not ordered");
            (threads, Some(place), message)
        });
    }

    pub(super) fn store_lane(
        &mut self,
        warp: &mut Warp,
        site: &Site,
        lane: usize,
        address: u64,
        chunk: &Chunk,
    ) {
        match site.space {
            Space::Shared => self.store_shared(warp, site, lane, address, chunk),
            Space::Global => self.store_global(warp, site, lane, address, chunk),
            Space::Local => {
                if let Some(offset) = self.flat_offset(warp, site, lane, address) {
                    warp.local.store(lane, offset, site.bytes as usize, chunk);
                }
            }
            space => {
                let place = Some((space, address));
                self.report(HazardKind::OutOfBounds, site.inst, warp.index, lane, place, || {
                    "stores to read-only memory".into()
                });
            }
        }
    }

    #[inline(always)]
    pub(super) fn store_shared(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        chunk: &Chunk,
    ) {
        let size = site.bytes as usize;
        let Some(offset) = self.shared_offset(warp, site, lane, address) else { return };
        if self.facts.context.options.checks.races {
            let access = plain(warp, site, lane);
            if self.collected.is_some() {
                self.doubt_readers(&access, Space::Shared, offset as u64, address, size as u64);
            }
            let shared = &self.shared.bytes;
            let forgiven =
                |c: &Conflict| same_store(c, &access) && load_bytes(shared, offset, size) == *chunk;
            if let Some((c, at)) = self.shared.shadow.write_unless(offset, size, &access, forgiven) {
                let place = (Space::Shared, self.facts.shared_address(at.max(offset)));
                self.report_conflict(site.inst, warp.index, lane, true, &c, place);
            }
        }
        store_bytes(&mut self.shared.bytes, offset, size, chunk);
    }

    fn store_global(&mut self, warp: &Warp, site: &Site, lane: usize, address: u64, chunk: &Chunk) {
        let Site { inst, bytes, .. } = *site;
        let bytes = bytes as usize;
        let Some((region, offset)) = self.global_region(warp, site, lane, address) else { return };
        let context = self.facts.context;
        let place = (Space::Global, address);
        if !region.writable() {
            return self.report_read_only(inst, warp.index, lane, address);
        }
        if context.options.checks.races {
            let access = plain(warp, site, lane);
            if self.collected.is_some() {
                self.doubt_readers(&access, Space::Global, 0, address, bytes as u64);
            }
            let forgiven = |c: &Conflict| same_store(c, &access) && region.load(offset, bytes) == *chunk;
            let found = self.order.grid.shadow.write_unless(address, bytes as u64, &access, forgiven);
            if let Some(c) = found {
                self.report_conflict(inst, warp.index, lane, true, &c, place);
            }
            if context.apart {
                let granule = context.program.granules[1] as usize;
                let other =
                    region.note_write(offset..offset + bytes, granule, self.facts.cluster as u32, inst.pc);
                self.report_foreign(inst, warp.index, lane, "writes", other, address);
            }
        }
        if site.strength != Strength::Weak {
            self.note_replaced(warp, site, lane, address, (region.load(offset, bytes), false));
        }
        region.store(offset, bytes, chunk);
    }

    pub(super) fn report_read_only(&mut self, inst: &Inst, warp: usize, lane: usize, address: u64) {
        self.report(HazardKind::OutOfBounds, inst, warp, lane, Some((Space::Global, address)), || {
            "stores to a buffer that is read-only in the launch contract".into()
        });
    }

    /// Checks an access and returns its offset from the start of shared memory.
    #[inline(always)]
    pub(super) fn shared_offset(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
    ) -> Option<usize> {
        let layout = &self.facts.context.program.layout;
        let rank = (address >> RANK_SHIFT) as usize;
        let own = rank == self.rank(warp);
        if !own && (rank >= self.facts.ctas.len() || site.inst.space == Space::Shared) {
            self.outside_of_window(warp, site, lane, address);
            return None;
        }
        let extent = (SHARED_BASE, layout.shared_extent as usize);
        let inside = address & ((1 << RANK_SHIFT) - 1);
        let offset = self.checked_offset(warp, site, lane, inside, extent)?;
        if !own {
            self.visit(warp, site.inst, lane, rank, address);
        }
        if site.bytes > layout.shared_align {
            self.check_promise(warp, site, lane, offset as u32);
        }
        Some(rank * self.facts.span + offset)
    }

    /// Checks an access and returns its offset from the start of local, constant or parameter memory.
    fn flat_offset(&mut self, warp: &Warp, site: &Site, lane: usize, address: u64) -> Option<usize> {
        let context = self.facts.context;
        let extent = match site.space {
            Space::Local => (LOCAL_BASE, warp.local.bytes()),
            Space::Const => (CONST_BASE, context.program.layout.constants.len()),
            _ => (0, context.parameters.bytes.len()),
        };
        self.checked_offset(warp, site, lane, address, extent)
    }

    #[inline(always)]
    fn checked_offset(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        (base, size): (u64, usize),
    ) -> Option<usize> {
        let bytes = u64::from(site.bytes);
        let offset = address.wrapping_sub(base);
        if offset.saturating_add(bytes) > size as u64 {
            self.out_of_bounds(warp, site, lane, address, size);
            return None;
        }
        if address & (bytes - 1) != 0 {
            self.misaligned(warp, site, lane, address);
            return None;
        }
        Some(offset as usize)
    }

    /// Checks an access and returns its buffer and the offset in it.
    #[inline(always)]
    pub(super) fn global_region(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
    ) -> Option<(&'a Region<'a>, usize)> {
        let bytes = site.bytes as usize;
        match self.facts.context.global.find(address) {
            Some((region, offset)) if offset >= 0 && offset as usize + bytes <= region.bytes => {
                if address & (bytes as u64 - 1) != 0 {
                    self.misaligned(warp, site, lane, address);
                    return None;
                }
                self.check_grid_wait(warp, site.inst, lane, address);
                Some((region, offset as usize))
            }
            found => {
                let size = found.map_or(0, |(region, _)| region.bytes);
                self.out_of_bounds(warp, site, lane, address, size);
                None
            }
        }
    }

    #[cold]
    fn outside_of_window(&mut self, warp: &Warp, site: &Site, lane: usize, address: u64) {
        self.lose(site);
        let (rank, ctas, own) = (address >> RANK_SHIFT, self.facts.ctas.len(), self.rank(warp));
        self.report(HazardKind::OutOfBounds, site.inst, warp.index, lane, Some((Space::Shared, address)), || {
            if rank < ctas as u64 {
                format!("the CTA of rank {own} uses a shared address of the CTA of rank {rank}: that needs .shared::cluster")
            } else {
                format!("accesses {} bytes outside shared memory, at {address:#x}", site.bytes)
            }
        });
    }

    /// Records that an access was not carried out.
    fn lose(&mut self, site: &Site) {
        if !matches!(site.inst.op, Op::Ld(_) | Op::Ldmatrix(_) | Op::WmmaLoad(_)) {
            self.log.findings.lost_shared |= site.space == Space::Shared;
            self.log.findings.lost_global |= site.space == Space::Global;
        }
    }

    #[cold]
    fn out_of_bounds(&mut self, warp: &Warp, site: &Site, lane: usize, address: u64, size: usize) {
        self.lose(site);
        let place = Some((site.space, address));
        let bytes = site.bytes;
        let dynamic = self.facts.context.program.layout.dynamic.filter(|(start, _)| {
            site.space == Space::Shared && inside(address) >= SHARED_BASE + u64::from(*start)
        });
        self.report(HazardKind::OutOfBounds, site.inst, warp.index, lane, place, || {
            if let Some((_, given)) = dynamic {
                format!(
                    "accesses {bytes} bytes beyond the dynamic shared memory, of which the launch gives {given} bytes"
                )
            } else if size == 0 {
                format!("accesses {bytes} bytes at {address:#x}, where no buffer or variable is")
            } else {
                format!("accesses {bytes} bytes beyond the bounds of {size} bytes")
            }
        });
    }

    /// Reports an access that is wider than the alignment of its variable. The address is aligned only
    /// because of where ptxas placed the variable.
    fn check_promise(&mut self, warp: &Warp, site: &Site, lane: usize, offset: u32) {
        let Some(variable) = self.facts.context.program.layout.shared_variable(offset) else { return };
        let bytes = site.bytes;
        if bytes <= variable.align {
            return;
        }
        let place = Some((Space::Shared, SHARED_BASE + u64::from(offset)));
        self.report(HazardKind::UnpromisedAlignment, site.inst, warp.index, lane, place, || {
            let SharedVariable { name, align, .. } = variable;
            format!(
                "accesses {bytes} bytes at once in `{name}`, whose declaration promises a multiple of {align}: it \
                 depends on where ptxas places the variable; declare it with __align__({bytes})"
            )
        });
    }

    #[cold]
    fn misaligned(&mut self, warp: &Warp, site: &Site, lane: usize, address: u64) {
        self.lose(site);
        let place = Some((site.space, address));
        let bytes = site.bytes;
        let offset = (address & ((1 << RANK_SHIFT) - 1)).wrapping_sub(SHARED_BASE);
        let layout = &self.facts.context.program.layout;
        let variable = (site.space == Space::Shared)
            .then(|| layout.shared_variable(offset as u32))
            .flatten()
            .filter(|variable| variable.align < bytes);
        self.report(HazardKind::Misaligned, site.inst, warp.index, lane, place, || {
            let what =
                format!("accesses {bytes} bytes at address {address:#x}, which is not a multiple of {bytes}");
            match variable {
                None => what,
                Some(SharedVariable { name, align, .. }) => format!(
                    "{what}; the declaration of `{name}` promises a multiple of {align}: declare it with \
                     __align__({bytes})"
                ),
            }
        });
    }
}

/// Hashes the values of a poll to detect a change (the multiplier is that of FxHash).
pub(super) fn mix(hash: u64, value: u64) -> u64 {
    (hash.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95)
}

/// The offsets of the elements. A vector access is a set of accesses to its elements (PTX ISA, "Vector
/// Data-types" of the memory consistency model).
fn elements(m: &Memory) -> impl Iterator<Item = u64> {
    (0..u64::from(m.bytes())).step_by(m.ty.bytes() as usize)
}

/// A weak access by one lane.
#[inline(always)]
pub(super) fn plain<'w>(warp: &'w Warp, site: &Site, lane: usize) -> Access<'w> {
    Access {
        view: &warp.view,
        actor: warp.index,
        epoch: warp.view.now(),
        proxy: None,
        lanes: 1 << lane,
        pc: site.inst.pc,
        strength: site.strength,
        width: site.inst.width,
        touch: Touch::Plain,
    }
}

/// Whether the conflicting write is by the same instruction, of another thread of the same CTA. If the values
/// are equal too, the order does not matter. Compilers rely on this (Triton, if a layout assigns the same
/// element to several threads).
fn same_store(c: &Conflict, a: &Access) -> bool {
    let Actors { warps, ctas, .. } = a.view.actors();
    let warp = c.agent.wrapping_sub(a.view.home()) as usize;
    let same_cta = warp < ctas * warps && warp / warps == a.actor / warps;
    c.wrote && c.touch == Touch::Plain && c.pc == a.pc && same_cta
}
