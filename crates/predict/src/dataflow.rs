//! The registers that an instruction reads and writes.

use ptx::{Instruction, Reg};
use smallvec::SmallVec;

/// Registers of one instruction.
pub(crate) type Regs = SmallVec<[Reg; 6]>;

/// The registers read, including those of the guard and of addresses.
pub(crate) fn reads(instruction: &Instruction) -> Regs {
    let mut regs = Regs::new();
    instruction.registers_read(|r| regs.push(r));
    regs
}

pub(crate) fn writes(instruction: &Instruction) -> Regs {
    let mut regs = Regs::new();
    instruction.registers_written(|r| regs.push(r));
    regs
}
