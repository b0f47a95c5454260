//! Reuse distances: the number of distinct sectors touched since the last touch of a sector. A fully
//! associative LRU cache of n sectors hits if and only if the distance is at most n (Mattson et al., 1970),
//! so one recording serves every machine.

use std::collections::HashMap;

/// The reuse distance of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Distance {
    First,
    /// Number of distinct sectors touched since then, including the sector itself.
    Sectors(u64),
}

/// The last touches, in a Fenwick tree over time. Slot t holds 1 when t is the last touch of some sector, so
/// a range sum counts distinct sectors (Bennett & Kruskal, 1975).
#[derive(Debug, Default)]
pub(super) struct ReuseStack {
    last: HashMap<u64, usize>,
    tree: Vec<u32>,
    now: usize,
}

impl ReuseStack {
    /// Records a touch and returns the distance to the previous one.
    pub(super) fn touch(&mut self, sector: u64) -> Distance {
        if self.now == self.tree.len() {
            self.compact();
        }
        let now = self.now;
        self.now += 1;
        let distance = match self.last.insert(sector, now) {
            None => Distance::First,
            Some(then) => {
                let since = self.last.len() as u64 - self.sum_below(then);
                self.add(then, -1);
                Distance::Sectors(since)
            }
        };
        self.add(now, 1);
        distance
    }

    /// Renumbers the last touches 0, 1, 2, … and doubles the capacity.
    fn compact(&mut self) {
        let mut order: Vec<(usize, u64)> = self.last.iter().map(|(sector, then)| (*then, *sector)).collect();
        order.sort_unstable();
        self.tree = vec![0; (2 * order.len()).max(1024)];
        self.now = order.len();
        for (time, (_, sector)) in order.into_iter().enumerate() {
            self.last.insert(sector, time);
            self.add(time, 1);
        }
    }

    fn add(&mut self, time: usize, delta: i32) {
        let mut i = time + 1;
        while let Some(slot) = self.tree.get_mut(i - 1) {
            *slot = slot.wrapping_add_signed(delta);
            i += i & i.wrapping_neg();
        }
    }

    /// Number of sectors last touched before `time`.
    fn sum_below(&self, time: usize) -> u64 {
        let (mut i, mut sum) = (time, 0);
        while i > 0 {
            sum += u64::from(self.tree[i - 1]);
            i -= i & i.wrapping_neg();
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_a_plain_stack() {
        let (mut stack, mut plain) = (ReuseStack::default(), Vec::new());
        let mut state = 1u64;
        for _ in 0..5000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let sector = (state >> 33) % 300;
            let expected = match plain.iter().rposition(|s| *s == sector) {
                None => Distance::First,
                Some(i) => {
                    let distance = (plain.len() - i) as u64;
                    plain.remove(i);
                    Distance::Sectors(distance)
                }
            };
            plain.push(sector);
            assert_eq!(stack.touch(sector), expected);
        }
    }
}
