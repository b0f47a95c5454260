//! The search that improves kernels by itself.

mod candidate;
mod task;

pub use candidate::{Candidate, Language, Source};
pub use task::{Finding, Outcome, Stage, Target, Task};
