//! Which query heads the rows of a tile are of.

/// What the rows of a tile are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Rows of one query head.
    #[default]
    Apart,
    /// Rows of all query heads that share a key head, position by position: where queries are few, tiles are
    /// fuller, and keys are read once for the group.
    Packed,
}
