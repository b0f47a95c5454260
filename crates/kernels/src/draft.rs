//! Kernels whose parameters are declared and whose bodies are not emitted yet.

use ptx::{Builder, Launch, Target, Verified, Violations};

use crate::contract::Contract;
use crate::program::Contracts;

/// A kernel before its body is emitted. Its launch contract is complete, so a launch of code that exists
/// costs no emission.
pub(crate) struct Draft<'a> {
    k: Builder,
    target: Target,
    contracts: Contracts,
    body: Box<dyn FnOnce(&mut Builder) + 'a>,
}

impl<'a> Draft<'a> {
    /// A kernel of the builder's parameters, which `contract` has declared. `body` emits the rest.
    pub fn new(
        k: Builder,
        contract: Contract<'_>,
        (entry, launch): (&str, Launch),
        target: Target,
        body: impl FnOnce(&mut Builder) + 'a,
    ) -> Draft<'a> {
        Draft { k, target, contracts: contract.into_contracts(entry, launch), body: Box::new(body) }
    }

    fn emit(mut self) -> Result<(Verified, Contracts), Violations> {
        (self.body)(&mut self.k);
        Ok((self.k.into_verified(self.target)?, self.contracts))
    }
}

/// The kernels of a plan in launch order. Their entries have different names.
pub(crate) struct Drafts<'a> {
    first: Draft<'a>,
    then: Vec<Draft<'a>>,
}

impl<'a> From<Draft<'a>> for Drafts<'a> {
    fn from(first: Draft<'a>) -> Drafts<'a> {
        Drafts { first, then: Vec::new() }
    }
}

impl<'a> Drafts<'a> {
    /// The kernels, with one that is launched before them.
    pub fn after(mut self, first: Draft<'a>) -> Drafts<'a> {
        self.then.insert(0, std::mem::replace(&mut self.first, first));
        self
    }

    /// The kernels, with one that is launched after them.
    pub fn followed_by(mut self, next: Draft<'a>) -> Drafts<'a> {
        self.then.push(next);
        self
    }

    /// The launch contracts alone.
    pub fn into_contracts(self) -> Contracts {
        let then = self.then.into_iter().map(|draft| draft.contracts);
        then.fold(self.first.contracts, Contracts::followed_by)
    }

    /// The module of all kernels, and their launch contracts.
    ///
    /// # Errors
    /// What the verifier refuses.
    pub fn emit(self) -> Result<(Verified, Contracts), Violations> {
        let (mut module, mut contracts) = self.first.emit()?;
        for draft in self.then {
            let (next, contract) = draft.emit()?;
            module = module.into_module().joined_with(next.into_module()).verify()?;
            contracts = contracts.followed_by(contract);
        }
        Ok((module, contracts))
    }
}
