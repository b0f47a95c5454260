//! The map from problems to what was prepared for them.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};

use foldhash::fast::RandomState;
use kernels::Plan;
use problem::{Problem, Programs};

/// Maximum number of entries. At this number a map is cleared.
const MOST: usize = 1024;

/// The key: all values of a problem, and what was asked of the preparation. Values decide the choice of a
/// plan and the arguments of a launch; loaded kernels have a key of their own ([`kernels::Baked`] and the
/// plan).
#[derive(Clone, Debug)]
pub(crate) struct Key {
    pub problem: Problem,
    pub wish: Wish,
}

/// A property of the preparation that the problem does not state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wish {
    /// The best known plan for a GPU.
    Best,
    /// This plan.
    Given(Box<Plan>),
    /// A plan for at most so many threads of the CPU.
    Threads(usize),
}

impl Key {
    /// The values that are compared, floats by their bits. A field that is added to the problem does not
    /// compile here until it is part of the key.
    fn values(&self) -> impl PartialEq + Hash + '_ {
        let Key { problem, wish } = self;
        let Problem {
            pass,
            batch,
            heads_q,
            heads_kv,
            seq_q,
            seq_kv,
            head_dim,
            head_dim_v,
            dtypes,
            scales,
            band,
            score,
            dropout,
            lengths,
            storage,
            programs: Programs { score: score_program, mask, floats, ints, tables },
            q,
            k,
            v,
            v_in_k,
            out,
            gradients,
        } = problem;
        let extents = [batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v];
        let floats: &[u32] = bytemuck::cast_slice(floats);
        let logit = (score.key(problem.softmax_scale()), dropout.map(f32::to_bits));
        (
            (pass, extents, dtypes, scales, band, lengths, storage, logit),
            ([q, k, v, out], v_in_k, gradients, score_program, mask, floats, ints, tables, wish),
        )
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.values() == other.values()
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.values().hash(state);
    }
}

/// The values that were prepared for earlier calls, by their problems or by another key.
#[derive(Debug)]
pub(crate) struct Known<T, K = Key>(HashMap<K, T, RandomState>);

impl<T, K> Default for Known<T, K> {
    fn default() -> Known<T, K> {
        Known(HashMap::default())
    }
}

impl<T: Clone, K: Eq + Hash> Known<T, K> {
    pub fn get(&self, key: &K) -> Option<T> {
        self.0.get(key).cloned()
    }

    /// Keeps a value, and returns the one that is known under the key from now on: the first.
    pub fn keep(&mut self, key: K, value: T) -> T {
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.entry(key).or_insert(value).clone()
    }
}

#[cfg(test)]
mod tests {
    use kernels::Arch;
    use problem::{Band, Layout, Score};

    use super::*;

    #[test]
    fn keys_tell_problems_apart() {
        let p = Problem::mission();
        let key = |p: &Problem| Key { problem: p.clone(), wish: Wish::Best };
        let with = |change: fn(&mut Problem)| {
            let mut other = p.clone();
            change(&mut other);
            other
        };
        let mut known = Known::default();
        known.keep(key(&p), 0);
        let stated = Score { scale: Some(0.125), ..Score::default() };
        assert_eq!(known.get(&key(&Problem { score: stated, ..p.clone() })), Some(0));
        assert_eq!(known.keep(key(&p), 1), 0);
        for other in [
            Problem { seq_kv: 511, ..p.clone() },
            p.clone().with_softcap(30.0),
            p.clone().with_lse(true),
            Problem { score: Score { scale: Some(0.5), ..Score::default() }, ..p.clone() },
            p.clone().with_band(Band::CAUSAL),
            p.clone().with_band(Band::CAUSAL_TOP_LEFT),
            p.clone().with_layout(Layout::Bshd),
            Problem { score: Score { sink: true, ..Score::default() }, ..p.clone() },
            with(|p| p.dropout = Some(0.1)),
            with(|p| p.lengths.kv.used = true),
            with(|p| p.lengths.q.packed = Some(512)),
            with(|p| p.programs.mask = "q / 2 == k / 2".parse().ok()),
            with(|p| p.programs.ints = vec![1]),
            with(|p| p.programs.floats = vec![-0.0]),
        ] {
            assert_eq!(known.get(&key(&other)), None, "{other:?}");
        }
        let zeros = [0.0, -0.0].map(|x| {
            let mut p = p.clone();
            p.programs.floats = vec![x];
            key(&p)
        });
        assert_ne!(zeros[0], zeros[1]);
        let plan = Box::new(Plan::default_for(&p, &Arch::SM_90).unwrap());
        for wish in [Wish::Given(plan), Wish::Threads(1)] {
            assert_eq!(known.get(&Key { problem: p.clone(), wish }), None);
        }
        for n in 1..=MOST {
            known.keep(key(&Problem { batch: 2, seq_kv: n, ..p.clone() }), n);
        }
        assert_eq!((known.0.len(), known.get(&key(&p))), (1, None));
    }
}
