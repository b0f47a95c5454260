//! Plans of the native kernels: how a problem is computed on the CPU, and the default choice.

use problem::{DType, Problem};
use serde::{Deserialize, Serialize};

use crate::computed::computed_type;
use crate::dims;
use crate::threads::threads;
use crate::{CpuError, Isa};

/// How a problem is computed. A plan is pure data, comparable and serialisable, so that a search can range
/// over plans. Every field is a gene: it changes how the result is computed, and the result itself only
/// within the rounding of f32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Written")]
pub struct CpuPlan {
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Maximum number of threads that share the work; 1 computes on the calling thread.
    pub threads: usize,
    /// Query rows of one task. A task goes through all keys with these rows, which share each widened block
    /// of K and V.
    pub block_q: usize,
    /// Keys per step of the online softmax.
    pub block_kv: usize,
    /// The elements that the lanes of a vector hold.
    pub lanes: Lanes,
    /// Number of vectors side by side in the register tile: along the query rows of a panel, or along the
    /// head dimension.
    pub vectors: usize,
    /// Rows of the register tile, which are unrolled: keys or columns of V if lanes are query rows, otherwise
    /// query rows.
    pub tile_rows: usize,
    /// The heads whose query rows a task may combine.
    pub rows: Rows,
    /// The order in which tasks are started.
    pub order: Order,
    /// Number of parts into which the keys are split. Each part is a separate task, and the partial results
    /// are merged at the end.
    pub splits: usize,
}

/// The elements that the lanes of a vector hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lanes {
    /// Query rows. No horizontal sums are needed, but lanes without a row are idle.
    Queries,
    /// Elements of one row. No lane is idle with a single query row, but logits need horizontal sums.
    Dims,
}

/// The heads whose query rows a task may combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rows {
    /// Rows of one query head.
    Head,
    /// Rows of all query heads that share a key head, concatenated.
    Group,
}

/// The order in which tasks are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// The last rows of every head first, then those before them. Under a causal mask the longest tasks come
    /// first, so that the threads end at about the same time.
    Longest,
    /// All rows of one head, the last rows first, then those of the next head: the keys and values of the
    /// head are still in the cache.
    Heads,
}

/// A plan in its text form. Fields that were added later may be missing, and then mean the behaviour before
/// they were added.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    isa: Isa,
    threads: usize,
    block_q: usize,
    block_kv: usize,
    lanes: Option<Lanes>,
    vectors: Option<usize>,
    tile_rows: Option<usize>,
    rows: Option<Rows>,
    order: Option<Order>,
    splits: Option<usize>,
}

impl From<Written> for CpuPlan {
    fn from(written: Written) -> CpuPlan {
        let Written { isa, threads, block_q, block_kv, lanes, vectors, tile_rows, rows, order, splits } =
            written;
        let vectors = vectors.unwrap_or(isa.tile().0);
        CpuPlan {
            isa,
            threads,
            block_q,
            block_kv,
            lanes: lanes.unwrap_or(Lanes::Queries),
            vectors,
            tile_rows: tile_rows.unwrap_or(isa.tile_rows(vectors)),
            rows: rows.unwrap_or(Rows::Head),
            order: order.unwrap_or(Order::Longest),
            splits: splits.unwrap_or(1),
        }
    }
}

/// Default number of keys in a step, if no smaller number is better. From 128 to 512, the time changes by
/// less than 2 %.
const BLOCK_KV: usize = 128;
/// Default number of keys in a step with AMX, whose steps are divided into chunks.
const AMX_BLOCK_KV: usize = 256;
/// Default number of keys in a step that reads elements of keys and values where they lie.
const IN_PLACE_BLOCK_KV: usize = 64;
/// Maximum size in bytes of a panel's weights in f32 that leaves room for Q and O in the L1 cache.
const WEIGHT_BYTES: usize = 1 << 14;
/// Maximum of `block_q` of an invariant plan: the rows share each widened block of K and V.
const MOST_INVARIANT_ROWS: usize = 128;
/// Maximum of `block_q` and `block_kv`. It limits a thread's scratch memory to some megabytes.
const MAX_BLOCK: usize = 4096;
/// Maximum number of threads: more than any machine has, and few enough that starting them does not dominate.
pub const MAX_THREADS: usize = 1024;
/// Maximum number of parts of the keys, because the partial outputs of all parts are stored.
const MAX_SPLITS: usize = 64;

impl CpuPlan {
    /// A good plan for `problem` on this machine, with the number of threads of a call without an executor
    /// ([`threads`]).
    pub fn for_problem(problem: &Problem) -> CpuPlan {
        CpuPlan::for_threads(problem, threads())
    }

    /// A good plan for `problem` on this machine, on at most `threads` threads.
    pub fn for_threads(problem: &Problem, threads: usize) -> CpuPlan {
        let problem = &*problem.canonical();
        let isas = Isa::available();
        let isa = isas.into_iter().find(|isa| isa.is_for(problem));
        CpuPlan::with_isa_and_threads(problem, isa.unwrap_or(Isa::Portable), threads)
    }

    /// A good plan for `problem` with the instructions of `isa`, with the number of threads of a call without
    /// an executor ([`threads`]).
    pub fn with_isa(problem: &Problem, isa: Isa) -> CpuPlan {
        CpuPlan::with_isa_and_threads(problem, isa, threads())
    }

    /// The plan with the lowest cost ([`CpuPlan::cost`]) among several ways of dividing the work.
    fn with_isa_and_threads(problem: &Problem, isa: Isa, threads: usize) -> CpuPlan {
        let problem = &*problem.canonical();
        let threads = threads.clamp(1, MAX_THREADS);
        if problem.pass.invariant().is_some() {
            return CpuPlan::invariant(problem, isa, threads);
        }
        let cheapest = |threads| {
            let costs = CpuPlan::cuts(problem, isa, threads)
                .into_iter()
                .map(|plan| (plan.cost(problem).cycles, plan));
            costs.min_by(|a, b| a.0.total_cmp(&b.0))
        };
        let best = cheapest(threads).map(|(cycles, plan)| match cheapest(1) {
            Some((alone, plan)) if alone < cycles => plan,
            _ => plan,
        });
        best.unwrap_or(CpuPlan::widest(isa, threads, isa.panel_rows(), BLOCK_KV))
    }

    /// The plan of an [invariant](problem::Invariant) problem. The order of a row's sums depends on the head
    /// dims, the element types and the instruction set alone: a row's sums are in f32, over lanes along the
    /// head dim and over blocks of keys that begin at multiples of `block_kv`, and the keys are not split.
    /// How rows are divided into tasks changes no bit of a row.
    fn invariant(problem: &Problem, isa: Isa, threads: usize) -> CpuPlan {
        let isa = isa.wide();
        let rows = CpuPlan::rows_for(problem, isa);
        let together = if rows == Rows::Group { problem.group_size() } else { 1 };
        let tasks_of_head = (2 * threads).div_ceil((problem.batch * problem.heads_q / together).max(1));
        let block_q = (problem.seq_q * together).div_ceil(tasks_of_head).next_multiple_of(dims::PANEL_ROWS);
        let block_q = block_q.clamp(dims::PANEL_ROWS, MOST_INVARIANT_ROWS);
        let block_kv = CpuPlan::dims_block_kv(problem);
        CpuPlan { lanes: Lanes::Dims, rows, ..CpuPlan::widest(isa, threads, block_q, block_kv) }
    }

    /// The fields on which the order of a row's sums depends.
    fn sums(&self, problem: &Problem) -> (Isa, Lanes, usize, usize) {
        let CpuPlan { isa, lanes, block_kv, splits, .. } = self.canonical(problem);
        (isa, lanes, block_kv, splits)
    }

    /// Several ways to divide a problem into tasks for this number of threads.
    fn cuts(problem: &Problem, isa: Isa, threads: usize) -> Vec<CpuPlan> {
        let rows = CpuPlan::rows_for(problem, isa);
        let together = if rows == Rows::Group { problem.group_size() } else { 1 };
        // A problem without rows is divided like one with a single row.
        let all = (problem.seq_q * together).max(1);
        let (panel, lanes) = (isa.panel_rows(), isa.lanes());
        // Converting K and V to integers or terms costs more than widening them, and AMX's panels are half as
        // wide.
        let (most, block_kv) = match isa {
            Isa::Amx | Isa::PortableTerms => (64, AMX_BLOCK_KV),
            Isa::Avx512Vnni | Isa::PortableIntegers => (16, BLOCK_KV),
            _ => (8, BLOCK_KV.min(WEIGHT_BYTES / size_of::<f32>() / panel)),
        };
        // Equal blocks of whole vectors: from the smallest number of blocks that tasks can hold to the number
        // that keeps every thread busy.
        let fewest = all.div_ceil(most * panel);
        let blocks = fewest..=all.div_ceil(lanes).min(fewest + 8 * threads);
        let cut = |blocks| {
            let vectors = all.div_ceil(blocks).div_ceil(lanes);
            let plan = CpuPlan::widest(isa, threads, vectors * lanes, block_kv);
            // Panels of equal width: a single remaining vector would need more loads than products.
            let vectors = vectors.div_ceil(vectors.div_ceil(plan.vectors));
            CpuPlan { vectors, tile_rows: isa.tile_rows(vectors), ..plan }
        };
        let mut tiles: Vec<CpuPlan> = blocks.map(cut).collect();
        tiles.dedup();
        if all <= lanes {
            let isa = isa.wide();
            let in_place = dims::is_in_place(problem, isa);
            let block_kv = if in_place { IN_PLACE_BLOCK_KV } else { CpuPlan::dims_block_kv(problem) };
            tiles.push(CpuPlan { lanes: Lanes::Dims, ..CpuPlan::widest(isa, threads, all, block_kv) });
        }
        // One sequence may be much longer than the others.
        let busy = problem.lengths.is_even() && problem.batch * problem.heads_q / together >= 2 * threads;
        let splits = (0..=5).map(|i| 1 << i).take_while(|&splits| {
            splits == 1 || (!busy && splits <= 4 * threads && problem.seq_kv >= 2 * splits * BLOCK_KV)
        });
        splits.flat_map(|splits| tiles.iter().map(move |plan| CpuPlan { rows, splits, ..*plan })).collect()
    }

    /// Number of keys in a step if the lanes are along the head dim: two blocks must fit in the L1 cache,
    /// together with the widened copies of 16-bit inputs.
    fn dims_block_kv(problem: &Problem) -> usize {
        let bytes = if computed_type(problem) == DType::F32 { 1 << 16 } else { 1 << 14 };
        let row = size_of::<f32>() * (problem.head_dim + problem.head_dim_v);
        // The head dimension may be 0.
        (bytes / row.max(1) / 16 * 16).clamp(16, BLOCK_KV)
    }

    /// The plan with these block sizes and the widest register tile of `isa`, with query rows of one head as
    /// lanes.
    pub fn widest(isa: Isa, threads: usize, block_q: usize, block_kv: usize) -> CpuPlan {
        let (vectors, tile_rows) = isa.tile();
        let (lanes, rows, order) = (Lanes::Queries, Rows::Head, Order::Longest);
        CpuPlan { isa, threads, block_q, block_kv, lanes, vectors, tile_rows, rows, order, splits: 1 }
    }

    /// Short sequences of the query heads that share a key head are concatenated, so that decoding fills the
    /// lanes with heads.
    fn rows_for(problem: &Problem, isa: Isa) -> Rows {
        if problem.seq_q < isa.panel_rows() { Rows::Group } else { Rows::Head }
    }

    /// Query rows of a panel. They go through each block of keys together.
    pub fn panel_rows(&self) -> usize {
        match self.lanes {
            Lanes::Queries => self.vectors * self.isa.lanes(),
            Lanes::Dims => dims::PANEL_ROWS,
        }
    }

    /// The canonical form of the plan for `problem`, equal for all plans that run the same code: each value
    /// is reduced to the largest one that has an effect, and each gene without effect has its value of
    /// [`CpuPlan::widest`].
    pub fn canonical(&self, problem: &Problem) -> CpuPlan {
        let p = &*problem.canonical();
        let mut plan = *self;
        if !plan.isa.is_for(p) {
            plan.isa = plan.isa.wide();
        }
        if p.group_size() == 1 {
            plan.rows = Rows::Head;
        }
        let together = if plan.rows == Rows::Group { p.group_size() } else { 1 };
        plan.block_q = plan.block_q.min(p.seq_q * together);
        plan.block_kv = plan.block_kv.min(p.seq_kv.max(1));
        let blocks = p.seq_kv.div_ceil(plan.block_kv).max(1);
        plan.splits = blocks.div_ceil(blocks.div_ceil(plan.splits));
        let heads = p.batch * p.heads_q / together;
        let row_blocks = (p.seq_q * together).div_ceil(plan.block_q);
        if heads == 1 || row_blocks == 1 {
            plan.order = Order::Longest;
        }
        plan.threads = plan.threads.min(heads * row_blocks * plan.splits);
        plan
    }

    /// Checks that this plan can compute `problem` on this machine.
    ///
    /// # Errors
    /// [`CpuError::Plan`] or [`CpuError::Isa`] with the field, its value and what is accepted, or the
    /// problem's own error.
    pub fn check(&self, problem: &Problem) -> Result<(), CpuError> {
        self.check_fields(problem)?;
        if !self.isa.is_available() {
            let names: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
            return Err(CpuError::Isa { isa: self.isa, available: names.join(", ") });
        }
        Ok(())
    }

    /// Checks that this plan can compute `problem` on a processor that supports its instruction set.
    pub(crate) fn check_fields(&self, problem: &Problem) -> Result<(), CpuError> {
        problem.check()?;
        let fields = [
            ("threads", self.threads, MAX_THREADS),
            ("block_q", self.block_q, MAX_BLOCK),
            ("block_kv", self.block_kv, MAX_BLOCK),
            ("vectors", self.vectors, self.isa.tile().0),
            ("tile_rows", self.tile_rows, self.isa.tile_rows(self.vectors)),
            ("splits", self.splits, MAX_SPLITS),
        ];
        for (field, value, most) in fields {
            if value == 0 || value > most {
                return Err(CpuError::Plan { field, value, most });
            }
        }
        if self.lanes == Lanes::Dims && !self.isa.has_dims() {
            return Err(CpuError::QueryLanes(self.isa));
        }
        if let Some(invariant) = problem.pass.invariant() {
            let kept = CpuPlan::invariant(problem, self.isa, self.threads);
            if self.sums(problem) != kept.sums(problem) {
                let CpuPlan { isa, block_kv, .. } = kept;
                return Err(CpuError::Invariant { invariant, isa, block_kv });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use problem::{Band, Layout};

    use super::*;

    fn keys(p: Problem, keys: usize) -> Problem {
        p.with_seq_kv(keys, Layout::Bhsd)
    }

    #[test]
    fn few_rows_have_lanes_along_the_head_dimension() {
        let isa = Isa::Avx512;
        let of =
            |rows: usize, dtype| CpuPlan::with_isa(&keys(Problem::new(1, 8, rows, 64, dtype), 2048), isa);
        for dtype in DType::ALL {
            assert_eq!(
                (of(1, dtype).lanes, of(8, dtype).lanes, of(64, dtype).lanes),
                (Lanes::Dims, Lanes::Dims, Lanes::Queries)
            );
        }
        // Keys and values in place; widened blocks of K and V: 16 kB each for 16-bit inputs.
        assert_eq!((of(1, DType::F32).block_kv, of(1, DType::Bf16).block_kv), (64, 64));
        let narrow = keys(Problem::new(1, 8, 1, 60, DType::Bf16), 2048);
        assert_eq!(CpuPlan::with_isa(&narrow, isa).block_kv, 32);
        let integers = CpuPlan::with_isa(&keys(Problem::new(1, 8, 1, 64, DType::F16), 2048), Isa::Avx512Vnni);
        assert_eq!((integers.isa, integers.lanes), (Isa::Avx512, Lanes::Dims));
    }

    #[test]
    fn heads_without_dimensions_or_rows_have_plans() {
        let problems = [(1, 0, DType::F32), (64, 0, DType::F16), (0, 8, DType::F32), (0, 0, DType::Bf16)];
        for problem in problems.map(|(rows, dim, dtype)| Problem::new(1, 2, rows, dim, dtype)) {
            // A problem without key heads is invalid; `attention` reports this.
            for problem in [Problem { heads_kv: 0, ..problem.clone() }, problem] {
                let plan = CpuPlan::for_problem(&problem);
                assert!(plan.block_q >= 1 && plan.block_kv >= 1, "{plan:?}");
            }
        }
    }

    #[test]
    fn threads_have_equal_shares_and_enough_to_do() {
        for threads in [1, 2, 3, 8] {
            let plan = |p: &Problem| CpuPlan::with_isa_and_threads(p, Isa::Avx512, threads);
            // The problem is too small to wake another thread.
            assert_eq!(plan(&Problem::new(1, 4, 32, 32, DType::F32)).threads, 1);
            // The rows of one head are divided into as many equal parts as there are threads, or a multiple.
            let p = keys(Problem::new(1, 1, 96 * threads, 64, DType::F32), 4096);
            let tasks = plan(&p).cost(&p).tasks;
            assert!(tasks.is_multiple_of(threads), "{tasks} tasks, {threads} threads");
            // With a single row, the keys are divided.
            let one = keys(Problem::new(1, 1, 1, 128, DType::F32), 1 << 16);
            assert!(plan(&one).splits >= threads && plan(&one).threads == threads, "{:?}", plan(&one));
        }
    }

    #[test]
    fn canonical_plans_are_those_without_idle_values() {
        let p = Problem::new(1, 1, 40, 64, DType::F32).with_band(Band::CAUSAL);
        let plan = CpuPlan::widest(Isa::Avx512Vnni, 8, 512, 128);
        let same = CpuPlan { rows: Rows::Group, order: Order::Heads, splits: 64, ..plan };
        let canonical = CpuPlan::widest(Isa::Avx512, 1, 40, 40);
        assert_eq!((plan.canonical(&p), same.canonical(&p)), (canonical, canonical));
        assert_eq!(canonical.canonical(&p), canonical);
        let other = CpuPlan { block_q: 16, ..plan };
        assert_eq!(other.canonical(&p), CpuPlan { isa: Isa::Avx512, threads: 3, block_kv: 40, ..other });
    }
}
