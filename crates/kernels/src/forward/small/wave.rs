//! How much of the GPU a problem's row tiles fill, on which the default plans depend.

use problem::{Band, Problem};

use super::common::{Common, RowOrder};
use crate::Arch;
use crate::family::row_tiles;

/// How much of the GPU the tiles of 64 query rows fill; each variant is an upper bound in waves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wave {
    Half,
    One,
    Two,
    Four,
    More,
}

impl Wave {
    /// The wave of a problem, whose heads are packed if that fills tiles better.
    pub fn of_problem(problem: &Problem, arch: &Arch) -> Wave {
        Wave::of(Common::BASE.filled(problem).tiles(problem), arch)
    }

    fn of(tiles: u64, arch: &Arch) -> Wave {
        match (2 * tiles.min(1 << 32)).div_ceil(arch.multiprocessors.into()) {
            0..=1 => Wave::Half,
            2 => Wave::One,
            3..=4 => Wave::Two,
            5..=8 => Wave::Four,
            _ => Wave::More,
        }
    }

    /// Causal row tiles differ in length. If two CTAs share an SM from start to end, the order pairs lengths
    /// that add up; if more CTAs follow, the long tiles come first.
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

/// Whether the grid is small. A wave of CTAs that do not overlap costs the whole chain of loads and products.
pub(super) fn is_small(problem: &Problem, arch: &Arch) -> bool {
    let most = if is_narrow(problem) { 8 } else { 2 };
    row_tiles(problem, 64) <= most * u64::from(arch.multiprocessors)
}

/// Whether neither head dim is larger than 64.
pub(super) fn is_narrow(problem: &Problem) -> bool {
    problem.head_dim.max(problem.head_dim_v) <= 64
}
