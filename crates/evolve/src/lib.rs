//! The search that improves kernels automatically.
//!
//! An [`Evolution`] hands out tasks ([`Evolution::ask`]) and receives outcomes ([`Evolution::tell`]). An
//! [`Evaluator`] carries out a task, in a thread, in a process that may crash, or on another machine.
//! Candidates pass through a cascade of stages ([`cascade`]), the cheapest first. Those that pass are ranked,
//! and the fastest race against the baseline. Besides the evolution's own arm there are two more: random
//! samples, which show what the search gains over chance, and a control (the baseline treated as a new
//! candidate), which shows the noise.

pub mod advice;
pub mod bandit;
pub mod cascade;
pub mod children;
pub mod config;
mod cpu_space;
mod drafting;
mod earlier;
mod engine;
mod error;
pub mod evaluate;
mod faults;
mod finals;
pub mod guidance;
mod holding;
mod joining;
mod member;
pub mod niches;
mod operators;
mod population;
mod proposal;
pub mod proposer;
mod rank;
mod report;
pub mod search;
pub mod seeding;
pub mod setup;
pub mod space;
mod task;
#[cfg(test)]
mod tests;
pub mod workers;

pub use bandit::Account;
pub use config::{Case, Config, Configuration, Limits};
pub use engine::{Ask, Evolution, Question};
pub use error::EvolveError;
pub use evaluate::{Evaluator, Look};
pub use ledger::{Candidate, KernelText, Language};
pub use report::{CaseReport, Cases, End, HeldOutEnd, Promoted, Report, RunProgress, Shown};
pub use task::{Finding, Outcome, Stage, Target, Task};
