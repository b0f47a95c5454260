//! Demands on the bits of a result.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A demand on the bits of a row of O and of its LSE: they must not depend on what a variant names, on one
/// device model with one version of FlashCore. Inputs are finite.
///
/// Sums in floating point depend on their order, and servers change the order: kernels divide keys by the
/// number of sequences and SMs, and prefill and decode are different kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Invariant {
    /// The rest of the batch (the number of sequences, their lengths and their order) and the number of SMs
    /// have no influence.
    Batch,
    /// The number of query rows of the call has no influence either: decode and any chunk of a prefill give
    /// a row the same bits. This demand contains [`Invariant::Batch`].
    Phase,
}

impl Invariant {
    /// Both demands.
    pub const ALL: [Invariant; 2] = [Invariant::Batch, Invariant::Phase];

    /// The name in files and options.
    pub const fn name(self) -> &'static str {
        match self {
            Invariant::Batch => "batch",
            Invariant::Phase => "phase",
        }
    }
}

/// A name that is not one of an [`Invariant`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid value '{0}' for invariant: expected batch or phase")]
pub struct UnknownInvariant(pub String);

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Invariant {
    type Err = UnknownInvariant;

    fn from_str(name: &str) -> Result<Invariant, UnknownInvariant> {
        let named = Invariant::ALL.into_iter().find(|invariant| invariant.name() == name);
        named.ok_or_else(|| UnknownInvariant(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_others_are_refused() {
        for invariant in Invariant::ALL {
            assert_eq!(invariant.to_string().parse(), Ok(invariant));
        }
        let refused = "Batch".parse::<Invariant>().unwrap_err().to_string();
        assert_eq!(refused, "invalid value 'Batch' for invariant: expected batch or phase");
    }
}
