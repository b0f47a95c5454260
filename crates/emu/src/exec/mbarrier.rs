//! Executes the instructions of mbarrier objects.

use ptx::{Mbarrier, MbarrierOp, MemSem, Space};

use super::Env;
use super::access::{Site, addresses, plain};
use super::registers::for_lanes;
use super::run::Flow;
use super::units::{Arrival, Clocks, LIMIT, inside, reaches_peers};
use super::warp::{Split, Warp};
use crate::decode::Inst;
use crate::memory::{RANK_SHIFT, resolve};
use crate::order::{Access, Agent, ProxySpace, Strength, Touch};
use crate::report::{HazardKind, Schedule};
use crate::trace::{Detail, MbarrierPlace};

/// Bytes of an object.
const BYTES: usize = 8;

/// The agent that advances a phase.
#[derive(Clone, Copy)]
pub(super) struct Cause<'i> {
    pub inst: &'i Inst,
    pub warp: usize,
    pub lane: usize,
}

impl Env<'_> {
    pub(super) fn mbarrier(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        m: Mbarrier,
        mask: u32,
    ) -> Flow {
        if m.op == MbarrierOp::PendingCount {
            let counts = warp.registers.get64(inst.s[0]).map(|state| state as u32);
            warp.registers.set32(inst.d[0], mask, &counts);
            return Flow::Next;
        }
        let places = addresses(&warp.registers, inst).map(|a| resolve(a).1);
        let lane = mask.trailing_zeros() as usize;
        let is_one = together(&places, mask, lane) == mask;
        let checked = || self.mbarriers.checked(places[lane], mask, warp.view.now());
        let wait = (m.op.waits() && is_one).then(checked);
        let mut good = 0;
        if wait.is_some() && warp.waited == wait {
            good = mask;
        } else {
            for_lanes(mask, |lane| {
                self.check_own(warp, inst, m, lane, places[lane]);
                let inside = self.shared_offset(warp, &object_site(inst), lane, places[lane]).is_some();
                good |= u32::from(
                    inside && (m.op == MbarrierOp::Init || self.check_made(warp, inst, lane, places[lane])),
                ) << lane;
            });
        }
        if m.op.waits() {
            warp.waited = wait.filter(|_| good == mask);
            return self.test_wait(warp, split, inst, m, good, mask, &places);
        }
        let operand = |l: usize| warp.registers.lane(inst.s[0], l) as u32;
        let operands: [u32; 32] = std::array::from_fn(|l| if inst.s[0].is_some() { operand(l) } else { 1 });
        let mut states = [0u64; 32];
        // Threads that arrive together release together only if they arrive at the same object.
        let mut released: (u32, Option<Clocks>) = (0, None);
        for_lanes(good, |lane| {
            if m.op.arrives() && released.0 >> lane & 1 == 0 {
                let here = together(&places, good, lane);
                released = (here, Some(self.released(warp, m, here)));
            }
            self.note_arrival(m.op, places[lane], operands[lane]);
            let (address, n, cause) = (places[lane], operands[lane], Cause { inst, warp: warp.index, lane });
            match m.op {
                MbarrierOp::Init => self.init(warp, cause, address, n),
                MbarrierOp::Inval => self.end(warp, cause, address),
                MbarrierOp::ExpectTx => self.expect_bytes(cause, address, n),
                MbarrierOp::CompleteTx => self.complete_bytes(cause, address, n, false),
                _ => {
                    let announces = m.op.expects_bytes();
                    let (count, bytes) = if announces { (1, n) } else { (n, 0) };
                    let dropped = if m.op.drops() { count } else { 0 };
                    if !(1..=LIMIT).contains(&count) {
                        self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                            format!("{count} arrivals in one instruction: expected 1 to {LIMIT}")
                        });
                    }
                    let arrival = Arrival { count, dropped, bytes, clocks: released.1.as_ref() };
                    states[lane] = self.arrive_at(cause, address, &arrival);
                    if matches!(m.op, MbarrierOp::ArriveNoComplete | MbarrierOp::ArriveDropNoComplete) {
                        self.check_incomplete(cause, address, states[lane]);
                    }
                }
            }
        });
        warp.registers.set64(inst.d[0], mask, &states);
        split.polls = 0;
        Flow::Next
    }

    /// Reports an operation on an object of another CTA, if the operation is defined for the own CTA's
    /// objects only (PTX ISA, "mbarrier"). If the address is not generic, other checks refuse that.
    fn check_own(&mut self, warp: &Warp, inst: &Inst, m: Mbarrier, lane: usize, address: u64) {
        let rank = (address >> RANK_SHIFT) as usize;
        let remote = matches!(m.op, MbarrierOp::ExpectTx | MbarrierOp::CompleteTx)
            || (m.op.arrives() && !inst.d[0].is_some());
        if inst.space != Space::Generic || remote || rank == self.rank(warp) || rank >= self.facts.ctas.len()
        {
            return;
        }
        let cause = Cause { inst, warp: warp.index, lane };
        self.report_at(HazardKind::OutOfBounds, cause, address, || {
            format!(
                "uses an mbarrier of the CTA of rank {rank}: only arrivals without a state, expect_tx and \
                 complete_tx may do that"
            )
        });
    }

    /// The accesses that an arrival of lanes releases: all earlier ones or, if it is relaxed, those that
    /// fences of the lanes cover.
    fn released(&mut self, warp: &mut Warp, m: Mbarrier, lanes: u32) -> Clocks {
        let far = reaches_peers(m.scope) && self.facts.actors.ctas > 1;
        if m.sem == MemSem::Relaxed {
            let near = warp.fences.released_to(&mut warp.view, lanes, Strength::Cta);
            let released = || warp.fences.released_to(&mut warp.view, lanes, Strength::Cluster);
            return Clocks { near, far: far.then(released) };
        }
        let near = warp.view.release(lanes);
        Clocks { far: far.then(|| near.clone()), near }
    }

    /// Records an arrival for the trace. Objects are identified by their address without the rank of the CTA.
    fn note_arrival(&mut self, op: MbarrierOp, address: u64, n: u32) {
        let Some(recorder) = &mut self.log.recorder else { return };
        let at = MbarrierPlace::new(inside(address));
        recorder.note(match op {
            MbarrierOp::Init => Detail::Expect { at, count: n },
            MbarrierOp::ExpectTx => Detail::Arrive { at, count: 0, bytes: n },
            _ if op.expects_bytes() => Detail::Arrive { at, count: 1, bytes: n },
            _ if op.arrives() => Detail::Arrive { at, count: n.min(255) as u8, bytes: 0 },
            _ => return,
        });
    }

    fn init(&mut self, warp: &Warp, cause: Cause, address: u64, count: u32) {
        if !(1..=LIMIT).contains(&count) {
            self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                format!("an mbarrier for {count} arrivals: there may be 1 to {LIMIT}")
            });
        }
        if let Some(line) = self.mbarriers.made_at(address) {
            self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                format!("initialises the mbarrier of line {line} again: `mbarrier.inval` must end it first")
            });
        }
        self.replace(warp, cause, address, Touch::Mbarrier);
        let maker = (warp.view.agent(), 1 << cause.lane, warp.view.now());
        self.mbarriers.init(address, count, self.facts.actors, maker, cause.inst.line);
    }

    fn end(&mut self, warp: &Warp, cause: Cause, address: u64) {
        self.replace(warp, cause, address, Touch::MbarrierEnd);
        self.mbarriers.end(address);
    }

    /// Ends an object, if there is one in this memory. Ending it counts as a write that may race with uses of
    /// the object.
    fn replace(&mut self, warp: &Warp, cause: Cause, address: u64, touch: Touch) {
        if self.mbarriers.has_flights(address) {
            self.report_at(HazardKind::TransactionMismatch, cause, address, || {
                "initialises or ends an mbarrier that copies on their way will complete on".into()
            });
        }
        if !self.facts.context.options.checks.races {
            return;
        }
        let site = Site { strength: Strength::Weak, ..object_site(cause.inst) };
        let access = Access { touch, ..plain(warp, &site, cause.lane) };
        if let Some((c, _)) = self.shared.shadow.write(self.facts.shared_offset(address), BYTES, &access) {
            self.report_conflict(cause.inst, cause.warp, cause.lane, true, &c, (Space::Shared, address));
        }
    }

    /// Records a use of the object, so that initialising or ending the object can race with it. Uses do not
    /// race with each other. [`Env::check_made`] checks that a use comes after the initialisation.
    fn note_use(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) {
        let access = Access { touch: Touch::Mbarrier, ..plain(warp, &object_site(inst), lane) };
        self.shared.shadow.note_read(self.facts.shared_offset(address), BYTES, &access);
    }

    /// Checks that there is an object which the lane may use: its initialisation must have happened before.
    pub(super) fn check_made(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) -> bool {
        let cause = Cause { inst, warp: warp.index, lane };
        let Some((agent, maker, epoch)) = self.mbarriers.maker(address) else {
            self.report_at(HazardKind::UninitialisedRead, cause, address, || {
                "uses an mbarrier that was not initialised".into()
            });
            return false;
        };
        if !self.facts.context.options.checks.races {
            return true;
        }
        self.note_use(warp, inst, lane, address);
        if epoch <= warp.view.known_to_all(agent.wrapping_sub(warp.view.home()) as usize)
            || warp.view.knows_agent(lane, agent, maker, epoch)
            || self.knows_initialisation(warp, lane, address)
        {
            return true;
        }
        let threads = vec![self.thread(warp.index, lane), self.thread_of(agent, maker.trailing_zeros())];
        let (place, line) = (Some(self.facts.place(Space::Shared, address)), self.mbarriers.made_at(address));
        self.log.findings.report(HazardKind::Race, inst.line, line, || {
            (threads, place, "uses an mbarrier, and nothing orders that after its initialisation".into())
        });
        true
    }

    /// Whether a `fence.mbarrier_init` or a proxy fence comes between the initialisation and the lane's
    /// present instruction.
    fn knows_initialisation(&self, warp: &Warp, lane: usize, address: u64) -> bool {
        let Some((agent, maker, epoch)) = self.mbarriers.maker(address) else { return true };
        let home = warp.view.home();
        let maker_warp = agent.wrapping_sub(home) as usize;
        [self.facts.actors.initialised(maker_warp), maker_warp + self.facts.actors.fenced(ProxySpace::Shared)]
            .into_iter()
            .any(|actor| {
                epoch <= warp.view.known_to_all(actor)
                    || warp.view.was_told(lane, home + actor as Agent, maker, epoch)
            })
    }

    /// `fence.mbarrier_init`: afterwards other CTAs may use the objects that these lanes initialised.
    pub(super) fn fence_initialisations(&mut self, warp: &mut Warp, mask: u32) {
        if self.facts.context.program.asynchronous {
            warp.view.show(mask, self.facts.actors.initialised(warp.index));
        }
    }

    fn expect_bytes(&mut self, cause: Cause, address: u64, bytes: u32) {
        if let Some(bytes) = self.mbarriers.expect_bytes(address, bytes) {
            self.report_at(HazardKind::TransactionMismatch, cause, address, || {
                format!("{bytes} bytes expected of one phase: at most {LIMIT}")
            });
        }
    }

    /// Counts bytes that have arrived. `by_copy` states that a copy in flight wrote them.
    pub(super) fn complete_bytes(&mut self, cause: Cause, address: u64, bytes: u32, by_copy: bool) {
        if let Some(bytes) = self.mbarriers.deliver(address, bytes, by_copy) {
            self.report_at(HazardKind::TransactionMismatch, cause, address, || {
                format!("{bytes} bytes more than expected have come in one phase")
            });
        }
        self.complete_phase(cause, address);
    }

    /// Counts an arrival. Returns the previous state: the phase and the number of pending arrivals.
    pub(super) fn arrive_at(&mut self, cause: Cause, address: u64, arrival: &Arrival) -> u64 {
        self.expect_bytes(cause, address, arrival.bytes);
        // The object may belong to another CTA of the same cluster, whose clocks have the same home.
        let (home, rank) = (self.facts.home(), self.facts.rank(cause.warp));
        let Some((state, surplus)) = self.mbarriers.arrive(address, home, rank, arrival) else { return 0 };
        if surplus {
            let (count, pending) = (arrival.count, state as u32);
            self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                format!(
                    "{count} arrivals at an mbarrier that waits for {pending} more: the count is too small"
                )
            });
        }
        self.complete_phase(cause, address);
        state
    }

    /// Reports an arrival with `.noComplete` that completes the phase, because its effect is undefined.
    /// `before` is the state before the arrival.
    fn check_incomplete(&mut self, cause: Cause, address: u64, before: u64) {
        if self.mbarriers.phase(address).is_some_and(|phase| phase != before >> 32) {
            self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                "an arrival with .noComplete completes the phase of the mbarrier".into()
            });
        }
    }

    fn complete_phase(&mut self, cause: Cause, address: u64) {
        let flights = self.mbarriers.complete_phase(address, self.facts.home(), self.facts.actors);
        if flights > 0 {
            let lines = match self.lines_of_flights(address) {
                lines if lines.is_empty() => lines,
                lines => format!(" ({lines})"),
            };
            self.report_at(HazardKind::TransactionMismatch, cause, address, || {
                format!("completes the phase of an mbarrier before {flights} copies that count on it{lines}: their bytes were not expected")
            });
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the lanes that may and those that ask differ")]
    fn test_wait(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        m: Mbarrier,
        good: u32,
        mask: u32,
        places: &[u64; 32],
    ) -> Flow {
        // A wait on an address without an mbarrier was reported, and succeeds at once.
        let mut done = mask & !good;
        let mut found: Option<(u64, u64)> = None;
        let by_parity = m.op.by_parity();
        for_lanes(good, |lane| {
            let token = warp.registers.lane(inst.s[0], lane);
            if by_parity && token > 1 {
                self.report_parity(Cause { inst, warp: warp.index, lane }, places[lane], token);
            }
            // Most waits are on one object.
            let known = found.filter(|(address, _)| *address == places[lane]);
            let phase = || Some((places[lane], self.mbarriers.phase(places[lane])?));
            found = known.or_else(phase);
            let Some((_, phase)) = found else { return };
            let complete = if by_parity { phase & 1 != token & 1 } else { phase != token >> 32 };
            done |= u32::from(complete) << lane;
            if !by_parity && phase.wrapping_sub(token >> 32) > 1 {
                self.report_stale(Cause { inst, warp: warp.index, lane }, places[lane], phase, token >> 32);
            }
        });
        warp.registers.set_pred(inst.d[0], mask, done);
        if let Some(recorder) = &mut self.log.recorder {
            let lane = mask.trailing_zeros() as usize;
            let token = warp.registers.lane(inst.s[0], lane);
            let parity = (if by_parity { token } else { token >> 32 }) & 1 == 1;
            let at = MbarrierPlace::new(inside(places[lane]));
            recorder.note(Detail::Wait { at, parity, done: done == mask });
        }
        let mut left = done & good;
        while left != 0 {
            // Lanes that wait on the same object acquire its clocks together. After a relaxed wait their next
            // fence acquires them.
            let lane = left.trailing_zeros() as usize;
            let (address, here) = (places[lane], together(places, left, lane));
            left &= !here;
            if let Some(completed) = self.mbarriers.completed(address) {
                for (strength, clock) in completed.reaching(warp.index / self.facts.actors.warps, m.scope) {
                    if m.sem == MemSem::Relaxed {
                        warp.fences.see(warp.view.home(), here, strength, clock);
                    } else {
                        warp.view.acquire(here, warp.live, clock);
                    }
                }
            }
        }
        if done == mask {
            split.polls = 0;
            return Flow::Next;
        }
        // Copies complete only after an unsuccessful wait, so that no kernel can rely on an earlier
        // completion.
        let mut left = mask & !done;
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            left &= !together(places, left, lane);
            if !self.still_flies(places[lane]) {
                self.land_on(places[lane]);
            }
        }
        match self.poll(warp, split, u64::from(inst.pc)) {
            _ if matches!(m.op, MbarrierOp::TryWait | MbarrierOp::TryWaitParity) => Flow::Yield,
            flow => flow,
        }
    }

    #[cold]
    fn report_parity(&mut self, cause: Cause, address: u64, parity: u64) {
        self.report_at(HazardKind::BarrierDivergence, cause, address, || {
            format!("waits for a phase of parity {parity}: the parity must be 0 or 1")
        });
    }

    /// Reports a wait for a phase that is neither the present one nor the one before it. PTX defines waits
    /// for these two alone (PTX ISA, "mbarrier.test_wait, mbarrier.try_wait").
    #[cold]
    fn report_stale(&mut self, cause: Cause, address: u64, phase: u64, waited: u64) {
        self.report_at(HazardKind::BarrierDivergence, cause, address, || {
            format!(
                "waits with the state of phase {waited} of an mbarrier that is in phase {phase}: the state \
                 must be of this phase or of the one before"
            )
        });
    }

    /// Whether the copies to an mbarrier stay in flight after this unsuccessful wait.
    fn still_flies(&mut self, address: u64) -> bool {
        matches!(self.facts.context.options.schedule, Schedule::Random | Schedule::Lagging)
            && self.mbarriers.still_flies(address, self.facts.cluster == 0, &mut self.rng)
    }

    /// Performs the arrivals of `cp.async.mbarrier.arrive`.
    pub(super) fn arrive_for_copies(&mut self, warp: &mut Warp, inst: &Inst, places: &[u64; 32], mask: u32) {
        let mut left = mask;
        while left != 0 {
            let here = together(places, left, left.trailing_zeros() as usize);
            left &= !here;
            let clocks = Clocks { near: warp.view.release(here), far: None };
            for_lanes(here, |lane| {
                if self.check_made(warp, inst, lane, places[lane]) {
                    let arrival = Arrival { count: 1, dropped: 0, bytes: 0, clocks: Some(&clocks) };
                    self.arrive_at(Cause { inst, warp: warp.index, lane }, places[lane], &arrival);
                }
            });
        }
    }

    pub(super) fn report_at(
        &mut self,
        kind: HazardKind,
        cause: Cause,
        address: u64,
        message: impl FnOnce() -> String,
    ) {
        self.report(kind, cause.inst, cause.warp, cause.lane, Some((Space::Shared, address)), message);
    }
}

/// The lanes of `mask` that use the same object as `lane`.
fn together(places: &[u64; 32], mask: u32, lane: usize) -> u32 {
    let mut here = 0;
    for_lanes(mask, |l| here |= u32::from(places[l] == places[lane]) << l);
    here
}

fn object_site(inst: &Inst) -> Site<'_> {
    Site { inst, space: Space::Shared, bytes: BYTES as u32, strength: Strength::Cta }
}
