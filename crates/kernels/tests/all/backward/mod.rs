//! Tests of the backward families on the emulator: no hazards with every check on, and gradients within the
//! rounding of P, dS, O and of the results.

mod fused;
mod ordered;
pub mod reference;
mod split;
