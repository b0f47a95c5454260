//! The cost of a plan, counted from the work that it executes. The default plan and forecasts use this cost.
//!
//! The unit is a cycle of one core. The rates are those of processors with two vector FMAs and two vector
//! loads per cycle. `bench` measures how long a cycle takes and how far a machine deviates from these rates;
//! the choice of a plan needs neither.

use std::borrow::Cow;

use problem::{Band, DType, Lengths, Problem, SideLengths};

use crate::computed::computed_type;
use crate::programs::operations_per_score;
use crate::{CpuPlan, Isa, Lanes, Order, Rows};

/// Cycles to load, convert and store a vector of 16-bit numbers: to f32, to integers with their bounds, to
/// terms with their bounds.
const WIDEN: f64 = 2.0;
const MAKE_INTEGERS: f64 = 6.0;
const MAKE_TERMS: f64 = 3.0;
/// Cycles of a product of two tiles, including its loads and stores.
const TILE_PRODUCT: f64 = 26.0;
/// Cycles of a vector of weights: load, FMA, nine instructions of the exponential, sum, maximum, store.
const WEIGH: f64 = 6.0;
/// Cycles of an operation of a program on a vector of scores: two loads, the operation, a store.
const OPERATE: f64 = 1.5;
/// Cycles of a vector of O per block of keys: load, add, store.
const ADD_OUT: f64 = 2.0;
/// Cycles of a horizontal sum. A vector's worth of sums is computed at a time.
const SUM: f64 = 2.0;
/// Latency of an FMA in cycles.
const LATENCY: f64 = 4.0;
/// Overhead in cycles of a task, of a panel's step and of a call.
const TASK: f64 = 1200.0;
const STEP: f64 = 60.0;
/// The fraction of a task by which the last thread ends late, because other programs use the machine too.
const JITTER: f64 = 0.05;
const CALL: f64 = 4000.0;
/// Cycles to wake another thread and to notice that it has ended: about 8 µs.
const WAKE: f64 = 24_000.0;
/// Bytes of K and V per cycle that a core loads from its own cache, and from beyond it.
const NEAR: f64 = 40.0;
const FAR: f64 = 10.0;
/// Size of a core's own cache in bytes.
const CACHE: f64 = 1.5e6;

/// The tasks and the cost of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    pub tasks: usize,
    /// Cycles of the average task.
    pub task: f64,
    /// Cycles from the call to its return.
    pub cycles: f64,
    /// The work that takes most of the cycles.
    pub bound: Bound,
}

/// The work that takes most cycles of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The two matrix products.
    Fma,
    /// Weights, sums and conversions.
    Vectors,
    /// Loading keys and values.
    Memory,
    /// Starting and ending calls, threads and tasks.
    Threads,
}

impl Bound {
    /// The name in one word.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Fma => "fma",
            Bound::Vectors => "vectors",
            Bound::Memory => "memory",
            Bound::Threads => "threads",
        }
    }
}

impl CpuPlan {
    /// The predicted cost of this plan for a problem.
    pub fn cost(&self, problem: &Problem) -> Cost {
        let whole = &*problem.canonical();
        let p = &*mean_sequence(whole);
        let together = if self.rows == Rows::Group { p.group_size() } else { 1 };
        let rows = p.seq_q * together;
        let blocks = rows.div_ceil(self.block_q);
        let mut parts = self.splits.min(whole.seq_kv.div_ceil(self.block_kv)).max(1);
        // Keys of the longest task, relative to those of the average one.
        let mut longest = 1.0;
        if !whole.lengths.is_even() {
            let part_keys = whole.seq_kv.div_ceil(parts).max(1);
            parts = p.seq_kv.div_ceil(part_keys).max(1);
            longest = (part_keys * parts) as f64 / p.seq_kv.max(1) as f64;
        }
        let tasks = p.batch * p.heads_q / together * blocks * parts;
        // The keys of the average task.
        let seen = mean_keys(p, self.block_q.min(p.seq_q).min(self.panel_rows())) / parts as f64;
        let count = Count { rows: rows as f64 / blocks as f64, keys: seen };
        let (fma, rest) = match self.lanes {
            Lanes::Queries => self.by_queries(p, count, self.block_q.min(rows)),
            Lanes::Dims => self.by_dims(p, count),
        };
        let (near, far) = self.transfer(p, seen);
        let task = (fma + rest + near).max(far) + TASK;
        let threads = self.threads.min(tasks).max(1) as f64;
        let wake = if threads > 1.0 { WAKE } else { 0.0 };
        let join =
            if parts > 1 { (p.batch * p.heads_q * p.seq_q * parts * p.head_dim_v) as f64 / 4.0 } else { 0.0 };
        let span = self.span(whole, tasks, [task, longest * task], threads);
        let cycles = CALL + wake + join + span;
        let bound = match () {
            () if 2.0 * span < cycles || 2.0 * TASK > task => Bound::Threads,
            () if far > fma + rest || near > fma.max(rest) => Bound::Memory,
            () if fma > rest => Bound::Fma,
            () => Bound::Vectors,
        };
        Cost { tasks, task, cycles, bound }
    }

    /// Cycles until the last task is done. `task` is the average one.
    fn span(&self, p: &Problem, tasks: usize, [task, longest]: [f64; 2], threads: f64) -> f64 {
        let even = tasks as f64 * task / threads;
        let span = match p.band {
            _ if !p.lengths.is_even() && threads > 1.0 => {
                if self.order == Order::Longest {
                    even.max(longest)
                } else {
                    even + longest
                }
            }
            Band::FULL => (tasks as f64 / threads).ceil() * task,
            _ if threads == 1.0 => even,
            // If the longest tasks come first, short tasks fill the gaps. Otherwise a long task may come
            // last.
            _ if self.order == Order::Longest => even.max(2.0 * task),
            _ => even + task,
        };
        span + JITTER * task
    }

    /// Cycles of FMAs and of everything else, with query rows as lanes. The largest task has `most` rows.
    fn by_queries(&self, p: &Problem, count: Count, most: usize) -> (f64, f64) {
        let (lanes, panel) = (self.isa.lanes(), self.panel_rows());
        let vectors =
            (most / panel * self.vectors + (most % panel).div_ceil(lanes)) as f64 * count.rows / most as f64;
        let dims = (p.head_dim + p.head_dim_v) as f64;
        let own = self.isa.is_for(p);
        let fma = match self.isa {
            Isa::Amx if own => vectors * count.keys * tile_products(p) * TILE_PRODUCT,
            _ => {
                let rate = if self.isa == Isa::Avx512Vnni && own { 0.5 } else { 1.0 };
                let wide = self.vectors.min(most.div_ceil(lanes));
                vectors * count.keys * dims * rate * fma_cycles(self.tile_rows, wide)
            }
        };
        let steps = count.keys / self.block_kv as f64;
        let convert = match (self.isa, computed_type(p)) {
            (_, DType::F32) => 0.0,
            (Isa::Amx, dtype) if own => MAKE_TERMS * terms(dtype),
            (Isa::Avx512Vnni, _) if own => MAKE_INTEGERS,
            _ => WIDEN,
        };
        let panels = (most.div_ceil(panel)) as f64;
        let operations = OPERATE * operations_per_score(p) as f64;
        let rest = vectors * count.keys * (WEIGH + operations)
            + vectors * steps * p.head_dim_v as f64 * ADD_OUT
            + panels * steps * STEP
            + count.keys * dims / lanes as f64 * convert;
        (fma, rest)
    }

    /// Cycles of FMAs and of everything else, with the lanes along the head dim.
    fn by_dims(&self, p: &Problem, count: Count) -> (f64, f64) {
        let lanes = self.isa.lanes();
        let [dim, dim_v] = [p.head_dim, p.head_dim_v].map(|dim| dim.div_ceil(lanes));
        let panel = (count.rows.ceil() as usize).min(self.panel_rows());
        let products = count.rows * count.keys;
        let of_logits = match panel {
            1 => fma_cycles(16, 1),
            _ => fma_cycles(4, 4),
        };
        let fma = products
            * (dim as f64 * of_logits
                + dim_v as f64 * fma_cycles(self.tile_rows.min(panel), self.vectors.min(dim_v)));
        let steps = count.keys / self.block_kv as f64;
        let convert = if computed_type(p) == DType::F32 { 0.0 } else { WIDEN };
        let operations = OPERATE * operations_per_score(p) as f64;
        let rest = products * SUM
            + products / lanes as f64 * (WEIGH + operations)
            + count.rows * steps * (STEP + dim_v as f64 * ADD_OUT)
            + count.keys * (dim + dim_v) as f64 * convert;
        (fma, rest)
    }

    /// Cycles to load a task's keys and values: from the core's own cache to registers, for which the core
    /// waits, and from beyond it, which overlaps with computation.
    fn transfer(&self, p: &Problem, keys: f64) -> (f64, f64) {
        let element = if computed_type(p) == DType::F32 { 4.0 } else { 2.0 };
        let row = (p.head_dim + p.head_dim_v) as f64 * element;
        let heads = (p.batch * p.heads_kv) as f64 * p.seq_kv as f64 * row;
        let far = if heads < CACHE * self.threads as f64 { 0.0 } else { keys * row / FAR };
        (keys * row / NEAR, far)
    }
}

/// A problem of equal sequences, with the mean length of those of `problem`. Used lengths are not part of a
/// problem, so they count as the maximum.
fn mean_sequence(problem: &Problem) -> Cow<'_, Problem> {
    let Lengths { q, kv, .. } = problem.lengths;
    if problem.lengths.is_even() {
        return Cow::Borrowed(problem);
    }
    let mean = |side: SideLengths, longest: usize| {
        side.packed.map_or(longest, |rows| rows.div_ceil(problem.batch.max(1)).min(longest))
    };
    let (seq_q, seq_kv) = (mean(q, problem.seq_q).max(1), mean(kv, problem.seq_kv));
    Cow::Owned(Problem { seq_q, seq_kv, lengths: Lengths::EVEN, ..problem.clone() })
}

/// Rows of a task, and keys that the task reads.
#[derive(Clone, Copy)]
struct Count {
    rows: f64,
    keys: f64,
}

/// Average number of keys that a panel of `rows` rows reads.
fn mean_keys(p: &Problem, rows: usize) -> f64 {
    let (queries, keys) = (p.seq_q as f64, p.seq_kv as f64);
    let mean = match p.band {
        Band::FULL => return keys,
        band if !band.is_causal() => mean_of_samples(p, band),
        // The first row sees one key, and each row sees one more key than the previous row, until all keys
        // are visible.
        Band::CAUSAL_TOP_LEFT if queries > keys => keys - keys * keys / (2.0 * queries),
        Band::CAUSAL_TOP_LEFT => queries / 2.0,
        // The last row sees all keys, and each row sees one key less than the next row.
        _ if keys > queries => keys - queries / 2.0,
        _ => keys * keys / (2.0 * queries),
    };
    // A panel reads all keys up to those of its last row.
    (mean + rows as f64 / 2.0).min(keys)
}

/// Average number of keys that a row sees, from evenly spaced rows.
fn mean_of_samples(p: &Problem, band: Band) -> f64 {
    const SAMPLES: usize = 64;
    let count = p.seq_q.clamp(1, SAMPLES);
    let rows = (0..count).map(|i| i * p.seq_q / count);
    rows.map(|row| band.keys(row, p.seq_q, p.seq_kv).len() as f64).sum::<f64>() / count as f64
}

/// Number of bf16 terms of a number.
fn terms(dtype: DType) -> f64 {
    if dtype == DType::F16 { 2.0 } else { 1.0 }
}

/// Products of two tiles per vector of lanes and key: 16 keys × 32 dims for the logits, 16 dims × 32 keys for
/// the values.
fn tile_products(p: &Problem) -> f64 {
    let (logits, values) = if computed_type(p) == DType::F16 { (4.0, 3.0) } else { (1.0, 1.0) };
    let [dim, dim_v] = [p.head_dim.div_ceil(32), p.head_dim_v.div_ceil(16)].map(|tiles| tiles as f64);
    dim * logits / 16.0 + dim_v * values / 32.0
}

/// Cycles of an FMA in a register tile: two FMAs per cycle, unless loads or latency limit the rate.
fn fma_cycles(rows: usize, vectors: usize) -> f64 {
    let (rows, vectors) = (rows.max(1) as f64, vectors.max(1) as f64);
    0.5f64.max((rows + vectors) / (2.0 * rows * vectors)).max(LATENCY / (rows * vectors))
}

#[cfg(test)]
mod tests {
    use problem::Layout;

    use super::*;

    fn cycles(plan: CpuPlan, p: &Problem) -> f64 {
        plan.cost(p).cycles
    }

    /// Pairs of plans on one thread, in the order in which the CPU notes measured them.
    #[test]
    fn plans_are_ranked_as_they_were_measured() {
        let plan = |block_q, block_kv| CpuPlan::widest(Isa::Avx512, 1, block_q, block_kv);
        let dims = |block_q, block_kv| CpuPlan { lanes: Lanes::Dims, ..plan(block_q, block_kv) };
        let keys = |rows: usize| Problem::new(1, 4, rows, 64, DType::F32).with_seq_kv(2048, Layout::Bhsd);
        for rows in [1, 4, 8] {
            assert!(
                1.3 * cycles(dims(64, 128), &keys(rows)) < cycles(plan(64, 128), &keys(rows)),
                "{rows} rows"
            );
        }
        assert!(cycles(dims(64, 128), &keys(16)) > cycles(plan(64, 128), &keys(16)));
        // Larger panels share blocks of K and V among more rows.
        let long = Problem::new(1, 8, 2048, 64, DType::F16);
        assert!(cycles(plan(512, 128), &long) < cycles(plan(64, 128), &long));
        let integers = CpuPlan { isa: Isa::Avx512Vnni, ..plan(512, 128) };
        assert!(1.3 * cycles(integers, &long) < cycles(plan(512, 128), &long));
        assert_eq!(integers.cost(&long).bound, Bound::Fma);
        // 48 + 48 + 64 rows on two threads, or 80 + 80.
        let two = |block_q| CpuPlan { threads: 2, ..plan(block_q, 128) };
        let odd = Problem::new(1, 1, 160, 64, DType::F32).with_seq_kv(4096, Layout::Bhsd);
        assert!(cycles(two(80), &odd) < cycles(two(64), &odd));
        let causal = Problem::new(1, 1, 1024, 64, DType::F32).with_band(Band::CAUSAL);
        assert!(
            cycles(plan(64, 128), &causal)
                < 0.7 * cycles(plan(64, 128), &causal.clone().with_band(Band::FULL))
        );
    }

    /// Compares the formula with a count row by row.
    #[test]
    fn causal_rows_see_so_many_keys_on_average() {
        for mask in Band::NAMED {
            for (rows, keys) in [(100, 100), (300, 100), (100, 300), (1, 50), (50, 1)] {
                let p =
                    Problem::new(1, 1, rows, 8, DType::F32).with_seq_kv(keys, Layout::Bhsd).with_band(mask);
                let seen: usize = (0..rows).map(|row| mask.keys(row, rows, keys).len()).sum();
                let (mean, exact) = (mean_keys(&p, 1), seen as f64 / rows as f64);
                assert!((mean - exact).abs() <= 0.5, "{mask} {rows} {keys}: {mean}, counted {exact}");
            }
        }
    }

    #[test]
    fn every_problem_has_a_finite_cost() {
        for (rows, keys) in [(1, 0), (1, 1), (7, 3), (300, 2), (2, 3000)] {
            for mask in Band::NAMED {
                let p =
                    Problem::new(3, 4, rows, 40, DType::Bf16).with_seq_kv(keys, Layout::Bhsd).with_band(mask);
                for isa in Isa::ALL {
                    let cost = CpuPlan::with_isa(&p, isa).cost(&p);
                    assert!(cost.cycles.is_finite() && cost.cycles > 0.0 && cost.tasks > 0, "{p:?} {cost:?}");
                }
            }
        }
    }
}
