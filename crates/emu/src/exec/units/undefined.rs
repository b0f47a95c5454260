//! Registers and bytes of shared memory whose values are undefined.

use std::collections::HashSet;

use crate::decode::{Join, Program, Watch};

/// For each watched register, the lanes in which its bytes are undefined.
#[derive(Debug, Default)]
pub(crate) struct Undefined {
    /// Indexed like [`Program::suspects`], then by the byte of the register.
    pub lanes: Vec<[u32; 8]>,
    /// For a register that was computed from an undefined one, the line that first read the undefined
    /// register.
    origin: Vec<Option<u32>>,
    /// For each region of a branch, the lanes in it whose branch an undefined value decided, and the line
    /// that first read the value.
    decided: Vec<(u32, u32)>,
    /// The lanes whose local memory depends on such a branch, or holds a followed value.
    pub local: u32,
}

/// The lanes in which each byte of a register is undefined, and the register's origin.
pub(crate) type Definedness = ([u32; 8], Option<u32>);

impl Undefined {
    pub fn new(program: &Program) -> Undefined {
        let count = program.suspects.len();
        Undefined { lanes: vec![[!0; 8]; count], origin: vec![None; count], decided: Vec::new(), local: 0 }
    }

    /// The lanes in which a byte of the register is undefined.
    pub fn of(&self, suspect: u32) -> u32 {
        self.lanes[suspect as usize].iter().fold(0, |set, lanes| set | lanes)
    }

    pub fn any(&self, suspects: &[u32]) -> u32 {
        suspects.iter().fold(0, |set, s| set | self.of(*s))
    }

    pub fn set(&mut self, suspects: &[u32], mask: u32, lanes: u32, origin: u32) {
        self.set_bytes(suspects, mask, [lanes; 8], origin);
    }

    pub fn set_bytes(&mut self, suspects: &[u32], mask: u32, bytes: [u32; 8], origin: u32) {
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
    pub fn origin(&self, suspects: &[u32], mask: u32, line: u32) -> u32 {
        let undefined = |s: &&u32| self.of(**s) & mask != 0;
        suspects.iter().filter(undefined).find_map(|s| self.origin[*s as usize]).unwrap_or(line)
    }

    /// Marks the registers that an instruction writes as undefined in some lanes.
    pub fn doubt(&mut self, watch: &Watch, lanes: u32, line: u32) {
        self.set(&watch.defines, lanes, lanes, line);
    }

    /// Notes the lanes whose branch into a region an undefined value decides.
    pub fn enter(&mut self, region: u32, lanes: u32, origin: u32) {
        let at = region as usize;
        self.decided.resize(self.decided.len().max(at + 1), (0, 0));
        self.decided[at] = (self.decided[at].0 | lanes, origin);
    }

    /// Marks what a region writes, for those of the lanes whose branch an undefined value decided.
    pub fn leave(&mut self, join: &Join, lanes: u32) {
        let Some(decided) = self.decided.get_mut(join.region as usize) else { return };
        let (lanes, origin) = (decided.0 & lanes, decided.1);
        decided.0 &= !lanes;
        if lanes != 0 {
            self.set(&join.writes, lanes, lanes, origin);
            self.local |= if join.stores { lanes } else { 0 };
        }
    }

    /// Applies an exchange of values between lanes. `parts` holds the watch, the line and the participating
    /// lanes of each instruction; `reached` gives the lanes whose results depend on those of a set of lanes.
    pub fn exchanged(&mut self, parts: &[(Option<&Watch>, u32, u32)], reached: impl Fn(u32) -> u32) {
        let from = parts.iter().fold(0, |set, (watch, _, lanes)| set | self.any(passed_on(*watch)) & lanes);
        let origins: Vec<u32> =
            parts.iter().map(|(watch, line, _)| self.origin(passed_on(*watch), !0, *line)).collect();
        let undefined = reached(from);
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

/// The bytes of shared memory with undefined values, if these are followed.
#[derive(Debug, Default)]
pub(crate) struct UndefinedBytes(HashSet<u64>);

impl UndefinedBytes {
    /// Notes a store of a value.
    pub fn store(&mut self, address: u64, bytes: u64, undefined: bool) {
        if undefined {
            self.0.extend(address..address + bytes);
        } else if !self.0.is_empty() {
            (address..address + bytes).for_each(|byte| {
                self.0.remove(&byte);
            });
        }
    }

    pub fn any(&self, address: u64, bytes: u64) -> bool {
        !self.0.is_empty() && (address..address + bytes).any(|byte| self.0.contains(&byte))
    }
}
