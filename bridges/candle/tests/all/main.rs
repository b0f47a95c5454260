//! The functions against plain f64 loops, against attention of candle's operations, and with bad arguments.
#![allow(clippy::duplicate_mod, reason = "each example loads the module of candle's operations")]

mod examples;
mod forward;
mod gradients;
mod hostile;
mod operations;
mod packed;
mod plain;
mod signatures;
