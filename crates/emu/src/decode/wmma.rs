//! Decodes the operands of `wmma`.

use ptx::{Op, Type, WmmaAccess};

use super::operands::{Operands, Result};
use super::{Class, Decoder, Inst};
use crate::semantics::{Fragment, products};

impl Decoder<'_> {
    pub(super) fn wmma(&mut self, out: &mut Inst, o: &Operands) -> Result<()> {
        let start = self.pool.len() as u32;
        match out.op {
            Op::Wmma(w) => {
                if products::of_wmma(&w).is_none() {
                    return self.unsupported(format!("{w}"));
                }
                let [a, b, c, d] = w.registers();
                let class = if w.a == Type::F64 { Type::F64 } else { Type::B32 };
                for (position, count) in [d, a, b, c].into_iter().enumerate() {
                    self.fragment(o.get(position)?, count, class)?;
                }
            }
            Op::WmmaLoad(m) => {
                self.fragment_access(out, o, m, 1)?;
                self.fragment(o.get(0)?, m.registers(), element(m.ty))?;
            }
            Op::WmmaStore(m) => {
                self.fragment_access(out, o, m, 0)?;
                self.fragment(o.get(1)?, m.registers(), element(m.ty))?;
            }
            _ => {}
        }
        out.list = (start, (self.pool.len() as u32 - start) as u16);
        Ok(())
    }

    fn fragment_access(&mut self, out: &mut Inst, o: &Operands, m: WmmaAccess, at: usize) -> Result<()> {
        let Some(fragment) = Fragment::new(m) else {
            return self.unsupported(format!("{}", out.op));
        };
        self.address(out, o.get(at)?, m.space)?;
        out.s[0] = match o.list.get(2) {
            Some(stride) => self.source(stride, Type::U32)?,
            None => self.constant(Class::W32, m.default_stride().into())?,
        };
        let narrowest = fragment.accesses.iter().map(|a| fragment.bytes(a)).min().unwrap_or(1);
        self.note_access(m.space, narrowest);
        out.target = self.fragments.len() as u32;
        self.fragments.push(fragment);
        Ok(())
    }
}

/// The type of a fragment's registers.
fn element(ty: Type) -> Type {
    if ty == Type::F64 { Type::F64 } else { Type::B32 }
}
