//! Executes `cp.async`. A copy completes at some time between its issue and the wait that covers it. Until
//! then no thread, including the issuing one, may access the destination or write the source (PTX ISA,
//! "Completion Mechanisms for Asynchronous Copy Operations"). After the wait, the data counts as a write of
//! the issuing thread.

use ptx::{CpAsync, Space};

use super::Env;
use super::access::{Site, addresses, based, plain};
use super::registers::for_lanes;
use super::units::CopyFlight;
use super::warp::Warp;
use crate::decode::Inst;
use crate::memory::{resolve, store_bytes};
use crate::order::{Access, Epoch, FLIGHT, Strength, Touch};
use crate::report::{HazardKind, Schedule};

impl Env<'_> {
    pub(super) fn copy_async(&mut self, warp: &mut Warp, inst: &Inst, c: &CpAsync, mask: u32) {
        let bytes = inst.target;
        let to = addresses(&warp.registers, inst).map(|a| resolve(a).1);
        let from = based(&warp.registers, inst.source.0, inst.source.1).map(|a| resolve(a).1);
        self.count_copy(warp, inst, mask, &to, &from);
        let mut taken: [u32; 32] = std::array::from_fn(|lane| {
            if !inst.s[0].is_some() {
                bytes
            } else if c.ignore_src {
                if warp.registers.get_pred(inst.s[0], inst.negated, 0) >> lane & 1 == 1 { 0 } else { bytes }
            } else {
                warp.registers.lane(inst.s[0], lane) as u32
            }
        });
        for_lanes(mask, |lane| {
            if taken[lane] > bytes {
                let source = taken[lane];
                self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                    format!(
                        "a source size of {source} bytes for a copy of {bytes} bytes: the effect is undefined"
                    )
                });
                taken[lane] = bytes;
            }
        });
        let (mut good, mut watched, mut destination) = (0, 0, [0; 32]);
        for_lanes(mask, |lane| {
            let copy = (to[lane], from[lane], taken[lane]);
            if let Some((watch, offset, read)) = self.issue_copy(warp, inst, lane, copy) {
                (destination[lane], taken[lane]) = (offset, read);
                good |= 1 << lane;
                watched |= u32::from(watch) << lane;
            }
        });
        if good == 0 {
            return;
        }
        let mut flight = CopyFlight {
            pc: inst.pc,
            lanes: good,
            open: good,
            group: [0; 32],
            destination,
            source: from,
            bytes,
            taken,
            watched,
            arrived: false,
        };
        flight.arrived = match self.facts.context.options.schedule {
            Schedule::Late => false,
            Schedule::Early => true,
            Schedule::Random | Schedule::Lagging => rand::Rng::random(&mut self.rng),
        };
        if flight.arrived {
            for_lanes(good, |lane| self.transfer(warp, &flight, lane));
        }
        warp.copies.depart(flight);
    }

    /// Checks a lane's copy at its issue: destination, source and number of bytes read. Returns whether the
    /// kernel may write the source, the offset of the destination and the bytes to read; `None` when the
    /// destination is invalid. From an invalid source nothing is read: the fault is reported once, and the
    /// destination is set to zero, so that later uses of it are no findings.
    fn issue_copy(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        (to, from, mut taken): (u64, u64, u32),
    ) -> Option<(bool, u32, u32)> {
        let write = copy_site(inst, Space::Shared, inst.target);
        let offset = self.shared_offset(warp, &write, lane, to)?;
        // The source is aligned to the copy's size, even when fewer bytes are read.
        if taken > 0 && !from.is_multiple_of(u64::from(inst.target)) {
            let (size, place) = (inst.target, Some((Space::Global, from)));
            self.report(HazardKind::Misaligned, inst, warp.index, lane, place, || {
                format!("copies {size} bytes from address {from:#x}, which is not a multiple of {size}")
            });
            taken = 0;
        }
        let read = copy_site(inst, Space::Global, taken);
        let races = self.facts.context.options.checks.races;
        let source = (taken > 0).then(|| self.global_region(warp, &read, lane, from)).flatten();
        if source.is_none() {
            taken = 0;
        }
        let watch = races && source.is_some_and(|(region, ..)| region.watched());
        if watch {
            let access = Access { touch: Touch::Copy, epoch: FLIGHT, ..plain(warp, &read, lane) };
            self.note_global_read(&read, &access, from, taken);
        }
        self.undefined_bytes.store(to, inst.target.into(), false);
        if races {
            let access = Access { touch: Touch::Copy, epoch: FLIGHT, ..plain(warp, &write, lane) };
            self.doubt_readers(&access, Space::Shared, offset as u64, to, inst.target.into());
            if let Some((c, at)) = self.shared.shadow.write(offset, inst.target as usize, &access) {
                let place = (Space::Shared, self.facts.shared_address(at));
                self.report_conflict(inst, warp.index, lane, true, &c, place);
            }
        }
        Some((watch, offset as u32, taken))
    }

    fn count_copy(&mut self, warp: &Warp, inst: &Inst, mask: u32, to: &[u64; 32], from: &[u64; 32]) {
        let bytes = inst.target;
        self.log.count_shared(inst, mask, to, bytes);
        self.log.counter(inst).global(mask, from, bytes);
        if let Some(recorder) = &mut self.log.recorder {
            recorder.copy(warp.index, inst.number, mask, to, from, bytes);
        }
    }

    /// Moves the bytes of one lane.
    fn transfer(&mut self, warp: &Warp, flight: &CopyFlight, lane: usize) {
        let inst = &self.facts.context.program.code[flight.pc as usize];
        let mut data = [0; 8];
        let mut at = 0;
        // A step is the whole copy, a word or a byte, because src-size can be any number.
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
            let from = flight.source[lane].wrapping_add(u64::from(at));
            if let Some(place) = self.global_region(warp, &site, lane, from) {
                let part = self.load_region(warp, &site, lane, from, place);
                let words = data[at as usize / 4..].iter_mut().zip(part).take(step.div_ceil(4) as usize);
                words.for_each(|(word, part)| *word |= part << (8 * (at % 4)));
            }
            at += step;
        }
        store_bytes(&mut self.shared.bytes, flight.destination[lane] as usize, flight.bytes as usize, &data);
    }

    pub(super) fn wait_group(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let keep = warp.registers.lane(inst.s[0], mask.trailing_zeros() as usize) as u32;
        let committed = warp.copies.committed();
        self.land(warp, mask, |flight, lane| {
            flight.open >> lane & 1 == 0 && flight.group[lane].saturating_add(keep) < committed[lane]
        });
    }

    pub(super) fn wait_all(&mut self, warp: &mut Warp, mask: u32) {
        self.land(warp, mask, |_, _| true);
    }

    /// Completes all copies at the end of the kernel.
    pub(super) fn land_all(&mut self, warp: &mut Warp) {
        self.land(warp, !0, |_, _| true);
    }

    /// Completes the copies of the lanes of `mask` that `due` selects.
    fn land(&mut self, warp: &mut Warp, mask: u32, due: impl Fn(&CopyFlight, usize) -> bool) {
        let epoch = warp.view.now();
        self.land_at(warp, mask, epoch, Touch::Copy, due);
    }

    fn land_at(
        &mut self,
        warp: &mut Warp,
        mask: u32,
        epoch: u32,
        touch: Touch,
        due: impl Fn(&CopyFlight, usize) -> bool,
    ) {
        let mut flights = warp.copies.take();
        for i in 0..flights.len() {
            let mut landing = 0;
            for_lanes(flights[i].lanes & mask, |lane| landing |= u32::from(due(&flights[i], lane)) << lane);
            flights[i].lanes &= !landing;
            for_lanes(landing, |lane| {
                if !flights[i].arrived {
                    self.transfer(warp, &flights[i], lane);
                }
                if self.facts.context.options.checks.races {
                    self.land_lane(warp, &flights, i, lane, (epoch, touch));
                }
            });
        }
        warp.copies.keep(flights);
    }

    /// Marks the accesses of a lane's copy `flights[i]` as complete at `epoch`.
    fn land_lane(
        &mut self,
        warp: &Warp,
        flights: &[CopyFlight],
        i: usize,
        lane: usize,
        (epoch, touch): (Epoch, Touch),
    ) {
        let flight = &flights[i];
        let thread = (warp.view.agent(), lane);
        let (to, bytes) = (flight.destination[lane] as usize, flight.bytes as usize);
        self.shared.shadow.land(to, bytes, thread, epoch, touch);
        let reads = |f: &CopyFlight| f.watched >> lane & 1 == 1;
        if !reads(flight) {
            return;
        }
        let (from, taken) = (flight.source[lane], u64::from(flight.taken[lane]));
        // Another copy in flight may still read the same bytes.
        let still = |f: &CopyFlight| {
            let (start, taken_there) = (f.source[lane], u64::from(f.taken[lane]));
            f.lanes >> lane & 1 == 1 && reads(f) && start < from + taken && from < start + taken_there
        };
        if !flights.iter().any(still) {
            self.order.grid.shadow.land(from, taken, thread, epoch, touch);
        }
    }

    /// Executes `cp.async.mbarrier.arrive`. The earlier copies of the thread complete now, which PTX allows.
    /// No thread, including the issuing one, may rely on this before it has observed the completion of the
    /// mbarrier's phase.
    pub(super) fn copy_arrive(&mut self, warp: &mut Warp, inst: &Inst, noinc: bool, mask: u32) {
        let places = addresses(&warp.registers, inst).map(|a| resolve(a).1);
        if !noinc {
            for_lanes(mask, |lane| self.mbarriers.expect_more(places[lane]));
        }
        let epoch = warp.view.now();
        self.land_at(warp, mask, epoch, Touch::CopyArrive, |_, _| true);
        self.arrive_for_copies(warp, inst, &places, mask);
    }
}

fn copy_site(inst: &Inst, space: Space, bytes: u32) -> Site<'_> {
    Site { inst, space, bytes, strength: Strength::Weak }
}
