//! The ledger: every candidate, forecast, proof, measurement and decision, in one SQLite file that many processes share.

mod facts;

pub use facts::*;
