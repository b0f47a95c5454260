//! Ranks compare the arguments that must be equal on all of them, before they exchange tensors.

use super::{Collectives, GroupError};
use crate::AttentionError;

/// Arguments by name, as text.
pub(super) type SharedArguments = Vec<(&'static str, String)>;

/// Compares arguments over all ranks. The error of a rank that refuses its arguments is returned there, and
/// another one on the other ranks.
pub(super) fn agree(
    group: &mut dyn Collectives,
    own: Result<SharedArguments, AttentionError>,
) -> Result<(), AttentionError> {
    let values = own.as_ref().map_or(Vec::new(), |own| own.iter().map(|(_, value)| &value[..]).collect());
    let all = group.all_gather(values.join("\0").as_bytes())?;
    let names = own?;
    if let Some(rank) = all.iter().position(Vec::is_empty) {
        return Err(GroupError::Refused { rank }.into());
    }
    let all: Vec<_> = all.iter().map(|values| String::from_utf8_lossy(values)).collect();
    for (rank, values) in all.iter().enumerate() {
        let pairs = values.split('\0').zip(all[0].split('\0'));
        if let Some(((argument, _), (value, expected))) = names.iter().zip(pairs).find(|(_, (a, b))| a != b) {
            let (value, expected) = (value.to_owned(), expected.to_owned());
            return Err(GroupError::Differs { argument, rank, value, expected }.into());
        }
    }
    Ok(())
}
