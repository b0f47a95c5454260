//! Forward attention: the kernel families and the code that they share.

mod baked;
mod before;
pub(crate) mod contract;
pub mod decode;
mod descale;
mod fp8;
pub(crate) mod lengths;
mod lists;
pub mod mma;
pub(crate) mod packing;
pub(crate) mod programs;
pub mod small;
pub mod wgmma;

pub use lists::{BLOCK_LISTS, Visits};
