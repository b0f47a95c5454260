//! FlashCore: emu.
