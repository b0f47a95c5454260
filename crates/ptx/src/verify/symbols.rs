//! What names mean, in a module and in one of its functions.

use std::collections::HashMap;

use crate::{Body, Function, ParamSpace, Space, Variable};

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Symbol<'m> {
    /// A variable.
    Variable(&'m Variable),
    /// A parameter or a result in `.param` space: alignment and size in bytes.
    Param {
        /// Alignment.
        align: u32,
        /// Size.
        bytes: u64,
    },
    /// A function, with the declaration or definition that says most.
    Function(&'m Function),
}

impl Symbol<'_> {
    /// The space it lies in; `None` for functions.
    pub(super) fn space(&self) -> Option<Space> {
        match self {
            Symbol::Variable(variable) => Some(variable.space),
            Symbol::Param { .. } => Some(Space::Param),
            Symbol::Function(_) => None,
        }
    }

    /// Alignment, and size in bytes where it is known.
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

/// The names that a function sees: its own first.
pub(super) struct Scope<'s> {
    module: &'s Symbols<'s>,
    own: HashMap<&'s str, Symbol<'s>>,
}

impl<'m> Symbols<'m> {
    /// The names seen inside `function`.
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
    /// What `name` stands for.
    pub(super) fn get(&self, name: &str) -> Option<Symbol<'s>> {
        self.own.get(name).or_else(|| self.module.0.get(name)).copied()
    }
}

impl Variable {
    /// Size in bytes; `None` where it overflows. 0 for an array of unknown length.
    pub(super) fn checked_bytes(&self) -> Option<u64> {
        let element = u64::from(self.ty.bytes()) * u64::from(self.vector);
        self.dims.iter().try_fold(element, |bytes, &dim| bytes.checked_mul(dim))
    }
}
