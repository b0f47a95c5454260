//! The arithmetic that instructions name, without registers and memory. `decode` asks which forms exist, and
//! `exec` applies them to the registers and the memory of warps.

pub(crate) mod atomic;
mod fragment;
pub(crate) mod products;
pub(crate) mod scalar;
pub(crate) mod tensor_descriptor;

pub(crate) use fragment::Fragment;
