//! Values that nothing defined, followed from register to register until something depends on them.

use std::collections::HashMap;

use ptx::Op;

use super::Env;
use super::warp::Warp;
use crate::decode::{Class, Inst, Program, Slot, Uses, defines, operand_list, uses};
use crate::report::HazardKind;

/// Lanes in which the watched registers of a warp are undefined.
#[derive(Debug, Default)]
pub(crate) struct Undefined {
    lanes: HashMap<Slot, u32>,
    /// Where an undefined register was first read, of those that were computed from one.
    origin: HashMap<Slot, u32>,
}

impl Undefined {
    pub fn new(program: &Program) -> Undefined {
        Undefined { lanes: program.suspects.iter().map(|s| (*s, !0)).collect(), origin: HashMap::new() }
    }

    fn of(&self, slot: Slot) -> u32 {
        self.lanes.get(&slot).copied().unwrap_or(0)
    }

    /// What lanes get when they shuffle.
    pub fn shuffled(&mut self, inst: &Inst, mask: u32, source: &[usize; 32]) {
        let from = self.of(inst.s[0]);
        let lanes = (0..32).fold(0, |set, l| set | (from >> source[l] & 1) << l);
        self.set(inst.d[0], mask, lanes, inst.line);
    }

    fn set(&mut self, slot: Slot, mask: u32, lanes: u32, origin: u32) {
        let Some(old) = self.lanes.get_mut(&slot) else { return };
        *old = *old & !mask | lanes & mask;
        if lanes & mask != 0 {
            self.origin.insert(slot, origin);
        }
    }
}

impl Env<'_> {
    /// Before an instruction that touches watched registers: `all` are the lanes that came to it, `mask` those that
    /// execute it.
    #[inline(never)]
    pub(super) fn watch(&mut self, warp: &mut Warp, inst: &Inst, all: u32, mask: u32) {
        let program = self.context.program;
        let list = operand_list(program, inst);
        let Uses { data, effect } = uses(inst, list);
        if let Some((index, _)) = inst.guard {
            self.check_defined(warp, inst, Slot { class: Class::Pred, index }, all);
        }
        if mask == 0 {
            return;
        }
        for slot in effect {
            self.check_defined(warp, inst, slot, mask);
        }
        let undefined = &mut warp.undefined;
        let (lanes, origin) = match inst.op {
            Op::Selp(_) => {
                let p = warp.registers.get_pred(inst.s[2], inst.negated, 2);
                let chosen = undefined.of(inst.s[0]) & p | undefined.of(inst.s[1]) & !p;
                (chosen | undefined.of(inst.s[2]), inst.line)
            }
            _ => (data.iter().fold(0, |set, s| set | undefined.of(*s)), inst.line),
        };
        let first =
            data.iter().filter(|s| undefined.of(**s) & mask != 0).find_map(|s| undefined.origin.get(s));
        let origin = first.copied().unwrap_or(origin);
        for slot in defines(inst, list) {
            undefined.set(slot, mask, lanes, origin);
        }
    }

    fn check_defined(&mut self, warp: &Warp, inst: &Inst, slot: Slot, mask: u32) {
        let lanes = warp.undefined.of(slot) & mask;
        if lanes == 0 {
            return;
        }
        let origin = warp.undefined.origin.get(&slot).copied().unwrap_or(inst.line);
        let other_line = (origin != inst.line).then_some(inst.line);
        let thread = self.thread(warp.index, lanes.trailing_zeros() as usize);
        self.findings.report(HazardKind::UninitialisedRead, origin, other_line, || {
            let message = match other_line {
                None => "depends on a register that the thread has not written".to_string(),
                Some(line) => {
                    format!("reads a register that the thread has not written, and line {line} depends on the result")
                }
            };
            (vec![thread], None, message)
        });
    }
}
