//! Executes `setmaxnreg`.

use ptx::RegisterChange;

use super::Env;
use super::run::Flow;
use super::units::{Change, WARPS};
use super::warp::{Split, Warp};
use crate::decode::Inst;
use crate::report::HazardKind;

impl Env<'_> {
    /// Executes `setmaxnreg` for the whole warp. `.inc` waits until the pool has enough registers.
    pub(super) fn change_registers(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        change: RegisterChange,
    ) -> Flow {
        if !self.pool.waits(warp.index) {
            self.check_change(warp, inst);
        }
        if self.facts.context.registers.is_none() {
            return Flow::Next;
        }
        let (rank, target) = (self.rank(warp), warp.registers.lane(inst.s[0], 0) as u32);
        match self.pool.change(warp.index, rank, change, target) {
            Change::Done => split.polls = 0,
            Change::Waits => return self.retry(split),
            Change::Wrong { has } => self.report(HazardKind::RegisterPool, inst, warp.index, 0, None, || {
                format!("changes from {has} to {target} registers: .inc only increases, .dec only decreases")
            }),
        }
        Flow::Next
    }

    /// Checks that all warps of a warpgroup execute the same changes and synchronise between them.
    fn check_change(&mut self, warp: &Warp, inst: &Inst) {
        let mut group = self.facts.warpgroup_of(warp.index);
        if group.len() < WARPS {
            self.report(HazardKind::BarrierDivergence, inst, warp.index, 0, None, || {
                "the warpgroup has fewer than four warps".into()
            });
        }
        let expected = self.pool.begin(warp.index, self.facts.actors.warpgroup(warp.index), inst.pc);
        if expected != inst.pc {
            let (thread, other) = (self.thread(warp.index, 0), self.line(expected));
            self.log.findings.report(HazardKind::BarrierDivergence, inst.line, Some(other), || {
                let message = "the warps of a warpgroup execute different setmaxnreg instructions";
                (vec![thread], None, message.into())
            });
        }
        let met = |other| self.pool.is_met(warp.index, other, |epoch| warp.view.knows(0, other, !0, epoch));
        if !group.all(|other| other == warp.index || met(other)) {
            self.report(HazardKind::RegisterPool, inst, warp.index, 0, None, || {
                "is not ordered after the previous setmaxnreg of another warp of the warpgroup".into()
            });
        }
        self.pool.note(warp.index, warp.view.now());
    }

    /// Checks at the end that no warp has exited without a change that other warps of its warpgroup made.
    pub(super) fn check_changes(&mut self) {
        for warp in 0..self.facts.actors.threads() {
            let Some(missing) = self.pool.missing(warp, self.facts.actors.warpgroup(warp)) else { continue };
            if self.live[warp] == 0 {
                let inst = &self.facts.context.program.code[missing as usize];
                self.report(HazardKind::BarrierDivergence, inst, warp, 0, None, || {
                    "a warp of the warpgroup exits without having executed this setmaxnreg".into()
                });
            }
        }
    }

    /// Describes what a warp waits for.
    pub(super) fn describe_pool(&self, warp: &Warp, inst: &Inst) -> String {
        let (has, free) = self.pool.registers(warp.index, self.rank(warp));
        let target = warp.registers.lane(inst.s[0], 0);
        format!(
            "for {target} registers per thread: it has {has}, and its CTA's pool has {free} more for one warp"
        )
    }
}
