//! The suite `random`: problems that nobody tuned for.

use problem::{Band, DType, Layout, Problem};

/// The name of the suite.
pub const RANDOM: &str = "random";

/// Head dims of models, each equally likely.
const DIMS: [usize; 7] = [64, 72, 80, 96, 128, 192, 256];
/// Shortest and longest sequences.
const LENGTHS: [usize; 2] = [64, 16384];
/// Largest batch and number of KV heads.
const MOST_BATCH: usize = 16;
const MOST_HEADS_KV: usize = 16;
/// Largest number of query heads, and of query heads per KV head.
const MOST_HEADS: usize = 64;
const MOST_GROUP: usize = 8;
/// Largest number of elements of all tensors (0.5 GiB), and of floating-point operations: some milliseconds
/// on an H200. Together they bound the memory and the time of a race.
const MOST_ELEMENTS: usize = 1 << 28;
const MOST_FLOPS: f64 = 2e12;

/// `count` problems of a seed. The first `n` problems of a seed do not depend on `count`.
///
/// Lengths, heads and batches are log-uniform. Half of the problems have query heads that share KV heads,
/// half have as many keys as queries, half have a causal mask. A causal mask is aligned to the bottom right;
/// with it, there are at least as many keys as queries.
pub fn random(seed: u64, count: usize) -> Vec<Problem> {
    let mut draws = Draws(seed);
    std::iter::repeat_with(|| draws.problem())
        .filter(|problem| elements(problem) <= MOST_ELEMENTS && problem.flops() <= MOST_FLOPS)
        .take(count)
        .collect()
}

fn elements(p: &Problem) -> usize {
    p.batch * p.head_dim * 2 * (p.heads_q * p.seq_q + p.heads_kv * p.seq_kv)
}

/// A stream of random numbers (SplitMix64). The generators of `rand` may change with its version, and a seed
/// must stand for the same problems in every row.
struct Draws(u64);

impl Draws {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below 1.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn coin(&mut self) -> bool {
        self.unit() < 0.5
    }

    /// A log-uniform whole number between two numbers, both included.
    fn between(&mut self, [least, most]: [usize; 2]) -> usize {
        let (least, end) = (least as f64, most as f64 + 1.0);
        ((least * (end / least).powf(self.unit())) as usize).min(most)
    }

    /// A length. Half of the lengths are multiples of 64.
    fn length(&mut self) -> usize {
        let length = self.between(LENGTHS);
        if self.coin() { length.next_multiple_of(64) } else { length }
    }

    fn problem(&mut self) -> Problem {
        let dim = DIMS[(self.unit() * DIMS.len() as f64) as usize];
        let dtype = if self.coin() { DType::Bf16 } else { DType::F16 };
        let heads_kv = self.between([1, MOST_HEADS_KV]);
        let group = if self.coin() { self.between([2, MOST_GROUP]) } else { 1 };
        let heads = heads_kv * group.min(MOST_HEADS / heads_kv);
        let (seq_q, batch) = (self.length(), self.between([1, MOST_BATCH]));
        let seq_kv = if self.coin() { self.length() } else { seq_q };
        let band = if self.coin() { Band::CAUSAL } else { Band::FULL };
        let seq_q = if band.is_causal() { seq_q.min(seq_kv) } else { seq_q };
        let problem = Problem::new(batch, heads, seq_q, dim, dtype).with_band(band);
        Problem { heads_kv, seq_kv, ..problem }.with_layout(Layout::Bhsd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows name a seed, so a seed must stand for the same problems in every version.
    #[test]
    fn a_seed_stands_for_its_problems() {
        let words: Vec<String> = random(7, 4).iter().map(crate::suites::words).collect();
        let expected = [
            "3,12,192,80,bf16,causal",
            "2,11,1338,256,f16",
            "3,14/2,13184,128,bf16,causal",
            "14,8/2,1856x169,256,bf16",
        ];
        assert_eq!(words, expected);
        assert_eq!(random(7, 100)[..4], random(7, 4));
        assert_ne!(random(8, 4), random(7, 4));
    }

    #[test]
    fn every_kind_is_drawn_and_none_is_too_large() {
        let drawn = random(1, 500);
        let count = |is: fn(&Problem) -> bool| drawn.iter().filter(|problem| is(problem)).count();
        for dim in DIMS {
            assert!(drawn.iter().filter(|problem| problem.head_dim == dim).count() > 30, "{dim}");
        }
        for is in [
            (|p| p.band.is_causal()) as fn(&Problem) -> bool,
            |p| p.group_size() > 1,
            |p| p.seq_q != p.seq_kv,
            |p| p.seq_q % 64 != 0,
            |p| p.dtypes.q == DType::F16,
            |p| p.batch > 1,
        ] {
            assert!((125..450).contains(&count(is)), "{}", count(is));
        }
        assert!(count(|p| p.seq_q < 256) > 50 && count(|p| p.seq_q > 4096) > 50);
        for problem in &drawn {
            problem.check().unwrap();
            assert!(problem.flops() <= MOST_FLOPS && elements(problem) <= MOST_ELEMENTS);
            assert!(!problem.band.is_causal() || problem.seq_q <= problem.seq_kv);
        }
    }
}
