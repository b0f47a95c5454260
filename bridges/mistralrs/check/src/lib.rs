//! Has cargo check mistral.rs, whose sources call the crates that `[patch]` replaces.

pub use mistralrs::{GgufModelBuilder, TextModelBuilder};
