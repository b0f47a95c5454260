//! CTAs of a cluster that work on the same keys: each requests a part of the rows of every tile and lets it
//! land in all of them, so that a tile is read from L2 once.

use ptx::{Builder, CmpOp, Pred, R16, R32, SpecialReg};

use crate::Consumer;

/// The CTAs of a cluster, along x, that share tiles.
#[derive(Clone, Copy, Debug)]
pub struct Peers {
    /// How many: a power of two.
    pub ctas: u32,
    /// Which of them this one is.
    pub rank: R32,
    /// The rank that a lane arrives at: the first `ctas` lanes of a warp speak to one CTA each.
    to: R32,
    /// All of them, a bit each.
    mask: R16,
}

impl Peers {
    /// Those of a cluster of so many; `None` where a CTA is alone.
    pub fn new(k: &mut Builder, ctas: u32) -> Option<Peers> {
        if ctas == 1 {
            return None;
        }
        let rank = k.special(SpecialReg::ClusterCtarank);
        let thread = k.special(SpecialReg::TidX);
        let mask = (1i32 << ctas) - 1;
        Some(Peers { ctas, rank, to: k.and(thread, ctas - 1), mask: k.mov(mask) })
    }

    /// The CTA that a lane speaks to.
    pub(crate) const fn to(&self) -> R32 {
        self.to
    }

    /// All of them, a bit each.
    pub(crate) const fn mask(&self) -> R16 {
        self.mask
    }

    /// The lanes that speak for a consumer's warp: one to each CTA.
    pub(crate) fn speakers(&self, k: &mut Builder, consumer: &Consumer) -> Pred {
        k.setp_u(CmpOp::Lt, consumer.threads.lane, self.ctas)
    }

    /// Waits, with all threads of all of them, until their barriers are prepared, which a fence has made
    /// known.
    pub fn begin(&self, k: &mut Builder) {
        k.cluster_arrive_relaxed();
        k.cluster_wait();
    }

    /// Waits, with all threads of all of them, until no one speaks to this CTA any more: then it may exit.
    pub fn end(&self, k: &mut Builder) {
        k.warp_sync();
        k.cluster_arrive();
        k.cluster_wait();
    }
}
