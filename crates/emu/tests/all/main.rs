//! The tests of the crate from outside, as one program; those of `filetests/` are the program `filetests`.

mod contract;
mod corpus;
mod deadlock;
mod limits;
mod quiet;
mod registers;
mod wgmma;
