//! Parses declarations of variables and parameters, and their initial values.

use super::constant::Constant;
use super::lexer::Kind;
use super::{Failure, Parser};
use crate::{Initializer, Linkage, Name, Space, Type, Variable};

/// Maximum size of a variable in bytes.
const MAX_BYTES: u64 = 1 << 40;

/// The state space with which a declaration starts.
pub(super) fn declared_space(directive: &str) -> Option<Space> {
    Some(match directive {
        ".global" => Space::Global,
        ".shared" => Space::Shared,
        ".const" => Space::Const,
        ".local" => Space::Local,
        ".param" => Space::Param,
        _ => return None,
    })
}

impl<'t> Parser<'t> {
    /// Parses an optional `.align N`, a power of two.
    pub(super) fn align(&mut self) -> Result<Option<u32>, Failure> {
        if !self.eat_dot(".align") {
            return Ok(None);
        }
        let start = self.here();
        let align = self.unsigned()?;
        if !align.is_power_of_two() {
            return Err(Failure::at(start, format!("expected a power of two, found {align}")));
        }
        Ok(Some(align))
    }

    /// A type such as `.b32`.
    pub(super) fn ty(&mut self) -> Result<Type, Failure> {
        let known = if self.peek() == Kind::Dot { Type::from_name(&self.text()[1..]) } else { None };
        let ty = known.ok_or_else(|| self.expected("a type"))?;
        self.next();
        Ok(ty)
    }

    /// The type of a variable or parameter in memory.
    pub(super) fn memory_ty(&mut self) -> Result<Type, Failure> {
        let start = self.here();
        let ty = self.ty()?;
        if ty.bytes() == 0 {
            return Err(Failure::at(start, format!("a value in memory cannot have the type `.{ty}`")));
        }
        Ok(ty)
    }

    /// Parses a declaration from its state space to the semicolon. `bind` declares a name and returns the
    /// name in the model.
    pub(super) fn variables(
        &mut self,
        linkage: Linkage,
        mut bind: impl FnMut(&mut Parser<'t>, &'t str, usize) -> Result<Name, Failure>,
    ) -> Result<Vec<Variable>, Failure> {
        let Some(space) = declared_space(self.text()) else { return Err(self.expected("a state space")) };
        self.next();
        let mut align = self.align()?;
        let vector = match self.text() {
            ".v2" => 2,
            ".v4" => 4,
            _ => 1,
        };
        if vector > 1 {
            self.next();
        }
        let ty = self.memory_ty()?;
        if align.is_none() {
            align = self.align()?;
        }
        let align = align.unwrap_or(ty.bytes() * vector);
        let mut variables = Vec::new();
        loop {
            let start = self.here();
            let name = self.name("the name of a variable")?;
            let mut dims = self.dimensions()?;
            let init = if self.eat(b'=') { Some(self.initializer(ty, vector, &mut dims)?) } else { None };
            let elements = dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
            let bytes = elements.and_then(|n| n.checked_mul(u64::from(ty.bytes() * vector)));
            if bytes.is_none_or(|n| n > MAX_BYTES) {
                return Err(Failure::at(start, format!("`{name}` is larger than {MAX_BYTES} bytes")));
            }
            let name = bind(self, name, start)?;
            variables.push(Variable { linkage, space, align, ty, vector, name, dims, init });
            if self.eat(b';') {
                return Ok(variables);
            }
            if self.peek() != Kind::Punct(b',', 0) {
                return Err(self.expected("`;`, `,`, `=` or `[`"));
            }
            self.next();
        }
    }

    /// Parses `[4][8]`. `[]` gives 0 and is accepted only as the first extent.
    pub(super) fn dimensions(&mut self) -> Result<Vec<u64>, Failure> {
        let mut dims = Vec::new();
        while self.eat(b'[') {
            let start = self.here();
            if self.eat(b']') {
                if !dims.is_empty() {
                    return Err(Failure::at(start, "only the first dimension may be left out"));
                }
                dims.push(0);
                continue;
            }
            let dim = self.integer()?;
            let dim = u64::try_from(dim).ok().filter(|&dim| dim > 0);
            dims.push(dim.ok_or_else(|| Failure::at(start, "expected a positive dimension"))?);
            self.punct(b']')?;
        }
        if dims.len() > 8 {
            return Err(Failure::at(self.here(), "more than 8 dimensions"));
        }
        Ok(dims)
    }

    /// Parses the initial value after `=`. Sets a first extent that was left open.
    fn initializer(&mut self, ty: Type, vector: u32, dims: &mut [u64]) -> Result<Initializer, Failure> {
        let start = self.here();
        let mut values = Values { ty, bytes: Vec::new(), addresses: Vec::new() };
        if self.peek() == Kind::Punct(b'{', 0) {
            let mut extents = dims.to_vec();
            if vector > 1 {
                extents.push(vector.into());
            }
            self.row(&mut values, &extents)?;
        } else {
            self.initial_value(&mut values)?;
        }
        if !values.bytes.is_empty() && !values.addresses.is_empty() {
            return Err(Failure::at(start, "numbers and addresses in one initialiser are not supported"));
        }
        if let Some(first) = dims.first().copied() {
            let row = dims[1..].iter().try_fold(1u64, |n, &dim| n.checked_mul(dim)).unwrap_or(u64::MAX);
            let row = row.saturating_mul(u64::from(vector)).max(1);
            let given = (values.bytes.len() / ty.bytes() as usize + values.addresses.len()) as u64;
            if first == 0 {
                dims[0] = given.div_ceil(row).max(1);
            } else if given > row.saturating_mul(first) {
                return Err(Failure::at(
                    start,
                    format!("{given} values for {} elements", row.saturating_mul(first)),
                ));
            }
        }
        Ok(if values.addresses.is_empty() {
            Initializer::Bytes(values.bytes)
        } else {
            Initializer::Addresses(values.addresses)
        })
    }

    /// Parses `{…}` over the given extents. A nested `{…}` fills one row, padded with zeros.
    fn row(&mut self, values: &mut Values, extents: &[u64]) -> Result<(), Failure> {
        let start = self.here();
        self.punct(b'{')?;
        let inner = extents.get(1..).unwrap_or(&[]);
        while !self.eat(b'}') {
            if self.peek() == Kind::Punct(b'{', 0) {
                if inner.is_empty() {
                    return Err(self.expected("a value, because there are no more dimensions"));
                }
                let row = inner.iter().try_fold(u64::from(values.ty.bytes()), |n, &dim| n.checked_mul(dim));
                let end = row
                    .and_then(|row| usize::try_from(row).ok())
                    .and_then(|row| row.checked_add(values.bytes.len()))
                    .ok_or_else(|| Failure::at(start, "the size of a row exceeds 64 bits"))?;
                self.row(values, inner)?;
                let padding = end
                    .checked_sub(values.bytes.len())
                    .ok_or_else(|| Failure::at(start, "more values than the row has elements"))?;
                self.padding_left = self.padding_left.checked_sub(padding).ok_or_else(|| {
                    Failure::at(start, "the short rows of the initialisers need too many zeros")
                })?;
                values.bytes.resize(end, 0);
            } else {
                self.initial_value(values)?;
            }
            if self.peek() != Kind::Punct(b'}', 0) {
                self.punct(b',')?;
            }
        }
        Ok(())
    }

    /// Parses a constant, or an address: `name`, `name+4`, `generic(name)`.
    fn initial_value(&mut self, values: &mut Values) -> Result<(), Failure> {
        let start = self.here();
        if !self.starts_constant() {
            let generic = self.peek() == Kind::Name && self.text() == "generic";
            if generic {
                self.next();
                self.punct(b'(')?;
            }
            let name = self.symbol_name()?;
            if generic {
                self.punct(b')')?;
            }
            let offset = self.displacement()?;
            if values.ty.bytes() != 8 {
                return Err(Failure::at(start, format!("`.{}` cannot hold an address", values.ty)));
            }
            values.addresses.push((name, offset));
            return Ok(());
        }
        let value = self.constant()?;
        let bytes = element_bytes(values.ty, value)
            .ok_or_else(|| Failure::at(start, format!("this constant cannot be a `.{}`", values.ty)))?;
        values.bytes.extend_from_slice(&bytes[..values.ty.bytes() as usize]);
        Ok(())
    }
}

struct Values {
    ty: Type,
    bytes: Vec<u8>,
    addresses: Vec<(Name, i64)>,
}

/// The little-endian bytes of a constant. The first bytes are its value in a narrower type.
fn element_bytes(ty: Type, value: Constant) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let word = match (ty, value) {
        (Type::F32, Constant::F64(v)) => u64::from((v as f32).to_bits()),
        (Type::F32, Constant::F32(bits)) => u64::from(bits),
        (Type::F64, Constant::F64(v)) => v.to_bits(),
        (Type::F64, Constant::F32(bits)) => f64::from(f32::from_bits(bits)).to_bits(),
        (Type::F32, Constant::Int { value, .. }) => u64::from((value as f32).to_bits()),
        (Type::F64, Constant::Int { value, .. }) => (value as f64).to_bits(),
        (_, Constant::Int { value, .. }) => {
            bytes = [if value < 0 { 0xFF } else { 0 }; 16];
            value as u64
        }
        _ => return None,
    };
    bytes[..8].copy_from_slice(&word.to_le_bytes());
    Some(bytes)
}
