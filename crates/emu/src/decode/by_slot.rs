//! Values that belong to slots.

use std::ops::{Index, IndexMut};

use super::{Program, Slot};

/// A value for each slot.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct BySlot<T> {
    /// The position of the first slot of each class.
    first: [usize; 4],
    pub values: Vec<T>,
}

impl<T: Clone> BySlot<T> {
    pub fn new(program: &Program, value: T) -> BySlot<T> {
        let [w32, w64, pred] = program.sizes;
        // Absent slots share the last position.
        BySlot { first: [0, w32, w32 + w64, w32 + w64 + pred], values: vec![value; w32 + w64 + pred + 1] }
    }
}

impl<T> Index<Slot> for BySlot<T> {
    type Output = T;

    fn index(&self, slot: Slot) -> &T {
        &self.values[self.first[slot.class as usize] + slot.at()]
    }
}

impl<T> IndexMut<Slot> for BySlot<T> {
    fn index_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.values[self.first[slot.class as usize] + slot.at()]
    }
}
