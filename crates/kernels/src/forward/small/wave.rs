//! How many waves a problem's row tiles fill on the GPU. The default plans depend on this.

use problem::{Band, Problem};

use super::common::{Common, RowOrder};
use crate::Arch;
use crate::family::row_tiles;

/// The number of waves that the tiles of 64 query rows fill. Each variant is an upper bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wave {
    Half,
    One,
    Two,
    Four,
    More,
}

impl Wave {
    /// The wave of a problem, with packed heads if packing fills tiles better.
    pub fn of_problem(problem: &Problem, arch: &Arch) -> Wave {
        Wave::of(Common::BASE.filled(problem).tiles(problem), arch)
    }

    fn of(tiles: u64, arch: &Arch) -> Wave {
        match (2 * tiles.min(1 << 32)).div_ceil(arch.multiprocessors.max(1).into()) {
            0..=1 => Wave::Half,
            2 => Wave::One,
            3..=4 => Wave::Two,
            5..=8 => Wave::Four,
            _ => Wave::More,
        }
    }

    /// Causal row tiles differ in length. If exactly two CTAs share an SM, the order pairs a long tile with a
    /// short one. If more CTAs follow, long tiles come first.
    pub fn order(self, mask: Band, row_tiles: u64) -> RowOrder {
        match (self, mask) {
            (_, Band::FULL) | (Wave::Half | Wave::One, _) => RowOrder::ByHead,
            (Wave::Two, _) => RowOrder::Folded,
            (Wave::Four | Wave::More, _) => {
                if row_tiles <= Arch::GRID_YZ {
                    RowOrder::LongestFirst
                } else {
                    RowOrder::ByHead
                }
            }
        }
    }
}

/// Whether the grid is small. In a wave of CTAs that do not overlap, the whole chain of loads and products is
/// exposed. Programs make a block longer than its products, so that `wgmma` was faster on an H200 with eight
/// waves (head dim 64: 224 instead of 243 µs with a bias, 101 instead of 107 µs with ALiBi).
pub(super) fn is_small(problem: &Problem, arch: &Arch) -> bool {
    let most = if is_narrow(problem) && problem.programs.is_empty() { 8 } else { 2 };
    row_tiles(problem, 64) <= most * u64::from(arch.multiprocessors)
}

/// Whether neither head dim is larger than 64.
pub(super) fn is_narrow(problem: &Problem) -> bool {
    problem.head_dim.max(problem.head_dim_v) <= 64
}
