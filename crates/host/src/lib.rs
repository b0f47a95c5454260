//! Services of the host: atomic file writes, scratch folders, child processes that may hang, reports of
//! panics, and the compilers of CUDA C++ and Triton kernels.

pub mod child;
pub mod cuda;
pub mod panics;
pub mod store;
pub mod tools;
pub mod triton;
