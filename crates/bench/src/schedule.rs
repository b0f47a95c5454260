//! The order of turns.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// The turns of one round: all lanes in an order drawn from the seed, then backwards (A B B A for two). Both
/// turns of a lane have the same mean position, so that a linear drift over the round favours no lane.
pub fn palindrome(lanes: usize, seed: u64, round: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lanes).collect();
    order.shuffle(&mut rng(seed, round, 0));
    let back: Vec<usize> = order.iter().rev().copied().collect();
    order.extend(back);
    order
}

/// Whether the output of this turn is checked: one turn in four, unpredictable for a contestant.
pub fn is_looked_at(seed: u64, round: u64, turn: u64) -> bool {
    rng(seed, round, 1 + turn).random_ratio(1, 4)
}

/// A random round after the first and before `rounds`, for new inputs in the middle of a race.
pub fn middle(seed: u64, rounds: u64) -> u64 {
    rng(seed, u64::MAX, 0).random_range(1..rounds.max(2))
}

fn rng(seed: u64, round: u64, stream: u64) -> SmallRng {
    // SplitMix64's increment separates neighbouring rounds and streams.
    let mixed = seed ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.rotate_left(32);
    SmallRng::seed_from_u64(mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_a_palindrome_of_all_lanes_in_changing_order() {
        let mut first = [0; 4];
        for round in 0..200 {
            let turns = palindrome(4, 9, round);
            let back: Vec<usize> = turns.iter().rev().copied().collect();
            assert_eq!(turns, back);
            let mut once = turns[..4].to_vec();
            once.sort_unstable();
            assert_eq!(once, [0, 1, 2, 3]);
            first[turns[0]] += 1;
        }
        assert!(first.iter().all(|&n| (30..=70).contains(&n)), "{first:?}");
        assert_eq!(palindrome(4, 9, 3), palindrome(4, 9, 3));
        assert_ne!(
            (0..8).map(|r| palindrome(4, 1, r)).collect::<Vec<_>>(),
            (0..8).map(|r| palindrome(4, 2, r)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn one_turn_of_four_is_looked_at() {
        let looked = (0..1000).filter(|&round| is_looked_at(5, round, 2)).count();
        assert!((200..300).contains(&looked), "{looked}");
        assert!((0..100).all(|seed| (1..12).contains(&middle(seed, 12))));
    }
}
