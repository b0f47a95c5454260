//! FlashCore: ptx.
