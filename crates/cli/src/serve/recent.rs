//! A cache of the values that were requested most recently.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// At most `MOST` values by key. The least recently requested one is dropped first.
pub struct Recent<K, V, const MOST: usize>(Mutex<VecDeque<(K, Arc<V>)>>);

impl<K, V, const MOST: usize> Default for Recent<K, V, MOST> {
    fn default() -> Self {
        Recent(Mutex::default())
    }
}

impl<K: PartialEq, V: Default, const MOST: usize> Recent<K, V, MOST> {
    /// The value of a key, made by default if the key is unknown. Simultaneous callers get the same value.
    pub fn cell(&self, key: K) -> Arc<V> {
        let mut cells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = cells.iter().position(|(known, _)| *known == key).and_then(|at| cells.remove(at));
        let (key, cell) = known.unwrap_or_else(|| (key, Arc::default()));
        if cells.len() >= MOST {
            cells.pop_front();
        }
        cells.push_back((key, Arc::clone(&cell)));
        cell
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_asked_for_the_longest_is_forgotten() {
        let recent: Recent<i64, u8, 3> = Recent::default();
        let [low, high] = [1, 9].map(|key| recent.cell(key));
        for key in [5, 1, 7, 1, 6] {
            recent.cell(key);
        }
        // Key 1 was requested repeatedly, so it stays although it is the lowest.
        assert!(Arc::ptr_eq(&low, &recent.cell(1)) && !Arc::ptr_eq(&high, &recent.cell(9)));
        assert_eq!(recent.0.lock().unwrap().len(), 3);
    }
}
