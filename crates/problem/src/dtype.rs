use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ProblemError;

/// Element type of Q, K, V and O. Sums are accumulated in f32 for every element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary16: 11 significant bits.
    F16,
    /// bfloat16: 8 significant bits, the exponent range of f32.
    Bf16,
    /// IEEE binary32: 24 significant bits.
    F32,
}

impl DType {
    /// Every element type, in the order in which messages list them.
    pub const ALL: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
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
        }
    }

    /// The name used on the command line, in launch files and in evidence rows.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
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
            accepted: "f16, bf16, f32",
        })
    }
}
