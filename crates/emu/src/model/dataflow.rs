//! Registers that an instruction reads and writes, as lists.

use ptx::{Instruction, Reg};
use smallvec::SmallVec;

type Regs = SmallVec<[Reg; 6]>;

/// Registers read, the guard's and those of addresses included.
pub(crate) fn reads(instruction: &Instruction) -> Regs {
    let mut regs = Regs::new();
    instruction.registers_read(|r| regs.push(r));
    regs
}

/// Registers written.
pub(crate) fn writes(instruction: &Instruction) -> Regs {
    let mut regs = Regs::new();
    instruction.registers_written(|r| regs.push(r));
    regs
}
