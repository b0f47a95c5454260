//! Follows undefined values, and values of racing reads, until an instruction depends on one.

use ptx::Space;

use super::Env;
use super::access::Site;
use super::registers::for_lanes;
use super::units::{Follow, inside};
use super::warp::Warp;
use crate::decode::{Inst, UndefinedRule, Watch};
use crate::memory::{Chunk, RANK_SHIFT, SHARED_BASE, load_bytes, store_bytes};
use crate::order::{Access, Agent, Conflict, Unordered};
use crate::report::HazardKind;

impl Env<'_> {
    /// Called before an instruction that touches watched registers. `all` are the lanes that reached it,
    /// `mask` the lanes that execute it.
    #[inline(never)]
    pub(super) fn watch(&mut self, warp: &mut Warp, inst: &Inst, watch: &Watch, all: u32, mask: u32) {
        watch.joins.iter().for_each(|join| warp.undefined.leave(join, all));
        match (watch.guard, watch.region) {
            (Some(guard), Some(region)) => {
                let lanes = warp.undefined.of(guard) & all;
                if lanes != 0 {
                    let origin = warp.undefined.origin(&[guard], lanes, inst.line);
                    warp.undefined.enter(region, lanes, origin);
                }
            }
            (Some(guard), None) => self.check_defined(warp, inst, guard, all),
            (None, _) => {}
        }
        if mask == 0 {
            return;
        }
        for &suspect in &watch.effect {
            self.check_defined(warp, inst, suspect, mask);
        }
        let undefined = &mut warp.undefined;
        let origin = undefined.origin(&watch.data, mask, inst.line);
        for (suspect, bytes) in &watch.bytes {
            let lanes = |parts: &Vec<(u32, u8)>| {
                parts.iter().fold(0, |set, (s, byte)| set | undefined.lanes[*s as usize][usize::from(*byte)])
            };
            let bytes = bytes.each_ref().map(lanes);
            undefined.set_bytes(&[*suspect], mask, bytes, origin);
        }
        if !watch.bytes.is_empty() {
            return;
        }
        let predicate = |at: usize| warp.registers.get_pred(inst.s[at], inst.negated, at as u32);
        let lanes = match &watch.choice {
            Some(UndefinedRule::Select(slots)) => {
                let p = predicate(2);
                let [a, b, of_p] = slots.map(|s| s.map_or(0, |s| undefined.of(s)));
                a & p | b & !p | of_p
            }
            Some(UndefinedRule::Join { sides, decides }) => {
                let [a, b] = sides.each_ref().map(|side| {
                    let of = undefined.any(&side.suspects);
                    let value = side.operand.map(|at| predicate(at.into()));
                    (of, value.map_or(0, |value| !of & if *decides { value } else { !value }))
                });
                (a.0 | b.0) & !a.1 & !b.1
            }
            None => undefined.any(&watch.data),
        };
        undefined.set(&watch.defines, mask, lanes, origin);
    }

    /// Called after a store in a run that follows loads. Its values are not among the effects of the
    /// instruction then. Where lanes store different values to one place, which value stays is undefined.
    #[cold]
    pub(super) fn follow_store(
        &mut self,
        warp: &mut Warp,
        site: &Site,
        lanes: u32,
        places: &[u64; 32],
        chunks: &[Chunk; 32],
    ) {
        let context = self.facts.context;
        let values: &[u32] =
            site.inst.watched.map_or(&[], |watch| &context.program.watches[watch as usize].data);
        if matches!(context.follow, Follow::Values(_)) && site.space == Space::Local {
            warp.undefined.local |= warp.undefined.any(values) & lanes;
            return;
        }
        if !(matches!(context.follow, Follow::Copies) && site.space == Space::Shared) {
            values.iter().for_each(|suspect| self.check_defined(warp, site.inst, *suspect, lanes));
            return;
        }
        let undefined = warp.undefined.any(values);
        for_lanes(lanes, |lane| {
            self.undefined_bytes.store(places[lane], site.bytes.into(), undefined >> lane & 1 == 1);
        });
        let bytes = site.bytes as usize;
        for_lanes(lanes, |lane| {
            let Some(offset) = self.shared_offset(warp, site, lane, places[lane]) else { return };
            let kept = load_bytes(&self.shared.bytes, offset, bytes);
            let words =
                (places[lane]..).step_by(4).zip(kept.iter().zip(&chunks[lane])).take(bytes.div_ceil(4));
            for (word, _) in words.filter(|(_, (kept, own))| kept != own) {
                self.undefined_bytes.store(word, bytes.min(4) as u64, true);
            }
        });
    }

    /// In a run that follows copies: the lanes that store to a place of shared memory at which a lower lane
    /// stores by the same instruction. That they race is known.
    pub(super) fn meeting_lanes(&self, site: &Site, lanes: u32, places: &[u64; 32]) -> u32 {
        if !(matches!(self.facts.context.follow, Follow::Copies) && site.space == Space::Shared) {
            return 0;
        }
        let is_active = |lane: &usize| lanes >> lane & 1 == 1;
        let meets = |lane: usize| (0..lane).filter(is_active).any(|lower| places[lower] == places[lane]);
        (0..32).filter(is_active).fold(0, |set, lane| set | u32::from(meets(lane)) << lane)
    }

    /// Stores to shared memory without a look at other accesses.
    #[cold]
    pub(super) fn overwrite_shared(
        &mut self,
        warp: &Warp,
        site: &Site,
        lane: usize,
        address: u64,
        chunk: &Chunk,
    ) {
        if let Some(offset) = self.shared_offset(warp, site, lane, address) {
            store_bytes(&mut self.shared.bytes, offset, site.bytes as usize, chunk);
        }
    }

    /// Called when a read races with an earlier write.
    #[cold]
    pub(super) fn doubt_read(
        &mut self,
        access: &Access,
        conflict: &Conflict,
        space: Space,
        address: u64,
        bytes: u64,
    ) {
        let agent = access.agent();
        if let Some(doubts) = self.collected.as_mut().filter(|_| conflict.wrote) {
            doubts.add(space, address, bytes, Unordered { agent, lanes: access.lanes, from: access.epoch });
        }
    }

    /// Called before a write: collects the reads that are not ordered before it.
    #[inline(always)]
    pub(super) fn doubt_readers(
        &mut self,
        access: &Access,
        space: Space,
        offset: u64,
        address: u64,
        bytes: u64,
    ) {
        let Some(mut doubts) = self.collected.take() else { return };
        let mut add = |readers| doubts.add(space, address, bytes, readers);
        match space {
            Space::Shared => {
                self.shared.shadow.unordered_readers(offset as usize, bytes as usize, access, &mut add)
            }
            _ => self.order.grid.shadow.unordered_readers(address, bytes, access, &mut add),
        }
        self.collected = Some(doubts);
    }

    /// Called after a load: marks the values that doubtful reads returned, or undefined bytes.
    #[cold]
    pub(super) fn mark_doubted(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        spaces: &[(Space, u32)],
        bytes: u64,
        places: &[u64; 32],
    ) {
        let Some(watch) = inst.watched else { return };
        let local = spaces.iter().filter(|(space, _)| *space == Space::Local);
        let mut doubted = local.fold(0, |set, (_, lanes)| set | lanes) & warp.undefined.local;
        for &(space, lanes) in
            spaces.iter().filter(|(space, _)| matches!(space, Space::Shared | Space::Global))
        {
            for_lanes(lanes, |lane| {
                let found = self.doubted_lanes(warp, space, places[lane], bytes);
                doubted |= found & 1 << lane;
            });
        }
        if doubted != 0 {
            let watch = &self.facts.context.program.watches[watch as usize];
            warp.undefined.doubt(watch, doubted, inst.line);
        }
    }

    /// Called after an `ldmatrix`: marks the lanes that receive a part of a doubtful row. Lane 8·matrix + row
    /// holds the address of a row.
    #[cold]
    pub(super) fn mark_doubted_rows(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        transposed: bool,
        lanes: u32,
        places: &[u64; 32],
    ) {
        let mut rows = 0;
        for_lanes(lanes, |row| {
            let found = self.doubted_lanes(warp, Space::Shared, places[row], 16);
            rows |= u32::from(found != 0) << row;
        });
        let program = self.facts.context.program;
        for (matrix, slot) in program.slots(inst).iter().enumerate() {
            let rows = rows >> (8 * matrix) & 0xff;
            let Some(suspect) = program.suspect(*slot).filter(|_| rows != 0) else { continue };
            let receives = |lane: u32| {
                if transposed { rows >> (2 * (lane % 4)) & 3 != 0 } else { rows >> (lane / 4) & 1 != 0 }
            };
            let lanes = (0..32).fold(0, |set, lane| set | u32::from(receives(lane)) << lane);
            warp.undefined.set_state(suspect, lanes, ([lanes; 8], Some(inst.line)));
        }
    }

    /// The lanes that may not depend on the bytes that they read at an address, in this run.
    fn doubted_lanes(&mut self, warp: &Warp, space: Space, address: u64, bytes: u64) -> u32 {
        let all = |doubted: bool| if doubted { !0 } else { 0 };
        match self.facts.context.follow {
            Follow::Values(doubts) => {
                let agent = warp.view.home() + warp.index as Agent;
                doubts.lanes(space, address, bytes, (agent, warp.view.now()))
            }
            Follow::Copies if space == Space::Shared => {
                all(self.undefined_bytes.any(address, bytes) || self.is_unwritten(address, bytes))
            }
            Follow::Copies | Follow::Collect | Follow::Nothing => 0,
        }
    }

    /// Whether the address lies in the shared memory of the cluster, and no thread has written there.
    fn is_unwritten(&mut self, address: u64, bytes: u64) -> bool {
        let inside = inside(address).wrapping_sub(SHARED_BASE);
        let extent = u64::from(self.facts.context.program.layout.shared_extent);
        let exists = (address >> RANK_SHIFT) < self.facts.ctas.len() as u64
            && inside.saturating_add(bytes) <= extent
            && address.is_multiple_of(bytes);
        exists && !self.shared.shadow.is_written(self.facts.shared_offset(address), bytes as usize)
    }

    /// Reports an instruction that depends on local memory, if a followed value is stored there.
    pub(super) fn check_local(&mut self, warp: &Warp, inst: &Inst, mask: u32) {
        self.report_undefined(warp, inst, warp.undefined.local & mask, inst.line);
    }

    fn check_defined(&mut self, warp: &Warp, inst: &Inst, suspect: u32, mask: u32) {
        let lanes = warp.undefined.of(suspect) & mask;
        self.report_undefined(warp, inst, lanes, warp.undefined.origin(&[suspect], mask, inst.line));
    }

    fn report_undefined(&mut self, warp: &Warp, inst: &Inst, lanes: u32, origin: u32) {
        if lanes == 0 {
            return;
        }
        let other_line = (origin != inst.line).then_some(inst.line);
        let thread = self.thread(warp.index, lanes.trailing_zeros() as usize);
        self.log.findings.report(HazardKind::UninitialisedRead, origin, other_line, || {
            let message = match other_line {
                None => "depends on a register that the thread has not written".to_string(),
                Some(line) => {
                    format!("reads a register that the thread has not written, and line {line} depends on the result")
                }
            };
            (vec![thread], None, message)
        });
    }
}
