//! Pack-GQA: the assignment of a tile's rows to query heads.

/// The query heads of a tile's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Rows of one query head.
    #[default]
    Apart,
    /// Rows of all query heads that share a KV head, position by position (pack-GQA). With few queries, tiles
    /// are fuller, and the keys are read once per group.
    Packed,
}
