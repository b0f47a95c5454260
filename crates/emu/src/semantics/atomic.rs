//! The values of atomics and of reductions by bulk copies.

use ptx::{AtomicOp, BinaryOp, FloatMods, Op, Type};

use super::scalar::evaluate;

/// Whether an atomic of this type can be executed.
pub(crate) fn atomic_exists(op: AtomicOp, ty: Type) -> bool {
    use AtomicOp::{Add, Max, Min};
    let small = matches!(ty, Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2);
    match op {
        Add => true,
        Min | Max => !small && !ty.is_float(),
        _ => !ty.is_float(),
    }
}

/// The new value of an atomic. `b` is the operand; `c` is the second operand of `cas`. `ftz` says whether
/// additions flush subnormal numbers.
pub(crate) fn updated(op: AtomicOp, ty: Type, old: u64, [b, c]: [u64; 2], ftz: bool) -> u64 {
    let mods = FloatMods { ftz, ..FloatMods::NONE };
    let two = |op| evaluate(&Op::Binary(op, ty, mods), [old, b, 0, 0]).unwrap_or(0);
    let mask = u64::MAX >> (64 - ty.bits());
    match op {
        AtomicOp::And => old & b & mask,
        AtomicOp::Or => (old | b) & mask,
        AtomicOp::Xor => (old ^ b) & mask,
        AtomicOp::Exch => b & mask,
        AtomicOp::Cas => {
            if old & mask == b & mask {
                c & mask
            } else {
                old
            }
        }
        AtomicOp::Inc => {
            if old & mask >= b & mask {
                0
            } else {
                old + 1
            }
        }
        AtomicOp::Dec => {
            if old & mask == 0 || old & mask > b & mask {
                b & mask
            } else {
                old - 1
            }
        }
        AtomicOp::Add => two(BinaryOp::Add),
        AtomicOp::Min => two(BinaryOp::Min),
        AtomicOp::Max => two(BinaryOp::Max),
    }
}

/// Combines the copied elements with the elements in memory.
pub(crate) fn reduce(op: AtomicOp, ty: Type, target: &mut [u8], source: &[u8]) {
    let size = ty.bytes() as usize;
    for (to, from) in target.chunks_exact_mut(size).zip(source.chunks_exact(size)) {
        let value = |bytes: &[u8]| {
            let mut eight = [0; 8];
            eight[..size].copy_from_slice(bytes);
            u64::from_le_bytes(eight)
        };
        // Unlike `red`, bulk reductions of f32 keep subnormal numbers, as seen on an H200.
        let after = updated(op, ty, value(to), [value(from), 0], false);
        to.copy_from_slice(&after.to_le_bytes()[..size]);
    }
}
