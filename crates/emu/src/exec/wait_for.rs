//! The wait-for graph of a deadlock. The emulator cannot know which lanes would have ended a wait, but it
//! knows which lanes could: lanes that can still reach code that ends the wait. Most deadlocks are a cycle of
//! such lanes.

use std::collections::VecDeque;

use ptx::{ClusterBarrier, Op, RegisterChange, Space};

use super::Env;
use super::access::{addresses, based};
use super::barrier::named;
use super::warp::{Split, State, Warp};
use crate::decode::{Inst, Slot};
use crate::memory::resolve;

/// The event that ends a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// Arrivals at a CTA barrier, with its index in the cluster.
    Barrier(u8),
    /// Arrivals and bytes at the mbarrier with this address.
    Mbarrier(u64),
    /// Arrivals at the cluster barrier.
    Cluster,
    /// The arrival of the other warps of the warpgroup at their wgmma instructions.
    Products,
    /// Registers in the pool of the CTA.
    Registers,
    /// Free columns of tensor memory.
    Columns,
    /// A store to the polled location.
    Memory,
    /// The other lanes of the warp.
    Lanes,
}

/// Lanes that wait, and the synchronising instructions that they can still reach.
pub(super) struct Waiter<'w> {
    pub warp: &'w Warp,
    pub split: &'w Split,
    pub awaited: Awaited,
    ahead: Vec<u32>,
}

/// How certain it is that an instruction ends a wait. If its barrier is in a register, the barrier may be
/// another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Match {
    Perhaps,
    AsItStands,
}

impl Env<'_> {
    pub(super) fn waiters<'w>(&self, warps: &'w [Warp]) -> Vec<Waiter<'w>> {
        let splits = warps.iter().flat_map(|warp| warp.splits.iter().map(move |split| (warp, split)));
        let waiter = |(warp, split)| Waiter {
            warp,
            split,
            awaited: self.awaited(warp, split),
            ahead: self.ahead(split),
        };
        splits.map(waiter).collect()
    }

    fn awaited(&self, warp: &Warp, split: &Split) -> Awaited {
        match split.state {
            State::Barrier(at) => return Awaited::Barrier(at),
            State::Parked | State::Lanes(_) => return Awaited::Lanes,
            State::Run => {}
        }
        match self.facts.context.program.code[split.pc as usize].op {
            Op::BarrierCluster(_) => Awaited::Cluster,
            Op::WgmmaWaitGroup => Awaited::Products,
            Op::Setmaxnreg(_) => Awaited::Registers,
            Op::Tcgen05Alloc { .. } => Awaited::Columns,
            // The split has yielded directly after the read.
            _ => self.polled(warp, split).map_or(Awaited::Memory, Awaited::Mbarrier),
        }
    }

    /// The mbarrier that lanes poll.
    pub(super) fn polled(&self, warp: &Warp, split: &Split) -> Option<u64> {
        let inst = &self.facts.context.program.code[split.pc.checked_sub(1)? as usize];
        let lane = split.mask.trailing_zeros() as usize;
        let waits = split.state == State::Run && matches!(inst.op, Op::Mbarrier(m) if m.op.waits());
        waits.then(|| resolve(addresses(&warp.registers, inst)[lane]).1)
    }

    /// The instructions that a split can still reach and that can end a wait.
    fn ahead(&self, split: &Split) -> Vec<u32> {
        let program = self.facts.context.program;
        let mut seen = vec![false; program.code.len()];
        // The split has already arrived at the barrier where it waits.
        let first = split.pc + u32::from(matches!(split.state, State::Barrier(_)));
        let mut work: Vec<u32> = split.frames.iter().map(|f| f.return_pc).chain([first]).collect();
        let mut found = Vec::new();
        while let Some(pc) = work.pop() {
            let Some(inst) = program.code.get(pc as usize) else { continue };
            if std::mem::replace(&mut seen[pc as usize], true) {
                continue;
            }
            if ends_waits(&inst.op) {
                found.push(pc);
            }
            match inst.op {
                Op::Bra { .. } => work.push(inst.target),
                Op::BrxIdx { .. } => {
                    work.extend(&program.targets[inst.list.0 as usize..][..usize::from(inst.list.1)]);
                }
                Op::Call { .. } => {
                    let callee = program.calls[inst.target as usize].callee;
                    work.extend([program.functions[callee].start, pc + 1]);
                }
                _ => {}
            }
            let leaves =
                matches!(inst.op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret { .. } | Op::Exit | Op::Trap);
            if !leaves || inst.guard.is_some() {
                work.push(pc + 1);
            }
        }
        found
    }

    /// For each waiter, the waiters that could end its wait.
    pub(super) fn helpers(&self, waiters: &[Waiter]) -> Vec<Vec<usize>> {
        let of = |waiter: &Waiter| {
            let matches: Vec<(usize, Match)> =
                (0..waiters.len()).filter_map(|i| Some((i, self.helps(waiter, &waiters[i])?))).collect();
            let best = matches.iter().map(|m| m.1).max();
            matches.into_iter().filter(|m| Some(m.1) == best).map(|m| m.0).collect()
        };
        waiters.iter().map(of).collect()
    }

    /// Whether `other` could end the wait.
    fn helps(&self, waiter: &Waiter, other: &Waiter) -> Option<Match> {
        let itself = std::ptr::eq(waiter.split, other.split);
        let same_warp = waiter.warp.index == other.warp.index;
        let may = match waiter.awaited {
            Awaited::Barrier(at) => {
                usize::from(at) / 16 == self.rank(other.warp)
                    && !self.barriers.has_arrived(at, other.warp.index)
            }
            Awaited::Mbarrier(_) => true,
            Awaited::Cluster => other.warp.attendance.absent(other.warp.live),
            Awaited::Products => {
                !same_warp && self.facts.warpgroup_of(waiter.warp.index).contains(&other.warp.index)
            }
            Awaited::Registers | Awaited::Columns => {
                !same_warp && self.rank(waiter.warp) == self.rank(other.warp)
            }
            Awaited::Memory => !itself,
            Awaited::Lanes => return (same_warp && !itself).then_some(Match::AsItStands),
        };
        if !may {
            return None;
        }
        let code = &self.facts.context.program.code;
        let mut found = None;
        for pc in &other.ahead {
            found = found.max(self.ends(waiter.awaited, other, &code[*pc as usize]));
            if found == Some(Match::AsItStands) {
                break;
            }
        }
        // A waiter can end its own wait only if that is certain: a loop may contain other arrivals.
        found.filter(|sure| !itself || *sure == Match::AsItStands)
    }

    /// Whether an instruction ahead of a split ends such a wait, judged by the present contents of its
    /// registers.
    fn ends(&self, awaited: Awaited, other: &Waiter, inst: &Inst) -> Option<Match> {
        let (registers, lane) = (&other.warp.registers, other.split.mask.trailing_zeros() as usize);
        let certain = |holds: bool| holds.then_some(Match::AsItStands);
        match (awaited, inst.op) {
            (Awaited::Barrier(at), Op::Bar { .. }) => {
                let same = named(other.warp, inst, lane).0 == u32::from(at) % 16;
                certain(same).or_else(|| (!self.is_constant(inst.s[0])).then_some(Match::Perhaps))
            }
            (Awaited::Mbarrier(address), op) => {
                let signal = match op {
                    Op::Mbarrier(m) if !m.op.waits() => addresses(registers, inst)[lane],
                    Op::CpAsyncMbarrierArrive { .. } | Op::Tcgen05Commit { .. } => {
                        addresses(registers, inst)[lane]
                    }
                    _ if signals(&op) => based(registers, inst.signal.0, inst.signal.1)[lane],
                    _ => return None,
                };
                certain(resolve(signal).1 == address).or(Some(Match::Perhaps))
            }
            (Awaited::Cluster, Op::BarrierCluster(kind)) => {
                certain(matches!(kind, ClusterBarrier::Arrive { .. }))
            }
            (Awaited::Products, op) => certain(op == Op::WgmmaCommitGroup),
            (Awaited::Registers, op) => certain(op == Op::Setmaxnreg(RegisterChange::Dec)),
            (Awaited::Columns, op) => certain(matches!(op, Op::Tcgen05Dealloc { .. })),
            (Awaited::Memory, Op::St(_) | Op::Atom(_) | Op::Red(_)) => certain(inst.space != Space::Local),
            _ => None,
        }
    }

    fn is_constant(&self, slot: Slot) -> bool {
        self.facts.context.program.constants.iter().any(|(known, _)| *known == slot)
    }
}

fn signals(op: &Op) -> bool {
    match op {
        Op::CpAsyncBulk(copy) => copy.route.has_mbarrier(),
        Op::CpReduceAsyncBulk(copy) => copy.route.has_mbarrier(),
        Op::CpAsyncBulkTensor(copy) => copy.route.has_mbarrier(),
        Op::StAsync(_) | Op::RedAsync(_) => true,
        _ => false,
    }
}

fn ends_waits(op: &Op) -> bool {
    signals(op)
        || matches!(
            op,
            Op::Bar { .. }
                | Op::Mbarrier(_)
                | Op::CpAsyncMbarrierArrive { .. }
                | Op::BarrierCluster(_)
                | Op::WgmmaCommitGroup
                | Op::Setmaxnreg(RegisterChange::Dec)
                | Op::Tcgen05Commit { .. }
                | Op::Tcgen05Dealloc { .. }
                | Op::St(_)
                | Op::Atom(_)
                | Op::Red(_)
        )
}

/// The shortest cycle, and the first one of that length. The number of starting points is limited.
pub(super) fn cycle(helpers: &[Vec<usize>]) -> Option<Vec<usize>> {
    const BEGINNINGS: usize = 64;
    let circles = (0..helpers.len()).take(BEGINNINGS).filter_map(|start| cycle_through(helpers, start));
    circles.min_by_key(Vec::len)
}

/// The shortest cycle through `start`, beginning there.
fn cycle_through(helpers: &[Vec<usize>], start: usize) -> Option<Vec<usize>> {
    let mut before = vec![None; helpers.len()];
    let mut work = VecDeque::from([start]);
    while let Some(at) = work.pop_front() {
        for &next in &helpers[at] {
            if next == start {
                let steps = std::iter::successors(Some(at), |&at| before[at]);
                let mut circle: Vec<usize> = steps.collect();
                circle.reverse();
                return Some(circle);
            }
            if before[next].is_none() {
                before[next] = Some(at);
                work.push_back(next);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::cycle;

    #[test]
    fn the_shortest_cycle_is_found() {
        assert_eq!(cycle(&[vec![1], vec![2], vec![0, 3], vec![2]]), Some(vec![2, 3]));
        assert_eq!(cycle(&[vec![1], vec![2], vec![]]), None);
        assert_eq!(cycle(&[vec![1], vec![1]]), Some(vec![1]));
    }
}
