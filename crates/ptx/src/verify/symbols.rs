//! Collects the names in a module and in its functions.

use std::collections::HashMap;

use crate::{Body, Function, ParamSpace, Space, Variable};

/// The declaration behind a name.
#[derive(Clone, Copy, Debug)]
pub(super) enum Symbol<'m> {
    /// A variable.
    Variable(&'m Variable),
    /// A parameter or a result in `.param` space.
    Param {
        /// Alignment in bytes.
        align: u32,
        /// Size in bytes.
        bytes: u64,
    },
    /// A function: its definition, or a declaration if there is no definition.
    Function(&'m Function),
}

impl Symbol<'_> {
    /// The state space; `None` for functions.
    pub(super) fn space(&self) -> Option<Space> {
        match self {
            Symbol::Variable(variable) => Some(variable.space),
            Symbol::Param { .. } => Some(Space::Param),
            Symbol::Function(_) => None,
        }
    }

    /// The alignment and, if known, the size, both in bytes.
    pub(super) fn layout(&self) -> Option<(u32, Option<u64>)> {
        match self {
            Symbol::Variable(variable) => {
                let bytes = variable.checked_bytes().filter(|&bytes| bytes > 0);
                Some((variable.align, bytes))
            }
            Symbol::Param { align, bytes } => Some((*align, Some(*bytes))),
            Symbol::Function(_) => None,
        }
    }
}

/// The names of a module.
#[derive(Default)]
pub(super) struct Symbols<'m>(pub(super) HashMap<&'m str, Symbol<'m>>);

/// The names visible in a function. The function's own names hide those of the module.
pub(super) struct Scope<'s> {
    module: &'s Symbols<'s>,
    own: HashMap<&'s str, Symbol<'s>>,
}

impl<'m> Symbols<'m> {
    /// The names visible in `function`.
    pub(super) fn enter<'s>(&'s self, function: &'s Function, body: &'s Body) -> Scope<'s> {
        let variables = body.variables.iter().map(|v| (&*v.name, Symbol::Variable(v)));
        let params = function.params.iter().chain(&function.returns);
        let params = params.filter(|p| p.space == ParamSpace::Param).map(|p| {
            let bytes = u64::from(p.ty.bytes()) * u64::from(p.elements.unwrap_or(1));
            (&*p.name, Symbol::Param { align: p.align, bytes })
        });
        Scope { module: self, own: params.chain(variables).collect() }
    }
}

impl<'s> Scope<'s> {
    /// The declaration of `name`.
    pub(super) fn get(&self, name: &str) -> Option<Symbol<'s>> {
        self.own.get(name).or_else(|| self.module.0.get(name)).copied()
    }
}

impl Variable {
    /// Size in bytes; 0 for an array of unknown length; `None` on overflow.
    pub(super) fn checked_bytes(&self) -> Option<u64> {
        let element = u64::from(self.ty.bytes()) * u64::from(self.vector);
        self.dims.iter().try_fold(element, |bytes, &dim| bytes.checked_mul(dim))
    }
}
