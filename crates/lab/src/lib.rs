//! FlashCore: lab.
