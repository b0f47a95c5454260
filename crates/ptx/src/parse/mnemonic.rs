//! Parses a mnemonic with its modifiers into an [`Op`].

use std::collections::HashMap;
use std::sync::LazyLock;

use super::Failure;
use super::modifiers::Modifiers;
use crate::isa::syntax::Syntax;
use crate::{Eviction, MmaShape, Op, Type};

/// The name of an instruction with the modifiers that belong to the name, and the operation that parsing
/// starts from.
struct Head {
    modifiers: Vec<&'static str>,
    start: Op,
}

/// The heads, by the text before the first dot.
static HEADS: LazyLock<HashMap<&'static str, Vec<Head>>> = LazyLock::new(|| {
    let mut heads: HashMap<&'static str, Vec<Head>> = HashMap::new();
    for start in Op::prototypes() {
        let (mut op, mut names) = (start, Names(Vec::new()));
        // The walk ends after the name, see `Names`.
        let _ = op.text(&mut names);
        for name in names.0 {
            let mut words = name.split('.');
            let base = words.next().unwrap_or_default();
            heads.entry(base).or_default().push(Head { modifiers: words.collect(), start });
        }
    }
    heads
});

/// The operation that a mnemonic names. Whether `cp.async` has a predicate, the location of A of `wgmma` and
/// `tcgen05.mma`, and whether `min` and `max` have three sources, depends on the operands; the caller sets
/// this.
pub(super) fn op(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let Some(heads) = HEADS.get(m.base) else { return Err(m.unknown()) };
    let present = heads.iter().filter(|head| head.modifiers.iter().all(|word| m.has(word)));
    // Of several heads with the same number of modifiers, the first is used.
    let Some(head) = present.reduce(|a, b| if b.modifiers.len() > a.modifiers.len() { b } else { a }) else {
        let accepted: Vec<String> =
            heads.iter().map(|head| format!("`.{}`", head.modifiers.join("."))).collect();
        return Err(m.missing(&one_of(&accepted)));
    };
    let mut op = head.start;
    op.text(m)?;
    m.finish()?;
    Ok(op)
}

/// Joins names as `a`, `b` or `c`.
fn one_of(names: &[String]) -> String {
    match names {
        [before, last] => format!("{before} or {last}"),
        [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => names.concat(),
    }
}

/// Collects the names of an instruction and ends the walk.
struct Names(Vec<&'static str>);

impl Syntax for Names {
    type Stop = ();

    fn name<T: Copy + PartialEq>(&mut self, _value: &mut T, names: &[(T, &'static str)]) -> Result<(), ()> {
        self.0.extend(names.iter().map(|(_, name)| name));
        Err(())
    }

    fn one<T: Copy + PartialEq>(&mut self, _: &mut T, _: &str, _: &[(T, &str)]) -> Result<(), ()> {
        Err(())
    }

    fn maybe<T: Copy + PartialEq>(&mut self, _: &mut Option<T>, _: &[(T, &str)]) -> Result<(), ()> {
        Err(())
    }

    fn word(&mut self, _: &str) -> Result<(), ()> {
        Err(())
    }

    fn ty(&mut self, _: &mut Type) -> Result<(), ()> {
        Err(())
    }

    fn shape(&mut self, _: &mut MmaShape) -> Result<(), ()> {
        Err(())
    }

    fn eviction(&mut self, _: &mut Option<Eviction>, _: &str) -> Result<(), ()> {
        Err(())
    }

    fn redundant(&mut self, _: &str) -> bool {
        false
    }

    fn types_left(&self) -> Option<usize> {
        None
    }

    fn refuse(&mut self, _: impl Into<String>) -> Result<(), ()> {
        Err(())
    }

    fn unsupported(&mut self, _: &[&str], _: &str) -> Result<(), ()> {
        Err(())
    }

    fn sync(&mut self) -> Result<(), ()> {
        Err(())
    }
}
