//! What the code of a quantisation depends on.

use problem::{DType, Rotation, Tensor};

/// Threads of a CTA.
pub(super) const THREADS: u32 = 256;
/// Elements that a thread loads, rotates and rounds at once. Their codes fill a store of 16 bytes.
pub(super) const UNIT: u32 = 16;
/// Units of a thread that are loaded before the first is used, so that enough loads are in flight.
pub(super) const STEPS: u32 = 4;

/// All properties of a quantisation that its code depends on. Lengths, strides, the number of heads and the
/// signs of the rotation are launch parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizationCode {
    pub(super) tensor: Tensor,
    pub(super) from: DType,
    pub(super) to: DType,
    pub(super) dim: u32,
    pub(super) rotated: bool,
    pub(super) passes: Passes,
}

/// How often the tensor is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Passes {
    /// Once, by one kernel: a CTA holds all rows of a factor, a thread `steps` units of them.
    Held {
        /// Units of a thread, 1 to [`STEPS`].
        steps: u32,
    },
    /// Twice: the first kernel stores the largest magnitude of each part of the rows of a factor, and the
    /// second kernel rounds.
    Two {
        /// Whether several heads share a factor.
        grouped: bool,
    },
}

impl QuantizationCode {
    /// Units of a row.
    pub(super) const fn units(&self) -> u32 {
        self.dim / UNIT
    }

    /// Rows that a CTA covers with one unit of each thread. Threads beyond these rows have no unit.
    pub(super) const fn slab(&self) -> u32 {
        THREADS / self.units()
    }

    /// Rows of a tile: what a CTA loads before it uses the first unit.
    pub(super) const fn tile(&self) -> u32 {
        self.slab() * STEPS
    }

    /// Whether every thread has a unit.
    pub(super) const fn all_have_units(&self) -> bool {
        THREADS.is_multiple_of(self.units())
    }

    /// 32-bit words of a unit in memory.
    pub(super) const fn words(&self) -> usize {
        UNIT as usize * self.from.bytes() / 4
    }

    /// Columns of a Hadamard matrix; 1 without a rotation.
    pub(super) const fn block(&self) -> u32 {
        if self.rotated { 1 << self.dim.trailing_zeros() } else { 1 }
    }

    /// The factor that normalises the rotation; 1 without one.
    pub(super) fn norm(&self) -> f32 {
        if self.rotated { Rotation::new(0, self.dim as usize).norm() } else { 1.0 }
    }

    /// [`Passes::Held`] if a CTA can hold `rows` rows of one head.
    pub(super) fn holds(&self, rows: u32) -> Option<Passes> {
        let steps = rows.div_ceil(self.slab()).max(1);
        let grouped = matches!(self.passes, Passes::Two { grouped: true });
        (steps <= STEPS && !grouped).then_some(Passes::Held { steps })
    }
}
