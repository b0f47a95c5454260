//! Products on the tensor cores, of a warp (`mma`) and of a warpgroup (`wgmma`).

mod mma;
mod ones;
mod pair_sum;
mod reader;
mod warp_sum;
mod wgmma;
mod widened;

pub use mma::{
    MmaType, OperandA, OperandB, Sign, mma_ab, mma_ab_apart, mma_ab_scaled, mma_abt, mma_abt_onto, row_dots,
};
pub use ones::Ones;
pub use pair_sum::PairSum;
pub use reader::{MatrixReader, OpenTile};
pub use warp_sum::WarpSum;
pub use wgmma::{Accumulate, Group, Products, SharedMatrix, WARPGROUP_ROWS};
pub use widened::{mma_ab_widened, mma_abt_widened};

/// Threads of a warpgroup.
pub const WARPGROUP_THREADS: u32 = 128;
