//! What programs need of the host: files that are written whole, scratch folders, child processes that may
//! hang, panics that are reported, and the compilers of CUDA C++ and of Triton kernels.

pub mod child;
pub mod cuda;
pub mod panics;
pub mod store;
pub mod tools;
pub mod triton;
