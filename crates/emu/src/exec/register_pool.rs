//! `setmaxnreg` (PTX ISA, "setmaxnreg"): the warpgroups of a CTA exchange registers through a pool.
//!
//! ptxas decides how many registers a warp has at the start. It supports `setmaxnreg` only if directives
//! bound the registers: `.maxnreg`, or threads and CTAs per SM. Without a bound it ignores the instruction
//! (warning C7508), so the emulator does not wait here either. With a bound it assigns as many registers as
//! are allowed, or as many as the largest `.inc` requests if that is less (observed with ptxas 13.5). The
//! pool is empty at the start. Registers of exited warps do not return to the pool; the PTX ISA does not
//! define this.

use ptx::{LaunchBounds, Op, RegisterChange};

use super::Env;
use super::run::Flow;
use super::warp::{Split, Warp};
use super::wgmma::WARPS;
use crate::decode::{Inst, Program};
use crate::order::{Actors, Epoch};
use crate::report::HazardKind;

/// Registers of an SM, the maximum for a thread, and the allocation unit of 8 (CUDA C++ Programming Guide,
/// "Compute Capabilities").
const REGISTERS: u32 = 65536;
const MOST: u32 = 256;
const STEP: u32 = 8;

/// Registers per thread at the start of the kernel; `None` if ptxas does not support `setmaxnreg` for it.
pub(crate) fn registers_at_entry(bounds: &LaunchBounds, program: &Program) -> Option<u32> {
    let threads: Option<u32> = bounds.required_threads.or(bounds.max_threads).map(|n| n.iter().product());
    let fitting = threads.zip(bounds.min_ctas_per_sm).map(|(threads, ctas)| {
        // Warps are distributed over the four partitions of an SM, each with its own registers.
        let places = threads.max(1).next_multiple_of(128).saturating_mul(ctas.max(1));
        REGISTERS / places / STEP * STEP
    });
    let bound = fitting.into_iter().chain(bounds.max_registers).min()?.min(MOST);
    let increase = |inst: &Inst| {
        let (slot, value) = program.constants.iter().find(|(slot, _)| *slot == inst.s[0])?;
        (slot.is_some() && inst.op == Op::Setmaxnreg(RegisterChange::Inc)).then_some(*value as u32)
    };
    let wanted = program.code.iter().filter_map(increase).max().unwrap_or(MOST);
    Some(bound.min(wanted).next_multiple_of(STEP))
}

/// The registers of a warp, and the changes that it has started.
#[derive(Clone, Debug, Default)]
struct Owner {
    /// Registers per thread.
    registers: u32,
    /// The epoch of each change.
    changes: Vec<Epoch>,
    /// Whether the last change still waits for registers.
    waits: bool,
}

/// The pools of a cluster.
#[derive(Debug)]
pub(crate) struct RegisterPool {
    owners: Vec<Owner>,
    /// Free registers of each CTA, counted in registers per thread of one warp.
    free: Vec<u32>,
    /// For each warpgroup, the `setmaxnreg` instructions that its warps execute, in order.
    sequences: Vec<Vec<u32>>,
}

impl RegisterPool {
    pub fn new(actors: Actors, at_entry: Option<u32>) -> RegisterPool {
        let owner = Owner { registers: at_entry.unwrap_or(0), ..Owner::default() };
        let warpgroups = actors.ctas * actors.warps.div_ceil(WARPS);
        RegisterPool {
            owners: vec![owner; actors.threads()],
            free: vec![0; actors.ctas],
            sequences: vec![Vec::new(); warpgroups],
        }
    }
}

impl Env<'_> {
    /// Executes `setmaxnreg` for the whole warp. `.inc` waits until the pool has enough registers.
    pub(super) fn change_registers(
        &mut self,
        warp: &mut Warp,
        split: &mut Split,
        inst: &Inst,
        change: RegisterChange,
    ) -> Flow {
        if !self.pool.owners[warp.index].waits {
            self.check_change(warp, inst);
        }
        let (rank, target) = (self.rank(warp), warp.registers.lane(inst.s[0], 0) as u32);
        let owner = &mut self.pool.owners[warp.index];
        owner.waits = false;
        let (Some(_), has) = (self.context.registers, owner.registers) else { return Flow::Next };
        match change {
            RegisterChange::Dec if target <= has => self.pool.free[rank] += has - target,
            RegisterChange::Inc if target >= has => match self.pool.free[rank].checked_sub(target - has) {
                Some(rest) => self.pool.free[rank] = rest,
                None => {
                    owner.waits = true;
                    return self.retry(split);
                }
            },
            _ => {
                self.report(HazardKind::RegisterPool, inst, warp.index, 0, None, || {
                    format!(
                        "changes from {has} to {target} registers: .inc only increases, .dec only decreases"
                    )
                });
                return Flow::Next;
            }
        }
        self.pool.owners[warp.index].registers = target;
        split.polls = 0;
        Flow::Next
    }

    /// Checks that all warps of a warpgroup execute the same changes and synchronise between them.
    fn check_change(&mut self, warp: &Warp, inst: &Inst) {
        let (group, warpgroup) = (self.warpgroup_of(warp), self.actors.warpgroup(warp.index));
        if group.len() < WARPS {
            self.report(HazardKind::BarrierDivergence, inst, warp.index, 0, None, || {
                "the warpgroup has fewer than four warps".into()
            });
        }
        let number = self.pool.owners[warp.index].changes.len();
        let sequence = &mut self.pool.sequences[warpgroup];
        let expected = *sequence.get(number).unwrap_or(&inst.pc);
        if number == sequence.len() {
            sequence.push(inst.pc);
        }
        if expected != inst.pc {
            let (thread, other) = (self.thread(warp.index, 0), self.line(expected));
            self.findings.report(HazardKind::BarrierDivergence, inst.line, Some(other), || {
                let message = "the warps of a warpgroup execute different setmaxnreg instructions";
                (vec![thread], None, message.into())
            });
        }
        let met = |other: usize| {
            let last = number.checked_sub(1).map(|last| self.pool.owners[other].changes.get(last).copied());
            last.is_none_or(|epoch| epoch.is_some_and(|e| warp.view.knows(0, other, !0, e)))
        };
        if !group.filter(|other| *other != warp.index).all(met) {
            self.report(HazardKind::RegisterPool, inst, warp.index, 0, None, || {
                "is not ordered after the previous setmaxnreg of another warp of the warpgroup".into()
            });
        }
        self.pool.owners[warp.index].changes.push(warp.view.now());
    }

    /// Checks at the end that no warp has exited without a change that other warps of its warpgroup made.
    pub(super) fn check_changes(&mut self) {
        for warp in 0..self.actors.threads() {
            let sequence = &self.pool.sequences[self.actors.warpgroup(warp)];
            let Some(&missing) = sequence.get(self.pool.owners[warp].changes.len()) else { continue };
            if self.live[warp] == 0 {
                let inst = &self.context.program.code[missing as usize];
                self.report(HazardKind::BarrierDivergence, inst, warp, 0, None, || {
                    "a warp of the warpgroup exits without having executed this setmaxnreg".into()
                });
            }
        }
    }

    /// Describes what a warp waits for.
    pub(super) fn describe_pool(&self, warp: &Warp, inst: &Inst) -> String {
        let (has, free) = (self.pool.owners[warp.index].registers, self.pool.free[self.rank(warp)]);
        let target = warp.registers.lane(inst.s[0], 0);
        format!(
            "for {target} registers per thread: it has {has}, and its CTA's pool has {free} more for one warp"
        )
    }
}
