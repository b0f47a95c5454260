//! Parses the module scope: header, variables, functions and their parameters.

use std::collections::HashMap;

use super::lexer::Kind;
use super::scope::Names;
use super::variable::declared_space;
use super::{Failure, Parser};
use crate::{
    Body, Function, FunctionKind, Item, LaunchBounds, Linkage, Module, Name, Operand, Param, ParamSpace, Reg,
    Register, Space, Statement, Target, Version,
};

impl<'t> Parser<'t> {
    pub(super) fn module(self) -> Result<Module, Failure> {
        self.module_and_rest().map(|(module, _)| module)
    }

    /// The module, and the functions that were left out.
    pub(super) fn module_and_rest(mut self) -> Result<(Module, Vec<(Name, Failure)>), Failure> {
        let (version, target) = self.header()?;
        let (mut items, mut aliases) = (Vec::new(), HashMap::new());
        while self.peek() != Kind::End {
            if self.eat_dot(".alias") {
                let alias = self.declared()?;
                self.punct(b',')?;
                aliases.insert(alias, self.declared()?);
                self.punct(b';')?;
            } else {
                self.item(&mut items)?;
            }
        }
        resolve(&mut items, &aliases);
        let rest = self.left_out.unwrap_or_default();
        let left_out =
            |f: &Function| f.kind == FunctionKind::Entry && rest.iter().any(|(name, _)| *name == f.name);
        items.retain(|item| !matches!(item, Item::Function(f) if left_out(f)));
        Ok((Module { version, target, items }, rest))
    }

    fn header(&mut self) -> Result<(Version, Target), Failure> {
        if !self.eat_dot(".version") {
            return Err(self.expected("`.version`"));
        }
        let version = self.version()?;
        if !self.eat_dot(".target") {
            return Err(self.expected("`.target`"));
        }
        let target = self.target()?;
        while self.eat(b',') {
            let option = self.name("a target option")?;
            if !matches!(option, "debug" | "texmode_unified") {
                return Err(Failure::at(
                    self.here(),
                    format!("the target option `{option}` is not supported"),
                ));
            }
        }
        if self.eat_dot(".address_size") {
            let start = self.here();
            if self.unsigned()? != 64 {
                return Err(Failure::at(start, "only `.address_size 64` is supported"));
            }
        }
        Ok((version, target))
    }

    fn version(&mut self) -> Result<Version, Failure> {
        let numbers = self.text().split_once('.');
        let version = numbers.and_then(|(major, minor)| {
            Some(Version { major: major.parse().ok()?, minor: minor.parse().ok()? })
        });
        let version = version.ok_or_else(|| self.expected("a version such as `8.0`"))?;
        self.next();
        Ok(version)
    }

    fn target(&mut self) -> Result<Target, Failure> {
        let target = self.text().strip_prefix("sm_").and_then(|name| name.parse().ok());
        let target = target.ok_or_else(|| self.expected("a target such as `sm_80` or `sm_90a`"))?;
        self.next();
        Ok(target)
    }

    fn item(&mut self, items: &mut Vec<Item>) -> Result<(), Failure> {
        // An `implicit-def` comment outside all functions.
        if self.peek() == Kind::Undefined {
            self.next();
            return Ok(());
        }
        if self.peek() != Kind::Dot {
            return Err(self.expected("a directive such as `.visible`, `.entry` or `.global`"));
        }
        match self.text() {
            ".file" | ".loc" => self.skip_line(),
            ".section" => self.skip_section()?,
            ".pragma" => self.skip_statement(),
            _ => {
                let linkage = self.linkage();
                match self.text() {
                    ".entry" | ".func" => items.push(Item::Function(self.function(linkage)?)),
                    directive if declared_space(directive).is_some_and(at_module_scope) => {
                        let bind = |p: &mut Parser<'t>, name: &'t str, _| Ok(p.define(name));
                        items.extend(self.variables(linkage, bind)?.into_iter().map(Item::Variable));
                    }
                    _ => return Err(self.expected("`.entry`, `.func`, `.global`, `.shared` or `.const`")),
                }
            }
        }
        Ok(())
    }

    fn linkage(&mut self) -> Linkage {
        let linkage = match self.text() {
            ".visible" => Linkage::Visible,
            ".extern" => Linkage::Extern,
            ".weak" => Linkage::Weak,
            ".common" => Linkage::Common,
            _ => return Linkage::Private,
        };
        self.next();
        linkage
    }

    /// Declares a name of the module. A name may be declared several times; the verifier checks that it is
    /// defined once.
    fn define(&mut self, name: &'t str) -> crate::Name {
        self.symbols.entry(name).or_insert_with(|| name.into()).clone()
    }

    /// The name of a variable or function that was declared before.
    fn declared(&mut self) -> Result<Name, Failure> {
        let start = self.here();
        let name = self.name("the name of a function")?;
        let declared = self.symbols.get(name).cloned();
        declared.ok_or_else(|| Failure::at(start, format!("`{name}` is not declared")))
    }

    /// `.section name { … }`: debugging information.
    fn skip_section(&mut self) -> Result<(), Failure> {
        while !matches!(self.peek(), Kind::Punct(b'{', 0) | Kind::End) {
            self.next();
        }
        self.punct(b'{')?;
        while self.peek() != Kind::Punct(b'}', 0) {
            if self.peek() == Kind::End {
                return Err(self.expected("`}`"));
            }
            self.next();
        }
        self.next();
        Ok(())
    }

    fn function(&mut self, linkage: Linkage) -> Result<Function, Failure> {
        let kind = if self.eat_dot(".entry") {
            FunctionKind::Entry
        } else {
            self.next();
            FunctionKind::Func
        };
        self.names = Names::default();
        self.names.open(self.here())?;
        let mut body = Body::default();
        let returns = match self.peek() {
            Kind::Punct(b'(', 0) if kind == FunctionKind::Func => self.params(kind, &mut body)?,
            _ => Vec::new(),
        };
        let name = self.name("the name of a function")?;
        let name = self.define(name);
        let params = match self.peek() {
            Kind::Punct(b'(', 0) => self.params(kind, &mut body)?,
            _ => Vec::new(),
        };
        let bounds = self.bounds()?;
        let body = if self.eat(b';') {
            None
        } else {
            let open = self.at;
            self.punct(b'{')?;
            match self.body(body) {
                Err(failure) if failure.unknown && self.left_out.is_some() => {
                    self.at = open;
                    self.skip_braces()?;
                    self.left_out.get_or_insert_default().push((name.clone(), failure));
                    None
                }
                body => Some(body?),
            }
        };
        Ok(Function { kind, linkage, name, returns, params, bounds, body })
    }

    fn params(&mut self, kind: FunctionKind, body: &mut Body) -> Result<Vec<Param>, Failure> {
        self.punct(b'(')?;
        let mut params = Vec::new();
        while !self.eat(b')') {
            if !params.is_empty() {
                self.punct(b',')?;
            }
            params.push(self.param(kind, body)?);
        }
        Ok(params)
    }

    fn param(&mut self, kind: FunctionKind, body: &mut Body) -> Result<Param, Failure> {
        if kind == FunctionKind::Func && self.eat_dot(".reg") {
            let (ty, start) = (self.ty()?, self.here());
            let name = self.name("the name of a parameter")?;
            self.spend_registers(1, start)?;
            let name = self.names.register(name, Reg(body.registers.len() as u32), start, |_| false)?;
            body.registers.push(Register { name: name.clone(), ty });
            return Ok(Param {
                space: ParamSpace::Reg,
                align: ty.bytes(),
                ty,
                name,
                elements: None,
                pointer: None,
            });
        }
        if !self.eat_dot(".param") {
            return Err(self.expected("`.param`"));
        }
        let align = self.align()?;
        let ty = self.memory_ty()?;
        let pointer = if self.eat_dot(".ptr") { Some(self.pointer()?) } else { None };
        let align = align.unwrap_or(ty.bytes());
        let start = self.here();
        let name = self.name("the name of a parameter")?;
        let elements = self.dimensions()?;
        let elements = match elements[..] {
            [] => None,
            [n] if n > 0 && n <= u64::from(u32::MAX / ty.bytes()) => Some(n as u32),
            _ => return Err(Failure::at(start, "a parameter has one dimension, of less than 4 GiB")),
        };
        let name = self.names.variable(name, start, |_| false)?;
        Ok(Param { space: ParamSpace::Param, align, ty, name, elements, pointer })
    }

    /// Parses the part after `.ptr`: the space pointed to, and the alignment, 4 bytes by default.
    fn pointer(&mut self) -> Result<(Space, u32), Failure> {
        let space = declared_space(self.text()).filter(|&space| space != Space::Param);
        if space.is_some() {
            self.next();
        }
        Ok((space.unwrap_or(Space::Generic), self.align()?.unwrap_or(4)))
    }

    /// Performance directives between the parameters and the body.
    fn bounds(&mut self) -> Result<LaunchBounds, Failure> {
        let mut bounds = LaunchBounds::default();
        loop {
            if self.peek() != Kind::Dot {
                return Ok(bounds);
            }
            let (directive, start) = (self.text(), self.here());
            self.next();
            match directive {
                ".maxntid" => bounds.max_threads = Some(self.extents()?),
                ".reqntid" => bounds.required_threads = Some(self.extents()?),
                ".reqnctapercluster" => bounds.required_cluster = Some(self.extents()?),
                ".minnctapersm" | ".maxnctapersm" => bounds.min_ctas_per_sm = Some(self.unsigned()?),
                ".maxnreg" => bounds.max_registers = Some(self.unsigned()?),
                ".maxclusterrank" => bounds.max_cluster_rank = Some(self.unsigned()?),
                ".explicitcluster" => bounds.explicit_cluster = true,
                ".noreturn" => bounds.no_return = true,
                ".pragma" => self.skip_statement(),
                ".loc" | ".file" => self.skip_line(),
                _ => {
                    return Err(Failure::at(start, format!("unknown directive `{directive}` before a body")));
                }
            }
        }
    }

    /// Parses one to three extents. Missing extents are 1.
    fn extents(&mut self) -> Result<[u32; 3], Failure> {
        let mut extents = [self.unsigned()?, 1, 1];
        for extent in &mut extents[1..] {
            if !self.eat(b',') {
                break;
            }
            *extent = self.unsigned()?;
        }
        Ok(extents)
    }

    /// Counts registers against the limit of the module.
    pub(super) fn spend_registers(&mut self, count: u32, offset: usize) -> Result<(), Failure> {
        match self.registers_left.checked_sub(count as usize) {
            Some(left) => {
                self.registers_left = left;
                Ok(())
            }
            None => {
                let message = format!("more than {} registers in a module", super::MAX_REGISTERS);
                Err(Failure::at(offset, message))
            }
        }
    }
}

/// Makes calls of aliases call the functions that they stand for, and drops the declarations of the aliases.
fn resolve(items: &mut Vec<Item>, aliases: &HashMap<Name, Name>) {
    if aliases.is_empty() {
        return;
    }
    items.retain(
        |item| !matches!(item, Item::Function(f) if f.body.is_none() && aliases.contains_key(&f.name)),
    );
    for item in items {
        let Item::Function(Function { body: Some(body), .. }) = item else { continue };
        for statement in &mut body.statements {
            let Statement::Inst(instruction) = statement else { continue };
            for operand in &mut instruction.operands {
                if let Operand::Function(name) = operand
                    && let Some(function) = aliases.get(name)
                {
                    *name = function.clone();
                }
            }
        }
    }
}

fn at_module_scope(space: Space) -> bool {
    matches!(space, Space::Global | Space::Shared | Space::Const)
}
