//! Runs work on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{available_parallelism, scope};

/// The results of `work` for each item, computed on as many threads as there are cores.
pub fn each<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let share = || {
        let taken = std::iter::from_fn(|| {
            let at = next.fetch_add(1, Ordering::Relaxed);
            items.get(at).map(|item| (at, work(item)))
        });
        taken.collect::<Vec<_>>()
    };
    let mut done: Vec<(usize, R)> = scope(|threads| {
        let shares: Vec<_> =
            (0..available_parallelism().map_or(1, usize::from)).map(|_| threads.spawn(share)).collect();
        shares.into_iter().flat_map(|share| share.join().expect("what failed has said why")).collect()
    });
    done.sort_unstable_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}
