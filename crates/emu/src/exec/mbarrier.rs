//! mbarrier objects (PTX ISA, "mbarrier"): counted phases in shared memory, which wait for arrivals and for
//! bytes of asynchronous copies. The contents of an object's 64 bits are opaque; the emulator keeps its own
//! state instead. From `init` to `inval`, nothing else may access these bits (PTX ISA, "Lifecycle of the
//! mbarrier object").

use std::collections::{BTreeMap, HashMap};

use ptx::{Mbarrier, MbarrierOp, MemSem, Scope, Space};
use rand::Rng;

use super::Env;
use super::access::{Site, addresses, plain};
use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, Warp};
use crate::decode::Inst;
use crate::memory::{RANK_SHIFT, SHARED_BASE, resolve};
use crate::order::{Access, Actors, Agent, Clock, Epoch, ProxySpace, Strength, Touch};
use crate::report::{HazardKind, Schedule};
use crate::trace::{Detail, MbarrierPlace};

/// The largest number of arrivals or bytes in a phase: 2^20 − 1 (PTX ISA, "Size and contents of mbarrier
/// object").
const LIMIT: u32 = (1 << 20) - 1;

/// Numbers of unsuccessful waits after which copies complete. One of them is drawn at random for each
/// mbarrier.
const VAIN_WAITS: [u32; 4] = [1, 8, 2, 64];

/// Bytes of an object.
const BYTES: usize = 8;

/// One mbarrier object.
#[derive(Clone, Debug)]
struct Object {
    /// Arrivals that a phase needs, and the number that is still missing.
    expected: u32,
    pending: u32,
    /// Bytes that the phase still expects. Negative if more bytes have arrived than were announced so far.
    bytes: i64,
    phase: u64,
    /// Accesses released by the arrivals of this phase, and by the arrivals of all completed phases.
    arriving: Released,
    completed: Released,
    /// The actor to which the accesses of the copies belong.
    actor: usize,
    /// Number of copies in flight that will complete on the object.
    flights: u32,
    /// The thread that initialised the object, and the time of the initialisation.
    maker: (Agent, u32, Epoch),
    made_at: u32,
}

/// Accesses that arrivals release, by scope. An arrival and a wait synchronise only if the scopes of both
/// contain both threads.
#[derive(Clone, Debug)]
struct Released {
    /// Accesses released to threads of the arriving thread's CTA, by the rank of the CTA in the cluster. Data
    /// of copies is released to all CTAs.
    near: Vec<Clock>,
    /// Accesses released at cluster scope. Threads of other CTAs acquire them by a wait at cluster scope.
    far: Clock,
}

impl Released {
    fn nothing(actors: Actors) -> Released {
        let clock = Clock::new(actors.total());
        Released { near: vec![clock.clone(); actors.ctas], far: clock }
    }

    fn join(&mut self, home: Agent, other: &Released) {
        for (mine, theirs) in self.near.iter_mut().zip(&other.near) {
            mine.join(home, theirs);
        }
        self.far.join(home, &other.far);
    }

    /// A thread of a CTA arrives.
    fn add(&mut self, home: Agent, rank: usize, clocks: &Clocks) {
        self.near[rank].join(home, &clocks.near);
        if let Some(far) = &clocks.far
            && self.near.len() > 1
        {
            self.far.join(home, far);
        }
    }

    /// The clocks that a wait by a thread of a CTA acquires. If the wait is relaxed, a later fence of this
    /// scope acquires them.
    fn reaching(&self, rank: usize, scope: Scope) -> impl Iterator<Item = (Strength, &Clock)> {
        let far = reaches_peers(scope) && self.near.len() > 1;
        let far = far.then_some((Strength::Cluster, &self.far));
        std::iter::once((Strength::Cta, &self.near[rank])).chain(far)
    }
}

/// Whether a scope includes the other CTAs of the cluster.
fn reaches_peers(scope: Scope) -> bool {
    scope != Scope::Cta
}

/// The accesses that an arrival releases to its CTA, and to the other CTAs of the cluster if its scope
/// includes them.
struct Clocks {
    near: Clock,
    far: Option<Clock>,
}

/// An arrival.
struct Arrival<'c> {
    count: u32,
    /// The number by which the arrival count of later phases decreases.
    dropped: u32,
    /// Bytes that the arrival announces.
    bytes: u32,
    clocks: Option<&'c Clocks>,
}

/// A wait of lanes on one object, after which a repeated wait needs no check: the lanes know no less, the
/// object is the same, and their use is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckedWait {
    address: u64,
    lanes: u32,
    /// The epoch in which the use is recorded.
    epoch: Epoch,
    /// [`Mbarriers::changes`] at that time.
    changes: usize,
}

/// The agent that advances a phase.
#[derive(Clone, Copy)]
pub(super) struct Cause<'i> {
    pub inst: &'i Inst,
    pub warp: usize,
    pub lane: usize,
}

/// The objects of a cluster, by address.
#[derive(Debug, Default)]
pub(crate) struct Mbarriers {
    objects: BTreeMap<u64, Object>,
    /// Number of objects initialised so far.
    made: usize,
    /// Number of objects initialised or ended so far.
    changes: usize,
    /// By actor, the phase in which copies complete now.
    phases: HashMap<usize, Epoch>,
    /// By address, the number of further unsuccessful waits before the copies complete.
    vain_waits: HashMap<u64, u32>,
}

impl Mbarriers {
    /// Expects one more arrival in this phase.
    pub fn expect_more(&mut self, address: u64) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.pending += 1;
        }
    }

    /// The actor of an object, and the epoch of accesses that complete on it now.
    pub fn actor(&self, address: u64) -> Option<(usize, Epoch)> {
        let actor = self.objects.get(&address)?.actor;
        Some((actor, self.phases.get(&actor).copied().unwrap_or(1)))
    }

    /// Counts a copy that will complete on an object.
    pub fn depart(&mut self, address: u64) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.flights += 1;
        }
    }

    /// Describes the arrivals and bytes for which a phase still waits.
    pub fn describe(&self, address: u64) -> String {
        let Some(object) = self.objects.get(&address) else { return "which is not initialised".into() };
        let Object { expected, pending, bytes, flights, phase, .. } = *object;
        format!(
            "phase {phase}: {pending} of {expected} arrivals and {bytes} bytes are missing, {flights} copies are on their way"
        )
    }

    /// The objects whose bytes can never balance: their addresses, the lines where they were initialised, and
    /// the bytes.
    pub fn unbalanced(&self) -> impl Iterator<Item = (u64, u32, i64)> {
        let off = |(address, o): (&u64, &Object)| {
            (o.bytes != 0 && o.flights == 0).then_some((*address, o.made_at, o.bytes))
        };
        self.objects.iter().filter_map(off)
    }
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
        let (address, epoch, changes) = (places[lane], warp.view.now(), self.mbarriers.changes);
        let wait = (m.op.waits() && is_one).then_some(CheckedWait { address, lanes: mask, epoch, changes });
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
                MbarrierOp::CompleteTx => self.complete_bytes(cause, address, n, None),
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
        if inst.space != Space::Generic || remote || rank == self.rank(warp) || rank >= self.ctas.len() {
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
        let far = reaches_peers(m.scope) && self.actors.ctas > 1;
        if m.sem == MemSem::Relaxed {
            let near = self.released_by_fences(warp, lanes, Strength::Cta);
            return Clocks {
                near,
                far: far.then(|| self.released_by_fences(warp, lanes, Strength::Cluster)),
            };
        }
        let near = warp.view.release(lanes);
        Clocks { far: far.then(|| near.clone()), near }
    }

    /// Records an arrival for the trace. Objects are identified by their address without the rank of the CTA.
    fn note_arrival(&mut self, op: MbarrierOp, address: u64, n: u32) {
        let Some(recorder) = &mut self.recorder else { return };
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
        if let Some(object) = self.mbarriers.objects.get(&address) {
            let line = object.made_at;
            self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                format!("initialises the mbarrier of line {line} again: `mbarrier.inval` must end it first")
            });
        }
        self.replace(warp, cause, address, Touch::Mbarrier);
        let nothing = Released::nothing(self.actors);
        let actor = self.actors.mbarrier((address >> RANK_SHIFT) as usize, self.mbarriers.made);
        self.mbarriers.made += 1;
        self.mbarriers.changes += 1;
        let object = Object {
            expected: count,
            pending: count,
            bytes: 0,
            phase: 0,
            arriving: nothing.clone(),
            completed: nothing,
            actor,
            flights: 0,
            maker: (warp.view.agent(), 1 << cause.lane, warp.view.now()),
            made_at: cause.inst.line,
        };
        self.mbarriers.objects.insert(address, object);
    }

    fn end(&mut self, warp: &Warp, cause: Cause, address: u64) {
        self.replace(warp, cause, address, Touch::MbarrierEnd);
        self.mbarriers.changes += 1;
        self.mbarriers.objects.remove(&address);
    }

    /// Ends an object, if there is one in this memory. Ending it counts as a write that may race with uses of
    /// the object.
    fn replace(&mut self, warp: &Warp, cause: Cause, address: u64, touch: Touch) {
        if self.mbarriers.objects.get(&address).is_some_and(|o| o.flights > 0) {
            self.report_at(HazardKind::TransactionMismatch, cause, address, || {
                "initialises or ends an mbarrier that copies on their way will complete on".into()
            });
        }
        if !self.context.options.checks.races {
            return;
        }
        let site = Site { strength: Strength::Weak, ..object_site(cause.inst) };
        let access = Access { touch, ..plain(warp, &site, cause.lane) };
        if let Some((c, _)) = self.shadow.write(self.shared_place(address), BYTES, &access) {
            self.report_conflict(cause.inst, cause.warp, cause.lane, true, &c, (Space::Shared, address));
        }
    }

    /// Records a use of the object, so that initialising or ending the object can race with it. Uses do not
    /// race with each other. [`Env::check_made`] checks that a use comes after the initialisation.
    fn note_use(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) {
        let access = Access { touch: Touch::Mbarrier, ..plain(warp, &object_site(inst), lane) };
        self.shadow.note_read(self.shared_place(address), BYTES, &access);
    }

    /// Offset in the cluster's shared memory of an address in shared memory.
    fn shared_place(&self, address: u64) -> usize {
        (address >> RANK_SHIFT) as usize * self.span + (inside(address) - SHARED_BASE) as usize
    }

    /// Checks that there is an object which the lane may use: its initialisation must have happened before.
    pub(super) fn check_made(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) -> bool {
        let cause = Cause { inst, warp: warp.index, lane };
        let Some(object) = self.mbarriers.objects.get(&address) else {
            self.report_at(HazardKind::UninitialisedRead, cause, address, || {
                "uses an mbarrier that was not initialised".into()
            });
            return false;
        };
        let ((agent, maker, epoch), line) = (object.maker, object.made_at);
        if !self.context.options.checks.races {
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
        let place = Some(self.place(Space::Shared, address));
        self.findings.report(HazardKind::Race, inst.line, Some(line), || {
            (threads, place, "uses an mbarrier, and nothing orders that after its initialisation".into())
        });
        true
    }

    /// Whether a `fence.mbarrier_init` or a proxy fence comes between the initialisation and the lane's
    /// present instruction.
    fn knows_initialisation(&self, warp: &Warp, lane: usize, address: u64) -> bool {
        let Some(object) = self.mbarriers.objects.get(&address) else { return true };
        let ((agent, maker, epoch), home) = (object.maker, warp.view.home());
        let maker_warp = agent.wrapping_sub(home) as usize;
        [self.actors.initialised(maker_warp), maker_warp + self.actors.fenced(ProxySpace::Shared)]
            .into_iter()
            .any(|actor| {
                epoch <= warp.view.known_to_all(actor)
                    || warp.view.was_told(lane, home + actor as Agent, maker, epoch)
            })
    }

    /// `fence.mbarrier_init`: afterwards other CTAs may use the objects that these lanes initialised.
    pub(super) fn fence_initialisations(&mut self, warp: &mut Warp, mask: u32) {
        if self.context.program.asynchronous {
            warp.view.show(mask, self.actors.initialised(warp.index));
        }
    }

    fn expect_bytes(&mut self, cause: Cause, address: u64, bytes: u32) {
        let Some(object) = self.mbarriers.objects.get_mut(&address) else { return };
        object.bytes += i64::from(bytes);
        if object.bytes > i64::from(LIMIT) {
            let bytes = object.bytes;
            self.report_at(HazardKind::TransactionMismatch, cause, address, || {
                format!("{bytes} bytes expected of one phase: at most {LIMIT}")
            });
        }
    }

    /// Counts bytes that have arrived. `landed` is the actor and epoch of the copy that wrote them.
    pub(super) fn complete_bytes(&mut self, cause: Cause, address: u64, bytes: u32, landed: Option<Epoch>) {
        let Some(object) = self.mbarriers.objects.get_mut(&address) else { return };
        object.bytes -= i64::from(bytes);
        object.flights -= u32::from(landed.is_some() && object.flights > 0);
        if object.bytes < -i64::from(LIMIT) {
            let bytes = -object.bytes;
            self.report_at(HazardKind::TransactionMismatch, cause, address, || {
                format!("{bytes} bytes more than expected have come in one phase")
            });
        }
        self.complete_phase(cause, address);
    }

    /// Counts an arrival. Returns the previous state: the phase and the number of pending arrivals.
    fn arrive_at(&mut self, cause: Cause, address: u64, arrival: &Arrival) -> u64 {
        let Arrival { count, dropped, bytes, clocks } = *arrival;
        self.expect_bytes(cause, address, bytes);
        // The object may belong to another CTA of the same cluster, whose clocks have the same home.
        let home = (self.cluster as u32).wrapping_mul(self.actors.total() as u32);
        let rank = cause.warp / self.actors.warps;
        let Some(object) = self.mbarriers.objects.get_mut(&address) else { return 0 };
        let state = object.phase << 32 | u64::from(object.pending);
        if let Some(clocks) = clocks {
            object.arriving.add(home, rank, clocks);
        }
        object.expected -= dropped.min(object.expected);
        if count > object.pending {
            let pending = object.pending;
            object.pending = 0;
            self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                format!(
                    "{count} arrivals at an mbarrier that waits for {pending} more: the count is too small"
                )
            });
        } else {
            object.pending -= count;
        }
        self.complete_phase(cause, address);
        state
    }

    /// Reports an arrival with `.noComplete` that completes the phase, because its effect is undefined.
    /// `before` is the state before the arrival.
    fn check_incomplete(&mut self, cause: Cause, address: u64, before: u64) {
        if self.mbarriers.objects.get(&address).is_some_and(|o| o.phase != before >> 32) {
            self.report_at(HazardKind::BarrierDivergence, cause, address, || {
                "an arrival with .noComplete completes the phase of the mbarrier".into()
            });
        }
    }

    fn complete_phase(&mut self, cause: Cause, address: u64) {
        let home = (self.cluster as u32).wrapping_mul(self.actors.total() as u32);
        let Some(object) = self.mbarriers.objects.get_mut(&address) else { return };
        if object.pending != 0 || object.bytes != 0 {
            return;
        }
        let flights = object.flights;
        object.phase += 1;
        object.pending = object.expected;
        let arrived = std::mem::replace(&mut object.arriving, Released::nothing(self.actors));
        object.completed.join(home, &arrived);
        let epoch = self.mbarriers.phases.entry(object.actor).or_insert(1);
        for completed in &mut object.completed.near {
            completed.learn(home, home + object.actor as Agent, !0, *epoch);
        }
        *epoch += 1;
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
        for_lanes(good, |lane| {
            let token = warp.registers.lane(inst.s[0], lane);
            if m.op.by_parity() && token > 1 {
                self.report_parity(Cause { inst, warp: warp.index, lane }, places[lane], token);
            }
            // Most waits are on one object.
            let known = found.filter(|(address, _)| *address == places[lane]);
            let phase = || Some((places[lane], self.mbarriers.objects.get(&places[lane])?.phase));
            found = known.or_else(phase);
            let Some((_, phase)) = found else { return };
            let complete = if m.op.by_parity() { phase & 1 != token & 1 } else { phase != token >> 32 };
            done |= u32::from(complete) << lane;
            if !m.op.by_parity() && phase.wrapping_sub(token >> 32) > 1 {
                self.report_stale(Cause { inst, warp: warp.index, lane }, places[lane], phase, token >> 32);
            }
        });
        warp.registers.set_pred(inst.d[0], mask, done);
        if let Some(recorder) = &mut self.recorder {
            let lane = mask.trailing_zeros() as usize;
            let token = warp.registers.lane(inst.s[0], lane);
            let parity = (if m.op.by_parity() { token } else { token >> 32 }) & 1 == 1;
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
            if let Some(object) = self.mbarriers.objects.get(&address) {
                for (strength, clock) in object.completed.reaching(warp.index / self.actors.warps, m.scope) {
                    if m.sem == MemSem::Relaxed {
                        warp.see(here, strength, clock);
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

    /// Whether the copies to an mbarrier stay in flight after this unsuccessful wait. A wait may fail any
    /// number of times (PTX ISA, "mbarrier.try_wait"), so a kernel must not rely on the number of attempts.
    fn still_flies(&mut self, address: u64) -> bool {
        if !matches!(self.context.options.schedule, Schedule::Random | Schedule::Lagging) {
            return false;
        }
        let rng = &mut self.rng;
        let waits =
            self.mbarriers.vain_waits.entry(address).or_insert_with(|| VAIN_WAITS[rng.random_range(0..4)]);
        *waits -= 1;
        let stays = *waits > 0;
        if !stays {
            self.mbarriers.vain_waits.remove(&address);
        }
        stays
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

/// An address without the rank of its CTA.
pub(super) fn inside(address: u64) -> u64 {
    address & ((1 << RANK_SHIFT) - 1)
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
