/// A point in a warp's time. It advances whenever a lane of the warp releases; 0 is before everything.
pub(crate) type Epoch = u32;

/// The epoch of an asynchronous write that nobody has waited for: later than everything anyone can know.
pub(crate) const FLIGHT: Epoch = Epoch::MAX;

/// A warp of the grid: CTA · warps per CTA + warp.
pub(crate) type Agent = u32;

/// All accesses of some lanes of a warp up to an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    agent: Agent,
    lanes: u32,
    epoch: Epoch,
}

/// A set of accesses that happened before. Nearly always whole warps of one CTA synchronise, so that is what is stored
/// densely; lanes of their own, and warps of other CTAs, are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// For each warp of the home CTA: everything its 32 lanes did up to this epoch.
    warps: Vec<Epoch>,
    parts: Vec<Part>,
}

impl Clock {
    /// Knows of nothing, in a CTA of `warps` warps.
    pub fn new(warps: usize) -> Clock {
        Clock { warps: vec![0; warps], parts: Vec::new() }
    }

    /// Epoch up to which every lane of a warp of the home CTA is known.
    #[inline(always)]
    pub fn warp(&self, warp: usize) -> Epoch {
        self.warps.get(warp).copied().unwrap_or(0)
    }

    /// Learns all that `lanes` of `agent` did up to `epoch`. `home` is the first agent of the home CTA.
    pub fn learn(&mut self, home: Agent, agent: Agent, lanes: u32, epoch: Epoch) {
        let local = agent.wrapping_sub(home) as usize;
        if local < self.warps.len() {
            if self.warps[local] >= epoch {
                return;
            }
            if lanes == !0 {
                self.warps[local] = epoch;
                self.parts.retain(|p| p.agent != agent || p.epoch > epoch);
                return;
            }
        }
        if self.parts.iter().any(|p| p.agent == agent && lanes & !p.lanes == 0 && epoch <= p.epoch) {
            return;
        }
        self.parts.retain(|p| p.agent != agent || p.lanes & !lanes != 0 || p.epoch > epoch);
        self.parts.push(Part { agent, lanes, epoch });
    }

    /// Learns all that a clock of the same home knows.
    pub fn join(&mut self, home: Agent, other: &Clock) {
        for (mine, theirs) in self.warps.iter_mut().zip(&other.warps) {
            *mine = (*mine).max(*theirs);
        }
        other.parts.iter().for_each(|p| self.learn(home, p.agent, p.lanes, p.epoch));
    }

    /// Learns all that a clock of another home knows.
    pub fn join_foreign(&mut self, home: Agent, other: &Clock, other_home: Agent) {
        if home == other_home && self.warps.len() == other.warps.len() {
            return self.join(home, other);
        }
        for (agent, epoch) in (other_home..).zip(&other.warps).filter(|(_, epoch)| **epoch > 0) {
            self.learn(home, agent, !0, *epoch);
        }
        other.parts.iter().for_each(|p| self.learn(home, p.agent, p.lanes, p.epoch));
    }

    /// Those of `lanes` of `agent` whose accesses at `epoch` are not known.
    pub fn unknown(&self, home: Agent, agent: Agent, lanes: u32, epoch: Epoch) -> u32 {
        let local = agent.wrapping_sub(home) as usize;
        if self.warps.get(local).is_some_and(|known| epoch <= *known) {
            return 0;
        }
        self.parts
            .iter()
            .filter(|p| p.agent == agent && epoch <= p.epoch)
            .fold(lanes, |left, p| left & !p.lanes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
