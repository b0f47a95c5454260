//! CTAs of a cluster that work on the same keys. Each CTA requests a part of the rows of every tile by
//! multicast to all of them, so a tile is read from L2 once.

use ptx::{Builder, CmpOp, Pred, R16, R32, SpecialReg};

use crate::Consumer;

/// The CTAs of a cluster, along x, that share tiles by multicast.
#[derive(Clone, Copy, Debug)]
pub struct Peers {
    /// Number of CTAs: a power of two.
    pub ctas: u32,
    /// Rank of this CTA.
    pub rank: R32,
    /// The CTA on whose mbarriers the lane arrives: each of the first `ctas` lanes of a warp arrives at one
    /// CTA.
    to: R32,
    /// Multicast mask: one bit per CTA.
    mask: R16,
}

impl Peers {
    /// The peers of a cluster of `ctas` CTAs; `None` for a single CTA.
    pub fn new(k: &mut Builder, ctas: u32) -> Option<Peers> {
        if ctas == 1 {
            return None;
        }
        let rank = k.special(SpecialReg::ClusterCtarank);
        let thread = k.special(SpecialReg::TidX);
        let mask = (1i32 << ctas) - 1;
        Some(Peers { ctas, rank, to: k.and(thread, ctas - 1), mask: k.mov(mask) })
    }

    /// The CTA on whose mbarriers the lane arrives.
    pub(crate) const fn to(&self) -> R32 {
        self.to
    }

    /// Multicast mask: one bit per CTA.
    pub(crate) const fn mask(&self) -> R16 {
        self.mask
    }

    /// The lanes that arrive for a consumer warp, one for each CTA.
    pub(crate) fn speakers(&self, k: &mut Builder, consumer: &Consumer) -> Pred {
        k.setp_u(CmpOp::Lt, consumer.threads.lane, self.ctas)
    }

    /// Cluster barrier of all threads at the start: afterwards the mbarriers of every CTA are initialised,
    /// which a fence has made visible.
    pub fn begin(&self, k: &mut Builder) {
        k.cluster_arrive_relaxed();
        k.cluster_wait();
    }

    /// Cluster barrier of all threads at the end: afterwards no peer accesses this CTA's shared memory, so
    /// the CTA may exit.
    pub fn end(&self, k: &mut Builder) {
        k.warp_sync();
        k.cluster_arrive();
        k.cluster_wait();
    }
}
