//! The properties on which the code of a quantisation depends.

use problem::{DType, Rotation, Tensor};

/// Threads of the largest CTA.
pub(super) const THREADS: u32 = 256;
/// Threads of a CTA that rotates and does not hold the rows of a factor. With more, an SM has room for fewer
/// warps, as a thread has 96 registers.
pub(super) const ROTATING: u32 = 128;
/// Elements whose codes fill a store of 16 bytes.
pub(super) const UNIT: u32 = 16;
/// Units that a thread holds at most.
const UNITS: u32 = 4;
/// Bytes that a thread loads before it uses the first, so that enough loads are in flight.
const IN_FLIGHT: u32 = 128;

/// Heads of a cluster at most: the largest cluster that every GPU with clusters accepts.
const CLUSTER: u32 = 8;

/// All properties of a quantisation that its code depends on. Lengths, strides, the number of heads (but for
/// the heads of a cluster) and the signs of the rotation are launch parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizationCode {
    pub(super) tensor: Tensor,
    pub(super) from: DType,
    pub(super) to: DType,
    pub(super) dim: u32,
    pub(super) rotated: bool,
    /// Whether the mean of the rows is subtracted.
    pub(super) smoothed: bool,
    /// Threads of a CTA.
    pub(super) threads: u32,
    pub(super) passes: Passes,
    /// Whether the grids are flat: more batch entries or heads than a launch has CTAs in y and z.
    pub(super) flat: bool,
}

/// How often the tensor is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Passes {
    /// Once, by one kernel: a CTA holds the rows of a factor in one head, a thread its share of `shares`
    /// rows.
    Held {
        shares: u32,
        /// Heads that share a factor: their CTAs are a cluster.
        group: u32,
    },
    /// Twice: the first kernel stores the largest magnitude of each part of the rows of a factor, and the
    /// second kernel rounds.
    Two {
        /// Whether several heads share a factor.
        grouped: bool,
        /// Rows of a head that share a factor ([`problem::Quantization::rows`]); `None` if all do.
        block: Option<u32>,
    },
}

impl QuantizationCode {
    /// Units of a row.
    pub(super) const fn units(&self) -> u32 {
        self.dim / UNIT
    }

    /// Units of a Hadamard matrix; 1 without a rotation.
    pub(super) const fn block_units(&self) -> u32 {
        if self.rotated { 1 << self.units().trailing_zeros() } else { 1 }
    }

    /// Units of a row that a thread has: its share. Units of one share are added without an exchange between
    /// lanes. At least two lanes share a row of two units or more, so that they use whole sectors of it.
    pub(super) fn share(&self) -> u32 {
        (self.units() / 2).clamp(1, UNITS).min(self.block_units())
    }

    /// The distance between the units of a share, in units.
    pub(super) fn distance(&self) -> u32 {
        self.block_units() / self.share()
    }

    /// Threads that share a row.
    pub(super) fn lanes(&self) -> u32 {
        self.units() / self.share()
    }

    /// Rows of which a thread loads its share before it uses the first.
    pub(super) fn shares(&self) -> u32 {
        match self.passes {
            Passes::Held { shares, .. } => shares,
            Passes::Two { block, .. } => {
                let in_flight = (IN_FLIGHT / (4 * self.words() as u32 * self.share())).max(1);
                block.map_or(in_flight, |rows| in_flight.min(rows.div_ceil(self.slab())))
            }
        }
    }

    /// Rows that a CTA covers with one share of each thread. Threads beyond these rows have none.
    pub(super) fn slab(&self) -> u32 {
        self.threads / self.lanes()
    }

    /// Rows of a tile: what a CTA loads before it uses the first unit.
    pub(super) fn tile(&self) -> u32 {
        self.slab() * self.shares()
    }

    /// 32-bit words of a unit in memory.
    pub(super) const fn words(&self) -> usize {
        UNIT as usize * self.from.bytes() / 4
    }

    /// The factor that normalises the rotation; 1 without one.
    pub(super) fn norm(&self) -> f32 {
        if self.rotated { Rotation::new(0, self.dim as usize).norm() } else { 1.0 }
    }

    /// Threads per SM that the register limit of a rotating kernel allows for. Without a bound, ptxas spills
    /// registers of some kernels to make room for more threads.
    pub(super) const fn resident_threads(&self) -> u32 {
        match self.passes {
            // A thread holds 64 elements: 96 registers, or 112 if it loads f32 elements and means.
            Passes::Held { .. } if self.smoothed && matches!(self.from, DType::F32) => 576,
            Passes::Held { .. } => 640,
            // Means of the columns take more.
            Passes::Two { .. } if self.smoothed => 512,
            Passes::Two { .. } => 640,
        }
    }

    /// The code of the kernel that adds the rows. A slab has a row of each strand of [`problem::Mean`].
    pub(super) const fn of_sums(self) -> QuantizationCode {
        let passes = Passes::Two { grouped: false, block: None };
        QuantizationCode { rotated: false, threads: THREADS, passes, ..self }
    }

    /// The code with no more threads than a block of rows needs.
    pub(super) fn fitted(self) -> QuantizationCode {
        let Passes::Two { block: Some(rows), .. } = self.passes else { return self };
        let threads = (rows * self.lanes()).next_multiple_of(32).min(self.threads);
        QuantizationCode { threads, ..self }
    }

    /// CTAs of a cluster.
    pub(super) const fn cluster(&self) -> u32 {
        match self.passes {
            Passes::Held { group, .. } => group,
            Passes::Two { .. } => 1,
        }
    }

    /// The code with one kernel, if a CTA can hold `rows` rows of one head, and a cluster the heads of a
    /// group if there are several.
    pub(super) fn held(self, rows: u32, group: u32, has_clusters: bool) -> Option<QuantizationCode> {
        let slab = rows.div_ceil(UNITS / self.share()).max(1);
        let threads = (slab.saturating_mul(self.lanes())).next_multiple_of(32);
        let held = QuantizationCode { threads, ..self };
        let shares = rows.div_ceil(held.slab()).max(1);
        let is_cluster = has_clusters && group.is_power_of_two() && group <= CLUSTER;
        let fits = threads <= THREADS && (group == 1 || is_cluster);
        fits.then_some(QuantizationCode { passes: Passes::Held { shares, group }, ..held })
    }
}
