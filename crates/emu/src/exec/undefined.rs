//! Follows undefined values, and values of racing reads, until an instruction depends on one.

use ptx::Space;

use super::Env;
use super::access::Site;
use super::registers::for_lanes;
use super::units::Follow;
use super::warp::Warp;
use crate::decode::{Inst, Watch};
use crate::order::{Access, Agent, Conflict};
use crate::report::HazardKind;

impl Env<'_> {
    /// Called before an instruction that touches watched registers. `all` are the lanes that reached it,
    /// `mask` the lanes that execute it.
    #[inline(never)]
    pub(super) fn watch(&mut self, warp: &mut Warp, inst: &Inst, watch: &Watch, all: u32, mask: u32) {
        if let Some(guard) = watch.guard {
            self.check_defined(warp, inst, guard, all);
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
        let lanes = match watch.choice {
            Some(slots) => {
                let p = warp.registers.get_pred(inst.s[2], inst.negated, 2);
                let [a, b, of_p] = slots.map(|s| s.map_or(0, |s| undefined.of(s)));
                a & p | b & !p | of_p
            }
            None => undefined.any(&watch.data),
        };
        undefined.set(&watch.defines, mask, lanes, origin);
    }

    /// Called after a store in a run that follows loads. Its values are not among the effects of the
    /// instruction then.
    #[cold]
    pub(super) fn follow_store(&mut self, warp: &Warp, site: &Site, lanes: u32, places: &[u64; 32]) {
        let context = self.facts.context;
        let values: &[u32] =
            site.inst.watched.map_or(&[], |watch| &context.program.watches[watch as usize].data);
        if !(matches!(context.follow, Follow::Copies) && site.space == Space::Shared) {
            values.iter().for_each(|suspect| self.check_defined(warp, site.inst, *suspect, lanes));
            return;
        }
        let undefined = warp.undefined.any(values);
        for_lanes(lanes, |lane| {
            self.undefined_bytes.store(places[lane], site.bytes.into(), undefined >> lane & 1 == 1);
        });
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
            doubts.add(space, address, bytes, agent, access.lanes);
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
        let mut add = |agent, lanes| doubts.add(space, address, bytes, agent, lanes);
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
        let agent = warp.view.home() + warp.index as Agent;
        let is_doubted = |space: Space, lane: usize| match self.facts.context.follow {
            Follow::Values(doubts) => doubts.lanes(space, places[lane], bytes, agent) >> lane & 1 == 1,
            Follow::Copies if space == Space::Shared => self.undefined_bytes.any(places[lane], bytes),
            Follow::Copies | Follow::Collect | Follow::Nothing => false,
        };
        let mut doubted = 0;
        for &(space, lanes) in
            spaces.iter().filter(|(space, _)| matches!(space, Space::Shared | Space::Global))
        {
            for_lanes(lanes, |lane| doubted |= u32::from(is_doubted(space, lane)) << lane);
        }
        if doubted != 0 {
            let watch = &self.facts.context.program.watches[watch as usize];
            warp.undefined.doubt(watch, doubted, inst.line);
        }
    }

    fn check_defined(&mut self, warp: &Warp, inst: &Inst, suspect: u32, mask: u32) {
        let lanes = warp.undefined.of(suspect) & mask;
        if lanes == 0 {
            return;
        }
        let origin = warp.undefined.origin(&[suspect], mask, inst.line);
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
