//! Element types of tensors, and the combinations of types that a problem may have.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{ProblemError, Tensor};

/// Element type of a tensor. Sums are accumulated in f32 for every element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary16: 11 significant bits.
    F16,
    /// bfloat16: 8 significant bits, the exponent range of f32.
    Bf16,
    /// IEEE binary32: 24 significant bits.
    F32,
    /// 8-bit floating point with 4 significant bits, largest number 448.
    E4m3,
    /// 8-bit floating point with 3 significant bits, largest number 57344.
    E5m2,
}

impl DType {
    /// Every element type, in the order of error messages.
    pub const ALL: [DType; 5] = [DType::F16, DType::Bf16, DType::F32, DType::E4m3, DType::E5m2];

    /// The element types of O. All four tensors of a problem can have one of these types.
    pub const OUTPUTS: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

    /// Whether this is one of the 8-bit types.
    pub const fn is_fp8(self) -> bool {
        matches!(self, DType::E4m3 | DType::E5m2)
    }

    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            DType::E4m3 | DType::E5m2 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
        }
    }

    /// Unit roundoff `u = 2⁻ᵖ` (half the spacing of numbers just above 1), for error models.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F16 => 1.0 / 2048.0,
            DType::Bf16 => 1.0 / 256.0,
            DType::F32 => 1.0 / 16_777_216.0,
            DType::E4m3 => 1.0 / 16.0,
            DType::E5m2 => 1.0 / 8.0,
        }
    }

    /// The largest finite number.
    pub const fn largest(self) -> f32 {
        match self {
            DType::F16 => 65504.0,
            DType::Bf16 => f32::from_bits(0x7f7f_0000),
            DType::F32 => f32::MAX,
            DType::E4m3 => 448.0,
            DType::E5m2 => 57344.0,
        }
    }

    /// The name used on the command line, in launch files and in evidence rows.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
            DType::E4m3 => "e4m3",
            DType::E5m2 => "e5m2",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = ProblemError;

    fn from_str(s: &str) -> Result<Self, ProblemError> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| ProblemError::UnknownName {
            what: "dtype",
            value: s.to_owned(),
            accepted: "f16, bf16, f32, e4m3, e5m2",
        })
    }
}

/// Element types of the four tensors of a problem.
///
/// As text, on the command line and in files: `q/k/v:out`, for example `e4m3/e5m2/bf16:f16`. One name stands
/// for Q, K and V: `e4m3:f16`. Without `:out`, O has the type of [`DTypes::from`]: `f16`, `e4m3`. `tf32`
/// stands for tensors in f32 that are multiplied in tf32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DTypes {
    /// Type of the queries.
    pub q: DType,
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
    /// Type of the output.
    pub out: DType,
    /// Whether the tensors are f32 and kernels may round Q, K, P and V to tf32, which has 11 significant bits
    /// and the exponent range of f32, before they multiply them. Otherwise products of f32 numbers have the
    /// precision of f32.
    pub tf32: bool,
}

impl DTypes {
    /// One type for all four tensors.
    pub const fn uniform(dtype: DType) -> DTypes {
        DTypes { q: dtype, k: dtype, v: dtype, out: dtype, tf32: false }
    }

    /// Tensors in f32 whose products are in tf32.
    pub const TF32: DTypes = DTypes { tf32: true, ..DTypes::uniform(DType::F32) };

    /// The common type of all four tensors, or `None` if they differ.
    pub fn one(self) -> Option<DType> {
        (DTypes { tf32: false, ..self } == DTypes::uniform(self.q)).then_some(self.q)
    }

    /// The type of a tensor.
    pub const fn of(self, tensor: Tensor) -> DType {
        match tensor {
            Tensor::Q | Tensor::Dq => self.q,
            Tensor::K | Tensor::Dk => self.k,
            Tensor::V | Tensor::Dv => self.v,
            Tensor::Out | Tensor::DOut => self.out,
        }
    }

    /// Whether an input has an 8-bit type.
    pub const fn has_fp8(self) -> bool {
        self.q.is_fp8() || self.k.is_fp8() || self.v.is_fp8()
    }

    /// Whether K and V have 8-bit types and Q has 16 bits: an 8-bit cache, which kernels widen to 16 bits.
    pub const fn has_narrow_cache(self) -> bool {
        matches!(self.q, DType::F16 | DType::Bf16) && self.k.is_fp8() && self.v.is_fp8()
    }

    /// The type to which kernels round the weights P before P·V. P is e4m3 for either 8-bit type of V: P lies
    /// in 0..=1, so the wider exponent range of e5m2 would only cost one bit of precision. With an 8-bit
    /// cache of 16-bit queries, P is f16, in which every 8-bit number is exact. With products in tf32, V's
    /// type is f32 and kernels round P to tf32 ([`DTypes::weight_roundoff`]).
    pub const fn weights(self) -> DType {
        match self.v {
            DType::E4m3 | DType::E5m2 if self.has_narrow_cache() => DType::F16,
            DType::E4m3 | DType::E5m2 => DType::E4m3,
            other => other,
        }
    }

    /// The unit roundoff of the weights P in the product P·V.
    pub const fn weight_roundoff(self) -> f64 {
        // tf32 has as many significant bits as f16.
        if self.tf32 { DType::F16.unit_roundoff() } else { self.weights().unit_roundoff() }
    }

    /// Rejects types that no implementation computes.
    pub(crate) fn check(self) -> Result<(), ProblemError> {
        let DTypes { q, k, v, out, tf32 } = self;
        let fp8 = q.is_fp8() && k.is_fp8() && v != DType::F32 && !out.is_fp8();
        let accepted = match self.one() {
            Some(dtype) if tf32 => dtype == DType::F32,
            Some(dtype) => !dtype.is_fp8(),
            None => (fp8 || self.has_narrow_cache() && !out.is_fp8()) && !tf32,
        };
        if accepted { Ok(()) } else { Err(ProblemError::DTypes { value: self.in_full() }) }
    }

    /// The text form that names the types of all four tensors.
    fn in_full(self) -> String {
        let products = if self.tf32 { " with products in tf32" } else { "" };
        format!("{}/{}/{}:{}{products}", self.q, self.k, self.v, self.out)
    }
}

/// The inputs have this type. O has it too, except that O is bf16 for 8-bit inputs.
impl From<DType> for DTypes {
    fn from(dtype: DType) -> DTypes {
        DTypes { out: if dtype.is_fp8() { DType::Bf16 } else { dtype }, ..DTypes::uniform(dtype) }
    }
}

impl fmt::Display for DTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == DTypes::TF32 {
            return f.pad("tf32");
        }
        let DTypes { q, k, v, out, tf32: _ } = *self;
        let inputs = if q == k && k == v { q.to_string() } else { format!("{q}/{k}/{v}") };
        if out == DTypes::from(v).out { f.pad(&inputs) } else { f.pad(&format!("{inputs}:{out}")) }
    }
}

impl FromStr for DTypes {
    type Err = ProblemError;

    fn from_str(s: &str) -> Result<Self, ProblemError> {
        let unknown = || ProblemError::UnknownName {
            what: "dtype",
            value: s.to_owned(),
            accepted: "f16, bf16, f32, tf32, e4m3, e5m2, or the types of Q, K, V and O as in e4m3/e4m3/bf16:f16",
        };
        if s == "tf32" {
            return Ok(DTypes::TF32);
        }
        let (inputs, out) = s.split_once(':').map_or((s, None), |(inputs, out)| (inputs, Some(out)));
        let dtype = |name: &str| name.parse::<DType>().map_err(|_| unknown());
        let names: Vec<&str> = inputs.split('/').collect();
        let (q, k, v) = match names[..] {
            [all] => (dtype(all)?, dtype(all)?, dtype(all)?),
            [q, k, v] => (dtype(q)?, dtype(k)?, dtype(v)?),
            _ => return Err(unknown()),
        };
        let out = out.map_or(Ok(DTypes::from(v).out), dtype)?;
        Ok(DTypes { q, k, v, out, tf32: false })
    }
}

impl Serialize for DTypes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DTypes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<DTypes, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Problem;

    #[test]
    fn types_survive_their_text() {
        let mut short = 0;
        for q in DType::ALL {
            for k in DType::ALL {
                for v in DType::ALL {
                    for out in DType::ALL {
                        let types = DTypes { q, k, v, out, tf32: false };
                        let text = types.to_string();
                        assert_eq!(text.parse(), Ok(types), "{text}");
                        assert_eq!(types.in_full().parse(), Ok(types));
                        short += usize::from(DType::ALL.iter().any(|d| d.name() == text));
                    }
                }
            }
        }
        assert_eq!(short, DType::ALL.len());
        let of = |text: &str| text.parse::<DTypes>().unwrap();
        assert_eq!(of("e4m3"), DTypes { out: DType::Bf16, ..DTypes::uniform(DType::E4m3) });
        assert_eq!(of("e5m2:f32").out, DType::F32);
        assert_eq!(of("tf32"), DTypes { tf32: true, ..DType::F32.into() });
        assert_eq!(of("tf32").to_string(), "tf32");
        assert_eq!(of("e4m3/e5m2/bf16").weights(), DType::Bf16);
        assert_eq!(of("bf16/e5m2/e4m3").weights(), DType::F16);
        for wrong in ["", "fp8", "e4m3/e4m3", "e4m3:", "f16:f16:f16", "e4m3/e4m3/e4m3/e4m3", "tf32:f32"] {
            let refused = wrong.parse::<DTypes>().unwrap_err().to_string();
            assert!(refused.starts_with(&format!("invalid value '{wrong}' for dtype")), "{refused}");
        }
    }

    #[test]
    fn only_computable_types_are_accepted() {
        let check = |text: &str| Problem::mission().with_dtypes(text.parse().unwrap()).check();
        for good in [
            "f16",
            "bf16",
            "f32",
            "tf32",
            "e4m3",
            "e5m2:f16",
            "e4m3/e5m2/e5m2:f32",
            "e5m2/e4m3/f16:bf16",
            "bf16/e4m3/e4m3",
            "f16/e4m3/e5m2:f16",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, full) in [
            ("e4m3:e4m3", "e4m3/e4m3/e4m3:e4m3"),
            ("f16/e4m3/f16:f16", "f16/e4m3/f16:f16"),
            ("f32/e4m3/e4m3", "f32/e4m3/e4m3:bf16"),
            ("f16/e4m3/e4m3:e4m3", "f16/e4m3/e4m3:e4m3"),
            ("e4m3/e4m3/f32", "e4m3/e4m3/f32:f32"),
            ("f16/f16/e4m3", "f16/f16/e4m3:bf16"),
            ("f16:f32", "f16/f16/f16:f32"),
        ] {
            assert_eq!(check(bad), Err(ProblemError::DTypes { value: full.to_owned() }));
        }
        for dtype in [DType::F16, DType::E4m3] {
            let dtypes = DTypes { tf32: true, ..dtype.into() };
            let refused = Problem::mission().with_dtypes(dtypes).check().unwrap_err().to_string();
            assert!(refused.contains(" with products in tf32' for the element types"), "{refused}");
        }
    }
}
