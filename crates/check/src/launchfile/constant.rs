//! Initial contents of a module's `.const` and `.global` variables.

use ptx::{Initializer, Item, Module, Space, Variable};

use super::LaunchError;
use super::memory::{BufferType, FileInit, Init, dtype_of, init_of};
use super::raw::RawConstant;

/// The contents of one variable.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Constant {
    name: String,
    pub dtype: BufferType,
    contents: Contents,
}

#[derive(Clone, Debug, PartialEq)]
enum Contents {
    /// The first bytes; the remaining bytes are 0.
    Bytes(Vec<u8>),
    Filled(Init),
}

pub(super) fn constants_of(
    raw: &[RawConstant],
    files: &mut Vec<FileInit>,
) -> Result<Vec<Constant>, LaunchError> {
    raw.iter().enumerate().map(|(index, raw)| constant_of(index, raw, files)).collect()
}

fn constant_of(index: usize, raw: &RawConstant, files: &mut Vec<FileInit>) -> Result<Constant, LaunchError> {
    let key = |key: &str| format!("[[constant]] {index} {key}");
    let dtype = dtype_of(key("dtype"), &raw.dtype)?;
    let contents = match (&raw.values, &raw.init) {
        (Some(values), None) => {
            let mut bytes = Vec::new();
            for value in values {
                let bits = match value {
                    toml::Value::Integer(_) | toml::Value::Float(_) => {
                        init_of(&key("values"), Some(value), dtype, files)?
                    }
                    _ => return Err(LaunchError::value(key("values"), value, "numbers")),
                };
                if let Init::Number(bits) = bits {
                    bytes.extend(&bits.to_le_bytes()[..dtype.bytes()]);
                }
            }
            Contents::Bytes(bytes)
        }
        (None, init @ Some(_)) => Contents::Filled(init_of(&key("init"), init.as_ref(), dtype, files)?),
        _ => {
            let accepted = "one of `values` and `init`";
            return Err(LaunchError::value(format!("[[constant]] {index}"), &raw.name, accepted));
        }
    };
    Ok(Constant { name: raw.name.clone(), dtype, contents })
}

impl Constant {
    /// Writes the contents into the module. `fill` computes the bytes of an `init`.
    ///
    /// # Errors
    /// When the module has no such variable, or one that is smaller than the contents.
    pub fn set(
        &self,
        module: &mut Module,
        fill: impl Fn(BufferType, usize, Init) -> Vec<u8>,
    ) -> Result<(), LaunchError> {
        let settable = |v: &Variable| matches!(v.space, Space::Const | Space::Global) && v.bytes() > 0;
        let names = ptx::quote::list(module.variables().filter(|v| settable(v)).map(|v| &v.name));
        let variable = module.items.iter_mut().find_map(|item| match item {
            Item::Variable(v) if settable(v) && *v.name == *self.name => Some(v),
            _ => None,
        });
        let key = format!("[[constant]] {}", ptx::quote::cut(&self.name));
        let variable = variable.ok_or_else(|| {
            let accepted = if names.is_empty() {
                "a variable of the module, which has none".to_owned()
            } else {
                format!("a variable of the module: {names}")
            };
            LaunchError::value("[[constant]] name", &self.name, accepted)
        })?;
        // A variable of several gigabytes would have been rejected when the module was read.
        let room = usize::try_from(variable.bytes()).unwrap_or(usize::MAX);
        let bytes = match &self.contents {
            Contents::Bytes(bytes) if bytes.len() > room => {
                let accepted = format!("at most {room} bytes, the variable's size");
                return Err(LaunchError::value(key, format!("{} bytes", bytes.len()), accepted));
            }
            Contents::Bytes(bytes) => bytes.clone(),
            Contents::Filled(Init::Uninitialised) => return Ok(()),
            Contents::Filled(init) => fill(self.dtype, room / self.dtype.bytes(), *init),
        };
        if bytes.len() > room {
            let accepted = format!("at most {room} bytes, the variable's size");
            return Err(LaunchError::value(key, format!("a file of {} bytes", bytes.len()), accepted));
        }
        variable.init = Some(Initializer::Bytes(bytes));
        Ok(())
    }
}
