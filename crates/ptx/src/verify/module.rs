//! Modules, variables, functions and the walk over their instructions.

use std::collections::HashMap;

use super::operands::{Place, Scope, Wrong};
use super::{MAX_ERRORS, Rule, VerifyError, constants, features, flow, modifiers, operands};
use crate::*;

/// The most bytes of parameters that a kernel takes (PTX ISA 8.1, sm_70 and later).
const MAX_PARAMETER_BYTES: u64 = 32764;

/// The most bytes of shared memory that a module may declare statically.
const MAX_STATIC_SHARED: u64 = 48 << 10;

/// The most threads of a CTA.
const MAX_THREADS: u64 = 1024;

/// What is being checked, and where errors go.
struct Checker<'m> {
    module: &'m Module,
    symbols: HashMap<&'m str, Place>,
    functions: HashMap<&'m str, &'m Function>,
    errors: &'m mut Vec<VerifyError>,
}

pub(super) fn check(module: &Module, errors: &mut Vec<VerifyError>) {
    let mut checker = Checker { module, symbols: HashMap::new(), functions: HashMap::new(), errors };
    let known = module.target.minimum_version();
    if module.version < known {
        let message = format!("knows no {}; needs {known}", module.target);
        checker.report(None, format!(".version {}", module.version), Rule::Version, message);
    }
    checker.declare();
    for variable in module.variables() {
        if variable.space == Space::Param || variable.space == Space::Local {
            let message = "cannot stand outside a function".to_owned();
            checker.report(None, shown(variable), Rule::Symbols, message);
        }
        checker.variable(None, variable);
    }
    for function in module.functions() {
        checker.function(function);
    }
}

/// A variable's declaration without what it starts with.
fn shown(variable: &Variable) -> String {
    Variable { init: None, ..variable.clone() }.to_string()
}

fn place(variable: &Variable) -> Place {
    let bytes = if variable.dims.contains(&0) { None } else { Some(variable.bytes()) };
    Place { space: variable.space, align: variable.align, bytes, function: false }
}

impl<'m> Checker<'m> {
    fn report(&mut self, function: Option<&Function>, what: String, rule: Rule, message: String) {
        if self.errors.len() < MAX_ERRORS {
            let function = function.map(|f| f.name.clone());
            self.errors.push(VerifyError { line: 0, function, instruction: what, rule, message });
        }
    }

    /// Collects the names of the module; a name is defined once.
    fn declare(&mut self) {
        for item in &self.module.items {
            let (name, place, redeclares) = match item {
                Item::Variable(v) => {
                    let external = v.linkage == Linkage::Extern;
                    (&v.name, place(v), external)
                }
                Item::Function(f) => {
                    let place = Place { space: Space::Generic, align: 1, bytes: None, function: true };
                    let known = self.functions.get(&*f.name);
                    let first = known.is_none_or(|known| known.body.is_none() || f.body.is_none());
                    if f.body.is_some() || known.is_none() {
                        self.functions.insert(&f.name, f);
                    }
                    (&f.name, place, first)
                }
            };
            let known = self.symbols.insert(name, place);
            if known.is_some_and(|known| !redeclares || known.function != place.function) {
                self.report(None, name.to_string(), Rule::Symbols, "is defined twice".to_owned());
            }
        }
    }

    fn variable(&mut self, function: Option<&Function>, variable: &Variable) {
        let mut wrong = |rule, message: String| self.report(function, shown(variable), rule, message);
        if !variable.align.is_power_of_two() {
            wrong(
                Rule::Alignment,
                format!("has the alignment {}; it must be a power of two", variable.align),
            );
        }
        let unsized_array = variable.dims.contains(&0);
        let external = variable.linkage == Linkage::Extern;
        if unsized_array && !external {
            wrong(Rule::Symbols, "has no length; only external arrays may leave it out".to_owned());
        }
        let Some(init) = &variable.init else { return };
        if !matches!(variable.space, Space::Global | Space::Const) || external {
            wrong(Rule::Symbols, "cannot start with a value; global and constant memory can".to_owned());
        }
        let given = match init {
            Initializer::Bytes(bytes) => bytes.len() as u64,
            Initializer::Addresses(list) => 8 * list.len() as u64,
        };
        if given > variable.bytes() {
            wrong(Rule::Symbols, format!("starts with {given} bytes but has {}", variable.bytes()));
        }
        if let Initializer::Addresses(list) = init
            && let Some((name, _)) = list.iter().find(|(name, _)| !self.symbols.contains_key(&**name))
        {
            self.report(
                function,
                shown(variable),
                Rule::Symbols,
                format!("starts with `{name}`, which is not declared"),
            );
        }
    }

    fn function(&mut self, function: &'m Function) {
        self.bounds(function);
        let Some(body) = &function.body else { return };
        let mut places: HashMap<&str, Place> = HashMap::new();
        let mut twice = Vec::new();
        for param in function.returns.iter().chain(&function.params) {
            let bytes = Some(param.bytes().into());
            let place = Place { space: Space::Param, align: param.align, bytes, function: false };
            if places.insert(&param.name, place).is_some() {
                twice.push(&param.name);
            }
        }
        for variable in &body.variables {
            self.variable(Some(function), variable);
            if places.insert(&variable.name, place(variable)).is_some() {
                twice.push(&variable.name);
            }
        }
        let mut registers = HashMap::with_capacity(body.registers.len());
        twice.extend(
            body.registers.iter().map(|r| &r.name).filter(|name| registers.insert(&***name, ()).is_some()),
        );
        for name in twice {
            self.report(Some(function), name.to_string(), Rule::Symbols, "is declared twice".to_owned());
        }
        self.labels(function, body);
        self.body(function, body, &places);
    }

    fn bounds(&mut self, function: &Function) {
        let bounds = &function.bounds;
        let mut wrong = |message: String| {
            self.report(Some(function), function.name.to_string(), Rule::Bounds, message);
        };
        for (what, extents) in [("maxntid", bounds.max_threads), ("reqntid", bounds.required_threads)] {
            let Some(extents) = extents else { continue };
            let threads = extents.iter().fold(1u64, |n, &e| n.saturating_mul(e.into()));
            if threads == 0 || threads > MAX_THREADS {
                wrong(format!("has `.{what}` of {threads} threads; a CTA has 1 to {MAX_THREADS}"));
            }
        }
        if bounds.max_threads.is_some() && bounds.required_threads.is_some() {
            wrong("has both `.maxntid` and `.reqntid`; one of them is accepted".to_owned());
        }
        if bounds.min_ctas_per_sm.is_some()
            && bounds.max_threads.is_none()
            && bounds.required_threads.is_none()
        {
            wrong("has `.minnctapersm` without `.maxntid` or `.reqntid`".to_owned());
        }
        let zero = [bounds.min_ctas_per_sm, bounds.max_registers, bounds.max_cluster_rank].contains(&Some(0));
        if zero || bounds.required_cluster.is_some_and(|extents| extents.contains(&0)) {
            wrong("has a bound of 0".to_owned());
        }
        if bounds.uses_clusters()
            && (self.module.target.sm < 90 || self.module.version < (Version { major: 7, minor: 8 }))
        {
            let message = "has bounds on clusters; they need sm_90 or later and `.version` 7.8".to_owned();
            self.report(Some(function), function.name.to_string(), Rule::Target, message);
        }
        let mut wrong = |message: &str| {
            self.report(Some(function), function.name.to_string(), Rule::Bounds, message.to_owned());
        };
        match function.kind {
            FunctionKind::Entry => {
                let bytes: u64 = function.params.iter().map(|p| u64::from(p.bytes())).sum();
                if bytes > MAX_PARAMETER_BYTES {
                    wrong(&format!("takes {bytes} bytes of parameters; {MAX_PARAMETER_BYTES} are accepted"));
                }
                if !function.returns.is_empty() || function.register_params() > 0 {
                    wrong("is a kernel: it returns nothing and takes `.param` only");
                }
            }
            FunctionKind::Func => {
                if (LaunchBounds { no_return: false, ..bounds.clone() }) != LaunchBounds::default() {
                    wrong("is not a kernel and has no launch to bound");
                }
            }
        }
        let variables = function.body.iter().flat_map(|body| &body.variables);
        let shared =
            variables.filter(|v| v.space == Space::Shared).fold(0, |n: u64, v| n.saturating_add(v.bytes()));
        if shared > MAX_STATIC_SHARED {
            wrong(&format!("has {shared} bytes of static shared memory; {MAX_STATIC_SHARED} are accepted"));
        }
    }

    /// Each label that is mentioned is placed once.
    fn labels(&mut self, function: &Function, body: &Body) {
        let mut placed = vec![0u32; body.labels.len()];
        for statement in &body.statements {
            if let Statement::Label(label) = statement
                && let Some(count) = placed.get_mut(label.0 as usize)
            {
                *count += 1;
            }
        }
        for (name, _) in body.labels.iter().zip(&placed).filter(|&(_, &count)| count > 1) {
            let message = "is placed more than once".to_owned();
            self.report(Some(function), format!("{name}:"), Rule::Labels, message);
        }
        for inst in instructions(body) {
            let missing = inst.operands.iter().any(|operand| {
                let unplaced = |label: &Label| placed.get(label.0 as usize).is_none_or(|&count| count == 0);
                match operand {
                    Operand::Label(label) => unplaced(label),
                    Operand::Labels(labels) => labels.iter().any(unplaced),
                    _ => false,
                }
            });
            if missing {
                let message = "goes to a label that is not placed in this function".to_owned();
                self.at(function, body, inst, (Rule::Labels, message));
            }
        }
    }

    fn at(&mut self, function: &Function, body: &Body, inst: &Instruction, (rule, message): Wrong) {
        self.report(Some(function), inst.display(body).to_string(), rule, message);
        if let Some(last) = self.errors.last_mut() {
            last.line = inst.line;
        }
    }

    fn body(&mut self, function: &'m Function, body: &'m Body, places: &HashMap<&str, Place>) {
        let symbols = std::mem::take(&mut self.symbols);
        let find = |name: &str| places.get(name).or_else(|| symbols.get(name)).copied();
        let scope = Scope { body, find: &find };
        for inst in instructions(body) {
            if self.errors.len() >= MAX_ERRORS {
                break;
            }
            for wrong in self.instruction(inst, &scope) {
                self.at(function, body, inst, wrong);
            }
        }
        self.symbols = symbols;
        let mut undefined = Vec::new();
        flow::undefined_reads(body, function.register_params(), |statement, reg| {
            if undefined.len() < MAX_ERRORS {
                undefined.push((statement, reg));
            }
        });
        undefined.sort_unstable();
        undefined.dedup();
        for (statement, reg) in undefined {
            let name = body.registers.get(reg.0 as usize).map_or("?", |register| &register.name);
            if let Statement::Inst(inst) = &body.statements[statement] {
                let message = format!("reads `{name}`, which nothing before it writes");
                self.at(function, body, inst, (Rule::Definitions, message));
            }
        }
    }

    /// All that is wrong with one instruction where it stands.
    fn instruction(&self, inst: &Instruction, scope: &Scope<'_>) -> Vec<Wrong> {
        let mut found: Vec<Wrong> = Vec::new();
        if let Some(guard) = inst.guard {
            let ty = scope.body.registers.get(guard.reg.0 as usize).map(|register| register.ty);
            if ty != Some(Type::Pred) {
                found.push((Rule::Types, "has a guard that is not a predicate".to_owned()));
            }
        }
        found.extend(modifiers::wrong(&inst.op).map(|message| (Rule::Modifiers, message)));
        found.extend(operands::check(inst, scope).err());
        found.extend(constants::wrong(inst).map(|message| (Rule::Immediates, message)));
        if let Op::Call { .. } = inst.op {
            found.extend(self.call(inst, scope).err());
        }
        let Module { target, version, .. } = *self.module;
        for feature in features::used(inst) {
            if !feature.needs.met_by(target) {
                let message =
                    format!("needs {}, for {}; the target is {target}", feature.needs, feature.what);
                found.push((Rule::Target, message));
            } else if feature.version > version {
                let message = format!(
                    "needs `.version` {}, for {}; the module has {version}",
                    feature.version, feature.what
                );
                found.push((Rule::Version, message));
            }
        }
        found
    }

    /// Arguments and results are as many and as large as the callee's.
    fn call(&self, inst: &Instruction, scope: &Scope<'_>) -> Result<(), Wrong> {
        let [Operand::List(results), Operand::Function(name), Operand::List(arguments)] = &inst.operands[..]
        else {
            return Err((Rule::Calls, "is not a direct call".to_owned()));
        };
        let Some(callee) = self.functions.get(&**name) else {
            return Err((Rule::Calls, format!("calls `{name}`, which is not declared")));
        };
        if callee.kind == FunctionKind::Entry {
            return Err((Rule::Calls, format!("calls `{name}`, which is a kernel")));
        }
        for (what, given, wanted) in
            [("results", results, &callee.returns), ("arguments", arguments, &callee.params)]
        {
            if given.len() != wanted.len() {
                let message = format!("has {} {what}; `{name}` has {}", given.len(), wanted.len());
                return Err((Rule::Calls, message));
            }
            for (operand, param) in given.iter().zip(wanted) {
                let bytes = match operand {
                    Operand::Symbol(variable, _) => (scope.find)(variable).and_then(|place| place.bytes),
                    Operand::Reg(reg) => {
                        scope.body.registers.get(reg.0 as usize).map(|register| register.ty.bytes().into())
                    }
                    _ => continue,
                };
                if bytes != Some(param.bytes().into()) {
                    let message = format!(
                        "gives `{}` of `{name}`, {} bytes, something else",
                        param.name,
                        param.bytes()
                    );
                    return Err((Rule::Calls, message));
                }
            }
        }
        Ok(())
    }
}

fn instructions(body: &Body) -> impl Iterator<Item = &Instruction> {
    body.statements.iter().filter_map(|statement| match statement {
        Statement::Inst(inst) => Some(inst),
        Statement::Label(_) | Statement::Pragma(_) => None,
    })
}
