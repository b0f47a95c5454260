//! `cp.async`: copies that land some time between their issue and the wait that covers them. Until then their
//! destination must be left alone, by the issuing thread too; after it the data is the issuing thread's write.

use ptx::{CpAsync, Space};

use super::Env;
use super::access::{Site, addresses, based, plain};
use super::registers::for_lanes;
use super::warp::Warp;
use crate::decode::Inst;
use crate::memory::{SHARED_BASE, resolve, store_bytes};
use crate::order::{Access, Strength, Touch};
use crate::report::Schedule;

/// A copy on its way, for some lanes.
#[derive(Debug)]
struct Flight {
    pc: u32,
    /// Lanes whose copy has not been waited for.
    lanes: u32,
    /// Lanes that have not committed it to a group.
    open: u32,
    /// Number of the group, per lane.
    group: [u32; 32],
    destination: [u32; 32],
    source: [u64; 32],
    bytes: u32,
    /// Bytes really read; the rest is zero.
    taken: [u32; 32],
    /// The bytes were moved at once, although nobody may know.
    arrived: bool,
}

/// The copies of a warp.
#[derive(Debug, Default)]
pub(crate) struct CopyQueue {
    flights: Vec<Flight>,
    /// Groups committed per lane.
    committed: [u32; 32],
}

impl CopyQueue {
    pub fn commit(&mut self, mask: u32) {
        for flight in self.flights.iter_mut().rev().take_while(|f| f.open != 0 || f.lanes != 0) {
            let lanes = flight.open & mask;
            for_lanes(lanes, |lane| flight.group[lane] = self.committed[lane]);
            flight.open &= !lanes;
        }
        for_lanes(mask, |lane| self.committed[lane] += 1);
    }
}

impl Env<'_> {
    pub(super) fn copy_async(&mut self, warp: &mut Warp, inst: &Inst, c: &CpAsync, mask: u32) {
        let bytes = inst.target;
        let to = addresses(&warp.registers, inst).map(|a| resolve(a).1);
        let from = based(&warp.registers, inst.source.0, inst.source.1).map(|a| resolve(a).1);
        self.count_copy(warp, inst, mask, &to, &from);
        let taken: [u32; 32] = std::array::from_fn(|lane| {
            if !inst.s[0].is_some() {
                bytes
            } else if c.ignore_src {
                if warp.registers.get_pred(inst.s[0], inst.negated, 0) >> lane & 1 == 1 { 0 } else { bytes }
            } else {
                (warp.registers.lane(inst.s[0], lane) as u32).min(bytes)
            }
        });
        let mut good = 0;
        for_lanes(mask, |lane| {
            let good_lane = self.issue_copy(warp, inst, lane, (to[lane], from[lane], taken[lane]));
            good |= u32::from(good_lane) << lane;
        });
        let mut flight = Flight {
            pc: inst.pc,
            lanes: good,
            open: good,
            group: [0; 32],
            destination: to.map(|a| a.wrapping_sub(SHARED_BASE) as u32),
            source: from,
            bytes,
            taken,
            arrived: false,
        };
        flight.arrived = match self.context.options.schedule {
            Schedule::Late => false,
            Schedule::Early => true,
            Schedule::Random => rand::Rng::random(&mut self.rng),
        };
        if flight.arrived {
            for_lanes(good, |lane| self.transfer(warp, &flight, lane));
        }
        warp.copies.flights.push(flight);
    }

    /// Checks a lane's copy as it is issued, its destination, its source and the bytes it takes.
    fn issue_copy(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        (to, from, taken): (u64, u64, u32),
    ) -> bool {
        let write = copy_site(inst, Space::Shared, inst.target);
        let Some(offset) = self.shared_offset(warp, &write, lane, to) else { return false };
        // The source is aligned to the copy's size, however little of it is read.
        let read = copy_site(inst, Space::Global, taken.max(1).next_power_of_two());
        if taken > 0 && self.global_region(warp, &read, lane, from).is_none() {
            return false;
        }
        if self.context.options.checks.races {
            let access = Access { touch: Touch::Copy, ..plain(warp, &write, lane) };
            if let Some((c, at)) = self.shadow.write(offset, inst.target as usize, &access) {
                let place = (Space::Shared, SHARED_BASE + at as u64);
                self.report_conflict(inst, warp.index, lane, true, &c, place);
            }
        }
        true
    }

    fn count_copy(&mut self, warp: &Warp, inst: &Inst, mask: u32, to: &[u64; 32], from: &[u64; 32]) {
        let bytes = inst.target;
        let counter = &mut self.counters.instructions[inst.pc as usize];
        counter.shared(mask, to, bytes, false);
        counter.global(mask, from, bytes);
        if let Some(recorder) = &mut self.recorder {
            recorder.copy(warp.index, inst.number, mask, to, from, bytes);
        }
    }

    /// Moves one lane's bytes.
    fn transfer(&mut self, warp: &Warp, flight: &Flight, lane: usize) {
        let inst = &self.context.program.code[flight.pc as usize];
        let mut data = [0; 8];
        let mut at = 0;
        // All at once, or word by word and then byte by byte: src-size is any number.
        while at < flight.taken[lane] {
            let left = flight.taken[lane] - at;
            let step = if left == flight.bytes {
                left
            } else if left >= 4 {
                4
            } else {
                1
            };
            let site = copy_site(inst, Space::Global, step);
            if let Some(part) =
                self.load_global(warp, &site, lane, flight.source[lane].wrapping_add(u64::from(at)))
            {
                let words = data[at as usize / 4..].iter_mut().zip(part).take(step.div_ceil(4) as usize);
                words.for_each(|(word, part)| *word |= part << (8 * (at % 4)));
            }
            at += step;
        }
        store_bytes(&mut self.shared, flight.destination[lane] as usize, flight.bytes as usize, &data);
    }

    pub(super) fn wait_group(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let keep = warp.registers.lane(inst.s[0], mask.trailing_zeros() as usize) as u32;
        let committed = warp.copies.committed;
        self.land(warp, mask, |flight, lane| {
            flight.open >> lane & 1 == 0 && flight.group[lane].saturating_add(keep) < committed[lane]
        });
    }

    pub(super) fn wait_all(&mut self, warp: &mut Warp, mask: u32) {
        self.land(warp, mask, |_, _| true);
    }

    /// At the end of the kernel everything lands.
    pub(super) fn land_all(&mut self, warp: &mut Warp) {
        self.land(warp, !0, |_, _| true);
    }

    /// Copies of the lanes of `mask` that `due` chooses are complete now.
    fn land(&mut self, warp: &mut Warp, mask: u32, due: impl Fn(&Flight, usize) -> bool) {
        let epoch = warp.view.now();
        self.land_at(warp, mask, epoch, Touch::Copy, due);
    }

    fn land_at(
        &mut self,
        warp: &mut Warp,
        mask: u32,
        epoch: u32,
        touch: Touch,
        due: impl Fn(&Flight, usize) -> bool,
    ) {
        let mut flights = std::mem::take(&mut warp.copies.flights);
        for flight in &mut flights {
            let mut landing = 0;
            for_lanes(flight.lanes & mask, |lane| landing |= u32::from(due(flight, lane)) << lane);
            for_lanes(landing, |lane| {
                let offset = flight.destination[lane] as usize;
                if !flight.arrived {
                    self.transfer(warp, flight, lane);
                }
                if self.context.options.checks.races {
                    self.shadow.land(offset, flight.bytes as usize, (warp.view.agent(), lane), epoch, touch);
                }
            });
            flight.lanes &= !landing;
        }
        flights.retain(|f| f.lanes != 0);
        warp.copies.flights = flights;
    }

    /// `cp.async.mbarrier.arrive`. The earlier copies of the thread land now, which is legal; but nobody may rely on it, the
    /// thread itself included, before it has seen the mbarrier's phase complete.
    pub(super) fn copy_arrive(&mut self, warp: &mut Warp, inst: &Inst, noinc: bool, mask: u32) {
        let places = addresses(&warp.registers, inst).map(|a| resolve(a).1);
        if !noinc {
            for_lanes(mask, |lane| self.mbarriers.expect_more(places[lane]));
        }
        let epoch = warp.view.now();
        let clock = warp.view.release(mask);
        self.land_at(warp, mask, epoch, Touch::CopyArrive, |_, _| true);
        self.arrive_for_copies(warp, inst, &places, mask, &clock);
    }
}

fn copy_site(inst: &Inst, space: Space, bytes: u32) -> Site<'_> {
    Site { inst, space, bytes, strength: Strength::Weak }
}
