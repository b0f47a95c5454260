//! The grid of a kernel's CTAs.

use ptx::{Builder, Dim3, R32, SpecialReg};

use crate::contract::Contract;
use crate::error::accept;
use crate::{Arch, PlanError};

/// A dimension of a grid.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Axis {
    X,
    Y,
    Z,
}

/// The extents of a grid in x, y and z.
///
/// A launch has at most 65,535 CTAs in y and in z. If an extent is larger, the launch has all CTAs in x (a
/// *flat* grid), and the code divides their index by the extents.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents(pub [u64; 3]);

impl Extents {
    /// Whether the extents need a flat grid.
    pub fn need_flat(self) -> bool {
        self.0[1..].iter().any(|&extent| extent > Arch::GRID_YZ)
    }

    /// Checks the number of CTAs in x. `what` names the extents in the order of x, y and z.
    pub fn check(self, what: &'static str) -> Result<(), PlanError> {
        let all = self.0.into_iter().fold(1, u64::saturating_mul);
        let in_x = if self.need_flat() { all } else { self.0[0] };
        let accepted = "fewer than 2^31 in x, or in all if y or z has more than 65535";
        accept(what, all, in_x < 1 << 31, accepted)
    }

    /// The grid of a launch that was checked.
    pub fn launch(self, flat: bool) -> Dim3 {
        let [x, y, z] = self.0.map(|extent| extent as u32);
        if flat { Dim3(x * y * z, 1, 1) } else { Dim3(x, y, z) }
    }

    /// Declares the extents of a flat grid in a kernel. The code depends on `flat`.
    pub fn declare(self, k: &mut Builder, c: &mut Contract<'_>, flat: bool) -> Grid {
        let names = ["grid_x", "grid_y", "grid_z"];
        let mut extents = || std::array::from_fn(|axis| c.u32(k, names[axis], self.0[axis] as u32));
        Grid { flat: flat.then(&mut extents) }
    }
}

/// The grid in a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// The extents of a flat grid.
    flat: Option<[R32; 3]>,
}

impl Grid {
    /// The CTA's index along a dimension.
    pub fn index(&self, k: &mut Builder, axis: Axis) -> R32 {
        let Some([x, y, _]) = self.flat else {
            return k.special(match axis {
                Axis::X => SpecialReg::CtaidX,
                Axis::Y => SpecialReg::CtaidY,
                Axis::Z => SpecialReg::CtaidZ,
            });
        };
        let index = k.special(SpecialReg::CtaidX);
        if matches!(axis, Axis::X) {
            return k.rem_u(index, x);
        }
        let index = k.div_u(index, x);
        if matches!(axis, Axis::Y) { k.rem_u(index, y) } else { k.div_u(index, y) }
    }

    /// The extent of a dimension.
    pub fn extent(&self, k: &mut Builder, axis: Axis) -> R32 {
        match self.flat {
            Some(extents) => extents[axis as usize],
            None => k.special(match axis {
                Axis::X => SpecialReg::NctaidX,
                Axis::Y => SpecialReg::NctaidY,
                Axis::Z => SpecialReg::NctaidZ,
            }),
        }
    }
}
