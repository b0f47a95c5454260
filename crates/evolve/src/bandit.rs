//! Chooses the operator of the next candidate: a bandit over the operators, by their recent rewards.
//!
//! UCB1 over a sliding window (Garivier & Moulines, "On Upper-Confidence Bound Policies for Switching Bandit
//! Problems", ALT 2011). An operator's reward changes during a search: random restarts pay early, small steps
//! late. Therefore only the last pulls count. A pull is counted when the candidate is made, its reward when
//! the time is known. An operator with open candidates is thus chosen less often.

use ledger::Operator;
use serde::Serialize;

/// Number of pulls in the window.
const WINDOW: usize = 60;
/// Weight of the exploration term. Rewards are at most 1 and mostly 0.
const EXPLORATION: f64 = 0.25;

/// The pulls of all operators with their rewards.
#[derive(Clone, Debug, Default)]
pub struct Bandit {
    /// Every pull in order: the candidate's key, the operator and the reward, which is 0 until it is known.
    pulls: Vec<(i64, Operator, f64)>,
}

/// The pulls and rewards of one operator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Account {
    pub operator: Operator,
    /// Number of candidates that the operator made.
    pub pulls: usize,
    /// Sum of their rewards.
    pub earned: f64,
}

impl Bandit {
    /// Records that an operator made candidate `key`.
    pub fn pulled(&mut self, key: i64, operator: Operator) {
        self.pulls.push((key, operator, 0.0));
    }

    /// Sets the reward of a candidate, from 0 to 1.
    pub fn earned(&mut self, key: i64, reward: f64) {
        if let Some(pull) = self.pulls.iter_mut().rev().find(|pull| pull.0 == key) {
            pull.2 = reward.clamp(0.0, 1.0);
        }
    }

    /// The operator with the highest index; ties go to the first. `None` for an empty list.
    pub fn choose(&self, among: &[Operator]) -> Option<Operator> {
        let mut best: Option<(Operator, f64)> = None;
        for &operator in among {
            let index = self.index(operator);
            if best.is_none_or(|(_, known)| index > known) {
                best = Some((operator, index));
            }
        }
        best.map(|(operator, _)| operator)
    }

    fn index(&self, operator: Operator) -> f64 {
        let recent = &self.pulls[self.pulls.len().saturating_sub(WINDOW)..];
        let own: Vec<f64> = recent.iter().filter(|pull| pull.1 == operator).map(|pull| pull.2).collect();
        if own.is_empty() {
            return f64::INFINITY;
        }
        let count = own.len() as f64;
        own.iter().sum::<f64>() / count + EXPLORATION * ((recent.len() as f64).ln() / count).sqrt()
    }

    /// The accounts of all operators that were used.
    pub fn accounts(&self) -> Vec<Account> {
        let of = |operator: Operator| {
            let own = self.pulls.iter().filter(|pull| pull.1 == operator);
            let (pulls, earned) = own.fold((0, 0.0), |(n, sum), pull| (n + 1, sum + pull.2));
            Account { operator, pulls, earned }
        };
        Operator::CHOSEN.into_iter().map(of).filter(|account| account.pulls > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREE: [Operator; 3] = [Operator::Mutate, Operator::Cross, Operator::Restart];

    /// Pulls that each operator gets out of `count`, if each chosen one earns `reward`.
    fn shares(
        bandit: &mut Bandit,
        from: i64,
        count: i64,
        reward: impl Fn(Operator, i64) -> f64,
    ) -> [usize; 3] {
        let mut pulls = [0; 3];
        for key in from..from + count {
            let operator = bandit.choose(&THREE).unwrap();
            bandit.pulled(key, operator);
            bandit.earned(key, reward(operator, key));
            pulls[THREE.iter().position(|known| *known == operator).unwrap()] += 1;
        }
        pulls
    }

    #[test]
    fn the_budget_goes_where_it_pays_and_moves_when_that_moves() {
        let mut bandit = Bandit::default();
        let pays =
            |which: Operator| move |o: Operator, key: i64| if o == which && key % 2 == 0 { 1.0 } else { 0.0 };
        let early = shares(&mut bandit, 0, 200, pays(Operator::Restart));
        assert!(early[2] > 2 * early[0] && early[2] > 2 * early[1], "{early:?}");
        // Every operator is still chosen from time to time.
        assert!(early.iter().all(|&pulls| pulls > 2), "{early:?}");
        shares(&mut bandit, 200, 60, pays(Operator::Mutate));
        let late = shares(&mut bandit, 260, 200, pays(Operator::Mutate));
        assert!(late[0] > 2 * late[2] && late[0] > 2 * late[1], "{late:?}");
    }

    /// An operator with open candidates is not chosen again and again.
    #[test]
    fn what_is_not_known_yet_waits() {
        let mut bandit = Bandit::default();
        let chosen: Vec<Operator> = (0..6)
            .map(|key| {
                let operator = bandit.choose(&THREE).unwrap();
                bandit.pulled(key, operator);
                operator
            })
            .collect();
        assert_eq!(chosen, [THREE, THREE].concat());
        bandit.earned(1, 5.0);
        assert_eq!(bandit.choose(&THREE), Some(Operator::Cross));
        assert_eq!(bandit.accounts()[1], Account { operator: Operator::Cross, pulls: 2, earned: 1.0 });
        assert_eq!(bandit.choose(&[]), None);
    }
}
