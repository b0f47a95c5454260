//! The laboratory: checks kernels, times them, says why they are slow, and stores every result. It is the only crate that
//! knows competing libraries, statistics and storage.

pub mod anatomy;
pub mod approx;
pub mod bench;
pub mod child;
pub mod climb;
pub mod diagnose;
pub mod differential;
pub mod evolve;
pub mod files;
pub mod forecast;
pub mod fuzz;
pub mod gate;
pub mod genes;
pub mod launchfile;
pub mod ledger;
pub mod machine;
pub mod panics;
pub mod probes;
pub mod provenance;
pub mod report;
pub mod search;
pub mod selftest;
pub mod store;
pub mod study;
pub mod tables;
pub mod tools;
pub mod values;
