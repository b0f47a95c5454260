//! Operands of asynchronous copies, mbarriers and barriers.

use ptx::{CacheOp, Imm, MbarrierOp, MemSem, Op, Operand, Scope, Space, Type};

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
                    return self.malformed("cp.async lacks an operand that its modifiers announce");
                };
                if rest == 0 {
                    Ok(())
                } else {
                    self.sources(out, o, 3, &[if c.ignore_src { Pred } else { U32 }])
                }
            }
            Op::CpAsyncMbarrierArrive { space, .. } => self.address(out, o.get(0)?, space),
            Op::Mbarrier(m)
                if m.space == Space::SharedCluster || m.scope != Scope::Cta || m.sem == MemSem::Relaxed =>
            {
                self.unsupported(out.op.to_string())
            }
            Op::Mbarrier(m) => match m.op {
                MbarrierOp::Init => {
                    self.address(out, o.get(0)?, Space::Shared)?;
                    self.sources(out, o, 1, &[U32])
                }
                MbarrierOp::Inval => self.address(out, o.get(0)?, Space::Shared),
                MbarrierOp::Arrive | MbarrierOp::ArriveDrop | MbarrierOp::ArriveNoComplete => {
                    out.d[0] = self.destination(o.get(0)?, B64)?;
                    self.address(out, o.get(1)?, Space::Shared)?;
                    if o.list.len() > 2 { self.sources(out, o, 2, &[U32]) } else { Ok(()) }
                }
                MbarrierOp::TestWait | MbarrierOp::TryWait => {
                    out.d[0] = self.destination(o.get(0)?, Pred)?;
                    self.address(out, o.get(1)?, Space::Shared)?;
                    self.sources(out, o, 2, &[B64])
                }
                MbarrierOp::TestWaitParity | MbarrierOp::TryWaitParity => {
                    out.d[0] = self.destination(o.get(0)?, Pred)?;
                    self.address(out, o.get(1)?, Space::Shared)?;
                    self.sources(out, o, 2, &[U32])
                }
                MbarrierOp::ExpectTx
                | MbarrierOp::CompleteTx
                | MbarrierOp::ArriveExpectTx
                | MbarrierOp::ArriveDropNoComplete
                | MbarrierOp::ArriveDropExpectTx => self.unsupported(out.op.to_string()),
                MbarrierOp::PendingCount => self.lanewise(out, o, U32, &[B64]),
            },
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
