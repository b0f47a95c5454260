//! Numbers and structs that a kernel takes by value.

use ptx::{Arg, StructArg, TensorMapSpec};

use super::LaunchError;
use super::memory::closed_names;
use super::raw::RawArg;
use super::spec::refuse_surplus;

closed_names!(
    /// Type of a number that a kernel takes by value.
    ScalarType: Bool = "bool", U8 = "u8", I8 = "i8", U16 = "u16", I16 = "i16", U32 = "u32", I32 = "i32",
    U64 = "u64", I64 = "i64", F16 = "f16", Bf16 = "bf16", F32 = "f32", F64 = "f64"
);

/// A number and its type.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    pub ty: ScalarType,
    pub value: Arg,
}

impl Scalar {
    /// The value as a number, for a reference.
    pub(super) fn number(&self) -> f64 {
        match (&self.value, self.ty) {
            (Arg::U8(v), ScalarType::I8) => f64::from(*v as i8),
            (Arg::U8(v), _) => f64::from(*v),
            (Arg::U16(v), ScalarType::I16) => f64::from(*v as i16),
            (Arg::U16(v), ScalarType::F16) => half::f16::from_bits(*v).to_f64(),
            (Arg::U16(v), ScalarType::Bf16) => half::bf16::from_bits(*v).to_f64(),
            (Arg::U16(v), _) => f64::from(*v),
            (Arg::U32(v), _) => f64::from(*v),
            (Arg::I32(v), _) => f64::from(*v),
            (Arg::U64(v), _) => *v as f64,
            (Arg::I64(v), _) => *v as f64,
            (Arg::F32(v), _) => f64::from(*v),
            (Arg::F64(v), _) => *v,
            (Arg::Buffer { .. } | Arg::TensorMap { .. } | Arg::Null | Arg::Struct(_), _) => f64::NAN,
        }
    }
}

impl ScalarType {
    pub const fn is_float(self) -> bool {
        matches!(self, ScalarType::F16 | ScalarType::Bf16 | ScalarType::F32 | ScalarType::F64)
    }

    /// The argument for a value as written, or the accepted values.
    fn argument(self, value: &toml::Value) -> Result<Arg, &'static str> {
        let integer = value.as_integer();
        let float = value.as_float().or(integer.map(|v| v as f64)).ok_or("a number, inf or nan");
        /// A number, unless rounding makes it infinite.
        fn rounded<T>(
            value: Result<f64, &'static str>,
            round: fn(f64) -> T,
            is_finite: fn(&T) -> bool,
            accepted: &'static str,
        ) -> Result<T, &'static str> {
            let (value, rounded) = value.map(|value| (value, round(value)))?;
            if value.is_finite() && !is_finite(&rounded) { Err(accepted) } else { Ok(rounded) }
        }
        /// An integer of a type that may be narrower.
        fn narrow<T: TryFrom<i64>>(value: Option<i64>, accepted: &'static str) -> Result<T, &'static str> {
            value.and_then(|v| T::try_from(v).ok()).ok_or(accepted)
        }
        Ok(match self {
            ScalarType::Bool => {
                let bit = value.as_bool().or(integer.filter(|v| (0..=1).contains(v)).map(|v| v == 1));
                Arg::U8(bit.ok_or("true or false")?.into())
            }
            ScalarType::U8 => Arg::U8(narrow(integer, "a whole number from 0 to 255")?),
            ScalarType::I8 => Arg::U8(narrow::<i8>(integer, "a whole number from -128 to 127")? as u8),
            ScalarType::U16 => Arg::U16(narrow(integer, "a whole number from 0 to 65535")?),
            ScalarType::I16 => {
                Arg::U16(narrow::<i16>(integer, "a whole number from -32768 to 32767")? as u16)
            }
            ScalarType::U32 => Arg::U32(narrow(integer, "a whole number from 0 to 2^32 - 1")?),
            ScalarType::I32 => Arg::I32(narrow(integer, "a whole number from -2^31 to 2^31 - 1")?),
            ScalarType::U64 => Arg::U64(narrow(integer, "a whole number from 0 to 2^63 - 1")?),
            ScalarType::I64 => Arg::I64(integer.ok_or("a whole number from -2^63 to 2^63 - 1")?),
            ScalarType::F16 => {
                let accepted = "a number from -65504 to 65504, inf or nan";
                let rounded = rounded(float, half::f16::from_f64, |v| v.is_finite(), accepted)?;
                Arg::U16(rounded.to_bits())
            }
            ScalarType::Bf16 => {
                let accepted = "a number from -3.38e38 to 3.38e38, inf or nan";
                let rounded = rounded(float, half::bf16::from_f64, |v| v.is_finite(), accepted)?;
                Arg::U16(rounded.to_bits())
            }
            ScalarType::F32 => {
                let accepted = "a number from -3.4e38 to 3.4e38, inf or nan";
                Arg::F32(rounded(float, |v| v as f32, |v| v.is_finite(), accepted)?)
            }
            ScalarType::F64 => Arg::F64(float?),
        })
    }
}

pub(super) fn scalar_of(index: usize, ty: ScalarType, raw: &RawArg) -> Result<Scalar, LaunchError> {
    refuse_surplus(index, raw, &["value"])?;
    let value = raw.value.as_ref();
    let value = value.ok_or_else(|| LaunchError::Missing { index, role: raw.role.clone(), key: "value" })?;
    let value = ty
        .argument(value)
        .map_err(|accepted| LaunchError::value(format!("[[arg]] {index} value"), value, accepted))?;
    Ok(Scalar { ty, value })
}

/// A struct by value.
#[derive(Clone, Debug, PartialEq)]
pub struct StructSpec {
    /// Size in bytes.
    bytes: u32,
    /// Offset in bytes and contents of each field.
    fields: Vec<(u32, FieldSpec)>,
}

/// A field of a struct.
#[derive(Clone, Debug, PartialEq)]
enum FieldSpec {
    Value(Arg),
    /// The tensor map of the argument with this number.
    Map(usize),
    Address(PointerSpec),
}

/// An address inside the memory of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerSpec {
    /// The number of the argument.
    pub of: usize,
    /// Bytes from the start of its memory.
    pub plus: u64,
}

impl PointerSpec {
    /// The address. `of` returns the value that the argument with the given number passes.
    pub(super) fn argument(self, of: impl Fn(usize) -> Option<Arg>) -> Arg {
        match of(self.of) {
            Some(Arg::Buffer { index, offset }) => {
                Arg::Buffer { index, offset: offset.saturating_add(self.plus) }
            }
            _ => Arg::Null,
        }
    }

    /// The address that a table states with `of` and `plus`. `key` names a key of the table.
    pub(super) fn of(
        key: &dyn Fn(&str) -> String,
        of: &toml::Value,
        plus: Option<i64>,
        number: &dyn Fn(&toml::Value) -> Option<(usize, bool)>,
    ) -> Result<PointerSpec, LaunchError> {
        let accepted = "the name or the number of an [[arg]] that has memory";
        let held = number(of).filter(|(_, is_map)| !is_map);
        let (of, _) = held.ok_or_else(|| LaunchError::value(key("of"), of, accepted))?;
        let plus = plus.unwrap_or(0);
        let plus = u64::try_from(plus).map_err(|_| LaunchError::value(key("plus"), plus, "0 or more"))?;
        Ok(PointerSpec { of, plus })
    }
}

impl StructSpec {
    /// The argument. `of` returns the value that the argument with the given number passes.
    pub(super) fn argument(&self, of: impl Fn(usize) -> Option<Arg>) -> Arg {
        let fields = self.fields.iter().map(|(offset, field)| {
            let value = match field {
                FieldSpec::Value(value) => value.clone(),
                FieldSpec::Map(index) => of(*index).unwrap_or(Arg::Null),
                FieldSpec::Address(pointer) => pointer.argument(&of),
            };
            (*offset, value)
        });
        Arg::Struct(StructArg { bytes: self.bytes, fields: fields.collect() })
    }

    pub(super) const fn bytes(&self) -> u32 {
        self.bytes
    }
}

/// Maximum size in bytes of all parameters of a kernel (PTX ISA, "Kernel Function Parameters", from sm_70
/// on).
const MOST: u32 = 32_764;

/// The struct that an argument states. `number` finds the argument that `of` names.
pub(super) fn struct_of(
    index: usize,
    raw: &RawArg,
    number: &dyn Fn(&toml::Value) -> Option<(usize, bool)>,
) -> Result<StructSpec, LaunchError> {
    refuse_surplus(index, raw, &["fields", "bytes"])?;
    let fields = raw.fields.as_deref().unwrap_or_default();
    if fields.is_empty() && raw.bytes.is_none() {
        return Err(LaunchError::Missing { index, role: raw.role.clone(), key: "fields" });
    }
    let (mut end, mut widest, mut placed) = (0u32, 1u32, Vec::new());
    for (at, field) in fields.iter().enumerate() {
        let key = |key: &str| format!("[[arg]] {index} fields[{at}] {key}");
        let (values, align) = field_of(&key, field, number)?;
        let offset = match field.offset {
            None => end.next_multiple_of(align),
            Some(given) => {
                u32::try_from(given).ok().filter(|&given| given >= end && given < MOST).ok_or_else(|| {
                    LaunchError::value(
                        key("offset"),
                        given,
                        format!("{end}, the end of the field before, or more"),
                    )
                })?
            }
        };
        end = offset;
        for value in values {
            let bytes = match &value {
                FieldSpec::Value(value) => value.bytes(),
                FieldSpec::Map(_) => TensorMapSpec::BYTES,
                FieldSpec::Address(_) => 8,
            };
            placed.push((end, value));
            end = end.saturating_add(bytes);
        }
        widest = widest.max(align);
    }
    let least = end.next_multiple_of(widest);
    let bytes = match raw.bytes {
        None => least,
        Some(given) => u32::try_from(given).ok().filter(|&given| given >= end).ok_or_else(|| {
            LaunchError::value(
                format!("[[arg]] {index} bytes"),
                given,
                format!("{end} or more, the end of the fields"),
            )
        })?,
    };
    if bytes == 0 || bytes > MOST {
        return Err(LaunchError::value(format!("[[arg]] {index} bytes"), bytes, format!("1 to {MOST}")));
    }
    Ok(StructSpec { bytes, fields: placed })
}

/// The consecutive values of one field, and its alignment.
fn field_of(
    key: &dyn Fn(&str) -> String,
    raw: &RawArg,
    number: &dyn Fn(&toml::Value) -> Option<(usize, bool)>,
) -> Result<(Vec<FieldSpec>, u32), LaunchError> {
    let missing = |name: &str| {
        LaunchError::value(key(name), "(missing)", format!("a value, since role = \"{}\" needs it", raw.role))
    };
    if let Ok(ty) = raw.role.parse::<ScalarType>() {
        let value = raw.value.as_ref().ok_or_else(|| missing("value"))?;
        let all = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        let values = all.iter().map(|value| {
            let refuse = |accepted| LaunchError::value(key("value"), value, accepted);
            ty.argument(value).map(FieldSpec::Value).map_err(refuse)
        });
        let values = values.collect::<Result<Vec<_>, _>>()?;
        let align = match values.first() {
            Some(FieldSpec::Value(value)) => value.bytes(),
            _ => return Err(LaunchError::value(key("value"), value, "a number or an array of at least one")),
        };
        return Ok((values, align));
    }
    match raw.role.as_str() {
        "bytes" => {
            let value = raw.value.as_ref().ok_or_else(|| missing("value"))?;
            let bytes = value.as_array().map(|all| {
                all.iter()
                    .map(|b| b.as_integer().and_then(|b| u8::try_from(b).ok()))
                    .collect::<Option<Vec<u8>>>()
            });
            let bytes = bytes.flatten().filter(|bytes| !bytes.is_empty());
            let bytes = bytes.ok_or_else(|| {
                LaunchError::value(key("value"), value, "an array of at least one number from 0 to 255")
            })?;
            Ok((bytes.into_iter().map(|b| FieldSpec::Value(Arg::U8(b))).collect(), 1))
        }
        "tensor_map" => {
            let of = raw.of.as_ref().ok_or_else(|| missing("of"))?;
            let map = number(of).filter(|(_, by_value)| *by_value).ok_or_else(|| {
                LaunchError::value(
                    key("of"),
                    of,
                    "the name or the number of an [[arg]] with role = \"tensor_map\"",
                )
            })?;
            Ok((vec![FieldSpec::Map(map.0)], TensorMapSpec::ALIGN))
        }
        "pointer" => match &raw.of {
            None => Ok((vec![FieldSpec::Value(Arg::Null)], 8)),
            // A map by value has the place of its 128 bytes.
            Some(of) => match number(of) {
                Some((map, true)) => Ok((vec![FieldSpec::Map(map)], TensorMapSpec::ALIGN)),
                _ => Ok((vec![FieldSpec::Address(PointerSpec::of(key, of, raw.plus, number)?)], 8)),
            },
        },
        other => {
            let accepted = format!("{}bytes pointer tensor_map", ScalarType::ACCEPTED);
            Err(LaunchError::value(key("role"), format!("\"{other}\""), accepted))
        }
    }
}
