//! The backward pass on tiles: the scores' gradient, and the loop over the blocks that a kernel streams.

mod ring;
mod scores;

pub use ring::{BlockRing, RingBlock};
pub use scores::{QueryNumbers, ScoreGradient, SoftcapSlope};
