//! The bands of a call.

use problem::program::library as lib;
use problem::{Band, Corner, Expr};

/// The intersection of the bands of a call. One band expresses all those that are aligned to one corner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bands {
    bottom_right: Band,
    top_left: Band,
}

impl Bands {
    pub const FULL: Bands = Bands { bottom_right: Band::FULL, top_left: Band::FULL };

    /// Hides the keys that `band` does not show.
    pub fn add(&mut self, band: Band) {
        let side = match band.corner {
            Corner::BottomRight => &mut self.bottom_right,
            Corner::TopLeft => &mut self.top_left,
        };
        *side = side.intersection(band).unwrap_or(*side);
    }

    /// The problem's band, and a mask for the bounds that it cannot express. `square` says whether all
    /// sequences have as many queries as keys, so that the corners coincide.
    pub fn resolve(self, square: bool) -> (Band, Option<Expr>) {
        let Bands { bottom_right, top_left } = self;
        let moved = if square { top_left.aligned(Corner::BottomRight) } else { top_left };
        match bottom_right.intersection(moved) {
            Some(band) => (band, None),
            None => (bottom_right, mask(top_left)),
        }
    }
}

/// The mask of a band that is aligned to the top left. Bounds of 2^31 keys or more hide nothing.
fn mask(top_left: Band) -> Option<Expr> {
    let bound = |keys: Option<u32>| keys.and_then(|keys| i32::try_from(keys).ok());
    let before = bound(top_left.before).map(|keys| (lib::query() - lib::key()).le(keys));
    let after = bound(top_left.after).map(|keys| (lib::key() - lib::query()).le(keys));
    before.into_iter().chain(after).reduce(|a, b| a & b)
}
