//! Demangles C++ names in messages.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use cpp_demangle::{BorrowedSymbol, DemangleOptions};

/// Maximum length of a mangled name and of its readable form, in bytes. A short mangled name can have a
/// readable form of any length.
const LONGEST: usize = 4096;

/// The longest list of template arguments that is shown, in bytes.
const ARGUMENTS: usize = 64;

/// A string that does not grow beyond [`LONGEST`] bytes.
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
/// parameters: `_ZZ3rowE7partial[0x0]` becomes `row::partial[0x0]`. Other words are not changed.
pub fn demangle(text: &str) -> Cow<'_, str> {
    let found = mangled(text);
    if found.is_empty() {
        return Cow::Borrowed(text);
    }
    let (mut readable, mut after) = (String::new(), 0);
    for (range, name) in found {
        readable.push_str(&text[after..range.start]);
        readable.push_str(&name);
        after = range.end;
    }
    readable.push_str(&text[after..]);
    Cow::Owned(readable)
}

/// The source names of the mangled names in a text, for messages that must keep mangled names: ` (_Z1kPf is
/// k)`. Empty if the text has none.
pub fn legend(text: &str) -> String {
    let found = mangled(text).into_iter().map(|(range, name)| format!("{} is {name}", &text[range]));
    let pairs: BTreeSet<String> = found.collect();
    if pairs.is_empty() { String::new() } else { format!(" ({})", ptx::quote::list(pairs)) }
}

/// The mangled names of a text with their readable forms.
fn mangled(text: &str) -> Vec<(Range<usize>, String)> {
    let belongs = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '.');
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].find("_Z").map(|at| from + at) {
        let end = text[at..].find(|c| !belongs(c)).map_or(text.len(), |length| at + length);
        let whole = !text[..at].ends_with(belongs);
        found.extend(symbol(&text[at..end]).filter(|_| whole).map(|name| (at..end, name)));
        from = end;
    }
    found
}

/// The readable form of one mangled name. PTX appends words to names, as in `_Z1kPf_param_0`; these are kept.
fn symbol(name: &str) -> Option<String> {
    let (symbol, tail) = BorrowedSymbol::with_tail(name.as_bytes()).ok().filter(|_| name.len() <= LONGEST)?;
    let options = DemangleOptions::new().no_params().no_return_type().hide_expression_literal_types();
    let mut readable = Bounded(String::new());
    symbol.structured_demangle(&mut readable, &options).ok()?;
    Some(shortened(&without_parameters(readable.0)) + str::from_utf8(tail).ok()?)
}

/// A name inside a function without the parameters of the function: `k(float*)::s` becomes `k::s`.
fn without_parameters(mut name: String) -> String {
    let Some(end) = name.rfind(")::") else { return name };
    let mut depth = 0;
    let opens = name[..=end].char_indices().rev().find(|&(_, c)| {
        depth += i32::from(c == ')') - i32::from(c == '(');
        depth == 0
    });
    if let Some((start, _)) = opens.filter(|&(start, _)| &name[start..=end] != "(anonymous namespace)") {
        name.replace_range(start..=end, "");
    }
    name
}

/// A name whose lists of template arguments are left out if they are long: those of CuTe take pages.
fn shortened(name: &str) -> String {
    let (mut short, mut rest) = (String::new(), name);
    while let Some(start) = rest.find('<') {
        let mut depth = 0;
        // The `>` of `->` closes nothing.
        let closes = rest.char_indices().skip(start).find(|&(at, c)| {
            depth += i32::from(c == '<') - i32::from(c == '>' && !rest[..at].ends_with('-'));
            depth == 0
        });
        let Some((end, _)) = closes else { break };
        let list = &rest[start..=end];
        short += &rest[..start];
        short += if list.len() > ARGUMENTS { "<…>" } else { list };
        rest = &rest[end + 1..];
    }
    short + rest
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
            ("_ZN12_GLOBAL__N_11kEPFviE", "(anonymous namespace)::k"),
            ("no_Z1kPf _Zebra tile[0x8]", "no_Z1kPf _Zebra tile[0x8]"),
        ] {
            assert_eq!(demangle(mangled), readable);
        }
    }

    #[test]
    fn a_legend_explains_names_that_must_be_written_as_they_are() {
        let said = "name one of: _Z1kIfEvPT_, _Z1kIdEvPT_, plain, _Z1kIfEvPT_";
        assert_eq!(legend(said), " (_Z1kIdEvPT_ is k<double>, _Z1kIfEvPT_ is k<float>)");
        assert_eq!(legend("name one of: a, b"), "");
    }

    #[test]
    fn long_template_arguments_are_left_out() {
        let list = "cute::Layout<cute::tuple<cute::C<8>, cute::C<64>>, cute::tuple<cute::C<1>, cute::C<8>>>";
        assert_eq!(shortened(&format!("copy<{list}>::run<float, 64>")), "copy<…>::run<float, 64>");
        assert_eq!(shortened("operator<"), "operator<");
        assert_eq!(shortened("k<(a->b), 3>::s"), "k<(a->b), 3>::s");
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
