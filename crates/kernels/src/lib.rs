//! FlashCore: kernels.
