//! The search that improves kernels by itself.

pub mod bandit;
mod candidate;
mod cpu_space;
pub mod evaluate;
pub mod niches;
pub mod space;
mod task;

pub use candidate::{Candidate, Language, Source};
pub use evaluate::{Evaluator, Look};
pub use task::{Finding, Outcome, Stage, Target, Task};
