//! The facts of a launch and of a cluster: nothing changes them while the cluster runs.

use std::ops::Range;

use ptx::{Dim3, Launch, Space, SpecialReg, TensorMapSpec};

use super::doubts::Doubts;
use super::products::WARPS;
use crate::decode::Program;
use crate::memory::{GlobalMemory, RANK_SHIFT, SHARED_BASE};
use crate::numerics::tensor::TensorRules;
use crate::order::{Actors, Agent};
use crate::report::{Options, Place, ThreadId};

/// The properties that all CTAs of a launch share.
pub(crate) struct Context<'a> {
    pub program: &'a Program,
    pub parameters: Parameters,
    pub launch: &'a Launch,
    pub global: &'a GlobalMemory<'a>,
    pub options: &'a Options,
    pub follow: Follow<'a>,
    pub rules: TensorRules,
    /// Whether clusters run independently and do not communicate.
    pub apart: bool,
    pub actors: Actors,
    /// Registers per thread at the start, where known (see `registers_at_entry`).
    pub registers: Option<u32>,
    pub maps: &'a [TensorMapSpec],
    /// The number of clusters that each executed cluster stands for. It is more than 1 in a sketch that
    /// leaves some clusters out.
    pub stands_for: u64,
}

/// The parameters of the entry.
pub(crate) struct Parameters {
    pub bytes: Vec<u8>,
    /// The byte ranges of the tensor maps.
    pub maps: Vec<Range<usize>>,
}

/// The values that a run follows in order to tell whether anything depends on them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Follow<'a> {
    Nothing,
    /// Collects the reads that race.
    Collect,
    /// Follows the values of these reads.
    Values(&'a Doubts),
    /// Follows undefined values through shared memory, instead of reporting their stores.
    Copies,
}

impl Follow<'_> {
    pub fn is_nothing(self) -> bool {
        matches!(self, Follow::Nothing)
    }

    /// Whether registers that a load writes may be undefined.
    pub fn follows_loads(self) -> bool {
        matches!(self, Follow::Values(_) | Follow::Copies)
    }
}

impl Context<'_> {
    /// The number of CTAs of a cluster.
    pub fn ranks(&self) -> u64 {
        self.launch.cluster.count()
    }

    fn clusters(&self) -> [u64; 3] {
        let Dim3(gx, gy, gz) = self.launch.grid;
        let Dim3(cx, cy, cz) = self.launch.cluster;
        [gx / cx, gy / cy, gz / cz].map(u64::from)
    }

    /// Linear index of the CTA with rank `rank` in a cluster.
    pub fn cta(&self, cluster: u64, rank: u64) -> u64 {
        let (at, within) = (split(cluster, self.clusters()), split(rank, extents(self.launch.cluster)));
        let size = extents(self.launch.cluster);
        let [x, y, z] = [0, 1, 2].map(|i| at[i] * size[i] + within[i]);
        let [gx, gy, _] = extents(self.launch.grid);
        x + gx * (y + gy * z)
    }

    /// The index of the first CTA of a cluster, along each dimension of the grid.
    pub fn first_cta(&self, cluster: u64) -> [u32; 3] {
        split(self.cta(cluster, 0), extents(self.launch.grid)).map(|at| at as u32)
    }

    /// Linear index of the cluster of a CTA.
    pub fn cluster_of(&self, cta: u64) -> u64 {
        let (at, size) = (split(cta, extents(self.launch.grid)), extents(self.launch.cluster));
        let [x, y, z] = [0, 1, 2].map(|i| at[i] / size[i]);
        let [nx, ny, _] = self.clusters();
        x + nx * (y + ny * z)
    }
}

fn extents(d: Dim3) -> [u64; 3] {
    [d.0, d.1, d.2].map(u64::from)
}

fn split(index: u64, [x, y, _]: [u64; 3]) -> [u64; 3] {
    [index % x, index / x % y, index / x / y]
}

/// The facts of a cluster.
pub(crate) struct Facts<'a> {
    pub context: &'a Context<'a>,
    /// Linear index of the cluster, and the linear indices of its CTAs by rank.
    pub cluster: u64,
    pub ctas: Vec<u64>,
    pub actors: Actors,
    /// Bytes of the shared memory of one CTA. That of the cluster has one CTA after the other.
    pub span: usize,
}

impl<'a> Facts<'a> {
    pub fn new(context: &'a Context<'a>, cluster: u64) -> Facts<'a> {
        let span = (context.program.layout.shared_extent as usize).next_multiple_of(16);
        let ctas = (0..context.actors.ctas as u64).map(|rank| context.cta(cluster, rank)).collect();
        Facts { context, cluster, ctas, actors: context.actors, span }
    }

    /// The first agent of the cluster.
    pub fn home(&self) -> Agent {
        (self.cluster as u32).wrapping_mul(self.actors.total() as u32)
    }

    /// The rank of a warp's CTA.
    pub fn rank(&self, warp: usize) -> usize {
        warp / self.actors.warps
    }

    /// The warps of the CTA of a rank.
    pub fn warps_of(&self, rank: usize) -> Range<usize> {
        rank * self.actors.warps..(rank + 1) * self.actors.warps
    }

    /// The warps of a warp's warpgroup.
    pub fn warpgroup_of(&self, warp: usize) -> Range<usize> {
        let warps = self.actors.warps;
        let first = warp - warp % warps % WARPS;
        first..(first + WARPS).min(warp - warp % warps + warps)
    }

    /// The address that belongs to an offset in the shared memory of the cluster.
    pub fn shared_address(&self, offset: usize) -> u64 {
        let (rank, inside) = ((offset / self.span) as u64, (offset % self.span) as u64);
        (rank << RANK_SHIFT) + SHARED_BASE + inside
    }

    /// The offset in the shared memory of the cluster that belongs to an address.
    pub fn shared_offset(&self, address: u64) -> usize {
        let inside = address & ((1 << RANK_SHIFT) - 1);
        (address >> RANK_SHIFT) as usize * self.span + (inside - SHARED_BASE) as usize
    }

    pub fn thread(&self, warp: usize, lane: usize) -> ThreadId {
        let Actors { warps, .. } = self.actors;
        ThreadId { cta: self.ctas[warp / warps], warp: (warp % warps) as u32, lane: lane as u32 }
    }

    pub fn line(&self, pc: u32) -> u32 {
        self.context.program.code[pc as usize].line
    }

    /// The buffer or variable that an address belongs to, with the offset.
    pub fn place(&self, space: Space, address: u64) -> Place {
        let (name, offset) = match space {
            Space::Shared => {
                let inside = address & ((1 << RANK_SHIFT) - 1);
                self.context.program.layout.shared_place(inside as i64 - SHARED_BASE as i64)
            }
            Space::Global => match self.context.global.find(address) {
                Some((region, offset)) => (region.name.clone(), offset),
                None => (String::new(), address as i64),
            },
            _ => (String::new(), address as i64),
        };
        Place { space, name, offset }
    }

    pub fn special(&self, special: SpecialReg, warp: usize, lane: usize) -> u64 {
        use SpecialReg as S;
        let Dim3(bx, by, bz) = self.context.launch.block;
        let [cx, cy, cz] = extents(self.context.launch.cluster);
        let [gx, gy, gz] = extents(self.context.launch.grid);
        let rank = (warp / self.actors.warps) as u64;
        let (warp, cta) = (warp % self.actors.warps, self.ctas[rank as usize]);
        let thread = (32 * warp + lane) as u32;
        let below = (1u64 << lane) - 1;
        let (at, within) = (split(cta, [gx, gy, gz]), split(rank, [cx, cy, cz]));
        let value = match special {
            S::TidX => thread % bx,
            S::TidY => thread / bx % by,
            S::TidZ => thread / bx / by,
            S::NtidX => bx,
            S::NtidY => by,
            S::NtidZ => bz,
            S::CtaidX => at[0] as u32,
            S::CtaidY => at[1] as u32,
            S::CtaidZ => at[2] as u32,
            S::NctaidX => gx as u32,
            S::NctaidY => gy as u32,
            S::NctaidZ => gz as u32,
            S::ClusteridX => (at[0] / cx) as u32,
            S::ClusteridY => (at[1] / cy) as u32,
            S::ClusteridZ => (at[2] / cz) as u32,
            S::NclusteridX => (gx / cx) as u32,
            S::NclusteridY => (gy / cy) as u32,
            S::NclusteridZ => (gz / cz) as u32,
            S::ClusterCtaidX => within[0] as u32,
            S::ClusterCtaidY => within[1] as u32,
            S::ClusterCtaidZ => within[2] as u32,
            S::ClusterNctaidX => cx as u32,
            S::ClusterNctaidY => cy as u32,
            S::ClusterNctaidZ => cz as u32,
            S::ClusterCtarank => rank as u32,
            S::ClusterNctarank => self.ctas.len() as u32,
            S::Envreg1 => (self.context.program.workspace >> 32) as u32,
            S::Envreg2 => self.context.program.workspace as u32,
            S::IsExplicitCluster => u32::from(self.ctas.len() > 1),
            S::LaneId => lane as u32,
            S::WarpId => warp as u32,
            S::NwarpId => self.actors.warps as u32,
            S::LanemaskEq => 1 << lane,
            S::LanemaskLt => below as u32,
            S::LanemaskLe => (below << 1 | 1) as u32,
            S::LanemaskGt => !((below << 1 | 1) as u32),
            S::LanemaskGe => !(below as u32),
            S::DynamicSmemSize => self.context.launch.dynamic_shared,
            S::TotalSmemSize | S::AggrSmemSize => self.context.program.layout.shared_bytes,
            S::NsmId => 132,
            S::SmId => (cta % 132) as u32,
            _ => 0,
        };
        u64::from(value)
    }
}
