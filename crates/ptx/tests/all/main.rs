//! The tests of `ptx` in one program, which is linked once.

mod agreement;
mod assumed;
mod generate;
mod round_trip;
