//! Checks variables, functions, launch bounds and names.

use std::collections::HashSet;

use crate::{
    Body, CtaGroup, Function, FunctionKind, Initializer, Item, LaunchBounds, Linkage, Module, Op, Param,
    ParamSpace, Space, Statement, Type, Variable, Version,
};

use super::symbols::{Symbol, Symbols};
use super::{Report, Rule, operands};

/// Maximum static shared memory of a CTA in bytes.
const STATIC_SHARED: u64 = 48 << 10;
/// Maximum local memory of a thread in bytes.
const LOCAL: u64 = 512 << 10;
/// Maximum constant memory in bytes.
const CONSTANT: u64 = 64 << 10;

/// Checks the declarations at module scope and collects their names.
pub(super) fn module<'m>(module: &'m Module, report: &mut Report) -> Symbols<'m> {
    let least = module.target.minimum_version();
    if module.version < least {
        let (target, version) = (module.target, module.version);
        report.declare(Rule::Target, format!("{target} needs .version {least}; the module says {version}"));
    }
    let mut symbols = Symbols::default();
    for item in &module.items {
        let (name, symbol) = match item {
            Item::Variable(variable) => (&*variable.name, Symbol::Variable(variable)),
            Item::Function(function) => (&*function.name, Symbol::Function(function)),
        };
        match (symbols.0.get(name), symbol) {
            (Some(Symbol::Function(known)), Symbol::Function(function)) => {
                redeclared(known, function, report)
            }
            (Some(_), _) => report.declare(Rule::Declaration, format!("{name} is declared twice")),
            (None, _) => {}
        }
        let says_less = matches!(symbol, Symbol::Function(f) if f.body.is_none());
        if !says_less || !symbols.0.contains_key(name) {
            symbols.0.insert(name, symbol);
        }
    }
    for v in module.variables() {
        variable(v, report);
        if !matches!(v.space, Space::Global | Space::Const | Space::Shared) {
            report.declare(Rule::Declaration, format!("{} cannot be in {} here", v.name, v.space.suffix()));
        }
        addresses(v, &symbols, report);
    }
    symbols
}

fn sizes(params: &[Param]) -> Vec<u64> {
    params.iter().map(|p| u64::from(p.ty.bytes()) * u64::from(p.elements.unwrap_or(1))).collect()
}

fn redeclared(known: &Function, function: &Function, report: &mut Report) {
    let name = &function.name;
    if known.body.is_some() && function.body.is_some() {
        report.declare(Rule::Declaration, format!("{name} is defined twice"));
    }
    let agrees = known.kind == function.kind
        && sizes(&known.params) == sizes(&function.params)
        && sizes(&known.returns) == sizes(&function.returns);
    if !agrees {
        report.declare(Rule::Declaration, format!("{name} is declared with different parameters"));
    }
}

fn alignment(name: &str, align: u32, ty: Type, report: &mut Report) {
    if !align.is_power_of_two() {
        report.declare(Rule::Declaration, format!("{name}: an alignment of {align} is not a power of two"));
    }
    if ty.bytes() == 0 {
        report.declare(Rule::Declaration, format!("{name}: a .{ty} cannot be stored"));
    }
}

fn variable(v: &Variable, report: &mut Report) {
    let name = &v.name;
    alignment(name, v.align, v.ty, report);
    if !matches!(v.vector, 1 | 2 | 4) || v.vector * v.ty.bytes() > 16 {
        report.declare(Rule::Declaration, format!("{name}: there are no vectors of {} .{}", v.vector, v.ty));
    }
    let unsized_array = v.dims.first() == Some(&0);
    if unsized_array && v.linkage != Linkage::Extern && v.init.is_none() {
        report.declare(Rule::Declaration, format!("{name}[] needs .extern or an initialiser"));
    }
    if v.dims.iter().skip(1).any(|&dim| dim == 0) {
        report.declare(Rule::Declaration, format!("{name}: only the first dimension may be left open"));
    }
    let most = match v.space {
        Space::Shared => STATIC_SHARED,
        Space::Local => LOCAL,
        Space::Const => CONSTANT,
        _ => u64::MAX,
    };
    match v.checked_bytes() {
        Some(bytes) if bytes <= most => {}
        Some(bytes) => {
            let space = v.space.suffix();
            report.declare(Rule::Declaration, format!("{name} has {bytes} bytes; {space} holds {most}"));
        }
        None => report.declare(Rule::Declaration, format!("{name} is larger than any memory")),
    }
    initial_value(v, unsized_array, report);
}

fn initial_value(v: &Variable, unsized_array: bool, report: &mut Report) {
    let Some(init) = &v.init else { return };
    if !matches!(v.space, Space::Global | Space::Const) {
        report.declare(Rule::Declaration, format!("{}: only .global and .const are initialised", v.name));
    }
    let bytes = match init {
        Initializer::Bytes(bytes) => bytes.len() as u64,
        Initializer::Addresses(list) => 8 * list.len() as u64,
    };
    if !unsized_array && v.checked_bytes().is_some_and(|room| bytes > room) {
        report
            .declare(Rule::Declaration, format!("{}: {bytes} initial bytes are more than its size", v.name));
    }
}

fn addresses(v: &Variable, symbols: &Symbols<'_>, report: &mut Report) {
    let Some(Initializer::Addresses(list)) = &v.init else { return };
    for (symbol, _) in list {
        if !symbols.0.contains_key(&**symbol) {
            report.declare(
                Rule::Symbol,
                format!("{symbol} in the initial value of {} is not declared", v.name),
            );
        }
    }
}

/// Checks everything in a function except its instructions.
pub(super) fn function(module: &Module, function: &Function, report: &mut Report) {
    for param in function.params.iter().chain(&function.returns) {
        match param.space {
            ParamSpace::Param => alignment(&param.name, param.align, param.ty, report),
            ParamSpace::Reg if function.kind == FunctionKind::Func => {}
            ParamSpace::Reg => {
                report.declare(
                    Rule::Declaration,
                    format!("{}: a parameter of a kernel cannot be a .reg", param.name),
                );
            }
        }
    }
    if function.kind == FunctionKind::Entry {
        entry(module, function, report);
    }
    bounds(&function.bounds, report);
    warpgroups(function, report);
    cta_groups(function, report);
    let needs = function.bounds.requirement();
    if !needs.met_by(module.target) || needs.version > module.version {
        let (target, version) = (module.target, module.version);
        report.declare(
            Rule::Target,
            format!("clusters need {needs}; the module is for {target} and .version {version}"),
        );
    }
    if let Some(body) = &function.body {
        names(function, body, report);
        body_variables(body, report);
        for (rule, message) in operands::labels(body) {
            report.declare(rule, message);
        }
    }
}

fn entry(module: &Module, function: &Function, report: &mut Report) {
    if !function.returns.is_empty() {
        report.declare(Rule::Declaration, "a kernel returns nothing");
    }
    if function.bounds.no_return {
        report.declare(Rule::Declaration, "a kernel does not take .noreturn");
    }
    if function.body.is_none() && function.linkage != Linkage::Extern && !defined(module, function) {
        report.declare(Rule::Declaration, "a kernel needs a body");
    }
    let most = if module.version >= (Version { major: 8, minor: 1 }) { 32764 } else { 4352 };
    let mut end = 0u64;
    for param in &function.params {
        let align = u64::from(param.align.max(1));
        end = end.next_multiple_of(align)
            + u64::from(param.ty.bytes()) * u64::from(param.elements.unwrap_or(1));
    }
    if end > most {
        report.declare(Rule::Declaration, format!("{end} bytes of parameters; at most {most} are accepted"));
    }
}

fn defined(module: &Module, function: &Function) -> bool {
    module.function(&function.name).is_some()
}

fn bounds(bounds: &LaunchBounds, report: &mut Report) {
    let mut product = |what: &str, value: Option<[u32; 3]>, most: i64| {
        let Some(extents) = value else { return };
        let count = extents.iter().fold(1u64, |n, &e| n.saturating_mul(e.into()));
        if count == 0 || count > most as u64 {
            let [x, y, z] = extents;
            report.declare(
                Rule::LaunchBounds,
                format!("{what} {x}, {y}, {z}: the product is not between 1 and {most}"),
            );
        }
    };
    product(".maxntid", bounds.max_threads, LaunchBounds::MOST_THREADS);
    product(".reqntid", bounds.required_threads, LaunchBounds::MOST_THREADS);
    product(".reqnctapercluster", bounds.required_cluster, 16);
    if bounds.max_threads.is_some() && bounds.required_threads.is_some() {
        report.declare(Rule::LaunchBounds, ".maxntid and .reqntid exclude each other");
    }
    for (what, value) in [(".minnctapersm", bounds.min_ctas_per_sm), (".maxnreg", bounds.max_registers)] {
        if value == Some(0) {
            report.declare(Rule::LaunchBounds, format!("{what} 0"));
        }
    }
}

/// All instructions of tensor memory of a function name the same number of CTAs.
fn cta_groups(function: &Function, report: &mut Report) {
    let statements = function.body.iter().flat_map(|body| &body.statements);
    let groups = statements.filter_map(|statement| match statement {
        Statement::Inst(inst) => inst.op.cta_group(),
        Statement::Label(_) | Statement::Pragma(_) => None,
    });
    let (one, two): (Vec<CtaGroup>, Vec<CtaGroup>) = groups.partition(|group| *group == CtaGroup::One);
    if !one.is_empty() && !two.is_empty() {
        report.declare(
            Rule::Declaration,
            "instructions of tensor memory name .cta_group::1 and .cta_group::2; a function names one of them",
        );
    }
}

/// `wgmma` and `setmaxnreg` need whole warpgroups of four warps.
fn warpgroups(function: &Function, report: &mut Report) {
    let statements = function.body.iter().flat_map(|body| &body.statements);
    let uses = statements.into_iter().any(|statement| match statement {
        Statement::Inst(inst) => matches!(inst.op, Op::Wgmma(_) | Op::Setmaxnreg(_)),
        Statement::Label(_) | Statement::Pragma(_) => false,
    });
    let bound = function.bounds.required_threads.or(function.bounds.max_threads);
    let threads = bound.map(|extents| extents.iter().fold(1u64, |n, &e| n.saturating_mul(e.into())));
    if let Some(threads) = threads.filter(|&n| uses && n < 128) {
        report.declare(
            Rule::LaunchBounds,
            format!("{threads} threads are fewer than a warpgroup of 128, which wgmma and setmaxnreg need"),
        );
    }
}

fn names(function: &Function, body: &Body, report: &mut Report) {
    let mut seen = HashSet::new();
    let registers = body.registers.iter().map(|r| &r.name);
    let labels = body.labels.iter();
    let variables = body.variables.iter().map(|v| &v.name);
    let params = function.params.iter().chain(&function.returns);
    let params = params.filter(|p| p.space == ParamSpace::Param).map(|p| &p.name);
    for name in registers.chain(labels).chain(variables).chain(params) {
        if !seen.insert(name) {
            report.declare(Rule::Declaration, format!("{name} is declared twice"));
        }
    }
}

fn body_variables(body: &Body, report: &mut Report) {
    let mut total = 0u64;
    for v in &body.variables {
        variable(v, report);
        if v.space == Space::Shared {
            let align = u64::from(v.align.max(1));
            total = total.next_multiple_of(align).saturating_add(v.checked_bytes().unwrap_or(0));
        }
    }
    if total > STATIC_SHARED {
        report.declare(
            Rule::Declaration,
            format!("{total} bytes of static shared memory; at most {STATIC_SHARED} are accepted"),
        );
    }
}
