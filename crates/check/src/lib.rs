//! Checks kernels and explains their time.
//!
//! - [`gate`]: runs a kernel in the emulator and judges its outputs by the f64 oracle.
//! - [`launchfile`]: describes how a kernel without host code is launched: the kernel with its buffers and
//!   its problem.
//! - [`given`]: a launch on memory that the caller gives.
//! - [`mod@reference`]: further judges of outputs: built-in operations, kernels, files, Python functions.
//! - [`study`]: check, resources, predicted times and root causes of one kernel.
//! - [`diagnose`]: the root causes.
//! - [`causes`]: the hazards of a check, grouped by cause, each with a fix.
//! - [`sources`] and [`names`]: source lines behind PTX lines, and readable C++ names.
//! - [`forecast`]: predicted times of plans, and their quality.
//! - [`accuracy`]: the error of 8-bit attention over the number of keys.
//! - [`files`]: tensors in files; [`numbers`]: arrays of any type in files.

pub mod accuracy;
pub mod causes;
pub mod diagnose;
pub mod files;
pub mod forecast;
pub mod gate;
pub mod genes;
pub mod given;
pub mod launchfile;
pub mod names;
pub mod numbers;
pub mod reference;
pub mod sources;
pub mod study;
