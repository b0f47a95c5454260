//! FlashCore: tile.
