//! Takes the modifiers after an instruction's name one by one.
//!
//! Compilers of different versions write some modifiers in different orders, and the PTX ISA's own order has
//! changed. A modifier is therefore accepted in any position. Only types keep their order. A modifier that is
//! left over is an error.

use smallvec::SmallVec;

use super::Failure;
use crate::isa::syntax::Syntax;
use crate::{Eviction, MmaShape, Type};

/// A modifier: its text without the leading dot, and its byte offset.
#[derive(Clone, Copy, Debug)]
struct Modifier<'t> {
    text: &'t str,
    offset: usize,
}

/// The modifiers of an instruction that have not been taken yet.
pub(super) struct Modifiers<'t> {
    /// The name before the first dot.
    pub(super) base: &'t str,
    /// Byte offset of the name.
    offset: usize,
    rest: SmallVec<[Modifier<'t>; 12]>,
}

impl<'t> Modifiers<'t> {
    pub(super) fn new(base: &'t str, offset: usize) -> Modifiers<'t> {
        Modifiers { base, offset, rest: SmallVec::new() }
    }

    pub(super) fn push(&mut self, text: &'t str, offset: usize) {
        self.rest.push(Modifier { text, offset });
    }

    /// Whether a modifier is present and not taken yet.
    pub(super) fn has(&self, text: &str) -> bool {
        self.rest.iter().any(|m| m.text == text)
    }

    /// An error at the first modifier that is left over.
    pub(super) fn finish(&self) -> Result<(), Failure> {
        match self.rest.first() {
            None => Ok(()),
            Some(m) => {
                Err(Failure::unknown(m.offset, format!("`{}` has no modifier `.{}`", self.base, m.text)))
            }
        }
    }

    /// An error about a missing required part.
    pub(super) fn missing(&self, what: &str) -> Failure {
        Failure::at(self.offset, format!("`{}` needs {what}", self.base))
    }

    /// An error about a name that is not an instruction.
    pub(super) fn unknown(&self) -> Failure {
        let mut name = self.base.to_owned();
        for m in &self.rest {
            name.push('.');
            name.push_str(m.text);
        }
        Failure::unknown(self.offset, format!("unknown instruction `{name}`"))
    }

    /// Takes the first modifier for which `accepts` returns a value.
    fn find<R>(&mut self, accepts: impl Fn(&str) -> Option<R>) -> Option<R> {
        let (at, value) =
            self.rest.iter().enumerate().find_map(|(at, m)| accepts(m.text).map(|value| (at, value)))?;
        self.rest.remove(at);
        Some(value)
    }

    /// Takes `text` if it is present.
    fn take(&mut self, text: &str) -> bool {
        self.find(|m| (m == text).then_some(())).is_some()
    }

    /// Takes a spelling whose modifiers are all present and returns its value. The spelling with the most
    /// modifiers wins, and of those the first in the text.
    fn choose<T: Copy>(&mut self, names: &[(T, &str)]) -> Option<T> {
        let mut best: Option<(usize, usize, T, &str)> = None;
        for &(value, name) in names {
            let mut words = name.split('.');
            let first = words.next().and_then(|word| self.rest.iter().position(|m| m.text == word));
            let Some(position) = first else { continue };
            if !words.clone().all(|word| self.has(word)) {
                continue;
            }
            let count = words.count();
            if best.is_none_or(|(most, at, ..)| count > most || count == most && position < at) {
                best = Some((count, position, value, name));
            }
        }
        let (_, _, value, name) = best?;
        for word in name.split('.') {
            self.take(word);
        }
        Some(value)
    }
}

impl Syntax for Modifiers<'_> {
    type Stop = Failure;

    fn name<T: Copy + PartialEq>(
        &mut self,
        value: &mut T,
        names: &[(T, &'static str)],
    ) -> Result<(), Failure> {
        let behind = |name: &'static str| match name.split_once('.') {
            Some((base, words)) => (base == self.base).then_some(words),
            None => (name == self.base).then_some(""),
        };
        let fitting = names.iter().filter_map(|&(value, name)| Some((value, behind(name)?)));
        let fitting =
            fitting.filter(|(_, words)| words.is_empty() || words.split('.').all(|word| self.has(word)));
        let length = |words: &str| if words.is_empty() { 0 } else { 1 + words.matches('.').count() };
        let longest = fitting.reduce(|a, b| if length(b.1) > length(a.1) { b } else { a });
        let Some((named, words)) = longest else { return Err(self.unknown()) };
        for word in words.split('.') {
            self.take(word);
        }
        *value = named;
        Ok(())
    }

    fn one<T: Copy + PartialEq>(
        &mut self,
        value: &mut T,
        what: &str,
        names: &[(T, &str)],
    ) -> Result<(), Failure> {
        *value = self.choose(names).ok_or_else(|| self.missing(what))?;
        Ok(())
    }

    fn maybe<T: Copy + PartialEq>(
        &mut self,
        value: &mut Option<T>,
        names: &[(T, &str)],
    ) -> Result<(), Failure> {
        *value = self.choose(names);
        Ok(())
    }

    fn word(&mut self, word: &str) -> Result<(), Failure> {
        if self.take(word) { Ok(()) } else { Err(self.missing(&format!("`.{word}`"))) }
    }

    fn ty(&mut self, ty: &mut Type) -> Result<(), Failure> {
        // A modifier that is left may be a type that the crate does not know.
        let missing = |m: &Self| Failure { unknown: !m.rest.is_empty(), ..m.missing("a type") };
        *ty = self.find(Type::from_name).ok_or_else(|| missing(self))?;
        Ok(())
    }

    fn shape(&mut self, shape: &mut MmaShape) -> Result<(), Failure> {
        *shape = self.find(extents).ok_or_else(|| self.missing("a shape such as `.m16n8k16`"))?;
        Ok(())
    }

    fn eviction(&mut self, priority: &mut Option<Eviction>, level: &str) -> Result<(), Failure> {
        *priority = self.find(|m| m.strip_prefix(level).and_then(Eviction::from_name));
        Ok(())
    }

    fn redundant(&mut self, word: &str) -> bool {
        self.take(word)
    }

    fn types_left(&self) -> Option<usize> {
        Some(self.rest.iter().filter(|m| Type::from_name(m.text).is_some()).count())
    }

    fn refuse(&mut self, message: impl Into<String>) -> Result<(), Failure> {
        Err(Failure::at(self.offset, message))
    }

    fn unsupported(&mut self, prefixes: &[&str], why: &str) -> Result<(), Failure> {
        let begins = |m: &&Modifier<'_>| prefixes.iter().any(|prefix| m.text.starts_with(prefix));
        match self.rest.iter().find(begins) {
            None => Ok(()),
            Some(m) => Err(Failure::unknown(m.offset, format!("`.{}` is not supported: {why}", m.text))),
        }
    }

    fn sync(&mut self) -> Result<(), Failure> {
        if self.take("sync") {
            return Ok(());
        }
        self.refuse(format!(
            "`{}` without `.sync` is not supported: sm_70 and later do not have it",
            self.base
        ))
    }
}

/// Parses `m16n8k16` into its three extents.
fn extents(word: &str) -> Option<MmaShape> {
    let (m, rest) = word.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some(MmaShape { m: m.parse().ok()?, n: n.parse().ok()?, k: k.parse().ok()? })
}
