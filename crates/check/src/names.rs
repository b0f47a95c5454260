//! Readable names: C++ names in messages as the source spells them.

use std::borrow::Cow;
use std::fmt;

use cpp_demangle::{BorrowedSymbol, DemangleOptions};

/// Maximum length of a mangled name and of the readable name made from it, in bytes. A short mangled name can
/// stand for a readable one of any length.
const LONGEST: usize = 4096;

/// A string that refuses to grow beyond [`LONGEST`] bytes.
struct Bounded(String);

impl fmt::Write for Bounded {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if self.0.len() + part.len() > LONGEST {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

/// The text with each mangled C++ name (Itanium ABI: `_Z…`) replaced by the name in the source, without
/// parameters: `_ZZ3rowE7partial[0x0]` becomes `row::partial[0x0]`. What is no such name stays as it is.
pub fn demangle(text: &str) -> Cow<'_, str> {
    let belongs = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '.');
    let mut readable = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("_Z") {
        let whole = !rest[..at].ends_with(belongs);
        let end = rest[at..].find(|c| !belongs(c)).map_or(rest.len(), |length| at + length);
        readable.push_str(&rest[..at]);
        match symbol(&rest[at..end]).filter(|_| whole) {
            Some(name) => readable.push_str(&name),
            None => readable.push_str(&rest[at..end]),
        }
        rest = &rest[end..];
    }
    if readable.is_empty() {
        return Cow::Borrowed(text);
    }
    readable.push_str(rest);
    Cow::Owned(readable)
}

/// The readable form of one mangled name. PTX appends words to names, as in `_Z1kPf_param_0`; these are kept.
fn symbol(name: &str) -> Option<String> {
    let (symbol, tail) = BorrowedSymbol::with_tail(name.as_bytes()).ok().filter(|_| name.len() <= LONGEST)?;
    let options = DemangleOptions::new().no_params().no_return_type().hide_expression_literal_types();
    let mut readable = Bounded(String::new());
    symbol.structured_demangle(&mut readable, &options).ok()?;
    Some(readable.0 + str::from_utf8(tail).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_in_the_source() {
        for (mangled, readable) in [
            ("race, _ZZ3rowE7partial[0x0]; CTA 0", "race, row::partial[0x0]; CTA 0"),
            ("_Z1kIfLi64EEvPT_", "k<float, 64>"),
            ("_ZZ1kIfLi64EEvPT_E1s[0x4]", "k<float, 64>::s[0x4]"),
            ("`_ZN4util3sumIfEET_S1_PS1_i` and `k`", "`util::sum<float>` and `k`"),
            ("_Z1kPf_param_0", "k_param_0"),
            ("no_Z1kPf _Zebra tile[0x8]", "no_Z1kPf _Zebra tile[0x8]"),
        ] {
            assert_eq!(demangle(mangled), readable);
        }
    }

    /// Each template argument is twice as long as the one before.
    #[test]
    fn a_name_that_grows_without_end_stays_mangled() {
        let name = |doublings: usize| {
            let digits = "23456789ABCDEFGHIJKLMNOPQRSTUV".chars().take(doublings);
            let pairs: String = digits.map(|digit| format!("S0_IS{digit}_S{digit}_E")).collect();
            format!("_Z1fI1pI1aS1_E{pairs}Evv")
        };
        assert_eq!(demangle(&name(1)), "f<p<a, a>, p<p<a, a>, p<a, a> > >");
        assert_eq!(demangle(&name(30)), name(30));
        let long = format!("_Z1k{}", "P".repeat(100_000));
        assert_eq!(demangle(&long), long);
    }
}
