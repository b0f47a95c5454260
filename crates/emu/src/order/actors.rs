//! The actors whose accesses the race check distinguishes.

/// An actor of the grid: index of the cluster · actors of a cluster + index of the [actor](Actors).
pub(crate) type Agent = u32;

/// The widest scope at which an access is strong. Two strong accesses whose scopes include each other do not
/// race (PTX ISA, "Morally Strong Operations").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Strength {
    #[default]
    Weak,
    Cta,
    Cluster,
    Gpu,
}

/// Number of mbarriers per CTA that the race check distinguishes. If a CTA has more, several mbarriers share
/// an index, and an observation of one of them counts for all of them.
const MBARRIERS: usize = 32;
/// Warps of a warpgroup.
const WARPGROUP: usize = 4;

/// The actors that access memory in a cluster. Their indices are assigned in this order:
/// - the warps;
/// - the wgmma of each warpgroup, whose epochs are its groups;
/// - the reads, then the writes, of each warp's bulk copies, whose epochs are their groups;
/// - the fenced actors of each warp, one per [`ProxySpace`]: how many of the warp's accesses are ordered for
///   the asynchronous proxy's accesses to shared or to global memory, or for uses of tensor maps;
/// - for each warp, the mbarriers that are known to be initialised;
/// - the mbarriers on which copies complete, whose epochs are their phases;
/// - for kernels that use tensor memory, the instructions in each [`TensorPipe`] of each warp;
/// - the previous grid (programmatic dependent launch), all of whose accesses have one epoch.
///
/// Only warps and wgmmas have a read slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Actors {
    /// CTAs of the cluster.
    pub ctas: usize,
    /// Warps of a CTA.
    pub warps: usize,
    /// Whether there are actors other than warps.
    pub asynchronous: bool,
    /// Whether the kernel uses tensor memory.
    pub tensor: bool,
    /// Whether the previous grid may still run.
    pub overlapping: bool,
    // Computed once, because the race check needs them for most accesses.
    threads: usize,
    slots: usize,
    /// The start and the end of [`Actors::tensors`].
    tensors: (usize, usize),
}

/// The actors of a kernel beside its warps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kinds {
    /// Whether the kernel uses the asynchronous proxy.
    pub asynchronous: bool,
    /// Whether the kernel uses tensor memory.
    pub tensor: bool,
    /// Whether the previous grid may still run.
    pub overlapping: bool,
}

/// The asynchronous instructions of a warp that complete in order of issue (PTX ISA, "Memory Consistency
/// Model for 5th generation of TensorCore operations").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorPipe {
    /// `tcgen05.mma`, `tcgen05.cp` and `tcgen05.shift`, which a `tcgen05.commit` covers. An epoch ends with
    /// each commit and each `tcgen05.fence::before_thread_sync`.
    Product,
    /// `tcgen05.ld`. An epoch ends with each `tcgen05.wait::ld`.
    Load,
    /// `tcgen05.st`. An epoch ends with each `tcgen05.wait::st`.
    Store,
    /// Not accesses, but the knowledge that those of [`TensorPipe::Product`] up to an epoch were issued:
    /// later products of any warp execute after them.
    Issued,
}

const TENSOR_PIPES: usize = 4;

/// The memory for which a proxy fence orders accesses (PTX ISA, "membar/fence"). The windows `shared::cta`
/// and `shared::cluster` are not distinguished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProxySpace {
    Shared,
    Global,
    /// Tensor maps, of which a proxy of their own makes the accesses.
    TensorMap,
}

/// The kind of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Actor {
    Warp(usize),
    /// The first warp of the warpgroup.
    Wgmma(usize),
    Bulk(usize),
    Mbarrier(usize),
    Tensor(usize),
}

impl Actors {
    /// The actors of a cluster of so many CTAs and warps of a CTA.
    pub const fn new(ctas: usize, warps: usize, kinds: Kinds) -> Actors {
        let Kinds { asynchronous, tensor, overlapping } = kinds;
        let threads = ctas * warps;
        let (warpgroups, more) = match asynchronous {
            true => (ctas * warps.div_ceil(WARPGROUP), 6 * threads + MBARRIERS * ctas),
            false => (0, 0),
        };
        let slots = threads + warpgroups;
        let first = slots + more;
        let range = (first, first + if tensor { TENSOR_PIPES * threads } else { 0 });
        Actors { ctas, warps, asynchronous, tensor, overlapping, threads, slots, tensors: range }
    }

    /// Warps of a cluster.
    pub const fn threads(self) -> usize {
        self.threads
    }

    /// The number of actors that have a read slot in the shadow of shared memory.
    pub const fn slots(self) -> usize {
        self.slots
    }

    /// The number of actors of a cluster.
    pub const fn total(self) -> usize {
        self.tensors.1 + self.overlapping as usize
    }

    /// The index range of all [`Actors::tensor`].
    pub const fn tensors(self) -> std::ops::Range<usize> {
        self.tensors.0..self.tensors.1
    }

    /// The instructions in a pipe of a warp.
    pub const fn tensor(self, warp: usize, pipe: TensorPipe) -> usize {
        self.tensors().start + pipe as usize * self.threads() + warp
    }

    /// The previous grid, if it may still run. The emulator does not track its accesses: it counts as
    /// accessing all global memory.
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

    /// The reads of a warp's bulk copies.
    pub const fn bulk_reads(self, warp: usize) -> usize {
        self.slots() + warp
    }

    /// The writes of a warp's bulk copies. They are a separate actor, because the completed reads of a group
    /// do not imply that the writes of earlier groups are complete.
    pub const fn bulk_writes(self, warp: usize) -> usize {
        self.slots() + self.threads() + warp
    }

    /// The offset from the index of a warp to the index of its fenced actor for a space. The epochs of that
    /// actor say how much of the warp is known to be ordered for the asynchronous proxy's accesses there.
    pub const fn fenced(self, space: ProxySpace) -> usize {
        match space {
            ProxySpace::Shared => self.slots() + 2 * self.threads(),
            ProxySpace::Global => self.slots() + 3 * self.threads(),
            ProxySpace::TensorMap => self.slots() + 4 * self.threads(),
        }
    }

    /// The actor that stands for the mbarriers which a warp has initialised.
    pub const fn initialised(self, warp: usize) -> usize {
        self.slots() + 5 * self.threads() + warp
    }

    /// The index range of all [`Actors::initialised`].
    pub const fn initialisations(self) -> std::ops::Range<usize> {
        let start = self.initialised(0);
        start..start + self.threads()
    }

    /// The `n`-th mbarrier of a CTA.
    pub const fn mbarrier(self, cta: usize, n: usize) -> usize {
        self.slots() + 6 * self.threads() + cta * MBARRIERS + n % MBARRIERS
    }

    /// The kind of an agent and its index in its cluster.
    pub fn name(self, agent: Agent) -> Actor {
        let local = agent as usize % self.total();
        let (threads, slots) = (self.threads(), self.slots());
        if local < threads {
            Actor::Warp(local)
        } else if local < slots {
            let per_cta = self.warps.div_ceil(WARPGROUP);
            let group = local - threads;
            Actor::Wgmma(group / per_cta * self.warps + group % per_cta * WARPGROUP)
        } else if local < slots + 6 * threads {
            Actor::Bulk((local - slots) % threads)
        } else if self.tensors().contains(&local) {
            Actor::Tensor((local - self.tensors().start) % threads)
        } else {
            Actor::Mbarrier(local - slots - 6 * threads)
        }
    }

    /// The fenced actor of an agent, if the agent is a warp and the kernel uses the asynchronous proxy.
    pub fn fenced_agent(self, agent: Agent, space: ProxySpace) -> Option<Agent> {
        let is_warp = || agent % (self.total() as Agent) < self.threads() as Agent;
        (self.asynchronous && is_warp()).then(|| agent + self.fenced(space) as Agent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_two() {
        let actors = Actors::new(2, 6, Kinds { asynchronous: true, tensor: true, overlapping: true });
        let pipes = [TensorPipe::Product, TensorPipe::Load, TensorPipe::Store, TensorPipe::Issued];
        let mut all: Vec<usize> = (0..12).chain([0, 4, 6, 10].map(|w| actors.wgmma(w))).collect();
        for warp in 0..12 {
            all.extend([actors.bulk_reads(warp), actors.bulk_writes(warp)]);
            let spaces = [ProxySpace::Shared, ProxySpace::Global, ProxySpace::TensorMap];
            all.extend(spaces.map(|space| warp + actors.fenced(space)));
            all.push(actors.initialised(warp));
            all.extend(pipes.map(|pipe| actors.tensor(warp, pipe)));
            assert_eq!(actors.name(actors.tensor(warp, TensorPipe::Load) as Agent), Actor::Tensor(warp));
        }
        all.extend((0..2).flat_map(|cta| (0..MBARRIERS).map(move |n| actors.mbarrier(cta, n))));
        all.extend(actors.grid_before());
        all.sort_unstable();
        assert_eq!(all, (0..actors.total()).collect::<Vec<_>>());
        assert_eq!(actors.name(actors.wgmma(11) as Agent), Actor::Wgmma(10));
        for bulk in [actors.bulk_reads(3), actors.bulk_writes(3)] {
            assert_eq!(actors.name((actors.total() + bulk) as Agent), Actor::Bulk(3));
        }
        let plain = Actors::new(1, 3, Kinds::default());
        assert_eq!((plain.total(), plain.grid_before()), (3, None));
    }
}
