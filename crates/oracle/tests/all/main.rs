//! Tests of the crate's public interface, in one program.

mod backward;
mod plain;
