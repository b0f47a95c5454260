//! PTX text to a [`Module`].
//!
//! The parser takes what NVRTC, nvcc and Triton write: debugging directives are dropped, nested scopes are flattened
//! (what they declare is renamed where it would clash), `.branchtargets` lists are put into the instructions that name
//! them. It checks what it must to build the model: syntax, known instructions and modifiers, declared names. Whether
//! an instruction fits its operands, its target and its place is the verifier's business.
//!
//! Input is never trusted: nesting, the number of registers and the size of initialisers are bounded, and no input
//! makes the parser panic or take more than linear time.

mod body;
mod constant;
mod lexer;
mod mnemonic;
mod modifiers;
mod module;
mod operand;
mod scope;
mod variable;

use std::collections::HashMap;

use crate::{Module, Name};
use lexer::{Kind, Token};
use scope::Names;

/// Registers that one module may declare.
const MAX_REGISTERS: usize = 1 << 20;

/// Zeros that the initialisers of one module may need between their rows, in bytes.
const MAX_PADDING: usize = 1 << 24;

/// Labels that the `.branchtargets` lists used by the instructions of one module may have in all.
const MAX_TARGETS: usize = 1 << 20;

/// Why a text is not PTX that FlashCore knows.
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

/// Reads a module.
///
/// # Errors
/// With the place of the first thing that is not understood.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    let parsed = if u32::try_from(text.len()).is_ok() {
        lexer::tokens(text).and_then(|tokens| Parser::new(text, tokens).module())
    } else {
        Err(Failure::at(0, "a text of 4 GiB or more"))
    };
    parsed.map_err(|failure| failure.locate(text))
}

/// An error that knows its byte offset only.
#[derive(Debug)]
pub(in crate::parse) struct Failure {
    offset: usize,
    message: String,
}

impl Failure {
    fn at(offset: usize, message: impl Into<String>) -> Failure {
        Failure { offset, message: message.into() }
    }

    fn locate(self, text: &str) -> ParseError {
        let before = text.get(..self.offset).unwrap_or(text);
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let line = text[start..].lines().next().unwrap_or("");
        // A line of a megabyte helps nobody.
        let text = line.chars().take(200).collect();
        ParseError {
            line: before.matches('\n').count() as u32 + 1,
            column: before[start..].chars().count() as u32 + 1,
            text,
            message: self.message,
        }
    }
}

/// A position in the tokens and what has been declared so far.
struct Parser<'t> {
    source: &'t str,
    tokens: Vec<Token>,
    at: usize,
    /// Variables and functions of the module.
    symbols: HashMap<&'t str, Name>,
    /// Names of the function being read.
    names: Names<'t>,
    /// Registers that may still be declared.
    registers_left: usize,
    /// Zeros that may still be put between rows of initialisers.
    padding_left: usize,
    /// Labels that may still be put into branches through a table.
    targets_left: usize,
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

    /// Takes the next token if it is this character.
    fn eat(&mut self, c: u8) -> bool {
        let found = self.peek() == Kind::Punct(c, 0);
        if found {
            self.next();
        }
        found
    }

    /// Takes this character, which must come next.
    fn punct(&mut self, c: u8) -> Result<(), Failure> {
        if self.eat(c) { Ok(()) } else { Err(self.expected(&format!("`{}`", c as char))) }
    }

    /// Takes the next token if it is this directive or modifier, dot included.
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

    /// Skips to the first token of another line.
    fn skip_line(&mut self) {
        let line = self.line();
        while self.line() == line && self.peek() != Kind::End {
            self.next();
        }
    }

    /// Skips past the next semicolon.
    fn skip_statement(&mut self) {
        while !matches!(self.peek(), Kind::Punct(b';', 0) | Kind::End) {
            self.next();
        }
        self.next();
    }

    /// Takes a string and returns what stands between the quotes.
    fn string(&mut self) -> Result<&'t str, Failure> {
        if self.peek() != Kind::String {
            return Err(self.expected("a string"));
        }
        let text = self.text();
        self.next();
        Ok(&text[1..text.len() - 1])
    }
}
