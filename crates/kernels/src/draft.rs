//! Kernels whose parameters are declared and whose bodies are not emitted yet.

use ptx::{Builder, Launch, Module, Target, Violations};

use crate::contract::Contract;
use crate::program::{Contracts, Program};

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

    fn emit(mut self) -> (Module, Contracts) {
        (self.body)(&mut self.k);
        (self.k.into_module(self.target), self.contracts)
    }
}

/// The launch contracts of kernels that are launched in this order. Each kernel declares the buffers that it
/// takes; operands and temporaries of the same name are one buffer of the program.
pub(crate) fn contracts(drafts: Vec<Draft<'_>>) -> Contracts {
    drafts.into_iter().fold(Contracts::default(), |all, draft| all.followed_by(draft.contracts))
}

/// The program of kernels that are launched in this order, at least one. Their entries have different names.
///
/// # Errors
/// What the verifier refuses.
pub(crate) fn emit(drafts: Vec<Draft<'_>>) -> Result<Program, Violations> {
    let join = |(module, contracts): (Module, Contracts), (next, step)| {
        (module.joined_with(next), contracts.followed_by(step))
    };
    let joined = drafts.into_iter().map(Draft::emit).reduce(join);
    let (module, contracts) = joined.expect("every plan has a kernel");
    Ok(Program { module: module.verify()?, contracts })
}
