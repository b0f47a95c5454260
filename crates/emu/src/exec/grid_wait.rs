//! Checks launches that may overlap with the previous grid (programmatic dependent launch; PTX ISA,
//! "griddepcontrol"). `griddepcontrol.wait` waits for the end of the previous grid. Until then, that grid may
//! still write memory that this grid reads, and read memory that this grid writes.
//!
//! The caller states what earlier grids do to each buffer ([`EarlierUse`]). Before the wait, a grid must not
//! write what they read, and must not access what they write. Where the caller does not know, an access is a
//! note; a check by the letter takes it as a hazard.
//!
//! The wait makes the previous grid's accesses visible "to the current grid", not only to the executing
//! thread. Accesses that are ordered after a wait are therefore ordered after that grid too: one thread
//! waits, and a barrier or an mbarrier orders the other threads. A thread that is not ordered after a wait
//! must not access global memory, including read-only buffers. A bulk copy counts for the thread that issues
//! it. Parameters (including tensor maps) and constants belong to the launch, and a prefetch accesses
//! nothing.
//!
//! A grid with one waiting thread cannot end before the previous grid. A grid without a waiting thread may
//! end first. The next grid, which waits only for this one, may then overlap with the previous grid;
//! `grid.rs` checks this when the launch has ended.

use ptx::Space;

use super::Env;
use super::registers::for_lanes;
use super::warp::Warp;
use crate::decode::Inst;
use crate::earlier::EarlierUse;
use crate::memory::GlobalMemory;
use crate::report::HazardKind;

impl Env<'_> {
    /// Checks that a lane is ordered after a grid wait before it accesses global memory.
    #[inline(always)]
    pub(super) fn check_grid_wait(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) {
        if self.facts.actors.overlapping
            && self.facts.context.options.checks.races
            && !warp.view.is_behind_grid(lane)
        {
            self.access_early(warp, inst, lane, address);
        }
    }

    #[cold]
    fn access_early(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) {
        let options = self.facts.context.options;
        let buffer = GlobalMemory::index(address).unwrap_or(usize::MAX);
        let (kind, use_of) = match options.earlier.of(buffer) {
            EarlierUse::Untouched => return,
            EarlierUse::Read if !inst.op.may_store_global() => return,
            EarlierUse::Read => {
                (HazardKind::BeforeGridWait, "an earlier grid, which may still run, reads it")
            }
            EarlierUse::Written => {
                (HazardKind::BeforeGridWait, "an earlier grid, which may still run, writes it")
            }
            EarlierUse::Unknown if options.by_the_letter => {
                (HazardKind::BeforeGridWait, "the previous grid may still read or write it")
            }
            EarlierUse::Unknown => {
                (HazardKind::EarlyAccess, "this is right only if no earlier grid that may still run uses it")
            }
        };
        self.report(kind, inst, warp.index, lane, Some((Space::Global, address)), || {
            format!("accesses global memory before griddepcontrol.wait: the launch overlaps with the previous grid; {use_of}")
        });
    }

    /// Notes that `lanes` let the next grid start, if one of them has not waited for the previous grid.
    pub(super) fn release_next_grid(&mut self, warp: &Warp, lanes: u32) {
        let overlapping = self.facts.actors.overlapping;
        for_lanes(lanes, |lane| self.log.overtaken |= overlapping && !warp.view.is_behind_grid(lane));
    }
}
