//! Splits text into tokens. A token is a kind and a span; its text is looked up in the source.

use super::Failure;

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `add`, `%r1`, `$L_0`, `_`.
    Name,
    /// `.b32`, `.shared::cta`, `.L2::cache_hint`; the text starts with the dot.
    Dot,
    /// `12`, `0x1F`, `0f3F800000`, `1.5e3`, `9.0`, `.5`.
    Number,
    /// `"…"`, quotes included.
    String,
    /// One character, or two for `<<`, `>>`, `==`, `!=`, `<=`, `>=`, `&&`, `||`.
    Punct(u8, u8),
    /// The register of a comment `// implicit-def: %r1`. With this comment LLVM marks a register that it
    /// leaves undefined on purpose. Only recognised where a statement may start.
    Undefined,
    /// After the last token.
    End,
}

/// A kind with its span in the text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) start: u32,
    pub(super) end: u32,
    /// The line, from 1.
    pub(super) line: u32,
}

const fn starts_name(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%')
}

const fn continues_name(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$')
}

/// Whether a statement may start after this token.
const fn ends_statement(kind: Kind) -> bool {
    matches!(kind, Kind::Punct(b';' | b':' | b'{' | b'}', 0) | Kind::Undefined)
}

/// The tokens of `text`, without comments and white space, followed by [`Kind::End`]. The text must be
/// shorter than 4 GiB.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, Failure> {
    let mut lexer = Lexer { bytes: text.as_bytes(), at: 0, line: 1 };
    let mut tokens = Vec::with_capacity(text.len() / 4);
    loop {
        lexer.skip_blank()?;
        let statement = tokens.last().is_some_and(|token: &Token| ends_statement(token.kind));
        if lexer.peek(0) == b'/' && lexer.peek(1) == b'/' {
            tokens.extend(lexer.comment().filter(|_| statement));
            continue;
        }
        let (start, line) = (lexer.at, lexer.line);
        let kind = lexer.token()?;
        tokens.push(Token { kind, start: start as u32, end: lexer.at as u32, line });
        if kind == Kind::End {
            return Ok(tokens);
        }
    }
}

struct Lexer<'t> {
    bytes: &'t [u8],
    at: usize,
    line: u32,
}

impl Lexer<'_> {
    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn skip_while(&mut self, accepts: impl Fn(u8) -> bool) {
        while self.at < self.bytes.len() && accepts(self.bytes[self.at]) {
            self.at += 1;
        }
    }

    fn skip_blank(&mut self) -> Result<(), Failure> {
        loop {
            match (self.peek(0), self.peek(1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (b' ' | b'\t' | b'\r' | b'\x0b' | b'\x0c', _) => self.at += 1,
                // NVRTC terminates its text with a NUL.
                (0, 0) if self.at < self.bytes.len() => self.at += 1,
                (b'/', b'*') => self.skip_comment()?,
                _ => return Ok(()),
            }
        }
    }

    /// Skips a comment to the end of its line, and returns the token of an `implicit-def` comment.
    fn comment(&mut self) -> Option<Token> {
        let line = self.line;
        self.at += 2;
        self.skip_while(|c| matches!(c, b' ' | b'\t'));
        const MARK: &[u8] = b"implicit-def: ";
        let marked = self.bytes[self.at..].starts_with(MARK);
        self.at += if marked { MARK.len() } else { 0 };
        let start = self.at;
        self.skip_while(|c| c == b'%' || continues_name(c));
        let (start, end) = (start as u32, self.at as u32);
        self.skip_while(|c| c != b'\n');
        (marked && start < end).then_some(Token { kind: Kind::Undefined, start, end, line })
    }

    fn skip_comment(&mut self) -> Result<(), Failure> {
        let start = self.at;
        self.at += 2;
        while self.at < self.bytes.len() {
            match (self.peek(0), self.peek(1)) {
                (b'*', b'/') => {
                    self.at += 2;
                    return Ok(());
                }
                (b'\n', _) => self.line += 1,
                _ => {}
            }
            self.at += 1;
        }
        Err(Failure::at(start, "a comment that is never closed; expected `*/`"))
    }

    fn token(&mut self) -> Result<Kind, Failure> {
        if self.at >= self.bytes.len() {
            return Ok(Kind::End);
        }
        let c = self.peek(0);
        if starts_name(c) && (c != b'%' || continues_name(self.peek(1))) {
            self.at += 1;
            self.skip_while(continues_name);
            return Ok(Kind::Name);
        }
        match c {
            b'.' if self.peek(1).is_ascii_digit() && !self.begins_extent() => {
                self.number();
                Ok(Kind::Number)
            }
            b'.' if continues_name(self.peek(1)) => {
                self.at += 1;
                self.skip_while(continues_name);
                while self.peek(0) == b':' && self.peek(1) == b':' && continues_name(self.peek(2)) {
                    self.at += 2;
                    self.skip_while(continues_name);
                }
                Ok(Kind::Dot)
            }
            b'0'..=b'9' => {
                self.number();
                Ok(Kind::Number)
            }
            b'"' => self.string(),
            _ => self.punctuation(),
        }
    }

    /// Whether the dot and digits here begin a modifier: the dimensions of a tensor copy, `.1d` to `.5d`, or a
    /// shape such as `.32x32b`.
    fn begins_extent(&self) -> bool {
        let digits = self.bytes[self.at + 1..].iter().take_while(|c| c.is_ascii_digit()).count();
        match self.peek(1 + digits) {
            b'd' => digits == 1 && matches!(self.peek(1), b'1'..=b'5') && !continues_name(self.peek(3)),
            b'x' => self.peek(2 + digits).is_ascii_digit(),
            _ => false,
        }
    }

    /// Takes all characters that could belong to a number. The value is parsed and checked by the user of the
    /// token.
    fn number(&mut self) {
        let hexadecimal =
            self.peek(0) == b'0' && matches!(self.peek(1), b'x' | b'X' | b'f' | b'F' | b'd' | b'D');
        self.skip_while(|c| c.is_ascii_alphanumeric());
        if hexadecimal {
            return;
        }
        if self.peek(0) == b'.' && self.peek(1).is_ascii_digit() {
            self.at += 1;
            self.skip_while(|c| c.is_ascii_alphanumeric());
        }
        let exponent = matches!(self.bytes[self.at - 1], b'e' | b'E');
        if exponent && matches!(self.peek(0), b'+' | b'-') && self.peek(1).is_ascii_digit() {
            self.at += 1;
            self.skip_while(|c| c.is_ascii_digit());
        }
    }

    fn string(&mut self) -> Result<Kind, Failure> {
        let start = self.at;
        self.at += 1;
        loop {
            match self.peek(0) {
                b'"' => {
                    self.at += 1;
                    return Ok(Kind::String);
                }
                b'\\' => self.at += 2,
                b'\n' => break,
                0 if self.at >= self.bytes.len() => break,
                _ => self.at += 1,
            }
        }
        Err(Failure::at(start, "a string that is never closed; expected `\"` on the same line"))
    }

    fn punctuation(&mut self) -> Result<Kind, Failure> {
        let (c, next) = (self.peek(0), self.peek(1));
        let double = matches!(
            (c, next),
            (b'<', b'<' | b'=') | (b'>', b'>' | b'=') | (b'=' | b'!', b'=') | (b'&', b'&') | (b'|', b'|')
        );
        if double {
            self.at += 2;
            return Ok(Kind::Punct(c, next));
        }
        if !c.is_ascii_punctuation() || matches!(c, b'\\' | b'\'' | b'`' | b'"') {
            return Err(Failure::at(self.at, "a character that PTX does not use here"));
        }
        self.at += 1;
        Ok(Kind::Punct(c, 0))
    }
}
