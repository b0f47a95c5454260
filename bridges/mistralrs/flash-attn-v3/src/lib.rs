//! The functions of `candle-flash-attn-v3`, computed by FlashCore.

pub use candle_flash_attn::v3::*;
