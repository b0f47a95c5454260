//! The population's elites: the fastest candidate of each niche (MAP-Elites; Mouret & Clune, "Illuminating
//! search spaces by mapping elites", 2015). A niche is a kernel's predicted bottleneck and the shape of its
//! tile. Kernels of a different kind are thus kept and can be improved, however slow they are at first.

use std::collections::BTreeMap;

use ledger::CandidateId;

/// The predicted bottleneck and the tile.
pub type Niche = (String, String);

/// The fastest candidate of a niche.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Elite {
    pub candidate: CandidateId,
    pub us: f64,
}

/// How a candidate compares with its niche.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    First,
    Better,
    None,
}

/// The elites by niche.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Niches(BTreeMap<Niche, Elite>);

impl Niches {
    /// Enters a candidate if it is the fastest of its niche.
    pub fn enter(&mut self, niche: Niche, candidate: CandidateId, us: f64) -> Entry {
        let elite = Elite { candidate, us };
        match self.0.get_mut(&niche) {
            None => {
                self.0.insert(niche, elite);
                Entry::First
            }
            Some(known) if us < known.us => {
                *known = elite;
                Entry::Better
            }
            Some(_) => Entry::None,
        }
    }

    /// Removes a candidate that was rejected.
    pub fn leave(&mut self, candidate: CandidateId) {
        self.0.retain(|_, elite| elite.candidate != candidate);
    }

    /// Every elite with its niche, fastest first.
    pub fn ranked(&self) -> Vec<(&Niche, Elite)> {
        let mut all: Vec<_> = self.0.iter().map(|(niche, elite)| (niche, *elite)).collect();
        all.sort_by(|a, b| a.1.us.total_cmp(&b.1.us));
        all
    }

    /// Number of niches with an elite.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_niche_keeps_its_fastest() {
        let niche = |bound: &str, tile: &str| (bound.to_owned(), tile.to_owned());
        let mut niches = Niches::default();
        let mut enter = |n: Niche, id: i64, us: f64| niches.enter(n, CandidateId(id), us);
        assert_eq!(enter(niche("tensor", "64x64"), 1, 10.0), Entry::First);
        assert_eq!(enter(niche("tensor", "64x64"), 2, 11.0), Entry::None);
        assert_eq!(enter(niche("tensor", "64x64"), 3, 9.0), Entry::Better);
        // Slower than all others, but the only one in its niche.
        assert_eq!(enter(niche("latency", "16x256"), 4, 50.0), Entry::First);
        let order: Vec<i64> = niches.ranked().iter().map(|(_, elite)| elite.candidate.0).collect();
        assert_eq!((order, niches.len()), (vec![3, 4], 2));
        niches.leave(CandidateId(3));
        assert_eq!((niches.len(), niches.is_empty()), (1, false));
    }
}
