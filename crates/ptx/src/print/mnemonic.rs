//! Prints the mnemonic of an operation with its modifiers, in the order of the PTX ISA.

use std::fmt::{self, Display, Formatter};

use crate::isa::syntax::Syntax;
use crate::{Cvt, Eviction, Mma, MmaShape, Op, Type, Wgmma, Wmma};

impl Display for Op {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut op = *self;
        op.text(&mut Printer(f))
    }
}

macro_rules! display_as_op {
    ($($ty:ident),*) => { $(
        impl Display for $ty {
            fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
                Op::$ty(*self).fmt(f)
            }
        }
    )* };
}

display_as_op! { Cvt, Mma, Wmma, Wgmma }

/// Writes each part of a mnemonic after a dot.
struct Printer<'a, 'f>(&'a mut Formatter<'f>);

impl Printer<'_, '_> {
    /// Writes the first spelling of a value; `?` for a value without a spelling. No accepted instruction has
    /// such a value.
    fn write<T: PartialEq>(&mut self, value: &T, names: &[(T, &str)]) -> fmt::Result {
        let name = names.iter().find(|(known, _)| known == value).map_or("?", |(_, name)| name);
        if name.is_empty() { Ok(()) } else { self.word(name) }
    }
}

impl Syntax for Printer<'_, '_> {
    type Stop = fmt::Error;

    fn name<T: Copy + PartialEq>(&mut self, value: &mut T, names: &[(T, &'static str)]) -> fmt::Result {
        let name = names.iter().find(|(known, _)| known == value).map_or("?", |(_, name)| name);
        self.0.write_str(name)
    }

    fn one<T: Copy + PartialEq>(&mut self, value: &mut T, _what: &str, names: &[(T, &str)]) -> fmt::Result {
        self.write(value, names)
    }

    fn maybe<T: Copy + PartialEq>(&mut self, value: &mut Option<T>, names: &[(T, &str)]) -> fmt::Result {
        value.map_or(Ok(()), |value| self.write(&value, names))
    }

    fn word(&mut self, word: &str) -> fmt::Result {
        self.0.write_str(".")?;
        self.0.write_str(word)
    }

    fn ty(&mut self, ty: &mut Type) -> fmt::Result {
        self.word(ty.name())
    }

    fn shape(&mut self, shape: &mut MmaShape) -> fmt::Result {
        write!(self.0, ".{shape}")
    }

    fn eviction(&mut self, priority: &mut Option<Eviction>, level: &str) -> fmt::Result {
        priority.map_or(Ok(()), |priority| write!(self.0, ".{level}{}", priority.name()))
    }

    fn redundant(&mut self, _word: &str) -> bool {
        false
    }

    fn types_left(&self) -> Option<usize> {
        None
    }

    fn refuse(&mut self, _message: impl Into<String>) -> fmt::Result {
        Ok(())
    }

    fn unsupported(&mut self, _prefixes: &[&str], _why: &str) -> fmt::Result {
        Ok(())
    }

    fn sync(&mut self) -> fmt::Result {
        self.word("sync")
    }
}
