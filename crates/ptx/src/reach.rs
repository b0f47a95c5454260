//! Finds the parts of a module that a launch of one entry needs: the functions that the entry may call, and
//! the shared memory that they name.

use std::collections::HashSet;

use crate::operand::{Address, Base, Operand};
use crate::{Function, Module, Space, Statement, Variable};

impl Function {
    fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.body.iter().flat_map(|body| &body.variables)
    }

    /// Calls `visit` with every operand, and with the elements of vectors and lists.
    fn operands<'f>(&'f self, visit: &mut impl FnMut(&'f Operand)) {
        for statement in self.body.iter().flat_map(|body| &body.statements) {
            if let Statement::Inst(instruction) = statement {
                instruction.operands.iter().for_each(|operand| inner(operand, visit));
            }
        }
    }
}

fn inner<'f>(operand: &'f Operand, visit: &mut impl FnMut(&'f Operand)) {
    visit(operand);
    if let Operand::Vector(parts) | Operand::List(parts) = operand {
        parts.iter().for_each(|part| inner(part, visit));
    }
}

impl Module {
    /// For each of [`Module::functions`], whether a launch of `entry` may run it: the entry, and what it and
    /// its callees call. Functions without a body are never run.
    pub fn reached_from(&self, entry: &str) -> Vec<bool> {
        let functions: Vec<&Function> = self.functions().collect();
        let named = |name: &str| functions.iter().position(|f| *f.name == *name && f.body.is_some());
        let mut reached = vec![false; functions.len()];
        let mut open: Vec<usize> = named(entry).into_iter().collect();
        while let Some(index) = open.pop() {
            if std::mem::replace(&mut reached[index], true) {
                continue;
            }
            functions[index].operands(&mut |operand| {
                if let Operand::Function(name) = operand {
                    open.extend(named(name));
                }
            });
        }
        reached
    }

    fn reached(&self, entry: &str) -> Vec<&Function> {
        let functions = self.functions().zip(self.reached_from(entry));
        functions.filter(|(_, reached)| *reached).map(|(function, _)| function).collect()
    }

    /// The variables and parameters that the instructions of `entry` and of its callees name.
    pub fn names_used(&self, entry: &str) -> HashSet<&str> {
        let mut names = HashSet::new();
        for function in self.reached(entry) {
            function.operands(&mut |operand| match operand {
                Operand::Symbol(name, _) | Operand::Address(Address { base: Base::Symbol(name), .. }) => {
                    names.insert(&**name);
                }
                _ => {}
            });
        }
        names
    }

    /// The shared variables that a launch of `entry` allocates, dynamic shared memory included, in the order
    /// in which ptxas 13.0 places them: those of the entry, those of the module, those of the callees, then
    /// those of the entry that no instruction names. A variable of the module counts only if the entry or a
    /// callee names it.
    pub fn shared_variables(&self, entry: &str) -> Vec<&Variable> {
        let reached = self.reached(entry);
        let named = self.names_used(entry);
        let shared = |v: &&Variable| matches!(v.space, Space::Shared | Space::SharedCluster);
        let is_named = |v: &&Variable| named.contains(&*v.name);
        let (entries, callees): (Vec<&Function>, Vec<&Function>) =
            reached.into_iter().partition(|f| *f.name == *entry);
        let own = || entries.iter().flat_map(|f| f.variables()).filter(shared);
        let of_callees = callees.iter().flat_map(|f| f.variables()).filter(shared);
        let of_module = self.variables().filter(shared).filter(is_named);
        own()
            .filter(is_named)
            .chain(of_module)
            .chain(of_callees)
            .chain(own().filter(|v| !is_named(v)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    const MODULE: &str = ".version 7.0
.target sm_80
.address_size 64
.shared .align 4 .b8 elsewhere[4000];
.shared .align 4 .b8 module[12];
.extern .shared .align 16 .b8 dynamic[];
.func callee() { .reg .b32 %r<2>; .shared .align 4 .b8 inner[20]; ld.shared.u32 %r0, [inner]; ret; }
.func uncalled() { .reg .b32 %r<2>; ld.shared.u32 %r0, [elsewhere]; ret; }
.visible .entry other() { .reg .b32 %r<2>; .shared .b8 theirs[64]; ld.shared.u32 %r0, [theirs]; ret; }
.visible .entry k()
{
    .reg .b32 %r<2>;
    .shared .align 4 .b8 unused[100];
    .shared .align 4 .b8 own[24];
    mov.u32 %r0, own;
    ld.shared.u32 %r0, [module+4];
    call callee;
    ret;
}
";

    /// ptxas 13.0 places the variables in this order: own at 0, module at 24, inner at 36, and 156 bytes in
    /// all.
    #[test]
    fn shared_memory_of_one_entry() {
        let module = crate::parse(MODULE).unwrap();
        let names = |entry: &str| -> Vec<String> {
            module.shared_variables(entry).iter().map(|v| v.name.to_string()).collect()
        };
        assert_eq!(names("k"), ["own", "module", "inner", "unused"]);
        assert_eq!(names("other"), ["theirs"]);
        assert_eq!(names("absent"), [""; 0]);
        assert_eq!(module.reached_from("k"), [true, false, false, true]);
    }
}
