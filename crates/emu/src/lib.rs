//! FlashCore: emu.

pub mod model;
pub mod resources;
pub mod trace;
