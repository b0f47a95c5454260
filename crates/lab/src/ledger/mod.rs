//! The ledger: every candidate, forecast, proof, measurement and decision, in one SQLite file that many processes share.

mod facts;
mod views;

pub use facts::*;
pub use views::*;
