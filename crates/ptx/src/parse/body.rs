//! Parses function bodies: declarations, labels, instructions.

use smallvec::{SmallVec, smallvec};

use super::lexer::Kind;
use super::modifiers::Modifiers;
use super::scope::Symbol;
use super::variable::declared_space;
use super::{Failure, Parser, mnemonic};
use crate::{
    BinaryOp, Body, Guard, Imm, Instruction, Label, Linkage, Op, Operand, Reg, Register, SlotKind, Statement,
    TernaryOp, Type, WgmmaSource,
};

/// Prefixes of labels that compilers write for debuggers only.
const DEBUG_LABELS: [&str; 3] = ["$L__tmp", "$L__func_begin", "$L__func_end"];

impl<'t> Parser<'t> {
    /// Parses a body after its `{`. `body` contains the registers that are parameters.
    pub(super) fn body(&mut self, mut body: Body) -> Result<Body, Failure> {
        loop {
            match self.peek() {
                Kind::Punct(b'}', 0) => {
                    self.next();
                    self.names.close();
                    if self.names.depth() == 0 {
                        break;
                    }
                }
                Kind::Punct(b'{', 0) => {
                    self.names.open(self.here())?;
                    self.next();
                }
                Kind::Punct(b';', 0) => self.next(),
                Kind::Dot => self.directive(&mut body)?,
                Kind::Name if self.peek_second() == Kind::Punct(b':', 0) => self.label(&mut body)?,
                Kind::Undefined => self.undefined(&mut body),
                Kind::Name | Kind::Punct(b'@', 0) => {
                    let instruction = self.instruction(&body)?;
                    body.statements.push(Statement::Inst(instruction));
                }
                _ => return Err(self.expected("an instruction, a directive, a label or `}`")),
            }
        }
        let (flat, names) = self.names.resolve_labels()?;
        body.labels = names;
        body.map_labels(|label| flat[label.0 as usize]);
        body.number_labels();
        Ok(body)
    }

    fn directive(&mut self, body: &mut Body) -> Result<(), Failure> {
        match self.text() {
            ".loc" | ".file" => self.skip_line(),
            ".reg" => self.registers(body)?,
            ".pragma" => {
                self.next();
                let text = self.string()?;
                self.punct(b';')?;
                body.statements.push(Statement::Pragma(text.into()));
            }
            directive if declared_space(directive).is_some() => {
                let variables = self.variables(Linkage::Private, |p, name, start| {
                    let symbols = &p.symbols;
                    p.names.variable(name, start, |n| symbols.contains_key(n))
                })?;
                body.variables.extend(variables);
            }
            _ => return Err(self.expected("a directive that a body accepts")),
        }
        Ok(())
    }

    /// `.reg .b32 %a, %r<10>;`
    fn registers(&mut self, body: &mut Body) -> Result<(), Failure> {
        self.next();
        if matches!(self.text(), ".v2" | ".v4") {
            return Err(Failure::at(self.here(), "vector registers are not supported"));
        }
        let ty = self.ty()?;
        loop {
            let start = self.here();
            let name = self.name("the name of a register")?;
            let count = if self.eat(b'<') { Some(self.range_count()?) } else { None };
            self.spend_registers(count.unwrap_or(1), start)?;
            let first = Reg(body.registers.len() as u32);
            let symbols = &self.symbols;
            let taken = |name: &str| symbols.contains_key(name);
            match count {
                Some(count) => {
                    let names = self.names.range(name, count, first, start, taken)?;
                    body.registers.extend(names.into_iter().map(|name| Register { name, ty }));
                }
                None => {
                    let name = self.names.register(name, first, start, taken)?;
                    body.registers.push(Register { name, ty });
                }
            }
            if self.eat(b';') {
                return Ok(());
            }
            if !self.eat(b',') {
                return Err(self.expected("`;`, `,` or `<`"));
            }
        }
    }

    /// Parses the number in `%r<10>`. It is not parsed as an expression, because `>` would be an operator.
    fn range_count(&mut self) -> Result<u32, Failure> {
        let count = if self.peek() == Kind::Number { self.text().parse().ok() } else { None };
        let count = count.ok_or_else(|| self.expected("a number of registers"))?;
        self.next();
        self.punct(b'>')?;
        Ok(count)
    }

    /// Parses `name:`, which may begin a list of targets.
    fn label(&mut self, body: &mut Body) -> Result<(), Failure> {
        let (name, start) = (self.text(), self.here());
        self.next();
        self.next();
        if self.eat_dot(".branchtargets") {
            let labels = self.labels(b';')?;
            self.names.add_targets(name, labels);
        } else if matches!(self.text(), ".callprototype" | ".calltargets") {
            // These lists are only used by indirect calls, which the parser rejects.
            self.skip_statement();
        } else if !DEBUG_LABELS.iter().any(|prefix| name.starts_with(prefix)) {
            body.statements.push(Statement::Label(self.names.place(name, start)?));
        }
        Ok(())
    }

    /// Parses labels separated by commas, and the character `end` after the last.
    fn labels(&mut self, end: u8) -> Result<Vec<Label>, Failure> {
        let mut labels = Vec::new();
        loop {
            labels.push(self.label_name()?);
            if self.eat(end) {
                return Ok(labels);
            }
            self.punct(b',')?;
        }
    }

    fn label_name(&mut self) -> Result<Label, Failure> {
        let start = self.here();
        let name = self.name("a label")?;
        Ok(self.names.mention(name, start))
    }

    fn instruction(&mut self, body: &Body) -> Result<Instruction, Failure> {
        let guard = if self.eat(b'@') {
            let negated = self.eat(b'!');
            Some(Guard { reg: self.register()?, negated })
        } else {
            None
        };
        let (line, start) = (self.line(), self.here());
        let mut modifiers = Modifiers::new(self.name("an instruction")?, start);
        while self.peek() == Kind::Dot {
            modifiers.push(&self.text()[1..], self.here());
            self.next();
        }
        let mut op = mnemonic::op(&mut modifiers)?;
        let mut operands = self.operands(op)?;
        if let (Op::Binary(which @ (BinaryOp::Min | BinaryOp::Max), ty, mods), 4) = (op, operands.len()) {
            let which = if which == BinaryOp::Min { TernaryOp::Min } else { TernaryOp::Max };
            op = Op::Ternary(which, ty, mods);
        }
        if let (Op::CpAsync(copy), Some(&Operand::Reg(Reg(r)))) = (&mut op, operands.get(3)) {
            copy.ignore_src = body.registers.get(r as usize).is_some_and(|reg| reg.ty == Type::Pred);
        }
        if let (Op::Wgmma(wgmma), Some(Operand::Vector(_))) = (&mut op, operands.get(1)) {
            wgmma.a_source = WgmmaSource::Registers;
        }
        if let Op::Tcgen05Mma(product) = &mut op {
            product.a_in_tensor_memory = matches!(operands.get(1), Some(Operand::Address(_)));
            product.masks_lanes = matches!(operands.get(4), Some(Operand::Vector(_)));
        }
        for (operand, slot) in operands.iter_mut().zip(op.signature()) {
            normalise(operand, slot.kind);
        }
        Ok(Instruction { guard, op, operands, line })
    }

    /// Sets a register to 0 that a compiler leaves undefined on purpose. Without a value, a read of the
    /// register would be reported as a fault.
    fn undefined(&mut self, body: &mut Body) {
        let (line, name) = (self.line(), self.text());
        self.next();
        let Some(&Symbol::Register(reg)) = self.names.find(name) else { return };
        let zero = |ty: Type| match ty {
            Type::F32 => (ty, Imm::F32(0)),
            Type::F64 => (ty, Imm::F64(0)),
            Type::Pred => (ty, Imm::Int(0)),
            _ => (Type::bits_of(ty.bits()), Imm::Int(0)),
        };
        let (ty, zero) = zero(body.registers[reg.0 as usize].ty);
        let operands = smallvec![Operand::Reg(reg), Operand::Imm(zero)];
        body.statements.push(Statement::Inst(Instruction { guard: None, op: Op::Mov(ty), operands, line }));
    }

    fn operands(&mut self, op: Op) -> Result<SmallVec<[Operand; 4]>, Failure> {
        let mut operands = SmallVec::new();
        match op {
            Op::Bra { .. } => operands.push(Operand::Label(self.label_name()?)),
            Op::BrxIdx { .. } => {
                operands.push(self.operand()?);
                self.punct(b',')?;
                operands.push(self.targets()?);
            }
            Op::Call { .. } => self.call(&mut operands)?,
            _ => {
                while self.peek() != Kind::Punct(b';', 0) {
                    self.operands_of_one(&mut operands)?;
                    if !self.eat(b',') {
                        break;
                    }
                }
            }
        }
        if !self.eat(b';') {
            return Err(self.expected("`,` or `;`"));
        }
        Ok(operands)
    }

    /// The targets of `brx.idx`: the name of a list.
    fn targets(&mut self) -> Result<Operand, Failure> {
        let start = self.here();
        let name = self.name("the name of a `.branchtargets` list")?;
        let Some(labels) = self.names.targets(name) else {
            let message = format!("`{name}` is not a `.branchtargets` list declared before this instruction");
            return Err(Failure::at(start, message));
        };
        // The limit keeps memory linear: many instructions that name one long list would take quadratic
        // memory.
        let Some(left) = self.targets_left.checked_sub(labels.len()) else {
            return Err(Failure::at(start, format!("more than {} targets in a module", super::MAX_TARGETS)));
        };
        self.targets_left = left;
        Ok(Operand::Labels(labels.clone()))
    }

    /// Parses `(results), function, (arguments)`. Both lists may be missing.
    fn call(&mut self, operands: &mut SmallVec<[Operand; 4]>) -> Result<(), Failure> {
        let results = if self.peek() == Kind::Punct(b'(', 0) {
            let results = self.arguments()?;
            self.punct(b',')?;
            results
        } else {
            Operand::List(Vec::new())
        };
        let start = self.here();
        if self.peek() == Kind::Name && matches!(self.names.find(self.text()), Some(Symbol::Register(_))) {
            return Err(Failure::at(
                start,
                "indirect calls are not supported; expected the name of a function",
            ));
        }
        let function = self.symbol_name()?;
        let arguments = match self.eat(b',') {
            true => self.arguments()?,
            false => Operand::List(Vec::new()),
        };
        operands.extend([results, Operand::Function(function), arguments]);
        Ok(())
    }
}

/// Turns a vector of one element into a scalar where the operand position requires that.
fn normalise(operand: &mut Operand, kind: SlotKind) {
    match (kind, &mut *operand) {
        (SlotKind::Value(_) | SlotKind::Wide(_), Operand::Vector(parts)) if parts.len() == 1 => {
            *operand = parts.remove(0);
        }
        _ => {}
    }
}
