//! Parses literals and constant expressions (PTX ISA, "Constants" and "Constant Expressions").

use super::lexer::Kind;
use super::{Failure, Parser};
use crate::Imm;

/// The deepest nesting of parentheses and operators in an expression.
const MAX_DEPTH: u32 = 64;

/// The value of an expression. Integers are 64 bits wide, and signed unless a literal
/// has the suffix `U` or exceeds the signed range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Constant {
    Int {
        value: i64,
        unsigned: bool,
    },
    /// The bits of `0f…`.
    F32(u32),
    F64(f64),
}

impl Constant {
    const fn signed(value: i64) -> Constant {
        Constant::Int { value, unsigned: false }
    }

    fn imm(self) -> Imm {
        match self {
            Constant::Int { value, .. } => Imm::Int(value),
            Constant::F32(bits) => Imm::F32(bits),
            Constant::F64(value) => Imm::F64(value.to_bits()),
        }
    }

    fn float(self) -> f64 {
        match self {
            Constant::Int { value, unsigned: true } => value as u64 as f64,
            Constant::Int { value, unsigned: false } => value as f64,
            Constant::F32(bits) => f32::from_bits(bits).into(),
            Constant::F64(value) => value,
        }
    }
}

/// The value of a literal.
fn literal(text: &str) -> Option<Constant> {
    let bits = |digits: &str, radix| u64::from_str_radix(digits, radix).ok();
    let (head, tail) = (text.get(..2).unwrap_or(""), text.get(2..).unwrap_or(""));
    match head {
        "0f" | "0F" if tail.len() == 8 => return bits(tail, 16).map(|b| Constant::F32(b as u32)),
        "0d" | "0D" if tail.len() == 16 => {
            return bits(tail, 16).map(|b| Constant::F64(f64::from_bits(b)));
        }
        "0f" | "0F" | "0d" | "0D" => return None,
        _ => {}
    }
    let digits = text.strip_suffix('U').unwrap_or(text);
    let tail = digits.get(2..).unwrap_or("");
    let value = match head {
        "0x" | "0X" => bits(tail, 16),
        "0b" | "0B" => bits(tail, 2),
        _ if digits.bytes().all(|c| c.is_ascii_digit()) => {
            if digits.len() > 1 && digits.starts_with('0') {
                bits(digits, 8)
            } else {
                digits.parse().ok()
            }
        }
        _ => return text.parse().ok().map(Constant::F64),
    };
    value.map(|v| Constant::Int {
        value: v as i64,
        unsigned: v > i64::MAX as u64 || digits.len() < text.len(),
    })
}

/// The precedence of a binary operator.
fn precedence(kind: Kind) -> Option<u32> {
    let Kind::Punct(first, second) = kind else { return None };
    Some(match (first, second) {
        (b'*' | b'/' | b'%', 0) => 10,
        (b'+' | b'-', 0) => 9,
        (b'<', b'<') | (b'>', b'>') => 8,
        (b'<' | b'>', 0 | b'=') => 7,
        (b'=' | b'!', b'=') => 6,
        (b'&', 0) => 5,
        (b'^', 0) => 4,
        (b'|', 0) => 3,
        (b'&', b'&') => 2,
        (b'|', b'|') => 1,
        _ => return None,
    })
}

impl Parser<'_> {
    /// Whether a constant can begin with the next token.
    pub(super) fn starts_constant(&self) -> bool {
        match self.peek() {
            Kind::Number | Kind::Punct(b'-' | b'+' | b'~' | b'(' | b'!', 0) => true,
            Kind::Name => self.text() == "WARP_SZ",
            _ => false,
        }
    }

    /// An immediate operand.
    pub(super) fn immediate(&mut self) -> Result<Imm, Failure> {
        Ok(self.expression(0, 0)?.imm())
    }

    /// A constant of any kind, for initialisers.
    pub(super) fn constant(&mut self) -> Result<Constant, Failure> {
        self.expression(0, 0)
    }

    /// An integer expression.
    pub(super) fn integer(&mut self) -> Result<i64, Failure> {
        let start = self.here();
        match self.expression(0, 0)? {
            Constant::Int { value, .. } => Ok(value),
            Constant::F32(_) | Constant::F64(_) => Err(Failure::at(start, "expected an integer constant")),
        }
    }

    /// An integer expression whose value fits an unsigned 32-bit integer.
    pub(super) fn unsigned(&mut self) -> Result<u32, Failure> {
        let start = self.here();
        let value = self.integer()?;
        u32::try_from(value).map_err(|_| {
            Failure::at(start, format!("expected an integer from 0 to 4294967295, found {value}"))
        })
    }

    /// A term of an address, without operators except unary minus. The address parser adds the terms of
    /// `[a+4+8]`.
    pub(super) fn offset(&mut self) -> Result<i64, Failure> {
        let start = self.here();
        match self.unary(0)? {
            Constant::Int { value, .. } => Ok(value),
            Constant::F32(_) | Constant::F64(_) => Err(Failure::at(start, "expected an integer offset")),
        }
    }

    fn expression(&mut self, lowest: u32, depth: u32) -> Result<Constant, Failure> {
        let mut left = self.unary(depth)?;
        while let Some(binds) = precedence(self.peek()).filter(|&p| p > lowest) {
            let (operator, start) = (self.peek(), self.here());
            self.next();
            let right = self.expression(binds, depth + 1)?;
            left = binary(operator, left, right)
                .ok_or_else(|| Failure::at(start, "this operation has no constant value"))?;
        }
        if lowest == 0 && self.peek() == Kind::Punct(b'?', 0) {
            self.next();
            let yes = self.expression(0, depth + 1)?;
            self.punct(b':')?;
            let no = self.expression(0, depth + 1)?;
            left = if left.float() != 0.0 { yes } else { no };
        }
        Ok(left)
    }

    fn unary(&mut self, depth: u32) -> Result<Constant, Failure> {
        let start = self.here();
        if depth > MAX_DEPTH {
            return Err(Failure::at(start, format!("an expression nested deeper than {MAX_DEPTH}")));
        }
        match self.peek() {
            Kind::Number => {
                let text = self.text();
                self.next();
                literal(text).ok_or_else(|| Failure::at(start, format!("`{text}` is not a number")))
            }
            Kind::Name if self.text() == "WARP_SZ" => {
                self.next();
                Ok(Constant::signed(32))
            }
            Kind::Punct(b'(', 0) => self.parenthesised(depth),
            Kind::Punct(operator @ (b'-' | b'+' | b'~' | b'!'), 0) => {
                self.next();
                let value = self.unary(depth + 1)?;
                unary(operator, value)
                    .ok_or_else(|| Failure::at(start, "expected an integer after this operator"))
            }
            _ => Err(self.expected("a constant")),
        }
    }

    /// `(expression)`, or a cast `(.s64) operand`.
    fn parenthesised(&mut self, depth: u32) -> Result<Constant, Failure> {
        self.next();
        let cast = match self.text() {
            ".s64" => Some(false),
            ".u64" => Some(true),
            _ => None,
        };
        if let Some(unsigned) = cast {
            self.next();
            self.punct(b')')?;
            return Ok(match self.unary(depth + 1)? {
                Constant::Int { value, .. } => Constant::Int { value, unsigned },
                float => float,
            });
        }
        let value = self.expression(0, depth + 1)?;
        self.punct(b')')?;
        Ok(value)
    }
}

fn unary(operator: u8, value: Constant) -> Option<Constant> {
    Some(match (operator, value) {
        (b'+', value) => value,
        (b'-', Constant::Int { value, unsigned }) => Constant::Int { value: value.wrapping_neg(), unsigned },
        (b'-', Constant::F32(bits)) => Constant::F32(bits ^ 1 << 31),
        (b'-', Constant::F64(value)) => Constant::F64(-value),
        (b'~', Constant::Int { value, unsigned }) => Constant::Int { value: !value, unsigned },
        (b'!', Constant::Int { value, .. }) => Constant::signed((value == 0).into()),
        _ => return None,
    })
}

fn binary(operator: Kind, left: Constant, right: Constant) -> Option<Constant> {
    let Kind::Punct(first, second) = operator else { return None };
    let (Constant::Int { value: a, unsigned: ua }, Constant::Int { value: b, unsigned: ub }) = (left, right)
    else {
        return float_binary((first, second), left.float(), right.float());
    };
    let unsigned = ua || ub;
    let (x, y) = (a as u64, b as u64);
    let order = if unsigned { x.cmp(&y) } else { a.cmp(&b) };
    let shift = u32::try_from(b).unwrap_or(64).min(64);
    let value = match (first, second) {
        (b'*', 0) => a.wrapping_mul(b),
        (b'/', 0) if unsigned => x.checked_div(y)? as i64,
        (b'/', 0) => a.checked_div(b)?,
        (b'%', 0) if unsigned => x.checked_rem(y)? as i64,
        (b'%', 0) => a.checked_rem(b)?,
        (b'+', 0) => a.wrapping_add(b),
        (b'-', 0) => a.wrapping_sub(b),
        (b'<', b'<') => a.checked_shl(shift).unwrap_or(0),
        (b'>', b'>') if ua => x.checked_shr(shift).unwrap_or(0) as i64,
        (b'>', b'>') => a >> shift.min(63),
        (b'&', 0) => a & b,
        (b'^', 0) => a ^ b,
        (b'|', 0) => a | b,
        (b'&', _) => (a != 0 && b != 0).into(),
        (b'|', _) => (a != 0 || b != 0).into(),
        (b'<', 0) => order.is_lt().into(),
        (b'<', _) => order.is_le().into(),
        (b'>', 0) => order.is_gt().into(),
        (b'>', _) => order.is_ge().into(),
        (b'=', _) => order.is_eq().into(),
        (b'!', _) => order.is_ne().into(),
        _ => return None,
    };
    Some(Constant::Int { value, unsigned })
}

fn float_binary(operator: (u8, u8), a: f64, b: f64) -> Option<Constant> {
    Some(Constant::F64(match operator {
        (b'*', 0) => a * b,
        (b'/', 0) => a / b,
        (b'+', 0) => a + b,
        (b'-', 0) => a - b,
        (b'<', 0) => return Some(Constant::signed((a < b).into())),
        (b'>', 0) => return Some(Constant::signed((a > b).into())),
        _ => return None,
    }))
}
