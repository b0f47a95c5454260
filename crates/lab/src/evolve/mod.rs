//! The search that improves kernels by itself.
//!
//! An [`Evolution`] is asked what to evaluate and told what came of it ([`Evolution::ask`], [`Evolution::tell`]); whoever evaluates is an
//! [`Evaluator`], in a thread, in a process that may die, or on another machine. Candidates go through a cascade
//! ([`cascade`]), the cheapest stage first; those that survive are ranked, and the fastest race against what is to be beaten.
//! Beside the evolution's own candidates there is always an arm of blind draws, which shows what the search gains, and a control,
//! the baseline as if it were new, which shows the noise.

pub mod advice;
pub mod bandit;
mod candidate;
pub mod cascade;
pub mod children;
pub mod config;
mod cpu_space;
mod drafting;
mod earlier;
mod engine;
pub mod evaluate;
mod faults;
mod finals;
mod holding;
pub mod insight;
mod joining;
pub mod niches;
mod operators;
mod population;
mod proposal;
pub mod proposer;
mod rank;
mod report;
pub mod seeding;
pub mod setup;
pub mod space;
mod task;
#[cfg(test)]
mod tests;
pub mod workers;

pub use candidate::{Candidate, Language, Source};
pub use config::{Case, Config, Configuration, Limits};
pub use engine::{Ask, Evolution, EvolveError, Question, words};
pub use evaluate::{Evaluator, Look};
pub use report::{Gain, Progress, Promoted, gain};
pub use task::{Finding, Outcome, Stage, Target, Task};
