//! Ranges of immediates.

use crate::{CacheOp, Imm, Instruction, Mbarrier, MbarrierOp, Op, Operand};

use super::{Fault, Rule, fault};

/// Most threads of a CTA.
pub(super) const MOST_THREADS: i64 = 1024;

pub(super) fn check(inst: &Instruction) -> Result<(), Fault> {
    let at = |i: usize| match inst.operands.get(i) {
        Some(Operand::Imm(Imm::Int(value))) => Some(*value),
        _ => None,
    };
    match inst.op {
        Op::Lop3(_) => range("the truth table of lop3", at(4), 0, 255),
        Op::Bar { kind, .. } => {
            // Reductions write a result first and read a predicate last.
            let first = usize::from(!matches!(kind, crate::BarKind::Sync | crate::BarKind::Arrive));
            range("a barrier", at(first), 0, 15)?;
            let count = at(first + 1);
            range("the threads of a barrier", count, 32, MOST_THREADS)?;
            multiple("the threads of a barrier", count, 32)
        }
        Op::CpAsync(copy) => {
            let size = at(2).unwrap_or(0);
            if copy.cache == CacheOp::Cg && size != 16 {
                return fault(Rule::Constant, format!("cp.async.cg copies 16 bytes, not {size}"));
            }
            if !matches!(size, 4 | 8 | 16) {
                return fault(Rule::Constant, format!("cp.async copies 4, 8 or 16 bytes, not {size}"));
            }
            let policy_fourth = copy.cache_hint && inst.operands.len() == 4;
            range("the bytes that cp.async reads", at(3).filter(|_| !policy_fourth), 0, size)
        }
        Op::CpAsyncWaitGroup => range("the groups that may stay in flight", at(0), 0, i64::from(u32::MAX)),
        Op::Setmaxnreg(_) => {
            range("the registers of setmaxnreg", at(0), 24, 256)?;
            multiple("the registers of setmaxnreg", at(0), 8)
        }
        Op::Pmevent => range("the event of pmevent", at(0), 0, 15),
        Op::Nanosleep => Ok(()),
        Op::Discard(_) => range("the bytes of discard", at(1), 128, 128),
        Op::Shfl(_) => mask(at(4)),
        Op::Vote(_) | Op::Match(..) | Op::Redux { .. } => mask(at(2)),
        Op::Elect => mask(at(1)),
        Op::BarWarpSync => mask(at(0)),
        Op::Mbarrier(Mbarrier { op: MbarrierOp::Init, .. }) => {
            range("the arrivals of an mbarrier", at(1), 1, (1 << 20) - 1)
        }
        Op::Mbarrier(Mbarrier { op: MbarrierOp::TestWaitParity | MbarrierOp::TryWaitParity, .. }) => {
            range("the parity of a phase", at(2), 0, 1)
        }
        _ => Ok(()),
    }
}

fn mask(value: Option<i64>) -> Result<(), Fault> {
    match value {
        Some(0) => fault(Rule::Constant, "a member mask of 0 names no lane"),
        _ => Ok(()),
    }
}

fn range(what: &str, value: Option<i64>, least: i64, most: i64) -> Result<(), Fault> {
    match value {
        Some(value) if !(least..=most).contains(&value) => {
            fault(Rule::Constant, format!("{what}: {value} is not between {least} and {most}"))
        }
        _ => Ok(()),
    }
}

fn multiple(what: &str, value: Option<i64>, of: i64) -> Result<(), Fault> {
    match value {
        Some(value) if value % of != 0 => {
            fault(Rule::Constant, format!("{what}: {value} is no multiple of {of}"))
        }
        _ => Ok(()),
    }
}
