//! Transformations of the scores between Q Kᵀ and the softmax: the softcap, then the score program, then the
//! mask program. [`ScoreChain`](crate::ScoreChain) applies them in their order.

mod ahead;
mod bounds;
mod coverage;
mod emit;
mod gradient;
mod lower;
mod program;
mod softcap;
mod staged;
mod words;

pub use coverage::TileMask;
pub use gradient::GradientPrograms;
pub(crate) use gradient::ProgramScore;
pub use lower::{ProgramCode, TileRead};
pub use program::{Elements, ProgramParams, RowPrograms, ScorePrograms, StagedParams, TableParams, half_of};
pub use softcap::{Softcap, Tanh};
pub use staged::StagedTables;
pub use words::Words;
