//! Checks launches that may overlap with the previous grid (programmatic dependent launch; PTX ISA,
//! "griddepcontrol"). `griddepcontrol.wait` waits for the end of the previous grid. Until then, that grid may
//! still write memory that this grid reads, and read memory that this grid writes.
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
use super::warp::Warp;
use crate::decode::Inst;
use crate::report::HazardKind;

impl Env<'_> {
    /// Checks that a lane is ordered after a grid wait before it accesses global memory.
    #[inline(always)]
    pub(super) fn check_grid_wait(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) {
        if self.facts.actors.overlapping
            && self.facts.context.options.checks.races
            && !warp.view.is_behind_grid(lane)
        {
            self.report(HazardKind::BeforeGridWait, inst, warp.index, lane, Some((Space::Global, address)), || {
                "accesses global memory before griddepcontrol.wait: the launch overlaps with the previous grid, \
                 which may still read or write that memory"
                    .into()
            });
        }
    }
}
