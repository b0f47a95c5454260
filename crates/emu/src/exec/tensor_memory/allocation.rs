//! `tcgen05.alloc`, `tcgen05.dealloc`, and memory that a CTA leaves allocated.

use super::super::Env;
use super::super::access::{Site, addresses, plain};
use super::super::run::Flow;
use super::super::units::{COLUMNS, LANES, Refused, TensorMemory};
use super::super::warp::{Split, Warp};
use super::access::Issue;
use crate::decode::Inst;
use crate::memory::{resolve, store_bytes};
use crate::order::{Access, Strength, TensorPipe};
use crate::report::HazardKind;
use ptx::Space;

impl Env<'_> {
    /// Allocates columns and writes their address to shared memory. Waits while other allocations have the
    /// columns.
    pub(super) fn tensor_alloc(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst) -> Flow {
        let (rank, lane) = (self.rank(warp), warp.live.trailing_zeros() as usize);
        let columns = warp.registers.lane(inst.s[0], lane) as usize;
        let first = match self.tensors.allocate(rank, columns, inst.pc) {
            Ok(first) => first,
            Err(Refused::Full) => return self.retry(split),
            Err(refused) => {
                self.report(HazardKind::TensorMemory, inst, warp.index, lane, None, || {
                    refusal(refused, columns)
                });
                return Flow::Next;
            }
        };
        split.polls = 0;
        let site = Site { inst, space: Space::Shared, bytes: 4, strength: Strength::Weak };
        let address = resolve(addresses(&warp.registers, inst)[lane]).1;
        let Some(offset) = self.shared_offset(warp, &site, lane, address) else { return Flow::Next };
        let access = Access { width: 4, ..plain(warp, &site, lane) };
        if self.facts.context.options.checks.races
            && let Some((c, at)) = self.shared.shadow.write(offset, 4, &access)
        {
            let place = (Space::Shared, self.facts.shared_address(at));
            self.report_conflict(inst, warp.index, lane, true, &c, place);
        }
        store_bytes(&mut self.shared.bytes, offset, 4, &[first as u32, 0, 0, 0, 0, 0, 0, 0]);
        // All threads of the warp execute the write.
        let (actor, now) = (warp.index, warp.view.now());
        warp.view.learn(!0, warp.live, (actor, 1 << lane), now);
        Flow::Next
    }

    /// Frees columns. No access may follow, so the instruction counts as a write.
    pub(super) fn tensor_dealloc(&mut self, warp: &mut Warp, inst: &Inst) {
        let (rank, lane) = (self.rank(warp), warp.live.trailing_zeros() as usize);
        let (address, columns) =
            (warp.registers.lane(inst.s[0], lane) as u32, warp.registers.lane(inst.s[1], lane) as usize);
        let first = (address & 0xffff) as usize;
        if !self.tensors.free(rank, first, columns) {
            self.report(HazardKind::TensorMemory, inst, warp.index, lane, None, || {
                format!("frees {columns} columns at {address:#x}, which are no allocation of this CTA")
            });
            return;
        }
        if !self.facts.context.options.checks.races {
            return;
        }
        let issue = Issue {
            inst,
            warp: warp.index,
            lane,
            pipe: TensorPipe::Store,
            view: warp.view.together(warp.live),
        };
        let site = Site { inst, space: Space::Shared, bytes: 4, strength: Strength::Weak };
        let access = Access { view: &issue.view, width: 4, ..plain(warp, &site, lane) };
        for column in first..(first + columns).min(COLUMNS) {
            for group in 0..LANES / super::super::units::CELL_LANES {
                let offset = TensorMemory::shadow_offset(rank, group, column);
                let found = self.tensors.shadow.write(offset, TensorMemory::shadow_bytes(), &access);
                if let Some((conflict, _)) = found {
                    self.report_tensor_conflict(&issue, &conflict, (16 * group, column), true);
                }
            }
        }
    }

    /// Called when a warp exits: the last warp of a CTA leaves no tensor memory allocated.
    pub(in crate::exec) fn leave_tensor_memory(&mut self, warp: &Warp) {
        let rank = self.rank(warp);
        if self.facts.warps_of(rank).any(|w| self.live[w] != 0) {
            return;
        }
        while let Some((columns, pc)) = self.tensors.leak(rank) {
            let inst = &self.facts.context.program.code[pc as usize];
            self.report(HazardKind::TensorMemory, inst, warp.index, 0, None, || {
                format!("the CTA exits without a tcgen05.dealloc of these {columns} columns")
            });
        }
    }
}

fn refusal(refused: Refused, columns: usize) -> String {
    match refused {
        Refused::Relinquished => "allocates after a tcgen05.relinquish_alloc_permit of the CTA".into(),
        Refused::Grows(last) => {
            format!("allocates {columns} columns after {last}: later allocations must not be larger")
        }
        Refused::Full | Refused::NotAPowerOfTwo => {
            format!("invalid value '{columns}' for nCols: expected a power of two from 32 to 512")
        }
    }
}
