//! The arithmetic of a GPU on a CPU, bit for bit where the hardware is specified or known.
//!
//! Nothing here depends on PTX text, warps or memory: functions take and return bits.
//! - [`tensor`]: `mma.sync`, with the rules of each architecture's tensor cores.
//! - [`convert`]: `cvt` in every rounding mode.
//! - [`float`]: IEEE arithmetic in f32, f64, f16 and bf16, with directed rounding.
//! - [`approx`]: the `.approx` functions, each with the error bound that PTX states.
//! - [`integer`]: integer, bit and byte instructions.
//!
//! A 32-bit register of a warp is [`Lanes32`], indexed by lane, and a 64-bit register is [`Lanes64`]. A
//! 16-bit value occupies the low half of a 32-bit lane. A predicate is a `u32` with one bit per lane.

pub mod approx;
pub mod convert;
mod exact;
pub mod float;
pub mod integer;
pub mod round;
pub mod tensor;

/// A 32-bit register of a warp, one element per lane.
pub type Lanes32 = [u32; 32];
/// A 64-bit register of a warp, one element per lane.
pub type Lanes64 = [u64; 32];
