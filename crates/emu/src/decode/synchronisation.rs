//! Decodes the operands of asynchronous copies, mbarriers and barriers.

use ptx::{CacheOp, Imm, Mbarrier, MbarrierOp, Op, Operand, Space, Type};

use super::operands::{Operands, Result};
use super::{Decoder, Inst};

impl Decoder<'_> {
    pub(super) fn asynchronous(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        use Type::{B64, Pred, U32};
        match out.op {
            Op::CpAsync(c) => {
                debug_assert!(matches!(c.cache, CacheOp::Ca | CacheOp::Cg) || c.l2_prefetch.is_none());
                self.address(out, o.get(0)?, Space::Shared)?;
                let (base, offset, _) = self.resolve(o.get(1)?, Space::Global)?;
                out.source = (base, offset);
                let bytes = match o.get(2)? {
                    Operand::Imm(Imm::Int(n @ (4 | 8 | 16))) => *n as u32,
                    _ => return self.malformed("cp.async copies 4, 8 or 16 bytes"),
                };
                out.target = bytes;
                self.note_access(Space::Shared, bytes);
                self.note_access(Space::Global, bytes);
                let least = 3 + usize::from(c.cache_hint);
                let Some(rest) = o.list.len().checked_sub(least) else {
                    return self.malformed("cp.async lacks an operand that its modifiers require");
                };
                if rest == 0 {
                    Ok(())
                } else {
                    self.sources(out, o, 3, &[if c.ignore_src { Pred } else { U32 }])
                }
            }
            Op::CpAsyncMbarrierArrive { space, .. } => {
                self.note_access(Space::Shared, 8);
                self.address(out, o.get(0)?, space)
            }
            Op::Mbarrier(Mbarrier { op: MbarrierOp::PendingCount, .. }) => self.lanewise(out, o, U32, &[B64]),
            Op::Mbarrier(m) => {
                self.asynchronous = true;
                self.note_access(Space::Shared, 8);
                let result = usize::from(m.op.arrives() || m.op.waits());
                if result == 1 {
                    out.d[0] = self.destination(o.get(0)?, if m.op.waits() { Pred } else { B64 })?;
                }
                self.address(out, o.get(result)?, m.space)?;
                let by_state = m.op.waits() && !m.op.by_parity();
                // The time limit of a wait has no effect in the emulator.
                if o.list.len() > result + 1 {
                    self.sources(out, o, result + 1, &[if by_state { B64 } else { U32 }])
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }

    pub(super) fn barrier(&mut self, out: &mut Inst, o: &Operands, kind: ptx::BarKind) -> Result<()> {
        use Type::{Pred, U32};
        use ptx::BarKind::{RedAnd, RedOr, RedPopc};
        let reduction = matches!(kind, RedAnd | RedOr | RedPopc);
        let (first, last) = (usize::from(reduction), o.list.len() - usize::from(reduction));
        if reduction {
            out.d[0] = self.destination(o.get(0)?, if kind == RedPopc { U32 } else { Pred })?;
            let operand = o.get(last)?;
            out.negated = if matches!(operand, Operand::Not(_)) { 4 } else { 0 };
            out.s[2] = self.source(operand, Pred)?;
        }
        for (i, position) in (first..last).enumerate().take(2) {
            out.s[i] = self.source(o.get(position)?, U32)?;
        }
        if out.s[0].is_some() { Ok(()) } else { self.malformed("a barrier has no number") }
    }
}
