//! The functions against plain f64 loops, and with bad arguments.

mod blocks;
mod filled;
mod hostile;
mod latent;
mod paged;
#[path = "../../../../candle/tests/all/plain.rs"]
#[allow(dead_code, reason = "the tests of bridges/candle use all of it")]
mod plain;
mod sinks;
