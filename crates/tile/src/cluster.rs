//! Clusters of CTAs that read the same tiles. Each CTA requests a part of the rows of every tile by multicast
//! to all CTAs, so that a tile is read from L2 once.

use ptx::{Builder, CmpOp, Pred, R16, R32, SpecialReg};

use crate::Consumer;

/// The CTAs of a cluster, along x, that share tiles by multicast.
#[derive(Clone, Copy, Debug)]
pub struct Cluster {
    /// Number of CTAs: a power of two.
    pub ctas: u32,
    /// Rank of this CTA.
    pub rank: R32,
    /// The CTA on whose mbarriers the lane arrives: each of the first `ctas` lanes of a warp arrives at one
    /// CTA.
    arrives_at: R32,
    /// Multicast mask: one bit per CTA.
    mask: R16,
}

impl Cluster {
    /// A cluster of `ctas` CTAs; `None` for a single CTA.
    pub fn new(k: &mut Builder, ctas: u32) -> Option<Cluster> {
        if ctas == 1 {
            return None;
        }
        let rank = k.special(SpecialReg::ClusterCtarank);
        let thread = k.special(SpecialReg::TidX);
        let mask = (1i32 << ctas) - 1;
        Some(Cluster { ctas, rank, arrives_at: k.and(thread, ctas - 1), mask: k.mov(mask) })
    }

    /// The CTA on whose mbarriers the lane arrives.
    pub(crate) const fn arrives_at(&self) -> R32 {
        self.arrives_at
    }

    /// Multicast mask: one bit per CTA.
    pub(crate) const fn mask(&self) -> R16 {
        self.mask
    }

    /// The elected lanes of a consumer warp. Each of them arrives for the warp on the mbarriers of one CTA.
    pub(crate) fn elected(&self, k: &mut Builder, consumer: &Consumer) -> Pred {
        k.setp_u(CmpOp::Lt, consumer.threads.lane, self.ctas)
    }

    /// Cluster barrier of all threads at the start. Afterwards the mbarriers of every CTA are initialised
    /// and, by a fence, visible.
    pub fn sync_at_start(&self, k: &mut Builder) {
        k.cluster_arrive_relaxed();
        k.cluster_wait();
    }

    /// Cluster barrier of all threads at the end: afterwards no other CTA accesses this CTA's shared memory,
    /// so the CTA may exit.
    pub fn sync_at_end(&self, k: &mut Builder) {
        k.warp_sync();
        k.cluster_arrive();
        k.cluster_wait();
    }
}
