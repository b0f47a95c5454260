//! Tests of the crate's public interface, in one program.

mod pass;
mod programs;
