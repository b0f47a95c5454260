//! The tests of `evolve` that need no process of their own, in one program, which is linked once.

mod blind;
mod proposer;
