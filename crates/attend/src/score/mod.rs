//! Changes of the scores between Q Kᵀ and the softmax: the softcap, then the score program, then the mask
//! program.

mod emit;
mod lower;
mod program;
mod softcap;

pub use program::{ProgramParams, RowPrograms, ScorePrograms, TableParams};
pub use softcap::{Softcap, Tanh};
