//! FlashCore: emu.

pub mod numerics;
