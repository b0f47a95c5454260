//! Launches that may overlap with the grid before (PTX ISA, "griddepcontrol"): until it has ended, which `griddepcontrol.wait`
//! waits for, it may still write whatever is read here and read whatever is written.
//!
//! The wait makes the other grid's accesses visible "to the current grid", not to the executing thread alone. So what happens
//! after a wait in causality order is behind it, too: one thread waits, and a barrier or an mbarrier tells the others. A
//! thread that has learned of no wait must leave global memory alone, read-only buffers included; a bulk copy counts for the
//! thread that issues it. Parameters (tensor maps among them) and constants belong to the launch, and a prefetch accesses nothing.

use ptx::Space;

use super::Env;
use super::warp::Warp;
use crate::decode::Inst;
use crate::report::HazardKind;

impl Env<'_> {
    /// A lane is about to access global memory.
    #[inline(always)]
    pub(super) fn check_grid_wait(&mut self, warp: &Warp, inst: &Inst, lane: usize, address: u64) {
        if self.actors.overlapping && self.context.options.checks.races && !warp.view.is_behind_grid(lane) {
            self.report(HazardKind::BeforeGridWait, inst, warp.index, lane, Some((Space::Global, address)), || {
                "accesses global memory, which the grid before may still write or read: the launch overlaps with it, and no griddepcontrol.wait came before"
                    .into()
            });
        }
    }
}
