//! Finds *quiet* buffers: buffers that a kernel seems only to read, although its contract lets it write them.
//! Reads of a quiet buffer race with nothing, so a run does not record them. The guess follows the parameters
//! to the addresses of stores, without regard to the order of instructions. It does not follow pointers
//! loaded from memory, so it may be wrong: a run that stores to a quiet buffer is repeated with all reads
//! recorded.

use std::collections::HashMap;

use ptx::{
    Access, Address, Arg, Base, Function, Instruction, Kernel, Name, Op, Operand, Reg, Space, Statement,
};

/// For each buffer of the contract, whether the kernel seems only to read it.
pub(crate) fn quiet_buffers(kernel: &Kernel) -> Vec<bool> {
    let is_entry = |function: &&Function| *function.name == *kernel.entry && function.body.is_some();
    let stored = kernel.module.functions().find(is_entry).map(stored_params).unwrap_or_default();
    let mut quiet: Vec<bool> =
        kernel.buffers.iter().map(|buffer| buffer.access == Access::ReadWrite).collect();
    for (arg, _) in kernel.args.iter().zip(stored).filter(|(_, stored)| *stored) {
        buffers_of(kernel, arg, &mut |index| quiet[index] = false);
    }
    quiet
}

/// Calls `found` for each buffer whose address is in an argument.
fn buffers_of(kernel: &Kernel, arg: &Arg, found: &mut impl FnMut(usize)) {
    match arg {
        Arg::Buffer { index, .. } => found(*index),
        Arg::TensorMap { index } => {
            if let Some(map) = kernel.tensor_maps.get(*index) {
                found(map.buffer);
            }
        }
        Arg::Struct(value) => value.fields.iter().for_each(|(_, field)| buffers_of(kernel, field, found)),
        _ => {}
    }
}

/// For each parameter, whether it reaches the address of an instruction that may store to global memory.
/// Parameters from the 64th on share one bit.
fn stored_params(entry: &Function) -> Vec<bool> {
    let bit = |at: usize| 1u64 << at.min(63);
    let names: HashMap<&Name, u64> =
        entry.params.iter().enumerate().map(|(at, param)| (&param.name, bit(at))).collect();
    let statements = || entry.body.iter().flat_map(|body| &body.statements);
    let instructions = || {
        statements().filter_map(|statement| match statement {
            Statement::Inst(inst) => Some(inst),
            Statement::Label(_) | Statement::Pragma(_) => None,
        })
    };
    let mut from = Origins { names, registers: HashMap::new() };
    loop {
        let mut grew = false;
        for inst in instructions().filter(|inst| !is_load_from_memory(inst)) {
            let sources = inst.operands.iter().skip(1).fold(0, |set, operand| set | from.of(operand));
            if sources != 0 && !inst.op.may_store_global() {
                inst.operands.first().into_iter().for_each(|result| from.add(result, sources, &mut grew));
            }
        }
        if !grew {
            break;
        }
    }
    // The stored value of a store does not matter. Other storing instructions have few operands, and all of
    // them count.
    let places = instructions().filter(|inst| inst.op.may_store_global()).fold(0, |set, inst| {
        let address = inst.operands.iter().filter(|operand| match inst.op {
            Op::St(_) | Op::Atom(_) | Op::Red(_) => matches!(operand, Operand::Address(_)),
            _ => true,
        });
        address.fold(set, |set, operand| set | from.of(operand))
    });
    (0..entry.params.len()).map(|at| places & bit(at) != 0).collect()
}

/// The parameters from which the value of each register may come.
struct Origins<'a> {
    names: HashMap<&'a Name, u64>,
    registers: HashMap<Reg, u64>,
}

impl Origins<'_> {
    fn of(&self, operand: &Operand) -> u64 {
        let register = |reg: &Reg| self.registers.get(reg).copied().unwrap_or(0);
        let name = |name: &Name| self.names.get(name).copied().unwrap_or(0);
        match operand {
            Operand::Reg(reg) => register(reg),
            Operand::Address(Address { base: Base::Reg(reg), .. }) => register(reg),
            Operand::Address(Address { base: Base::Symbol(symbol), .. }) | Operand::Symbol(symbol, _) => {
                name(symbol)
            }
            Operand::Vector(all) | Operand::List(all) => all.iter().fold(0, |set, one| set | self.of(one)),
            _ => 0,
        }
    }

    /// Adds origins to the registers of a result.
    fn add(&mut self, result: &Operand, origins: u64, grew: &mut bool) {
        match result {
            Operand::Reg(reg) | Operand::Pair(Some(reg), _) => {
                let known = self.registers.entry(*reg).or_insert(0);
                *grew |= origins & !*known != 0;
                *known |= origins;
            }
            Operand::Vector(all) => all.iter().for_each(|one| self.add(one, origins, grew)),
            _ => {}
        }
    }
}

/// A load whose value is data, not a parameter.
fn is_load_from_memory(inst: &Instruction) -> bool {
    match inst.op {
        Op::Ld(memory) => memory.space != Space::Param,
        Op::Ldmatrix(_) | Op::WmmaLoad(_) | Op::Atom(_) => true,
        _ => false,
    }
}
