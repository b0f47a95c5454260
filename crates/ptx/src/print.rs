//! Prints the model as canonical PTX text, one statement per line. ptxas accepts the text, and the parser
//! reads it back as an equal module.

mod mnemonic;

use std::fmt::{self, Display, Formatter, Write};

use crate::{
    Address, Base, Body, Function, FunctionKind, Imm, Initializer, Instruction, Item, LaunchBounds, Linkage,
    Module, Op, Operand, Param, ParamSpace, Register, Space, Statement, Target, TargetSuffix, Variable,
    Version,
};

impl Display for Version {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Display for Target {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let suffix = match self.suffix {
            TargetSuffix::None => "",
            TargetSuffix::ArchSpecific => "a",
            TargetSuffix::Family => "f",
        };
        write!(f, "sm_{}{suffix}", self.sm)
    }
}

impl Display for Module {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, ".version {}\n.target {}\n.address_size 64", self.version, self.target)?;
        for item in &self.items {
            match item {
                Item::Variable(variable) => writeln!(f, "\n{variable}")?,
                Item::Function(function) => write!(f, "\n{function}")?,
            }
        }
        Ok(())
    }
}

impl Module {
    /// Gives each instruction its line in the printed text, so that findings about a built module point into
    /// the text of `to_string()`.
    pub fn number_lines(&mut self) {
        let mut line = 4;
        for item in &mut self.items {
            line += 1;
            match item {
                Item::Variable(_) => line += 1,
                Item::Function(function) => {
                    let mut head = Header(function).to_string();
                    head.push('\n');
                    line += head.matches('\n').count() as u32;
                    let skipped = function.register_params();
                    let Some(body) = &mut function.body else { continue };
                    line += body.declarations(skipped).matches('\n').count() as u32 + 1;
                    for statement in &mut body.statements {
                        if let Statement::Inst(inst) = statement {
                            inst.line = line;
                        }
                        line += 1;
                    }
                    line += 1;
                }
            }
        }
    }
}

/// The part of a function before its body: directives, name, parameters, bounds.
struct Header<'a>(&'a Function);

impl Display for Header<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Header(function) = self;
        f.write_str(linkage(function.linkage))?;
        f.write_str(match function.kind {
            FunctionKind::Entry => ".entry ",
            FunctionKind::Func => ".func ",
        })?;
        if !function.returns.is_empty() {
            f.write_char('(')?;
            params(f, &function.returns)?;
            f.write_str(") ")?;
        }
        write!(f, "{}(", function.name)?;
        params(f, &function.params)?;
        write!(f, "){}", function.bounds)
    }
}

fn params(f: &mut Formatter<'_>, list: &[Param]) -> fmt::Result {
    for (i, param) in list.iter().enumerate() {
        f.write_str(if i == 0 { "" } else { ", " })?;
        write!(f, "{param}")?;
    }
    Ok(())
}

impl Display for Function {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Header(self))?;
        let Some(body) = &self.body else { return writeln!(f, ";") };
        writeln!(f, "\n{{")?;
        f.write_str(&body.declarations(self.register_params()))?;
        for statement in &body.statements {
            match statement {
                Statement::Label(label) => writeln!(f, "{}:", name(&body.labels, label.0))?,
                Statement::Inst(inst) => writeln!(f, "\t{}", inst.display(body))?,
                Statement::Pragma(text) => writeln!(f, "\t.pragma \"{text}\";")?,
            }
        }
        writeln!(f, "}}")
    }
}

fn linkage(linkage: Linkage) -> &'static str {
    match linkage {
        Linkage::Private => "",
        Linkage::Visible => ".visible ",
        Linkage::Extern => ".extern ",
        Linkage::Weak => ".weak ",
        Linkage::Common => ".common ",
    }
}

impl Display for Param {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.space {
            ParamSpace::Reg => return write!(f, ".reg .{} {}", self.ty, self.name),
            ParamSpace::Param => f.write_str(".param ")?,
        }
        // `.align` before the type is the alignment of the parameter. `.align` after `.ptr` is the alignment
        // of the memory pointed to.
        if self.align != self.ty.bytes() {
            write!(f, ".align {} ", self.align)?;
        }
        write!(f, ".{}", self.ty)?;
        if let Some((space, align)) = self.pointer {
            write!(
                f,
                " .ptr{} .align {align}",
                if space == Space::Generic { String::new() } else { format!(" {}", space.suffix()) }
            )?;
        }
        write!(f, " {}", self.name)?;
        match self.elements {
            Some(n) => write!(f, "[{n}]"),
            None => Ok(()),
        }
    }
}

impl Display for LaunchBounds {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let triple = |f: &mut Formatter<'_>, what: &str, value: Option<[u32; 3]>| match value {
            Some([x, y, z]) => write!(f, "\n{what} {x}, {y}, {z}"),
            None => Ok(()),
        };
        let single = |f: &mut Formatter<'_>, what: &str, value: Option<u32>| match value {
            Some(n) => write!(f, "\n{what} {n}"),
            None => Ok(()),
        };
        triple(f, ".maxntid", self.max_threads)?;
        triple(f, ".reqntid", self.required_threads)?;
        single(f, ".minnctapersm", self.min_ctas_per_sm)?;
        single(f, ".maxnreg", self.max_registers)?;
        triple(f, ".reqnctapercluster", self.required_cluster)?;
        single(f, ".maxclusterrank", self.max_cluster_rank)?;
        f.write_str(if self.explicit_cluster { "\n.explicitcluster" } else { "" })?;
        f.write_str(if self.no_return { "\n.noreturn" } else { "" })
    }
}

impl Display for Variable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let space = if self.space == Space::Generic { ".global" } else { self.space.suffix() };
        write!(f, "{}{space} ", linkage(self.linkage))?;
        if self.align != self.ty.bytes() * self.vector {
            write!(f, ".align {} ", self.align)?;
        }
        if self.vector > 1 {
            write!(f, ".v{} ", self.vector)?;
        }
        write!(f, ".{} {}", self.ty, self.name)?;
        for dim in &self.dims {
            if *dim == 0 { f.write_str("[]")? } else { write!(f, "[{dim}]")? }
        }
        match &self.init {
            None => {}
            Some(Initializer::Bytes(bytes)) => {
                let elements = bytes.chunks(self.ty.bytes().max(1) as usize).map(|chunk| {
                    let word = chunk.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
                    element(self.ty, word)
                });
                self.initializer(f, elements)?;
            }
            Some(Initializer::Addresses(list)) => {
                let elements = list.iter().map(|(symbol, offset)| match offset {
                    0 => symbol.to_string(),
                    _ => format!("{symbol}+{offset}"),
                });
                self.initializer(f, elements)?;
            }
        }
        f.write_char(';')
    }
}

fn element(ty: crate::Type, word: u64) -> String {
    match ty {
        crate::Type::F32 => format!("0f{word:08X}"),
        crate::Type::F64 => format!("0d{word:016X}"),
        _ => word.to_string(),
    }
}

impl Variable {
    fn initializer(&self, f: &mut Formatter<'_>, elements: impl Iterator<Item = String>) -> fmt::Result {
        let vector = (self.vector > 1).then_some(u64::from(self.vector));
        let extents: Vec<u64> = self.dims.iter().copied().chain(vector).collect();
        let elements: Vec<String> = elements.collect();
        f.write_str(" = ")?;
        match extents.get(1..) {
            None => f.write_str(&elements.join(", ")),
            Some(inner) => rows(f, &elements, inner),
        }
    }
}

/// `{…}` with a nested `{…}` for each row of the inner extents. ptxas rejects a flat list for a variable of
/// several dimensions.
fn rows(f: &mut Formatter<'_>, elements: &[String], inner: &[u64]) -> fmt::Result {
    let Some(rest) = inner.get(1..) else { return write!(f, "{{{}}}", elements.join(", ")) };
    let row = inner.iter().fold(1u64, |n, &dim| n.saturating_mul(dim)).max(1);
    f.write_char('{')?;
    for (i, part) in elements.chunks(usize::try_from(row).unwrap_or(usize::MAX)).enumerate() {
        f.write_str(if i == 0 { "" } else { ", " })?;
        rows(f, part, rest)?;
    }
    f.write_char('}')
}

impl Body {
    /// The `.reg` and variable declarations, one per line, without the first `skipped` registers, which are
    /// parameters. Registers whose names count up from 0 are declared as one range.
    fn declarations(&self, skipped: usize) -> String {
        let mut text = String::new();
        let mut rest = self.registers.get(skipped..).unwrap_or(&[]);
        while let Some(first) = rest.first() {
            let run = range_length(rest);
            let declared = match first.name.strip_suffix('0') {
                Some(prefix) if run > 1 => format!("\t.reg .{} {prefix}<{run}>;\n", first.ty),
                _ => format!("\t.reg .{} {};\n", first.ty, first.name),
            };
            text.push_str(&declared);
            rest = &rest[run..];
        }
        for variable in &self.variables {
            text.push_str(&format!("\t{variable}\n"));
        }
        text
    }
}

/// The number of registers at the start of the slice that are `prefix0`, `prefix1`, … and have the same type;
/// at least 1.
fn range_length(registers: &[Register]) -> usize {
    let first = &registers[0];
    let Some(prefix) = first.name.strip_suffix('0').filter(|p| !p.ends_with(|c: char| c.is_ascii_digit()))
    else {
        return 1;
    };
    let counts = |(i, r): (usize, &Register)| {
        r.ty == first.ty && r.name.strip_prefix(prefix).is_some_and(|digits| digits == i.to_string())
    };
    registers.iter().enumerate().take_while(|&(i, r)| counts((i, r))).count().max(1)
}

fn name(names: &[crate::Name], index: u32) -> &str {
    names.get(index as usize).map_or("?", |name| name)
}

impl Instruction {
    /// The instruction as text. `body` provides the names of registers and labels.
    pub fn display<'a>(&'a self, body: &'a Body) -> impl Display + 'a {
        fmt::from_fn(move |f| {
            // ptxas accepts the targets of `brx.idx` only as the name of a list. A scope of its own keeps
            // that name from clashing with other names.
            if let Some(Operand::Labels(labels)) = self.operands.get(1) {
                let names: Vec<&str> = labels.iter().map(|label| name(&body.labels, label.0)).collect();
                write!(f, "{{ $targets: .branchtargets {}; ", names.join(", "))?;
            }
            if let Some(guard) = self.guard {
                let not = if guard.negated { "!" } else { "" };
                write!(f, "@{not}{} ", register(body, guard.reg))?;
            }
            write!(f, "{}", self.op)?;
            self.operands(f, body)?;
            f.write_str(if matches!(self.operands.get(1), Some(Operand::Labels(_))) { "; }" } else { ";" })
        })
    }

    fn operands(&self, f: &mut Formatter<'_>, body: &Body) -> fmt::Result {
        let skip_empty = matches!(self.op, Op::Call { .. });
        let boxed = self.boxed();
        let mut separator = " ";
        for (i, operand) in self.operands.iter().enumerate() {
            match (boxed, operand) {
                (Some(map), Operand::Address(address)) if map == i => {
                    write!(f, "{separator}[{}", Place { address, body })?;
                    separator = ", ";
                    continue;
                }
                (Some(map), _) if map + 1 == i => {
                    write!(f, "{separator}{}]", Shown { operand, body })?;
                    continue;
                }
                _ => {}
            }
            if skip_empty && matches!(operand, Operand::List(parts) if parts.is_empty()) {
                continue;
            }
            write!(f, "{separator}{}", Shown { operand, body })?;
            separator = ", ";
        }
        Ok(())
    }

    /// The position of a tensor map that is followed by its coordinates; both are printed in one pair of
    /// brackets.
    fn boxed(&self) -> Option<usize> {
        let map = self.op.tensor_map_operand()?;
        let pair = (self.operands.get(map)?, self.operands.get(map + 1)?);
        matches!(pair, (Operand::Address(_), Operand::Vector(_))).then_some(map)
    }
}

fn register(body: &Body, reg: crate::Reg) -> &str {
    body.registers.get(reg.0 as usize).map_or("?", |register| &register.name)
}

struct Shown<'a> {
    operand: &'a Operand,
    body: &'a Body,
}

impl Display for Shown<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let body = self.body;
        let list = |f: &mut Formatter<'_>, open: &str, parts: &[Operand], close: &str| {
            f.write_str(open)?;
            for (i, operand) in parts.iter().enumerate() {
                write!(f, "{}{}", if i == 0 { "" } else { ", " }, Shown { operand, body })?;
            }
            f.write_str(close)
        };
        match self.operand {
            Operand::Reg(reg) => f.write_str(register(body, *reg)),
            Operand::Not(reg) => write!(f, "!{}", register(body, *reg)),
            Operand::Sink => f.write_char('_'),
            Operand::Imm(imm) => write!(f, "{imm}"),
            Operand::Special(special) => f.write_str(special.name()),
            Operand::Vector(parts) => list(f, "{", parts, "}"),
            Operand::List(parts) => list(f, "(", parts, ")"),
            Operand::Pair(a, b) => {
                let half = |reg: &Option<crate::Reg>| reg.map_or("_", |reg| register(body, reg));
                write!(f, "{}|{}", half(a), half(b))
            }
            Operand::Address(address) => write!(f, "[{}]", Place { address, body }),
            Operand::Symbol(symbol, 0) => f.write_str(symbol),
            Operand::Symbol(symbol, offset) => write!(f, "{symbol}{offset:+}"),
            Operand::Label(label) => f.write_str(name(&body.labels, label.0)),
            Operand::Labels(_) => f.write_str("$targets"),
            Operand::Function(function) => f.write_str(function),
        }
    }
}

struct Place<'a> {
    address: &'a Address,
    body: &'a Body,
}

impl Display for Place<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.address.base {
            Base::Reg(reg) => f.write_str(register(self.body, *reg))?,
            Base::Symbol(symbol) => f.write_str(symbol)?,
            Base::Absolute => return write!(f, "{}", self.address.offset),
        }
        match self.address.offset {
            0 => Ok(()),
            // ptxas reads `+-8`, but not `-8`.
            offset => write!(f, "+{offset}"),
        }
    }
}

impl Display for Imm {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Imm::Int(value) => write!(f, "{value}"),
            Imm::F32(bits) => write!(f, "0f{bits:08X}"),
            Imm::F64(bits) => write!(f, "0d{bits:016X}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Builder, CmpOp, SpecialReg, Statement, Target};

    #[test]
    fn numbered_lines_are_those_of_the_text() {
        let mut k = Builder::kernel("scale");
        let (x, n) = (k.param_pointer("x"), k.param_u32("n"));
        k.max_threads(128);
        let i = k.special(SpecialReg::TidX);
        let inside = k.setp_u(CmpOp::Lt, i, n);
        k.if_(inside, |k| {
            let to = k.index(x, i, 4);
            let value = k.ld::<crate::F32>(to);
            k.st(to, value);
        });
        let mut module = k.into_module(Target::sm(80));
        module.number_lines();
        let text = module.to_string();
        let lines: Vec<&str> = text.lines().collect();
        let body = module.function("scale").and_then(|f| f.body.as_ref()).unwrap();
        let mut seen = 0;
        for statement in &body.statements {
            if let Statement::Inst(inst) = statement {
                assert_eq!(lines[inst.line as usize - 1].trim(), inst.display(body).to_string());
                seen += 1;
            }
        }
        assert!(seen > 8, "{text}");
    }
}
