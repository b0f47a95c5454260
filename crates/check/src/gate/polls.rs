//! Loops that wait for another CTA: their condition depends on a strong read of global memory.

use std::collections::{HashMap, HashSet};

use ptx::{
    Address, AtomicOp, Base, Function, Imm, Instruction, MemSem, Module, Op, Operand, Reg, Space, Statement,
};

/// A loop whose condition depends on a strong read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Poll {
    /// The index of the read in the module, and its line.
    pub read: usize,
    pub line: u32,
    /// The index of the backward branch.
    pub back: usize,
}

/// The polls of a module.
pub(super) fn polls(module: &Module) -> Vec<Poll> {
    let mut start = 0;
    let mut found = Vec::new();
    for function in module.functions() {
        let instructions: Vec<&Instruction> = function.instructions().collect();
        for (first, back) in loops(function) {
            let read = poll(&instructions[first..=back]);
            found.extend(read.map(|at| {
                let at = first + at;
                Poll { read: start + at, line: instructions[at].line, back: start + back }
            }));
        }
        start += instructions.len();
    }
    found
}

/// The loops of a function, each from the target of a backward branch to the branch.
pub(super) fn loops(function: &Function) -> Vec<(usize, usize)> {
    let (mut labels, mut found, mut at) = (HashMap::new(), Vec::new(), 0);
    for statement in function.body.iter().flat_map(|body| &body.statements) {
        match statement {
            Statement::Label(label) => drop(labels.insert(*label, at)),
            Statement::Inst(inst) => {
                let target = match (&inst.op, inst.operands.first()) {
                    (Op::Bra { .. }, Some(Operand::Label(target))) => labels.get(target),
                    _ => None,
                };
                found.extend(target.map(|first| (*first, at)));
                at += 1;
            }
            Statement::Pragma(_) => {}
        }
    }
    found
}

/// The strong read on which a branch of the loop depends. A value may pass through shared memory, where one
/// thread polls for a CTA.
fn poll(body: &[&Instruction]) -> Option<usize> {
    let reads: Vec<usize> = (0..body.len()).filter(|at| waits(body[*at])).collect();
    reads.into_iter().find(|read| {
        let depends = dependents(body, *read);
        // A retry of an atomic computes its operands from what it read. A poll has constant operands.
        let retries = matches!(body[*read].op, Op::Atom(_))
            && registers(&body[*read].operands[2..]).iter().any(|reg| depends.contains(reg));
        let decides = |inst: &&Instruction| {
            matches!(inst.op, Op::Bra { .. }) && inst.guard.is_some_and(|guard| depends.contains(&guard.reg))
        };
        !retries && body.iter().any(decides)
    })
}

/// Whether an instruction is a strong read that other CTAs may answer, and that changes no counter.
fn waits(inst: &Instruction) -> bool {
    let is_global = |space| matches!(space, Space::Global | Space::Generic);
    match inst.op {
        Op::Ld(m) => is_global(m.space) && !matches!(m.sem, MemSem::Default | MemSem::Weak),
        Op::Atom(a) if is_global(a.space) => match a.op {
            AtomicOp::Cas | AtomicOp::Exch => true,
            AtomicOp::Add | AtomicOp::Or => matches!(inst.operands.get(2), Some(Operand::Imm(Imm::Int(0)))),
            _ => false,
        },
        _ => false,
    }
}

/// The registers whose values depend on an instruction of a loop.
fn dependents(body: &[&Instruction], read: usize) -> HashSet<Reg> {
    let mut depends: HashSet<Reg> = results(body[read]).into_iter().collect();
    let mut in_shared = false;
    loop {
        let before = (depends.len(), in_shared);
        for inst in body {
            let (first, rest) = match inst.op {
                Op::St(m) => {
                    let stored = registers(&inst.operands).iter().any(|reg| depends.contains(reg));
                    in_shared |= stored && matches!(m.space, Space::Shared | Space::Generic);
                    continue;
                }
                _ => (results(inst), inst.operands.get(1..).unwrap_or_default()),
            };
            let loads = in_shared && matches!(inst.op, Op::Ld(m) if m.space == Space::Shared);
            if loads || registers(rest).iter().any(|reg| depends.contains(reg)) {
                depends.extend(first);
            }
        }
        if before == (depends.len(), in_shared) {
            return depends;
        }
    }
}

/// The registers that an instruction writes.
fn results(inst: &Instruction) -> Vec<Reg> {
    registers(inst.operands.get(..1).unwrap_or_default())
}

fn registers(operands: &[Operand]) -> Vec<Reg> {
    let of = |operand: &Operand| match operand {
        Operand::Reg(reg) | Operand::Not(reg) => vec![*reg],
        Operand::Address(Address { base: Base::Reg(reg), .. }) => vec![*reg],
        Operand::Pair(a, b) => a.iter().chain(b).copied().collect(),
        Operand::Vector(all) | Operand::List(all) => registers(all),
        _ => Vec::new(),
    };
    operands.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(body: &str) -> Vec<u32> {
        let text = format!(
            ".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 a)\n{{\n    .reg .b32 %r<9>;\n    \
             .reg .b64 %rd<9>;\n    .reg .pred %p<9>;\n    .shared .align 4 .b8 s[4];\n{body}    ret;\n}}\n"
        );
        let found = polls(&ptx::parse(&text).unwrap());
        found.iter().map(|poll| poll.line).collect()
    }

    #[test]
    fn a_loop_that_reads_until_a_value_comes_is_a_poll() {
        let load =
            "L:\n    ld.acquire.gpu.global.u32 %r1, [%rd1];\n    setp.ne.u32 %p1, %r1, 1;\n    @%p1 bra L;\n";
        assert_eq!(lines(load), [11]);
        let leaves = "L:\n    ld.volatile.global.u32 %r1, [%rd1];\n    setp.eq.u32 %p1, %r1, 1;\n    @%p1 bra D;\n    \
                      nanosleep.u32 20;\n    bra L;\nD:\n";
        assert_eq!(lines(leaves), [11]);
        let lock =
            "L:\n    atom.global.cas.b32 %r1, [%rd1], 0, 1;\n    setp.ne.u32 %p1, %r1, 0;\n    @%p1 bra L;\n";
        assert_eq!(lines(lock), [11]);
        let through_shared = "L:\n    atom.global.cas.b32 %r1, [%rd1], %r7, %r8;\n    st.shared.u32 [s], %r1;\n    \
                              bar.sync 0;\n    ld.shared.u32 %r2, [s];\n    setp.ne.u32 %p1, %r2, 1;\n    @%p1 bra L;\n";
        assert_eq!(lines(through_shared), [11]);
    }

    #[test]
    fn other_loops_are_no_polls() {
        let retry = "L:\n    mov.u32 %r2, %r1;\n    add.u32 %r3, %r2, 1;\n    atom.global.cas.b32 %r1, [%rd1], %r2, %r3;\n    \
                     setp.ne.u32 %p1, %r1, %r2;\n    @%p1 bra L;\n";
        assert_eq!(lines(retry), [0; 0]);
        let draws =
            "L:\n    atom.global.add.u32 %r1, [%rd1], 1;\n    setp.lt.u32 %p1, %r1, 9;\n    @%p1 bra L;\n";
        assert_eq!(lines(draws), [0; 0]);
        let counts = "L:\n    ld.volatile.global.u32 %r1, [%rd1];\n    add.u32 %r2, %r2, 1;\n    setp.lt.u32 %p1, %r2, 9;\n    \
                      @%p1 bra L;\n";
        assert_eq!(lines(counts), [0; 0]);
        let forward =
            "    ld.volatile.global.u32 %r1, [%rd1];\n    setp.lt.u32 %p1, %r1, 9;\n    @%p1 bra L;\nL:\n";
        assert_eq!(lines(forward), [0; 0]);
    }
}
