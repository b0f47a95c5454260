//! Ranges of immediates.

use crate::{CacheOp, Imm, Instruction, Mbarrier, MbarrierOp, Op, Operand, Wgmma};

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
        Op::CpAsyncBulkWaitGroup { .. } | Op::WgmmaWaitGroup => {
            range("the groups that may stay in flight", at(0), 0, i64::from(u32::MAX))
        }
        Op::Wgmma(wgmma) if wgmma.has_scales() => factors(&wgmma, [at(4), at(5)], [at(6), at(7)]),
        Op::CpAsyncBulk(_) | Op::CpReduceAsyncBulk(_) => bulk_bytes(at(2)),
        Op::CpAsyncBulkPrefetch { .. } => bulk_bytes(at(1)),
        Op::FenceTensormap(..) => range("the bytes of a tensor map", at(1), 128, 128),
        Op::Mbarrier(Mbarrier { op: MbarrierOp::Init, .. }) => {
            range("the arrivals of an mbarrier", at(1), 1, (1 << 20) - 1)
        }
        Op::Mbarrier(Mbarrier { op: MbarrierOp::TestWaitParity | MbarrierOp::TryWaitParity, .. }) => {
            range("the parity of a phase", at(2), 0, 1)
        }
        _ => Ok(()),
    }
}

/// `imm-scale-a, imm-scale-b` and, where they are taken, `imm-trans-a, imm-trans-b`.
fn factors(wgmma: &Wgmma, scales: [Option<i64>; 2], majors: [Option<i64>; 2]) -> Result<(), Fault> {
    if let Some(scale) = scales.into_iter().flatten().find(|scale| !matches!(scale, -1 | 1)) {
        return fault(Rule::Constant, format!("a scale of wgmma: {scale} is neither 1 nor -1"));
    }
    let majors = if wgmma.has_transpose() { majors } else { [None, None] };
    majors.into_iter().try_for_each(|major| range("a transposition of wgmma", major, 0, 1))
}

/// An mbarrier counts up to 2^20 - 1 bytes (PTX ISA, "mbarrier: Tracking asynchronous operations").
fn bulk_bytes(value: Option<i64>) -> Result<(), Fault> {
    range("the bytes of a bulk copy", value, 0, (1 << 20) - 16)?;
    multiple("the bytes of a bulk copy", value, 16)
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
