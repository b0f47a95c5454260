//! mbarrier objects (PTX ISA, "mbarrier"): counted phases in shared memory. What their 64 bits hold is opaque; the state
//! kept here stands for them.

use std::collections::HashMap;

use ptx::{MbarrierOp, Space};

use super::Env;
use super::access::{Site, addresses};
use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, Warp};
use crate::decode::Inst;
use crate::memory::resolve;
use crate::order::{Clock, Strength};
use crate::report::HazardKind;

/// One object.
#[derive(Clone, Debug)]
struct Object {
    /// Arrivals a phase needs, and how many it still does.
    expected: u32,
    pending: u32,
    phase: u64,
    /// What this phase's arrivals release, and what those of all completed ones did.
    arriving: Clock,
    completed: Clock,
}

/// An arrival.
struct Arrival<'c> {
    count: u32,
    /// By how much the count of later phases goes down.
    dropped: u32,
    /// What it releases.
    clock: &'c Clock,
}

/// The objects of a CTA, by address.
#[derive(Debug, Default)]
pub(crate) struct Mbarriers {
    objects: HashMap<u64, Object>,
}

impl Mbarriers {
    /// One more arrival is expected in this phase.
    pub fn expect_more(&mut self, address: u64) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.pending += 1;
        }
    }
}

impl Env<'_> {
    pub(super) fn mbarrier(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        op: MbarrierOp,
        mask: u32,
    ) -> Flow {
        if op == MbarrierOp::PendingCount {
            let counts = warp.registers.get64(inst.s[0]).map(|state| state as u32);
            warp.registers.set32(inst.d[0], mask, &counts);
            return Flow::Next;
        }
        let places = addresses(&warp.registers, inst).map(|a| resolve(a).1);
        let wait = matches!(
            op,
            MbarrierOp::TestWait
                | MbarrierOp::TryWait
                | MbarrierOp::TestWaitParity
                | MbarrierOp::TryWaitParity
        );
        if wait {
            return self.test_wait(warp, split, inst, op, mask, &places);
        }
        let counts: [u32; 32] = std::array::from_fn(|l| {
            if inst.s[0].is_some() { warp.registers.lane(inst.s[0], l) as u32 } else { 1 }
        });
        let mut states = [0u64; 32];
        // An arrival releases what the thread did before.
        let clock = (!matches!(op, MbarrierOp::Init | MbarrierOp::Inval)).then(|| warp.view.release(mask));
        for_lanes(mask, |lane| {
            if self.shared_offset(warp, &object_site(inst), lane, places[lane]).is_none() {
                return;
            }
            match op {
                MbarrierOp::Init => self.init(places[lane], counts[lane]),
                MbarrierOp::Inval => {
                    self.mbarriers.objects.remove(&places[lane]);
                }
                _ => {
                    let dropped = u32::from(op == MbarrierOp::ArriveDrop);
                    if let Some(clock) = &clock {
                        let arrival = Arrival { count: counts[lane], dropped, clock };
                        states[lane] = self.arrive_at(warp, inst, lane, places[lane], &arrival);
                    }
                }
            }
        });
        warp.registers.set64(inst.d[0], mask, &states);
        split.polls = 0;
        Flow::Next
    }

    fn init(&mut self, address: u64, count: u32) {
        let clock = Clock::new(self.live.len());
        let object =
            Object { expected: count, pending: count, phase: 0, arriving: clock.clone(), completed: clock };
        self.mbarriers.objects.insert(address, object);
    }

    /// Returns the state: the phase and what was pending before.
    fn arrive_at(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64, arrival: &Arrival) -> u64 {
        let Arrival { count, dropped, clock } = *arrival;
        let Some(object) = self.mbarriers.objects.get_mut(&address) else {
            self.report(
                HazardKind::UninitialisedRead,
                inst,
                warp.index,
                lane,
                Some((Space::Shared, address)),
                || "arrives at an mbarrier that was not initialised".into(),
            );
            return 0;
        };
        let state = object.phase << 32 | u64::from(object.pending);
        object.arriving.join(warp.view.home(), clock);
        object.expected -= dropped.min(object.expected);
        if count > object.pending {
            let pending = object.pending;
            object.pending = 0;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, Some((Space::Shared, address)), || {
                format!("{count} arrivals at an mbarrier that waits for {pending} more: the count is too small")
            });
        } else {
            object.pending -= count;
        }
        self.complete_phase(warp, address);
        state
    }

    fn complete_phase(&mut self, warp: &Warp, address: u64) {
        let warps = self.live.len();
        let Some(object) = self.mbarriers.objects.get_mut(&address) else { return };
        if object.pending == 0 {
            object.phase += 1;
            object.pending = object.expected;
            let arrived = std::mem::replace(&mut object.arriving, Clock::new(warps));
            object.completed.join(warp.view.home(), &arrived);
        }
    }

    fn test_wait(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        op: MbarrierOp,
        mask: u32,
        places: &[u64; 32],
    ) -> Flow {
        let parity = matches!(op, MbarrierOp::TestWaitParity | MbarrierOp::TryWaitParity);
        let mut done = 0;
        for_lanes(mask, |lane| {
            let token = warp.registers.lane(inst.s[0], lane);
            let Some(object) = self.mbarriers.objects.get(&places[lane]) else {
                done |= 1 << lane;
                let place = Some((Space::Shared, places[lane]));
                return self.report(HazardKind::UninitialisedRead, inst, warp.index, lane, place, || {
                    "waits for an mbarrier that was not initialised".into()
                });
            };
            let complete = if parity { object.phase & 1 != token & 1 } else { object.phase != token >> 32 };
            done |= u32::from(complete) << lane;
        });
        warp.registers.set_pred(inst.d[0], mask, done);
        let mut left = done;
        while left != 0 {
            // Lanes that wait for one object learn together.
            let address = places[left.trailing_zeros() as usize];
            let mut here = 0;
            for_lanes(left, |l| here |= u32::from(places[l] == address) << l);
            left &= !here;
            if let Some(object) = self.mbarriers.objects.get(&address) {
                warp.view.acquire(here, warp.live, &object.completed);
            }
        }
        if done == mask {
            split.polls = 0;
            return Flow::Next;
        }
        match self.poll(warp, split, u64::from(inst.pc)) {
            _ if matches!(op, MbarrierOp::TryWait | MbarrierOp::TryWaitParity) => Flow::Yield,
            flow => flow,
        }
    }

    /// The arrivals of `cp.async.mbarrier.arrive`.
    pub(super) fn arrive_for_copies(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        places: &[u64; 32],
        mask: u32,
        clock: &Clock,
    ) {
        for_lanes(mask, |lane| {
            self.arrive_at(warp, inst, lane, places[lane], &Arrival { count: 1, dropped: 0, clock });
        });
    }
}

fn object_site(inst: &Inst) -> Site<'_> {
    Site { inst, space: Space::Shared, bytes: 8, strength: Strength::Cta }
}
