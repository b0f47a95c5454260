//! Constants that must lie in a range which their type does not say.

use crate::*;

/// What is wrong with the constants of an instruction, if anything.
pub(super) fn wrong(inst: &Instruction) -> Option<String> {
    let constant = |i: usize| match inst.operands.get(i) {
        Some(Operand::Imm(Imm::Int(value))) => Some(*value),
        _ => None,
    };
    let within = |i: usize, what: &str, low: i64, high: i64| {
        constant(i)
            .filter(|value| !(low..=high).contains(value))
            .map(|value| format!("{what} {value} is not from {low} to {high}"))
    };
    match inst.op {
        Op::Lop3 => within(4, "the table", 0, 255),
        Op::Pmevent => within(0, "the event", 0, 15),
        Op::CpAsyncWaitGroup => within(0, "the number of groups", 0, i32::MAX.into()),
        Op::Discard(_) => within(1, "the size", 128, 128),
        Op::CpAsync(copy) => {
            let size = constant(2)?;
            let known: &[i64] = if copy.cache == CacheOp::Cg { &[16] } else { &[4, 8, 16] };
            if !known.contains(&size) {
                let known: Vec<String> = known.iter().map(i64::to_string).collect();
                return Some(format!("copies {} bytes, not {size}", known.join(", ")));
            }
            if copy.cache_hint && inst.operands.len() == 4 {
                None
            } else {
                within(3, "the size read", 0, size)
            }
        }
        Op::Setmaxnreg(_) => constant(0)
            .filter(|n| !(24..=256).contains(n) || n % 8 != 0)
            .map(|n| format!("{n} registers is not a multiple of 8 from 24 to 256")),
        Op::Bar { kind, .. } => {
            let first = usize::from(!matches!(kind, BarKind::Sync | BarKind::Arrive));
            within(first, "the barrier", 0, 15).or_else(|| {
                let counted = inst.operands.len() > first + 1 + first;
                constant(first + 1)
                    .filter(|n| counted && (*n <= 0 || n % 32 != 0))
                    .map(|n| format!("{n} threads is not a positive multiple of 32"))
            })
        }
        _ => None,
    }
}
