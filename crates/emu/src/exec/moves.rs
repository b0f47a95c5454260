//! Executes `mov` with its packing, and the conversions between address spaces.

use ptx::{Space, Type};

use super::Env;
use super::warp::Warp;
use crate::decode::{CLOCK, Class, Inst};
use crate::memory::{RANK_SHIFT, resolve, window};

impl Env<'_> {
    pub(super) fn mov(&mut self, warp: &mut Warp, inst: &Inst, ty: Type, mask: u32) {
        let slots = self.facts.context.program.slots(inst);
        let registers = &mut warp.registers;
        if inst.target == CLOCK {
            let now = self.log.steps;
            return registers.set_any(inst.d[0], mask, &[now; 32]);
        }
        // A register of 128 bits is two of 64.
        let halves = (ty.bits() / 64).max(1) as usize;
        if slots.is_empty() {
            match inst.d[0].class {
                Class::W32 => {
                    let value = *registers.get32(inst.s[0]);
                    registers.set32(inst.d[0], mask, &value);
                }
                Class::W64 => {
                    for (d, s) in inst.d.into_iter().zip(inst.s).take(halves) {
                        let value = *registers.get64(s);
                        registers.set64(d, mask, &value);
                    }
                }
                Class::Pred => {
                    let value = registers.get_pred(inst.s[0], inst.negated, 0);
                    registers.set_pred(inst.d[0], mask, value);
                }
                Class::Sink => {}
            }
            return;
        }
        let bits = ty.bits() / slots.len() as u32;
        let part = u64::MAX >> (64 - bits);
        for (half, slots) in slots.chunks(slots.len() / halves).enumerate() {
            if inst.d[half].is_some() {
                let mut packed = [0u64; 32];
                for (i, slot) in slots.iter().enumerate() {
                    let value = registers.get_any(*slot);
                    (0..32).for_each(|l| packed[l] |= (value[l] & part) << (bits * i as u32));
                }
                registers.set_any(inst.d[half], mask, &packed);
            } else {
                let whole = registers.get_any(inst.s[half]);
                for (i, slot) in slots.iter().enumerate() {
                    registers.set_any(*slot, mask, &whole.map(|v| v >> (bits * i as u32) & part));
                }
            }
        }
    }

    pub(super) fn cvta(&mut self, warp: &mut Warp, inst: &Inst, space: Space, to_space: bool, mask: u32) {
        let a = warp.registers.get_any(inst.s[0]);
        let base = window(space);
        let result = a.map(|v| if to_space { v.wrapping_sub(base) } else { v.wrapping_add(base) });
        warp.registers.set_any(inst.d[0], mask, &result);
    }

    pub(super) fn isspacep(&mut self, warp: &mut Warp, inst: &Inst, space: Space, mask: u32) {
        let a = *warp.registers.get64(inst.s[0]);
        let own = self.rank(warp) as u64;
        let contains = |address: u64| match (resolve(address), space) {
            ((Space::Shared, place), Space::Shared) => place >> RANK_SHIFT == own,
            ((Space::Shared, _), Space::SharedCluster) => true,
            ((found, _), _) => found == space,
        };
        let inside = (0..32).fold(0, |set, l| set | u32::from(contains(a[l])) << l);
        warp.registers.set_pred(inst.d[0], mask, inside);
    }
}
