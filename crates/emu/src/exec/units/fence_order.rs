//! A Fence-SC order (PTX ISA, "Fence-SC Order"): a total order into which fences are inserted while a kernel
//! runs.

use std::collections::BTreeMap;
use std::ops::Bound;

/// A fence. The default stands before all fences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FenceId(u32);

/// The space between the labels of two fences when labels are given anew.
const GAP: u128 = 1 << 64;

/// Fences with labels that increase along the order.
#[derive(Clone, Debug)]
pub(super) struct FenceOrder {
    labels: Vec<u128>,
    by_label: BTreeMap<u128, FenceId>,
}

impl Default for FenceOrder {
    fn default() -> FenceOrder {
        FenceOrder { labels: vec![0], by_label: BTreeMap::from([(0, FenceId(0))]) }
    }
}

impl FenceOrder {
    fn label(&self, fence: FenceId) -> u128 {
        self.labels[fence.0 as usize]
    }

    pub fn precedes(&self, a: FenceId, b: FenceId) -> bool {
        self.label(a) < self.label(b)
    }

    pub fn later(&self, a: FenceId, b: FenceId) -> FenceId {
        if self.precedes(a, b) { b } else { a }
    }

    /// Adds a fence behind all others.
    pub fn place_last(&mut self) -> FenceId {
        let last = self.by_label.last_key_value().map_or(0, |(label, _)| *label);
        self.add(last + GAP)
    }

    /// Adds a fence directly behind another one.
    pub fn place_behind(&mut self, floor: FenceId) -> FenceId {
        if self.room_behind(floor).is_some_and(|room| room < 2) {
            for (place, fence) in std::mem::take(&mut self.by_label).into_values().enumerate() {
                let label = place as u128 * GAP;
                self.labels[fence.0 as usize] = label;
                self.by_label.insert(label, fence);
            }
        }
        match self.room_behind(floor) {
            None => self.place_last(),
            Some(room) => self.add(self.label(floor) + room / 2),
        }
    }

    /// The distance to the label of the next fence.
    fn room_behind(&self, floor: FenceId) -> Option<u128> {
        let label = self.label(floor);
        let mut behind = self.by_label.range((Bound::Excluded(label), Bound::Unbounded));
        behind.next().map(|(next, _)| next - label)
    }

    fn add(&mut self, label: u128) -> FenceId {
        let fence = FenceId(self.labels.len() as u32);
        self.labels.push(label);
        self.by_label.insert(label, fence);
        fence
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    /// Compares the labels with a list into which the fences are inserted.
    #[test]
    fn labels_increase_along_the_order() {
        let mut rng = SmallRng::seed_from_u64(3);
        let (mut order, mut list) = (FenceOrder::default(), vec![FenceId(0)]);
        for round in 0..3000 {
            // A long row of insertions at the front uses up the room there.
            let at = if round < 1500 { 0 } else { rng.random_range(0..list.len()) };
            let last = round % 7 == 6;
            let fence = if last { order.place_last() } else { order.place_behind(list[at]) };
            list.insert(if last { list.len() } else { at + 1 }, fence);
        }
        assert!(list.windows(2).all(|pair| order.precedes(pair[0], pair[1])));
        assert_eq!(order.later(list[5], list[9]), list[9]);
        assert_eq!(order.later(list[9], list[5]), list[9]);
    }
}
