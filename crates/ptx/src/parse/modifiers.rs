//! The modifiers after an instruction's name, taken one by one.
//!
//! Compilers of different versions write some modifiers in different orders, and the ISA's own order has changed, so a
//! modifier is taken from wherever it stands; only types keep their order. What is left over in the end is an error.

use smallvec::SmallVec;

use super::Failure;
use crate::{Eviction, MemSem, Scope, Space, Type};

/// One modifier: its text without the leading dot, and where it stands.
#[derive(Clone, Copy, Debug)]
struct Modifier<'t> {
    text: &'t str,
    offset: usize,
}

/// The modifiers of one instruction that have not been taken yet.
pub(super) struct Modifiers<'t> {
    /// The name before the first dot.
    pub(super) base: &'t str,
    /// Where the name stands.
    pub(super) offset: usize,
    rest: SmallVec<[Modifier<'t>; 12]>,
}

impl<'t> Modifiers<'t> {
    pub(super) fn new(base: &'t str, offset: usize) -> Modifiers<'t> {
        Modifiers { base, offset, rest: SmallVec::new() }
    }

    pub(super) fn push(&mut self, text: &'t str, offset: usize) {
        self.rest.push(Modifier { text, offset });
    }

    /// Takes the first modifier for which `accepts` gives a value.
    pub(super) fn find<R>(&mut self, accepts: impl Fn(&str) -> Option<R>) -> Option<R> {
        let (at, value) =
            self.rest.iter().enumerate().find_map(|(at, m)| accepts(m.text).map(|value| (at, value)))?;
        self.rest.remove(at);
        Some(value)
    }

    /// As [`Modifiers::find`]; an error that says what was wanted when there is none.
    pub(super) fn one<R>(&mut self, what: &str, accepts: impl Fn(&str) -> Option<R>) -> Result<R, Failure> {
        self.find(accepts).ok_or_else(|| self.missing(what))
    }

    /// Takes `text` if it is there.
    pub(super) fn take(&mut self, text: &str) -> bool {
        self.find(|m| (m == text).then_some(())).is_some()
    }

    /// Takes `text`, which must be there.
    pub(super) fn require(&mut self, text: &str) -> Result<(), Failure> {
        if self.take(text) { Ok(()) } else { Err(self.missing(&format!("`.{text}`"))) }
    }

    /// Takes the next type.
    pub(super) fn ty(&mut self) -> Result<Type, Failure> {
        self.one("a type", Type::from_name)
    }

    /// The state space, `Generic` where none is written. `.param::entry` and `.param::func` are `.param`.
    pub(super) fn space(&mut self) -> Space {
        let space = self.find(|m| {
            Some(match m {
                "global" => Space::Global,
                "shared" | "shared::cta" => Space::Shared,
                "shared::cluster" => Space::SharedCluster,
                "local" => Space::Local,
                "const" => Space::Const,
                "param" | "param::entry" | "param::func" => Space::Param,
                _ => return None,
            })
        });
        space.unwrap_or(Space::Generic)
    }

    /// `.weak`, `.volatile`, `.relaxed`, … with the scope.
    pub(super) fn ordering(&mut self) -> (MemSem, Option<Scope>) {
        let mmio = self.take("mmio");
        let sem = self.find(|m| {
            Some(match m {
                "weak" => MemSem::Weak,
                "volatile" => MemSem::Volatile,
                "relaxed" => MemSem::Relaxed,
                "acquire" => MemSem::Acquire,
                "release" => MemSem::Release,
                "acq_rel" => MemSem::AcqRel,
                _ => return None,
            })
        });
        let sem = if mmio { MemSem::Mmio } else { sem.unwrap_or_default() };
        (sem, self.find(Scope::from_name))
    }

    /// `.v2`, `.v4`, `.v8`; 1 where none is written.
    pub(super) fn vector(&mut self) -> u8 {
        let vector = self.find(|m| match m {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        vector.unwrap_or(1)
    }

    /// `.L2::64B` and its like, in bytes.
    pub(super) fn l2_prefetch(&mut self) -> Option<u16> {
        self.find(|m| match m {
            "L2::64B" => Some(64),
            "L2::128B" => Some(128),
            "L2::256B" => Some(256),
            _ => None,
        })
    }

    /// `.L1::evict_…` or `.L2::evict_…`, by the level's prefix.
    pub(super) fn eviction(&mut self, level: &str) -> Option<Eviction> {
        self.find(|m| m.strip_prefix(level).and_then(Eviction::from_name))
    }

    /// An error at the first modifier that nothing has taken.
    pub(super) fn finish(&self) -> Result<(), Failure> {
        match self.rest.first() {
            None => Ok(()),
            Some(m) => Err(Failure::at(
                m.offset,
                format!("`{}` does not know the modifier `.{}`", self.base, m.text),
            )),
        }
    }

    fn missing(&self, what: &str) -> Failure {
        Failure::at(self.offset, format!("`{}` needs {what}", self.base))
    }

    /// An error about the instruction as a whole.
    pub(super) fn unknown(&self) -> Failure {
        let mut name = self.base.to_owned();
        for m in &self.rest {
            name.push('.');
            name.push_str(m.text);
        }
        Failure::at(self.offset, format!("unknown instruction `{name}`"))
    }
}
