use super::Agent;

/// mbarriers of a CTA that are told apart; more of them share these, and what is known of one is then known of both.
const MBARRIERS: usize = 32;
/// Warps of a warpgroup.
const WARPGROUP: usize = 4;

/// Who accesses memory in a cluster, in this order: its warps; the wgmma of each warpgroup, whose epochs are its groups; and,
/// whose accesses no read slot is kept for, what the bulk copies of each warp read and what they write, whose epochs are
/// their groups, what each warp knows to be ordered for the asynchronous proxy, and to be initialised of mbarriers; the
/// mbarriers that copies complete on, whose epochs are their phases; and the grid before, all that it does being of one
/// epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Actors {
    /// CTAs of the cluster.
    pub ctas: usize,
    /// Warps of a CTA.
    pub warps: usize,
    /// Whether there is any but warps.
    pub asynchronous: bool,
    /// Whether the grid before may still run.
    pub overlapping: bool,
}

/// One of them, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Actor {
    Warp(usize),
    /// The first warp of the warpgroup.
    Wgmma(usize),
    Bulk(usize),
    Mbarrier(usize),
}

impl Actors {
    /// Warps of a cluster.
    pub const fn threads(self) -> usize {
        self.ctas * self.warps
    }

    const fn warpgroups(self) -> usize {
        if self.asynchronous { self.ctas * self.warps.div_ceil(WARPGROUP) } else { 0 }
    }

    /// Those whose reads of shared memory are kept apart.
    pub const fn slots(self) -> usize {
        self.threads() + self.warpgroups()
    }

    /// All of a cluster.
    pub const fn total(self) -> usize {
        let more = if self.asynchronous { 4 * self.threads() + MBARRIERS * self.ctas } else { 0 };
        self.slots() + more + self.overlapping as usize
    }

    /// The grid before, where it may still run. Its accesses are watched nowhere: it counts as accessing all global memory.
    pub const fn grid_before(self) -> Option<usize> {
        if self.overlapping { Some(self.total() - 1) } else { None }
    }

    /// The warpgroup that a warp belongs to, counted over the cluster.
    pub const fn warpgroup(self, warp: usize) -> usize {
        warp / self.warps * self.warps.div_ceil(WARPGROUP) + warp % self.warps / WARPGROUP
    }

    /// The wgmma of a warp's warpgroup.
    pub const fn wgmma(self, warp: usize) -> usize {
        self.threads() + self.warpgroup(warp)
    }

    /// The bulk copies of a warp, as they read.
    pub const fn bulk_reads(self, warp: usize) -> usize {
        self.slots() + warp
    }

    /// The same, as they write: that a group has read tells nothing of what earlier ones have written.
    pub const fn bulk_writes(self, warp: usize) -> usize {
        self.slots() + self.threads() + warp
    }

    /// From a warp to what is known to be ordered of it for the asynchronous proxy.
    pub const fn fenced(self) -> usize {
        self.slots() + 2 * self.threads()
    }

    /// The mbarriers that a warp is known to have initialised.
    pub const fn initialised(self, warp: usize) -> usize {
        self.slots() + 3 * self.threads() + warp
    }

    /// First of [`Actors::initialised`], and their number.
    pub const fn initialisations(self) -> std::ops::Range<usize> {
        let start = self.initialised(0);
        start..start + self.threads()
    }

    /// The `n`-th mbarrier of a CTA.
    pub const fn mbarrier(self, cta: usize, n: usize) -> usize {
        self.slots() + 4 * self.threads() + cta * MBARRIERS + n % MBARRIERS
    }

    /// Which one it is of its cluster.
    pub fn name(self, agent: Agent) -> Actor {
        let local = agent as usize % self.total();
        let (threads, slots) = (self.threads(), self.slots());
        if local < threads {
            Actor::Warp(local)
        } else if local < slots {
            let per_cta = self.warps.div_ceil(WARPGROUP);
            let group = local - threads;
            Actor::Wgmma(group / per_cta * self.warps + group % per_cta * WARPGROUP)
        } else if local < slots + 4 * threads {
            Actor::Bulk((local - slots) % threads)
        } else {
            Actor::Mbarrier(local - slots - 4 * threads)
        }
    }

    /// The agent that stands for what is known to be ordered of this one for the asynchronous proxy, if it is a warp.
    pub fn fenced_agent(self, agent: Agent) -> Option<Agent> {
        let local = agent as usize % self.total();
        (self.asynchronous && local < self.threads()).then(|| agent + self.fenced() as Agent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_two() {
        let actors = Actors { ctas: 2, warps: 6, asynchronous: true, overlapping: true };
        let mut all: Vec<usize> = (0..12).chain([0, 4, 6, 10].map(|w| actors.wgmma(w))).collect();
        for warp in 0..12 {
            all.extend([actors.bulk_reads(warp), actors.bulk_writes(warp)]);
            all.extend([warp + actors.fenced(), actors.initialised(warp)]);
        }
        all.extend((0..2).flat_map(|cta| (0..MBARRIERS).map(move |n| actors.mbarrier(cta, n))));
        all.extend(actors.grid_before());
        all.sort_unstable();
        assert_eq!(all, (0..actors.total()).collect::<Vec<_>>());
        assert_eq!(actors.name(actors.wgmma(11) as Agent), Actor::Wgmma(10));
        for bulk in [actors.bulk_reads(3), actors.bulk_writes(3)] {
            assert_eq!(actors.name((actors.total() + bulk) as Agent), Actor::Bulk(3));
        }
        let plain = Actors { ctas: 1, warps: 3, asynchronous: false, overlapping: false };
        assert_eq!((plain.total(), plain.grid_before()), (3, None));
    }
}
