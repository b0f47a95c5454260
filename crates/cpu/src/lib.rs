//! FlashCore: cpu.
