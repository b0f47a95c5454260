//! Names and lists of machines that a file describes, kept until the program ends.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Deserializer};

/// A name with static lifetime: from the table, or from a file that was read.
pub type Name = &'static str;
/// A list with static lifetime.
pub type List = &'static [u32];

/// Reads a name. Machines are described once and used until the program ends, so each name is leaked once.
pub(super) fn kept_name<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    static KEPT: Mutex<BTreeSet<Name>> = Mutex::new(BTreeSet::new());
    let name = String::deserialize(from)?;
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = kept.get(name.as_str()) {
        return Ok(known);
    }
    let name: Name = Box::leak(name.into_boxed_str());
    kept.insert(name);
    Ok(name)
}

/// Like [`kept_name`], for a list.
pub(super) fn kept_list<'de, D: Deserializer<'de>>(from: D) -> Result<List, D::Error> {
    static KEPT: Mutex<BTreeSet<List>> = Mutex::new(BTreeSet::new());
    let list = Vec::<u32>::deserialize(from)?;
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = kept.get(list.as_slice()) {
        return Ok(known);
    }
    let list: List = Box::leak(list.into_boxed_slice());
    kept.insert(list);
    Ok(list)
}
