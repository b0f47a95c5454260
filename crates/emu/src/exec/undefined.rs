//! Tracks undefined values from register to register until an instruction depends on one.

use ptx::Space;

use super::access::Site;
use super::registers::for_lanes;
use super::warp::Warp;
use super::{Env, Follow};
use crate::decode::{Inst, Program, Watch};
use crate::report::HazardKind;

/// For each watched register, the lanes in which its bytes are undefined.
#[derive(Debug, Default)]
pub(crate) struct Undefined {
    /// Indexed like [`Program::suspects`], then by the byte of the register.
    lanes: Vec<[u32; 8]>,
    /// For a register that was computed from an undefined one, the line that first read the undefined
    /// register.
    origin: Vec<Option<u32>>,
}

/// The lanes in which each byte of a register is undefined, and the register's origin.
pub(crate) type Definedness = ([u32; 8], Option<u32>);

impl Undefined {
    pub fn new(program: &Program) -> Undefined {
        let count = program.suspects.len();
        Undefined { lanes: vec![[!0; 8]; count], origin: vec![None; count] }
    }

    /// The lanes in which a byte of the register is undefined.
    fn of(&self, suspect: u32) -> u32 {
        self.lanes[suspect as usize].iter().fold(0, |set, lanes| set | lanes)
    }

    fn any(&self, suspects: &[u32]) -> u32 {
        suspects.iter().fold(0, |set, s| set | self.of(*s))
    }

    fn set(&mut self, suspects: &[u32], mask: u32, lanes: u32, origin: u32) {
        self.set_bytes(suspects, mask, [lanes; 8], origin);
    }

    fn set_bytes(&mut self, suspects: &[u32], mask: u32, bytes: [u32; 8], origin: u32) {
        suspects.iter().for_each(|suspect| self.set_state(*suspect, mask, (bytes, Some(origin))));
    }

    pub fn state(&self, suspect: u32) -> Definedness {
        (self.lanes[suspect as usize], self.origin[suspect as usize])
    }

    pub fn set_state(&mut self, suspect: u32, mask: u32, (bytes, origin): Definedness) {
        for (old, lanes) in self.lanes[suspect as usize].iter_mut().zip(bytes) {
            *old = *old & !mask | lanes & mask;
        }
        if bytes.iter().any(|lanes| lanes & mask != 0) {
            self.origin[suspect as usize] = origin;
        }
    }

    /// Marks registers as never written in some lanes.
    pub fn forget(&mut self, suspects: &[u32], mask: u32) {
        suspects.iter().for_each(|suspect| self.set_state(*suspect, mask, ([!0; 8], None)));
    }

    /// The line where the undefined value in these registers was first read; `line` if the present line is
    /// the first.
    fn origin(&self, suspects: &[u32], mask: u32, line: u32) -> u32 {
        let undefined = |s: &&u32| self.of(**s) & mask != 0;
        suspects.iter().filter(undefined).find_map(|s| self.origin[*s as usize]).unwrap_or(line)
    }

    /// Marks the registers that an instruction writes as undefined in some lanes.
    pub fn doubt(&mut self, watch: &Watch, lanes: u32, line: u32) {
        self.set(&watch.defines, lanes, lanes, line);
    }

    /// Applies a shuffle. `parts` holds the watch, the line and the participating lanes of each instruction.
    pub fn shuffled(&mut self, parts: &[(Option<&Watch>, u32, u32)], source: &[usize; 32]) {
        let from = parts.iter().fold(0, |set, (watch, _, lanes)| set | self.any(passed_on(*watch)) & lanes);
        let origins: Vec<u32> =
            parts.iter().map(|(watch, line, _)| self.origin(passed_on(*watch), !0, *line)).collect();
        let undefined = (0..32).fold(0, |set, l| set | (from >> source[l] & 1) << l);
        for ((watch, _, lanes), origin) in parts.iter().zip(origins) {
            if let Some(watch) = watch {
                self.set(&watch.defines, *lanes, undefined, origin);
            }
        }
    }
}

fn passed_on(watch: Option<&Watch>) -> &[u32] {
    watch.map_or(&[], |watch| &watch.data)
}

impl Env<'_> {
    /// Called before an instruction that touches watched registers. `all` are the lanes that reached it,
    /// `mask` the lanes that execute it.
    #[inline(never)]
    pub(super) fn watch(&mut self, warp: &mut Warp, inst: &Inst, watch: &Watch, all: u32, mask: u32) {
        if let Some(guard) = watch.guard {
            self.check_defined(warp, inst, guard, all);
        }
        if mask == 0 {
            return;
        }
        for &suspect in &watch.effect {
            self.check_defined(warp, inst, suspect, mask);
        }
        let undefined = &mut warp.undefined;
        let origin = undefined.origin(&watch.data, mask, inst.line);
        for (suspect, bytes) in &watch.bytes {
            let lanes = |parts: &Vec<(u32, u8)>| {
                parts.iter().fold(0, |set, (s, byte)| set | undefined.lanes[*s as usize][usize::from(*byte)])
            };
            let bytes = bytes.each_ref().map(lanes);
            undefined.set_bytes(&[*suspect], mask, bytes, origin);
        }
        if !watch.bytes.is_empty() {
            return;
        }
        let lanes = match watch.choice {
            Some(slots) => {
                let p = warp.registers.get_pred(inst.s[2], inst.negated, 2);
                let [a, b, of_p] = slots.map(|s| s.map_or(0, |s| undefined.of(s)));
                a & p | b & !p | of_p
            }
            None => undefined.any(&watch.data),
        };
        undefined.set(&watch.defines, mask, lanes, origin);
    }

    /// Called after a store in a run that follows loads. Its values are not among the effects of the
    /// instruction then.
    #[cold]
    pub(super) fn follow_store(&mut self, warp: &Warp, site: &Site, lanes: u32, places: &[u64; 32]) {
        let context = self.context;
        let values: &[u32] =
            site.inst.watched.map_or(&[], |watch| &context.program.watches[watch as usize].data);
        if !(matches!(context.follow, Follow::Copies) && site.space == Space::Shared) {
            values.iter().for_each(|suspect| self.check_defined(warp, site.inst, *suspect, lanes));
            return;
        }
        let undefined = warp.undefined.any(values);
        for_lanes(lanes, |lane| {
            let bytes = places[lane]..places[lane] + u64::from(site.bytes);
            if undefined >> lane & 1 == 1 {
                self.undefined_bytes.extend(bytes);
            } else {
                bytes.for_each(|byte| {
                    self.undefined_bytes.remove(&byte);
                });
            }
        });
    }

    pub(super) fn has_undefined_bytes(&self, address: u64, bytes: u64) -> bool {
        !self.undefined_bytes.is_empty()
            && (address..address + bytes).any(|byte| self.undefined_bytes.contains(&byte))
    }

    fn check_defined(&mut self, warp: &Warp, inst: &Inst, suspect: u32, mask: u32) {
        let lanes = warp.undefined.of(suspect) & mask;
        if lanes == 0 {
            return;
        }
        let origin = warp.undefined.origin(&[suspect], mask, inst.line);
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
