//! scratch
#![allow(missing_docs, unreachable_pub)]
pub mod u8_baseline;
pub mod u8_common;
pub mod u8_stage_a;
pub mod u8_stage_b;
pub fn dump(p: &problem::Problem, a: &crate::Arch) -> Vec<ptx::Kernel> {
    vec![
        u8_baseline::emit(p, a, u8_baseline::Width::Byte),
        u8_baseline::emit(p, a, u8_baseline::Width::Vector16),
        u8_stage_a::emit(p, a),
        u8_stage_b::emit(p, a, u8_stage_b::Conversion::Union),
        u8_stage_b::emit(p, a, u8_stage_b::Conversion::ThroughRegisters),
    ]
}
