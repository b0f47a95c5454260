//! Reads and writes programs as text, for files and the command line.
//!
//! `s` is the score; `q` and `k` are the positions of the query and the key; `b` and `h` are the batch entry
//! and the query head; `q_len` and `k_len` are the lengths; `f0` and `i0` are parameters; `t0[...]` is an
//! element of a float table, `n0[...]` of an integer table. Operators bind as in Python and Rust, comparisons
//! weakest. `name = expression;` before the result defines a named part. Example, ALiBi: `s - t0[h] *
//! float(abs(q + k_len - q_len - k))`.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use super::{BinaryOp, Comparison, Expr, Id, Input, Op, Program, ProgramError, UnaryOp};

/// The deepest nesting that the parser accepts.
const MOST_DEPTH: usize = 200;

const POSITIONS: [(&str, Input); 7] = [
    ("s", Input::Score),
    ("q", Input::Query),
    ("k", Input::Key),
    ("b", Input::Batch),
    ("h", Input::Head),
    ("q_len", Input::QueryLength),
    ("k_len", Input::KeyLength),
];

impl UnaryOp {
    const FUNCTIONS: [UnaryOp; 7] = [
        UnaryOp::Abs,
        UnaryOp::Exp2,
        UnaryOp::Log2,
        UnaryOp::Tanh,
        UnaryOp::Sqrt,
        UnaryOp::ToFloat,
        UnaryOp::ToInt,
    ];

    /// The function's name, or the operator.
    pub const fn name(self) -> &'static str {
        match self {
            UnaryOp::Neg => "-",
            UnaryOp::Not => "!",
            UnaryOp::Abs => "abs",
            UnaryOp::Exp2 => "exp2",
            UnaryOp::Log2 => "log2",
            UnaryOp::Tanh => "tanh",
            UnaryOp::Sqrt => "sqrt",
            UnaryOp::ToFloat => "float",
            UnaryOp::ToInt => "int",
        }
    }
}

impl BinaryOp {
    /// The operators with their precedence.
    const OPERATORS: [(BinaryOp, u8); 10] = [
        (BinaryOp::Or, 2),
        (BinaryOp::Xor, 3),
        (BinaryOp::And, 4),
        (BinaryOp::Shl, 5),
        (BinaryOp::Shr, 5),
        (BinaryOp::Add, 6),
        (BinaryOp::Sub, 6),
        (BinaryOp::Mul, 7),
        (BinaryOp::Div, 7),
        (BinaryOp::Rem, 7),
    ];

    /// The operator, or the function's name.
    pub const fn name(self) -> &'static str {
        match self {
            BinaryOp::Add => "+",
            BinaryOp::Sub => "-",
            BinaryOp::Mul => "*",
            BinaryOp::Div => "/",
            BinaryOp::Rem => "%",
            BinaryOp::Min => "min",
            BinaryOp::Max => "max",
            BinaryOp::And => "&",
            BinaryOp::Or => "|",
            BinaryOp::Xor => "^",
            BinaryOp::Shl => "<<",
            BinaryOp::Shr => ">>",
        }
    }
}

impl Comparison {
    /// Ordered so that no operator is a prefix of a later one.
    const ALL: [Comparison; 6] =
        [Comparison::Eq, Comparison::Ne, Comparison::Le, Comparison::Ge, Comparison::Lt, Comparison::Gt];

    /// The operator.
    pub const fn name(self) -> &'static str {
        match self {
            Comparison::Eq => "==",
            Comparison::Ne => "!=",
            Comparison::Lt => "<",
            Comparison::Le => "<=",
            Comparison::Gt => ">",
            Comparison::Ge => ">=",
        }
    }
}

/// Prints text that [`Program::from_str`] reads. An operation that is used more than once gets a name.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut readers = vec![0; self.ops.len()];
        for id in self.ops.iter().flat_map(Op::reads) {
            readers[id] += 1;
        }
        let mut texts: Vec<String> = Vec::with_capacity(self.ops.len());
        let mut names = 0;
        for (id, op) in self.ops.iter().enumerate() {
            let text = written(op, &texts);
            if readers[id] > 1 && !op.reads().is_empty() {
                let name = format!("v{names}");
                names += 1;
                write!(f, "{name} = {text}; ")?;
                texts.push(name);
            } else {
                texts.push(text);
            }
        }
        f.write_str(&texts[texts.len() - 1])
    }
}

fn written(op: &Op, texts: &[String]) -> String {
    let list = |ids: &[Id]| ids.iter().map(|&id| texts[id].as_str()).collect::<Vec<_>>().join(", ");
    match op {
        Op::Input(Input::FloatParameter(i)) => format!("f{i}"),
        Op::Input(Input::IntParameter(i)) => format!("i{i}"),
        Op::Input(input) => {
            POSITIONS.iter().find(|(_, known)| known == input).map_or("", |(name, _)| name).to_owned()
        }
        Op::Float(bits) => float(f32::from_bits(*bits)),
        Op::Int(i32::MIN) => "(-2147483647 - 1)".to_owned(),
        Op::Int(x) if *x < 0 => format!("({x})"),
        Op::Int(x) => x.to_string(),
        Op::Bool(x) => x.to_string(),
        Op::Load { table, float, index } => {
            format!("{}{table}[{}]", if *float { 't' } else { 'n' }, list(index))
        }
        Op::Unary(op @ (UnaryOp::Neg | UnaryOp::Not), a) => format!("({}{})", op.name(), texts[*a]),
        Op::Unary(op, a) => format!("{}({})", op.name(), texts[*a]),
        Op::Binary(op @ (BinaryOp::Min | BinaryOp::Max), a, b) => {
            format!("{}({})", op.name(), list(&[*a, *b]))
        }
        Op::Binary(op, a, b) => format!("({} {} {})", texts[*a], op.name(), texts[*b]),
        Op::Compare(op, a, b) => format!("({} {} {})", texts[*a], op.name(), texts[*b]),
        Op::Select(a, b, c) => format!("select({})", list(&[*a, *b, *c])),
    }
}

/// Formats a float as the parser reads it: with a point or an exponent, or as `inf` or `nan`.
fn float(x: f32) -> String {
    let text = match x {
        _ if x.is_nan() => "nan".to_owned(),
        _ if x.is_infinite() => "inf".to_owned(),
        _ => format!("{:?}", x.abs()),
    };
    if x.is_sign_negative() && !x.is_nan() { format!("(-{text})") } else { text }
}

impl FromStr for Program {
    type Err = ProgramError;

    fn from_str(text: &str) -> Result<Program, ProgramError> {
        let mut parser = Parser { text, at: 0, names: HashMap::new(), depth: 0 };
        let expr = parser.program()?;
        Program::new(&expr)
    }
}

impl From<Program> for String {
    fn from(program: Program) -> String {
        program.to_string()
    }
}

impl TryFrom<String> for Program {
    type Error = ProgramError;

    fn try_from(text: String) -> Result<Program, ProgramError> {
        text.parse()
    }
}

struct Parser<'t> {
    text: &'t str,
    at: usize,
    names: HashMap<&'t str, Expr>,
    depth: usize,
}

impl<'t> Parser<'t> {
    /// `name = expression;` any number of times, then the result.
    fn program(&mut self) -> Result<Expr, ProgramError> {
        loop {
            let start = self.at;
            let name = self.word();
            if !name.is_empty() && self.peek("=") && !self.peek("==") {
                self.expect("=")?;
                let value = self.expression(0)?;
                self.expect(";")?;
                self.names.insert(name, value);
                continue;
            }
            self.at = start;
            let result = self.expression(0)?;
            self.skip_space();
            return if self.at == self.text.len() {
                Ok(result)
            } else {
                Err(self.fault("an operator or the end"))
            };
        }
    }

    /// Parses an expression whose operators have at least the precedence `least`. Comparisons have precedence
    /// 1.
    fn expression(&mut self, least: u8) -> Result<Expr, ProgramError> {
        self.depth += 1;
        if self.depth > MOST_DEPTH {
            return Err(self.fault("at most 200 levels of nesting"));
        }
        let mut left = self.operand()?;
        'operators: loop {
            self.skip_space();
            for (op, strength) in BinaryOp::OPERATORS {
                if strength >= least && self.take(op.name()) {
                    left = left.binary(op, self.expression(strength + 1)?);
                    continue 'operators;
                }
            }
            if least <= 1 {
                for op in Comparison::ALL {
                    if self.take(op.name()) {
                        left = left.compare(op, self.expression(2)?);
                        continue 'operators;
                    }
                }
            }
            self.depth -= 1;
            return Ok(left);
        }
    }

    fn operand(&mut self) -> Result<Expr, ProgramError> {
        self.skip_space();
        if self.take("(") {
            let inner = self.expression(0)?;
            self.expect(")")?;
            return Ok(inner);
        }
        if self.take("-") {
            // A minus sign before a digit belongs to the constant, so that the constant prints as it was
            // read.
            if self.peek_digit() {
                return self.number(true);
            }
            let start = self.at;
            if self.word() == "inf" {
                return Ok(Expr::from(f32::NEG_INFINITY));
            }
            self.at = start;
            return Ok(self.expression(8)?.unary(UnaryOp::Neg));
        }
        if !self.peek("!=") && self.take("!") {
            return Ok(self.expression(8)?.unary(UnaryOp::Not));
        }
        if self.peek_digit() {
            return self.number(false);
        }
        let start = self.at;
        let word = self.word();
        if let Some(expr) = self.names.get(word) {
            return Ok(expr.clone());
        }
        if let Some((_, input)) = POSITIONS.iter().find(|(name, _)| *name == word) {
            return Ok(Expr::input(*input));
        }
        match word {
            "true" | "false" => return Ok(Expr::from(word == "true")),
            "inf" => return Ok(Expr::from(f32::INFINITY)),
            "nan" => return Ok(Expr::from(f32::NAN)),
            _ => {}
        }
        if let Some(expr) = self.function(word)? {
            return Ok(expr);
        }
        let number = |prefix: char| word.strip_prefix(prefix).and_then(|n| n.parse::<u32>().ok());
        if let Some(i) = number('f') {
            return Ok(Expr::input(Input::FloatParameter(i)));
        }
        if let Some(i) = number('i') {
            return Ok(Expr::input(Input::IntParameter(i)));
        }
        for (prefix, float) in [('t', true), ('n', false)] {
            if let Some(table) = number(prefix) {
                self.expect("[")?;
                let index = self.list("]")?;
                return Ok(Expr::load(table, float, index));
            }
        }
        self.at = start;
        Err(self.fault(
            "a number, s, q, k, b, h, q_len, k_len, f0 or i0 (parameters), t0[...] or n0[...] (tables), true, \
             false, inf, nan, a named part, (, -, ! or one of the functions abs, exp2, log2, tanh, sqrt, float, \
             int, min, max, select",
        ))
    }

    fn function(&mut self, name: &str) -> Result<Option<Expr>, ProgramError> {
        let arguments = match name {
            "min" | "max" => 2,
            "select" => 3,
            _ if UnaryOp::FUNCTIONS.iter().any(|op| op.name() == name) => 1,
            _ => return Ok(None),
        };
        self.expect("(")?;
        let list = self.list(")")?;
        let wrong = format!("{arguments} arguments of {name}, not {}", list.len());
        let expr = match (name, <[Expr; 3]>::try_from(list)) {
            ("select", Ok([a, b, c])) => Ok(a.select(b, c)),
            (_, Ok(_)) => Err(self.fault(&wrong)),
            (_, Err(list)) => match (name, <[Expr; 2]>::try_from(list)) {
                ("min", Ok([a, b])) => Ok(a.min(b)),
                ("max", Ok([a, b])) => Ok(a.max(b)),
                (_, Err(list)) if arguments == 1 && list.len() == 1 => {
                    let op = UnaryOp::FUNCTIONS.into_iter().find(|op| op.name() == name);
                    let operand = list.into_iter().next();
                    op.zip(operand).map(|(op, a)| a.unary(op)).ok_or_else(|| self.fault(&wrong))
                }
                _ => Err(self.fault(&wrong)),
            },
        };
        expr.map(Some)
    }

    /// Parses expressions separated by commas, up to `end`.
    fn list(&mut self, end: &str) -> Result<Vec<Expr>, ProgramError> {
        let mut found = vec![self.expression(0)?];
        while !self.take(end) {
            self.expect(",")?;
            found.push(self.expression(0)?);
        }
        Ok(found)
    }

    /// Parses a number. A number with a point or an exponent is a float.
    fn number(&mut self, negative: bool) -> Result<Expr, ProgramError> {
        self.skip_space();
        let rest = &self.text[self.at..];
        let mut end = 0;
        for (i, c) in rest.char_indices() {
            let sign_of_exponent = (c == '-' || c == '+') && rest[..i].ends_with(['e', 'E']);
            if !(c.is_ascii_digit() || c == '.' || c == 'e' || c == 'E' || sign_of_exponent) {
                break;
            }
            end = i + c.len_utf8();
        }
        let text = format!("{}{}", if negative { "-" } else { "" }, &rest[..end]);
        let parsed = match text.parse::<i32>() {
            Ok(x) => Some(Expr::from(x)),
            Err(_) if text.contains(['.', 'e', 'E']) => text.parse::<f32>().ok().map(Expr::from),
            Err(_) => None,
        };
        let number = parsed.ok_or_else(|| self.fault("an integer of 32 bits or a float"))?;
        self.at += end;
        Ok(number)
    }

    fn word(&mut self) -> &'t str {
        self.skip_space();
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn peek_digit(&mut self) -> bool {
        self.skip_space();
        self.text[self.at..].starts_with(|c: char| c.is_ascii_digit())
    }

    fn peek(&mut self, token: &str) -> bool {
        self.skip_space();
        self.text[self.at..].starts_with(token)
    }

    fn take(&mut self, token: &str) -> bool {
        // `<` must not match the first half of `<<`, nor `>` that of `>>`.
        let doubled = matches!(token, "<" | ">") && self.peek(&token.repeat(2));
        let found = self.peek(token) && !doubled;
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn expect(&mut self, token: &str) -> Result<(), ProgramError> {
        if self.take(token) { Ok(()) } else { Err(self.fault(token)) }
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.text[self.at..].trim_start().len();
    }

    fn fault(&self, expected: &str) -> ProgramError {
        ProgramError::Syntax {
            text: self.text.chars().take(200).collect(),
            column: self.text[..self.at].chars().count() + 1,
            expected: expected.to_owned(),
        }
    }
}
