//! Resolves the names of one function: scopes, renaming, labels.

use std::collections::{HashMap, HashSet};

use super::Failure;
use crate::{Label, Name, Reg};

/// Maximum nesting depth of `{ … }`.
const MAX_DEPTH: usize = 64;

/// Maximum number of new names that are tried for a name that clashes. Only a text written for this purpose
/// needs more.
const MAX_RENAMES: u32 = 8;

/// The declaration behind a name in a function.
#[derive(Clone, Debug)]
pub(super) enum Symbol {
    Register(Reg),
    /// A variable or parameter, with its name in the flat body.
    Variable(Name),
}

#[derive(Default)]
struct Scope<'t> {
    symbols: HashMap<Name, Symbol>,
    labels: HashMap<&'t str, Label>,
    /// `.branchtargets` lists.
    targets: HashMap<&'t str, Vec<Label>>,
}

/// A label that has been mentioned or placed. A label that a scope mentions and does not place is the label
/// with the same name in the enclosing scope.
struct Seen<'t> {
    name: &'t str,
    mentioned_at: usize,
    placed: bool,
    outer: Option<Label>,
}

/// The declarations of the function that is being parsed.
#[derive(Default)]
pub(super) struct Names<'t> {
    scopes: Vec<Scope<'t>>,
    /// Names taken in the flat body.
    used: HashSet<Name>,
    labels: Vec<Seen<'t>>,
    /// The number of renamed declarations; part of each new name.
    renamed: u32,
}

impl<'t> Names<'t> {
    pub(super) fn depth(&self) -> usize {
        self.scopes.len()
    }

    pub(super) fn open(&mut self, offset: usize) -> Result<(), Failure> {
        if self.scopes.len() >= MAX_DEPTH {
            return Err(Failure::at(offset, format!("scopes nested deeper than {MAX_DEPTH}")));
        }
        self.scopes.push(Scope::default());
        Ok(())
    }

    /// Closes a scope. Labels that the scope mentions and does not place belong to the enclosing scope.
    pub(super) fn close(&mut self) {
        let Some(scope) = self.scopes.pop() else { return };
        if self.scopes.is_empty() {
            return;
        }
        let mut labels: Vec<_> = scope.labels.into_iter().collect();
        labels.sort_by_key(|&(_, label)| label.0);
        for (name, label) in labels {
            let seen = &self.labels[label.0 as usize];
            if !seen.placed {
                let offset = seen.mentioned_at;
                let outer = self.mention(name, offset);
                self.labels[label.0 as usize].outer = Some(outer);
            }
        }
    }

    /// A unique name in the flat body: `wanted` if it is free. `taken` says whether a name exists outside the
    /// function.
    fn free(&mut self, wanted: &str, taken: impl Fn(&str) -> bool) -> Option<Name> {
        let is_free = |name: &str, used: &HashSet<Name>| !used.contains(name) && !taken(name);
        if is_free(wanted, &self.used) {
            return Some(wanted.into());
        }
        (0..MAX_RENAMES).find_map(|_| {
            let name = format!("{wanted}${}", self.renamed);
            self.renamed += 1;
            is_free(&name, &self.used).then(|| name.into())
        })
    }

    /// Declares a variable or parameter and returns its name in the flat body.
    pub(super) fn variable(
        &mut self,
        name: &str,
        offset: usize,
        taken: impl Fn(&str) -> bool,
    ) -> Result<Name, Failure> {
        let flat = self.free(name, taken).ok_or_else(|| clash(name, offset))?;
        self.declare(name, Symbol::Variable(flat.clone()), offset)?;
        self.used.insert(flat.clone());
        Ok(flat)
    }

    /// Declares one register and returns its name in the flat body.
    pub(super) fn register(
        &mut self,
        name: &str,
        reg: Reg,
        offset: usize,
        taken: impl Fn(&str) -> bool,
    ) -> Result<Name, Failure> {
        let flat = self.free(name, taken).ok_or_else(|| clash(name, offset))?;
        self.declare(name, Symbol::Register(reg), offset)?;
        self.used.insert(flat.clone());
        Ok(flat)
    }

    /// Declares `prefix0` … `prefix(count-1)` as registers from index `first` on. Returns their names in the
    /// flat body.
    pub(super) fn range(
        &mut self,
        prefix: &str,
        count: u32,
        first: Reg,
        offset: usize,
        taken: impl Fn(&str) -> bool,
    ) -> Result<Vec<Name>, Failure> {
        let names = |prefix: &str| (0..count).map(|i| Name::from(format!("{prefix}{i}"))).collect::<Vec<_>>();
        let declared = names(prefix);
        let mut flat = declared.clone();
        for attempt in 0.. {
            if flat.iter().all(|name| !self.used.contains(name) && !taken(name)) {
                break;
            }
            if attempt == MAX_RENAMES {
                return Err(clash(prefix, offset));
            }
            flat = names(&format!("{prefix}${}_", self.renamed));
            self.renamed += 1;
        }
        for (name, i) in declared.into_iter().zip(0..) {
            self.declare(&name.clone(), Symbol::Register(Reg(first.0 + i)), offset)?;
        }
        self.used.extend(flat.iter().cloned());
        Ok(flat)
    }

    fn declare(&mut self, name: &str, symbol: Symbol, offset: usize) -> Result<(), Failure> {
        let Some(scope) = self.scopes.last_mut() else { return Ok(()) };
        match scope.symbols.insert(name.into(), symbol) {
            None => Ok(()),
            Some(_) => Err(Failure::at(offset, format!("`{name}` is declared twice in this scope"))),
        }
    }

    pub(super) fn find(&self, name: &str) -> Option<&Symbol> {
        self.scopes.iter().rev().find_map(|scope| scope.symbols.get(name))
    }

    /// The label with this name as seen from the innermost scope.
    pub(super) fn mention(&mut self, name: &'t str, offset: usize) -> Label {
        let fresh = Label(self.labels.len() as u32);
        let Some(scope) = self.scopes.last_mut() else { return fresh };
        *scope.labels.entry(name).or_insert_with(|| {
            self.labels.push(Seen { name, mentioned_at: offset, placed: false, outer: None });
            fresh
        })
    }

    /// Places a label in the innermost scope.
    pub(super) fn place(&mut self, name: &'t str, offset: usize) -> Result<Label, Failure> {
        let label = self.mention(name, offset);
        if std::mem::replace(&mut self.labels[label.0 as usize].placed, true) {
            return Err(Failure::at(offset, format!("the label `{name}` is placed twice")));
        }
        Ok(label)
    }

    pub(super) fn add_targets(&mut self, name: &'t str, labels: Vec<Label>) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.targets.insert(name, labels);
        }
    }

    pub(super) fn targets(&self, name: &str) -> Option<&Vec<Label>> {
        self.scopes.iter().rev().find_map(|scope| scope.targets.get(name))
    }

    /// Returns the label in the flat body for each label of the text, and the names of the flat labels. To be
    /// called when all scopes are closed.
    pub(super) fn resolve_labels(&mut self) -> Result<(Vec<Label>, Vec<Name>), Failure> {
        let mut flat = vec![Label(0); self.labels.len()];
        let mut names = Vec::new();
        // A label of an enclosing scope may be placed after an inner scope mentions it, so placed labels are
        // resolved first.
        for (i, place) in flat.iter_mut().enumerate() {
            let Seen { name, placed, mentioned_at, .. } = self.labels[i];
            if placed {
                *place = Label(names.len() as u32);
                let free = self.free(name, |_| false).ok_or_else(|| clash(name, mentioned_at))?;
                self.used.insert(free.clone());
                names.push(free);
            }
        }
        let resolved = (0..self.labels.len()).map(|mut root| {
            while let Some(outer) = self.labels[root].outer {
                root = outer.0 as usize;
            }
            let Seen { name, placed, mentioned_at, .. } = self.labels[root];
            let message = || format!("the label `{name}` is not placed in this scope or an enclosing scope");
            if placed { Ok(flat[root]) } else { Err(Failure::at(mentioned_at, message())) }
        });
        Ok((resolved.collect::<Result<_, _>>()?, names))
    }
}

fn clash(name: &str, offset: usize) -> Failure {
    Failure::at(offset, format!("`{name}` clashes with other names of the function and could not be renamed"))
}
