//! Tests of the crate's public interface, in one program.

mod common;
mod data;
mod features;
mod fp8;
mod narrow;
mod operands;
mod outliers;
mod quantize;
mod terms;
