//! FlashCore: emu.

pub mod trace;
