//! Tests of the crate's public interface, in one program.

mod book;
mod ladder;
