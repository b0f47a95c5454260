//! Parses operands as written. The verifier checks whether the instruction accepts them.

use smallvec::SmallVec;

use super::lexer::Kind;
use super::scope::Symbol;
use super::{Failure, Parser};
use crate::{Address, Base, Name, Operand, Reg, SpecialReg};

impl<'t> Parser<'t> {
    /// One operand other than a label, a callee or an argument list.
    pub(super) fn operand(&mut self) -> Result<Operand, Failure> {
        match self.peek() {
            Kind::Punct(b'{', 0) => self.vector(),
            Kind::Punct(b'[', 0) => {
                let address = self.address()?;
                self.punct(b']')?;
                Ok(Operand::Address(address))
            }
            _ => self.element(),
        }
    }

    /// One operand, or the two of `[map, {x, y}]`.
    pub(super) fn operands_of_one(&mut self, operands: &mut SmallVec<[Operand; 4]>) -> Result<(), Failure> {
        if self.peek() != Kind::Punct(b'[', 0) {
            operands.push(self.operand()?);
            return Ok(());
        }
        operands.push(Operand::Address(self.address()?));
        if self.eat(b',') {
            operands.push(self.vector()?);
        }
        self.punct(b']')
    }

    /// An operand that may also be an element of a vector.
    fn element(&mut self) -> Result<Operand, Failure> {
        let negated = self.peek() == Kind::Punct(b'!', 0) && self.peek_second() == Kind::Name;
        if negated {
            self.next();
            return Ok(Operand::Not(self.register()?));
        }
        if self.starts_constant() {
            return Ok(Operand::Imm(self.immediate()?));
        }
        if self.peek() != Kind::Name {
            return Err(self.expected("an operand"));
        }
        let (name, start) = (self.text(), self.here());
        if name == "_" {
            self.next();
            return Ok(if self.eat(b'|') { Operand::Pair(None, self.pair_half()?) } else { Operand::Sink });
        }
        match self.names.find(name) {
            Some(&Symbol::Register(reg)) => {
                self.next();
                if self.peek() == Kind::Dot {
                    return Err(Failure::at(start, "components of vector registers are not supported"));
                }
                Ok(if self.eat(b'|') {
                    Operand::Pair(Some(reg), self.pair_half()?)
                } else {
                    Operand::Reg(reg)
                })
            }
            Some(Symbol::Variable(_)) => self.symbol(),
            None if name.starts_with('%') => self.special(),
            None => self.symbol(),
        }
    }

    /// The predicate after `d|`.
    fn pair_half(&mut self) -> Result<Option<Reg>, Failure> {
        if self.peek() == Kind::Name && self.text() == "_" {
            self.next();
            return Ok(None);
        }
        self.register().map(Some)
    }

    /// A declared register.
    pub(super) fn register(&mut self) -> Result<Reg, Failure> {
        let start = self.here();
        let name = self.name("a register")?;
        match self.names.find(name) {
            Some(&Symbol::Register(reg)) => Ok(reg),
            _ => Err(Failure::at(start, format!("`{name}` is not declared as a register"))),
        }
    }

    /// `%tid.x`: a name and, for a register with components, a modifier after the name.
    fn special(&mut self) -> Result<Operand, Failure> {
        let (name, start) = (self.text(), self.here());
        self.next();
        if let Some(special) = SpecialReg::from_name(name) {
            return Ok(Operand::Special(special));
        }
        let mut known = None;
        if self.peek() == Kind::Dot {
            known = SpecialReg::from_name(&format!("{name}{}", self.text()));
        }
        let special = known.ok_or_else(|| {
            Failure::unknown(start, format!("`{name}` is neither a declared register nor a special register"))
        })?;
        self.next();
        Ok(Operand::Special(special))
    }

    /// The name of a variable, parameter or function in the flat module.
    pub(super) fn symbol_name(&mut self) -> Result<Name, Failure> {
        let start = self.here();
        let name = self.name("a name")?;
        match self.names.find(name) {
            Some(Symbol::Variable(flat)) => return Ok(flat.clone()),
            Some(Symbol::Register(_)) => {
                return Err(Failure::at(start, format!("`{name}` is a register; expected a variable")));
            }
            None => {}
        }
        let declared = self.symbols.get(name).cloned();
        declared.ok_or_else(|| Failure::at(start, format!("`{name}` is not declared")))
    }

    /// `smem+16`.
    fn symbol(&mut self) -> Result<Operand, Failure> {
        let name = self.symbol_name()?;
        Ok(Operand::Symbol(name, self.displacement()?))
    }

    /// Parses `+16-4`; 0 if nothing is written.
    pub(super) fn displacement(&mut self) -> Result<i64, Failure> {
        let mut sum = 0i64;
        loop {
            let start = self.here();
            let term = match self.peek() {
                Kind::Punct(b'+', 0) => {
                    self.next();
                    Some(self.offset()?)
                }
                Kind::Punct(b'-', 0) => {
                    self.next();
                    // 2^63 is a valid constant; its negative has the same 64 bits.
                    Some(self.offset()?.wrapping_neg())
                }
                _ => return Ok(sum),
            };
            sum = term
                .and_then(|term| sum.checked_add(term))
                .ok_or_else(|| Failure::at(start, "the offset exceeds 64 bits"))?;
        }
    }

    /// Parses `[base+offset`. The caller takes the rest.
    fn address(&mut self) -> Result<Address, Failure> {
        self.punct(b'[')?;
        if self.starts_constant() {
            let offset = self.integer()?;
            return Ok(Address { base: Base::Absolute, offset });
        }
        let base = match self.peek() {
            Kind::Name => match self.names.find(self.text()) {
                Some(&Symbol::Register(reg)) => {
                    self.next();
                    Base::Reg(reg)
                }
                None if self.text().starts_with('%') => return Err(self.expected("a declared register")),
                _ => Base::Symbol(self.symbol_name()?),
            },
            _ => return Err(self.expected("a register, a variable or a constant address")),
        };
        let offset = self.displacement()?;
        Ok(Address { base, offset })
    }

    /// `{a, b, …}`.
    fn vector(&mut self) -> Result<Operand, Failure> {
        self.punct(b'{')?;
        let mut elements = Vec::new();
        loop {
            elements.push(self.element()?);
            if self.eat(b'}') {
                return Ok(Operand::Vector(elements));
            }
            self.punct(b',')?;
        }
    }

    /// `(a, b, …)` of a call.
    pub(super) fn arguments(&mut self) -> Result<Operand, Failure> {
        self.punct(b'(')?;
        let mut list = Vec::new();
        if self.eat(b')') {
            return Ok(Operand::List(list));
        }
        loop {
            list.push(self.element()?);
            if self.eat(b')') {
                return Ok(Operand::List(list));
            }
            self.punct(b',')?;
        }
    }
}
