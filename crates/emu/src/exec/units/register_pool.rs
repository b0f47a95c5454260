//! `setmaxnreg` (PTX ISA, "setmaxnreg"): the warpgroups of a CTA exchange registers through a pool.
//!
//! ptxas decides how many registers a warp has at the start. It supports `setmaxnreg` only if directives
//! bound the registers: `.maxnreg`, or threads and CTAs per SM. Without a bound it ignores the instruction
//! (warning C7508), so the emulator does not wait here either. With a bound it assigns as many registers as
//! are allowed, or as many as the largest `.inc` requests if that is less (observed with ptxas 13.5). The
//! pool is empty at the start. Registers of exited warps do not return to the pool; the PTX ISA does not
//! define this.

use ptx::{LaunchBounds, Op, RegisterChange};

use super::products::WARPS;
use crate::decode::{Inst, Program};
use crate::order::{Actors, Epoch};

/// Registers of an SM, the maximum for a thread, and the allocation unit of 8 (CUDA C++ Programming Guide,
/// "Compute Capabilities").
pub(crate) const REGISTERS: u32 = 65536;
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

/// The result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Done,
    /// The pool has too few registers.
    Waits,
    /// The change is in the wrong direction from this number of registers per thread.
    Wrong {
        has: u32,
    },
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

    /// Whether the last change of a warp still waits for registers.
    pub fn waits(&self, warp: usize) -> bool {
        self.owners[warp].waits
    }

    /// Changes the registers per thread of a warp of the CTA of a rank.
    pub fn change(&mut self, warp: usize, rank: usize, change: RegisterChange, target: u32) -> Change {
        let (owner, free) = (&mut self.owners[warp], &mut self.free[rank]);
        let has = owner.registers;
        owner.waits = false;
        match change {
            RegisterChange::Dec if target <= has => *free += has - target,
            RegisterChange::Inc if target >= has => match free.checked_sub(target - has) {
                Some(rest) => *free = rest,
                None => {
                    owner.waits = true;
                    return Change::Waits;
                }
            },
            _ => return Change::Wrong { has },
        }
        owner.registers = target;
        Change::Done
    }

    /// Starts the next change of a warp, by the instruction at `pc`. Returns the instruction by which the
    /// warpgroup makes this change.
    pub fn begin(&mut self, warp: usize, warpgroup: usize, pc: u32) -> u32 {
        let number = self.owners[warp].changes.len();
        let sequence = &mut self.sequences[warpgroup];
        if number == sequence.len() {
            sequence.push(pc);
        }
        *sequence.get(number).unwrap_or(&pc)
    }

    /// Whether a warp about to make its next change knows the last change of another warp. `knows` tells
    /// whether it knows an epoch of that warp.
    pub fn is_met(&self, warp: usize, other: usize, knows: impl Fn(Epoch) -> bool) -> bool {
        let Some(last) = self.owners[warp].changes.len().checked_sub(1) else { return true };
        self.owners[other].changes.get(last).is_some_and(|epoch| knows(*epoch))
    }

    /// Notes the epoch of a warp's change.
    pub fn note(&mut self, warp: usize, now: Epoch) {
        self.owners[warp].changes.push(now);
    }

    /// The next change of its warpgroup that a warp has not made.
    pub fn missing(&self, warp: usize, warpgroup: usize) -> Option<u32> {
        self.sequences[warpgroup].get(self.owners[warp].changes.len()).copied()
    }

    /// Registers per thread of a warp, and those that its CTA's pool has for one warp.
    pub fn registers(&self, warp: usize, rank: usize) -> (u32, u32) {
        (self.owners[warp].registers, self.free[rank])
    }
}
