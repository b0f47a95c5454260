//! Tests of the crate's public interface, in one program. The tests of `filetests/` are in the program
//! `filetests`.

mod contract;
mod corpus;
mod deadlock;
mod limits;
mod litmus;
mod product;
mod quiet;
mod registers;
mod tcgen05;
mod wgmma;
