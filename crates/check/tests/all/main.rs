//! Tests of the crate's public interface, in one program.

mod ahead;
mod allowed;
mod bands;
mod blind_spots;
mod budget;
mod common;
mod continued;
mod cuda;
mod decode;
mod diagnosis;
mod draws;
mod dropout;
mod factors;
mod fp8;
mod gate;
mod gradients;
mod launches;
mod lengths;
mod lists;
mod pages;
mod programs;
mod range;
mod shapes;
mod splits;
mod staged;
mod verdicts;
