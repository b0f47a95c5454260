//! Tests of the crate's public interface, in one program.

mod baked;
mod bands;
mod common;
mod emit;
mod far;
mod forward;
mod genes;
mod hidden_numbers;
mod machine_code;
mod many_entries;
mod mma_fp8;
mod programs;
mod quantize;
mod shapes;
mod small;
mod small_needed;
mod small_refused;
mod tools;
mod tuned;
mod wgmma;
mod wgmma_forward;
mod wgmma_fp8;
mod wgmma_needed;
mod wgmma_tables;
mod wgmma_tail;
mod wide_logits;
