//! The uses of buffers by launches before this one, which may not have ended when it starts (programmatic
//! dependent launch).

use std::collections::HashMap;

/// The use that launches before this one may still make of a buffer. Of two uses, the greater one counts.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "self-evident")]
pub enum EarlierUse {
    Untouched,
    Read,
    #[default]
    Unknown,
    Written,
}

/// The use of each buffer by launches before this one, by the number of the buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EarlierUses {
    known: HashMap<usize, EarlierUse>,
    /// The use of all other buffers.
    others: EarlierUse,
}

impl EarlierUses {
    /// The use of a buffer.
    pub fn of(&self, buffer: usize) -> EarlierUse {
        self.known.get(&buffer).copied().unwrap_or(self.others)
    }

    /// States the use of a buffer.
    pub fn state(&mut self, buffer: usize, earlier: EarlierUse) {
        self.known.insert(buffer, earlier);
    }

    /// The uses after one more launch, which reads the buffers `taken` and writes those of them that are
    /// `stored`. Before it ends, the launches before it may run only if it `overtakes` them.
    pub fn after(
        &self,
        overtakes: bool,
        taken: impl IntoIterator<Item = usize>,
        stored: &[bool],
    ) -> EarlierUses {
        let ended = EarlierUses { known: HashMap::new(), others: EarlierUse::Untouched };
        let mut after = if overtakes { self.clone() } else { ended };
        for buffer in taken {
            let is_stored = stored.get(buffer).copied().unwrap_or(true);
            let own = if is_stored { EarlierUse::Written } else { EarlierUse::Read };
            after.state(buffer, own.max(after.of(buffer)));
        }
        after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_ends_the_uses_before_it_unless_it_lets_the_next_one_overtake() {
        use EarlierUse::{Read, Unknown, Untouched, Written};
        let mut first = EarlierUses::default();
        first.state(1, Written);
        let uses = |after: &EarlierUses| [0, 1, 2].map(|buffer| after.of(buffer));
        let ended = first.after(false, [0, 2], &[false, false, true]);
        assert_eq!(uses(&ended), [Read, Untouched, Written]);
        let overtaken = first.after(true, [0, 2], &[false, false, true]);
        assert_eq!(uses(&overtaken), [Unknown, Written, Written]);
    }
}
