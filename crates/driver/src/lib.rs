//! FlashCore: driver.
