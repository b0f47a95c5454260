//! Parses PTX text into a [`Module`].
//!
//! The parser accepts the output of NVRTC, nvcc and Triton. It drops debugging directives, which
//! [`LineTable`] reads, flattens nested scopes (and renames what clashes), and copies each `.branchtargets`
//! list into the instructions that name the list. It checks syntax, known instructions and modifiers, and
//! declared names. The verifier checks whether an instruction fits its operands, its target and its place.
//!
//! The input is not trusted. Nesting, the number of registers and the size of initialisers are bounded. No
//! input makes the parser panic or take more than linear time.

mod body;
mod constant;
mod lexer;
mod lines;
mod mnemonic;
mod modifiers;
mod module;
mod operand;
mod scope;
mod variable;

use std::collections::HashMap;

use crate::{Module, Name, quote};
use lexer::{Kind, Token};
use scope::Names;

pub use lines::{LineTable, SourceFrame};

/// Maximum number of registers that one module may declare.
const MAX_REGISTERS: usize = 1 << 20;

/// Maximum number of zero bytes that pad the rows of the initialisers of one module.
const MAX_PADDING: usize = 1 << 24;

/// Maximum number of labels that the instructions of one module may take from `.branchtargets` lists.
const MAX_TARGETS: usize = 1 << 20;

/// The position and the reason of an error: the text is not PTX that the crate supports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}\n    {text}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// The text of the line.
    pub text: String,
    /// What is wrong, or what was expected.
    pub message: String,
}

/// Parses a module.
///
/// # Errors
/// The position of the first error, what is wrong there and what is accepted.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    parser(text).and_then(Parser::module).map_err(|failure| failure.locate(text))
}

/// A function that [`parse_known`] omitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The name of the function.
    pub function: Name,
    /// The first unknown instruction, modifier or special register in its body.
    pub error: ParseError,
}

/// Parses a module in which some functions may use instructions, modifiers or special registers that the
/// crate does not know. An entry that uses one is omitted. Another function that uses one keeps its
/// declaration and loses its body.
///
/// # Errors
/// As for [`parse`], apart from unknown instructions, modifiers and special registers.
pub fn parse_known(text: &str) -> Result<(Module, Vec<LeftOut>), ParseError> {
    let parsed = parser(text).and_then(|mut parser| {
        parser.left_out = Some(Vec::new());
        parser.module_and_rest()
    });
    let (module, rest) = parsed.map_err(|failure| failure.locate(text))?;
    let rest = rest.into_iter().map(|(function, failure)| LeftOut { function, error: failure.locate(text) });
    Ok((module, rest.collect()))
}

fn parser(text: &str) -> Result<Parser<'_>, Failure> {
    if u32::try_from(text.len()).is_err() {
        return Err(Failure::at(0, "a text of 4 GiB or more"));
    }
    lexer::tokens(text).map(|tokens| Parser::new(text, tokens))
}

/// An error with its byte offset.
#[derive(Debug)]
pub(in crate::parse) struct Failure {
    offset: usize,
    message: String,
    /// Whether the name of an instruction, a modifier or a special register is unknown or not supported.
    unknown: bool,
}

impl Failure {
    fn at(offset: usize, message: impl Into<String>) -> Failure {
        Failure { offset, message: message.into(), unknown: false }
    }

    fn unknown(offset: usize, message: String) -> Failure {
        Failure { unknown: true, ..Failure::at(offset, message) }
    }

    fn locate(self, text: &str) -> ParseError {
        let before = text.get(..self.offset).unwrap_or(text);
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let line = text[start..].lines().next().unwrap_or("");
        let text = around(line, before.len() - start);
        ParseError {
            line: before.matches('\n').count() as u32 + 1,
            column: before[start..].chars().count() as u32 + 1,
            text,
            message: quote::words(&self.message).into_owned(),
        }
    }
}

/// The part of a line around the position of an error. The whole line if it is short enough to be quoted.
fn around(line: &str, at: usize) -> String {
    let places = || line.char_indices().map(|(place, _)| place).chain([line.len()]);
    if places().count() <= quote::LONGEST {
        return line.to_owned();
    }
    let (before, length) = (quote::LONGEST / 2, quote::LONGEST - 4);
    let first = places().filter(|&place| place < at).count().saturating_sub(before);
    let begin = places().nth(first).unwrap_or(0);
    let end = places().nth(first + length).unwrap_or(line.len());
    let (left, right) = (if begin > 0 { "… " } else { "" }, if end < line.len() { " …" } else { "" });
    format!("{left}{}{right}", &line[begin..end])
}

/// The position in the tokens, and the declarations so far.
struct Parser<'t> {
    source: &'t str,
    tokens: Vec<Token>,
    at: usize,
    /// Variables and functions of the module.
    symbols: HashMap<&'t str, Name>,
    /// Names of the function that is being parsed.
    names: Names<'t>,
    /// Number of registers that may still be declared.
    registers_left: usize,
    /// Bytes of padding that initialisers may still use.
    padding_left: usize,
    /// Number of labels that may still be taken from `.branchtargets` lists.
    targets_left: usize,
    /// The functions with unknown instructions, if these are omitted instead of rejected.
    left_out: Option<Vec<(Name, Failure)>>,
}

impl<'t> Parser<'t> {
    fn new(source: &'t str, tokens: Vec<Token>) -> Parser<'t> {
        Parser {
            source,
            tokens,
            at: 0,
            symbols: HashMap::new(),
            names: Names::default(),
            registers_left: MAX_REGISTERS,
            padding_left: MAX_PADDING,
            targets_left: MAX_TARGETS,
            left_out: None,
        }
    }

    fn token(&self) -> Token {
        // The last token is `End`, and `next` stops there.
        self.tokens[self.at]
    }

    fn peek(&self) -> Kind {
        self.token().kind
    }

    fn peek_second(&self) -> Kind {
        self.tokens.get(self.at + 1).map_or(Kind::End, |token| token.kind)
    }

    fn next(&mut self) {
        self.at = (self.at + 1).min(self.tokens.len() - 1);
    }

    /// Byte offset of the next token.
    fn here(&self) -> usize {
        self.token().start as usize
    }

    fn line(&self) -> u32 {
        self.token().line
    }

    /// Text of the next token.
    fn text(&self) -> &'t str {
        let Token { start, end, .. } = self.token();
        &self.source[start as usize..end as usize]
    }

    fn expected(&self, what: &str) -> Failure {
        let found = match self.peek() {
            Kind::End => "the end of the text".to_owned(),
            _ => format!("`{}`", self.text().chars().take(60).collect::<String>()),
        };
        Failure::at(self.here(), format!("expected {what}, found {found}"))
    }

    /// Takes the next token if it is the character `c`.
    fn eat(&mut self, c: u8) -> bool {
        let found = self.peek() == Kind::Punct(c, 0);
        if found {
            self.next();
        }
        found
    }

    /// Takes the character `c`; an error if the next token is another.
    fn punct(&mut self, c: u8) -> Result<(), Failure> {
        if self.eat(c) { Ok(()) } else { Err(self.expected(&format!("`{}`", c as char))) }
    }

    /// Takes the next token if it is the directive or modifier `text`, which includes the dot.
    fn eat_dot(&mut self, text: &str) -> bool {
        let found = self.peek() == Kind::Dot && self.text() == text;
        if found {
            self.next();
        }
        found
    }

    /// Takes a name.
    fn name(&mut self, what: &str) -> Result<&'t str, Failure> {
        if self.peek() != Kind::Name {
            return Err(self.expected(what));
        }
        let text = self.text();
        self.next();
        Ok(text)
    }

    /// Skips to the first token of the next line.
    fn skip_line(&mut self) {
        let line = self.line();
        while self.line() == line && self.peek() != Kind::End {
            self.next();
        }
    }

    /// Skips past the brace that closes the one here.
    fn skip_braces(&mut self) -> Result<(), Failure> {
        let mut depth = 0usize;
        loop {
            match self.peek() {
                Kind::Punct(b'{', 0) => depth += 1,
                Kind::Punct(b'}', 0) => depth -= 1,
                Kind::End => return Err(self.expected("`}`")),
                _ => {}
            }
            self.next();
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Skips past the next semicolon.
    fn skip_statement(&mut self) {
        while !matches!(self.peek(), Kind::Punct(b';', 0) | Kind::End) {
            self.next();
        }
        self.next();
    }

    /// Takes a string and returns the text between the quotes.
    fn string(&mut self) -> Result<&'t str, Failure> {
        if self.peek() != Kind::String {
            return Err(self.expected("a string"));
        }
        let text = self.text();
        self.next();
        Ok(&text[1..text.len() - 1])
    }
}

#[cfg(test)]
mod tests {
    use super::parse_known;

    /// Types of later architectures and modifiers that the crate refuses as a whole are unknown modifiers
    /// too.
    #[test]
    fn entries_with_unknown_modifiers_are_left_out() {
        let known = ".version 8.8\n.target sm_90a\n.visible .entry known() { ret; }";
        let inside = |line: &str| format!("{known}\n.visible .entry k() {{ .reg .b32 r<4>; {line} ret; }}");
        for line in [
            "add.bogus.u32 r1, r2, r3;",
            "cvt.rn.satfinite.e2m1x2.f32 r1, r2, r3;",
            "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group [r1, {r1, r1, r1}], [r2];",
            "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {r1, r2}, r3, r3, r3, 0, 1, 1, 1, 0, 0;",
        ] {
            let (module, left_out) = parse_known(&inside(line)).unwrap();
            assert_eq!(module.functions().count(), 1, "{line}");
            assert_eq!(&*left_out[0].function, "k", "{line}");
        }
        for line in ["add r1, r2, r3;", "cvt.rn.f32 r1, r2;"] {
            assert!(parse_known(&inside(line)).is_err(), "{line}");
        }
    }
}
