//! Vector clocks: sets of accesses that happened before.

use std::ops::Range;

use super::actors::{Actors, Agent, ProxySpace};

/// A point in the time of an actor. It advances whenever a lane of the warp releases. Epoch 0 comes before
/// all accesses.
pub(crate) type Epoch = u32;

/// The epoch of an asynchronous access for which no thread has waited: later than any epoch that a clock can
/// contain.
pub(crate) const FLIGHT: Epoch = Epoch::MAX;

/// All accesses of some lanes of an agent up to an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    agent: Agent,
    lanes: u32,
    epoch: Epoch,
}

/// A set of accesses that happened before. Usually whole warps of one cluster synchronise. The clock
/// therefore stores whole actors of its home cluster in an array, and lists single lanes and actors of other
/// clusters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// For each actor of the home cluster, the epoch up to which the accesses of all its 32 lanes are known.
    warps: Vec<Epoch>,
    /// Sorted by agent, the latest epoch first. A lane is in at most one part of its agent.
    parts: Vec<Part>,
}

impl Clock {
    /// A clock that knows no accesses, in a cluster of `warps` actors.
    pub fn new(warps: usize) -> Clock {
        Clock { warps: vec![0; warps], parts: Vec::new() }
    }

    /// The epoch up to which every lane of an actor of the home cluster is known.
    #[inline(always)]
    pub fn warp(&self, warp: usize) -> Epoch {
        self.warps.get(warp).copied().unwrap_or(0)
    }

    /// Adds all accesses of `lanes` of `agent` up to `epoch`. `home` is the first agent of the home cluster.
    pub fn learn(&mut self, home: Agent, agent: Agent, lanes: u32, epoch: Epoch) {
        let local = agent.wrapping_sub(home) as usize;
        if self.warps.get(local).is_some_and(|known| *known >= epoch) {
            return;
        }
        let whole = lanes == !0 && local < self.warps.len();
        let Range { start, mut end } = range(&self.parts, agent);
        let (mut at, mut left) = (start, lanes);
        while at < end {
            let part = &mut self.parts[at];
            if part.epoch > epoch || (part.epoch == epoch && !whole) {
                left &= !part.lanes;
            } else {
                part.lanes &= !lanes;
                if part.lanes == 0 {
                    self.parts.remove(at);
                    end -= 1;
                    continue;
                }
            }
            at += 1;
        }
        if whole {
            self.warps[local] = epoch;
        } else if left != 0 {
            let at = start + self.parts[start..end].partition_point(|p| p.epoch > epoch);
            match self.parts[..end].get_mut(at).filter(|p| p.epoch == epoch) {
                Some(part) => part.lanes |= left,
                None => self.parts.insert(at, Part { agent, lanes: left, epoch }),
            }
        }
    }

    /// Adds all accesses known to a clock of the same home cluster.
    pub fn join(&mut self, home: Agent, other: &Clock) {
        for (mine, theirs) in self.warps.iter_mut().zip(&other.warps) {
            *mine = (*mine).max(*theirs);
        }
        self.join_parts(home, &other.parts);
    }

    /// Adds all accesses known to a clock of another home cluster.
    pub fn join_foreign(&mut self, home: Agent, other: &Clock, other_home: Agent) {
        if home == other_home && self.warps.len() == other.warps.len() {
            return self.join(home, other);
        }
        for (agent, epoch) in (other_home..).zip(&other.warps).filter(|(_, epoch)| **epoch > 0) {
            self.learn(home, agent, !0, *epoch);
        }
        self.join_parts(home, &other.parts);
    }

    /// Merges two sorted lists, agent by agent. Equal lists and equal parts are skipped, because clocks that
    /// know thousands of lanes mostly have equal parts.
    fn join_parts(&mut self, home: Agent, other: &[Part]) {
        if other.is_empty() || self.parts == other {
            return;
        }
        let mine = std::mem::take(&mut self.parts);
        self.parts.reserve(mine.len().max(other.len()));
        let (mut ours, mut theirs) = (&mine[..], other);
        while let Some(agent) = ours.first().into_iter().chain(theirs.first()).map(|p| p.agent).min() {
            let (here, rest) = ours.split_at(first_of(ours, agent));
            let (there, others) = theirs.split_at(first_of(theirs, agent));
            (ours, theirs) = (rest, others);
            self.parts.extend_from_slice(here);
            let foreign = agent.wrapping_sub(home) as usize >= self.warps.len();
            if here.is_empty() && foreign {
                self.parts.extend_from_slice(there);
            } else if here != there {
                there.iter().for_each(|p| self.learn(home, agent, p.lanes, p.epoch));
            }
        }
    }

    /// The lanes among `lanes` of `agent` whose accesses at `epoch` are not known.
    #[inline]
    pub fn unknown(&self, home: Agent, agent: Agent, lanes: u32, epoch: Epoch) -> u32 {
        let local = agent.wrapping_sub(home) as usize;
        if self.warps.get(local).is_some_and(|known| epoch <= *known) {
            return 0;
        }
        let parts = self.parts[range(&self.parts, agent)].iter();
        parts.take_while(|p| epoch <= p.epoch).fold(lanes, |left, p| left & !p.lanes)
    }

    /// Marks everything known as ordered for the asynchronous proxy's accesses to `space` too.
    pub fn fence(&mut self, home: Agent, actors: Actors, space: ProxySpace) {
        let fenced = actors.fenced(space);
        for warp in 0..actors.threads() {
            self.warps[warp + fenced] = self.warps[warp + fenced].max(self.warps[warp]);
        }
        for part in self.parts.clone() {
            if let Some(agent) = actors.fenced_agent(part.agent, space) {
                self.learn(home, agent, part.lanes, part.epoch);
            }
        }
    }

    /// Keeps only the accesses of these actors of each cluster.
    pub fn keep(&mut self, actors: &Range<usize>, total: usize) {
        for (actor, epoch) in self.warps.iter_mut().enumerate() {
            if !actors.contains(&actor) {
                *epoch = 0;
            }
        }
        self.parts.retain(|p| actors.contains(&(p.agent as usize % total)));
    }

    /// The number of listed parts: the cost of copying and joining the clock.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }
}

/// The index range of an agent's parts.
fn range(parts: &[Part], agent: Agent) -> Range<usize> {
    let start = parts.partition_point(|p| p.agent < agent);
    start..start + first_of(&parts[start..], agent)
}

/// The number of parts of an agent at the start of a list. Most agents have one or two.
fn first_of(parts: &[Part], agent: Agent) -> usize {
    parts.iter().take_while(|p| p.agent == agent).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    #[test]
    fn parts_cover_lanes() {
        let mut clock = Clock::new(2);
        clock.learn(10, 11, 0xff, 3);
        clock.learn(10, 11, 0xff00, 5);
        assert_eq!(clock.unknown(10, 11, 0xffff, 3), 0);
        assert_eq!(clock.unknown(10, 11, 0xffff, 4), 0xff);
        clock.learn(10, 11, !0, 5);
        assert_eq!(clock, Clock { warps: vec![0, 5], parts: vec![] });
        let mut other = Clock::new(2);
        other.join_foreign(20, &clock, 10);
        assert_eq!(other.unknown(20, 11, 1, 5), 0);
        assert_eq!(other.unknown(20, 11, 1, 6), 1);
        assert_eq!(other.unknown(20, 20, 1, 1), 1);
    }

    /// Compares the clocks with the definition: the latest known epoch of each lane.
    #[test]
    fn joined_clocks_know_what_either_knew() {
        let mut rng = SmallRng::seed_from_u64(5);
        for _ in 0..200 {
            let (mut clocks, mut known) = ([Clock::new(2), Clock::new(2)], [[[0; 32]; 6]; 2]);
            for _ in 0..40 {
                let (which, agent) = (rng.random_range(0..2), rng.random_range(0..6));
                let lanes =
                    if rng.random_range(0..4) == 0 { !0 } else { rng.random::<u32>() & rng.random::<u32>() };
                let epoch = rng.random_range(1..9);
                clocks[which].learn(2, agent, lanes, epoch);
                for lane in (0..32).filter(|l| lanes >> l & 1 == 1) {
                    let known: &mut u32 = &mut known[which][agent as usize][lane];
                    *known = epoch.max(*known);
                }
            }
            let [mut joined, other] = clocks;
            joined.join(2, &other);
            for (agent, lane) in (0..6).flat_map(|a| (0..32).map(move |l| (a, l))) {
                let latest = known.iter().map(|k| k[agent as usize][lane]).max().unwrap();
                assert!(latest == 0 || joined.unknown(2, agent, 1 << lane, latest) == 0);
                assert_eq!(joined.unknown(2, agent, 1 << lane, latest + 1), 1 << lane);
            }
        }
    }
}
