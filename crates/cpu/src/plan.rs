use problem::{DType, Problem};
use serde::{Deserialize, Serialize};

use crate::computed::computed_type;
use crate::dims;
use crate::threads::threads;
use crate::{CpuError, Isa};

/// How to compute: pure data, comparable and serialisable, so that a search can range over it. Every field is
/// a gene: it changes what is executed, and what is computed only within the rounding of f32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Written")]
pub struct CpuPlan {
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Threads that share the work, at most; 1 computes on the calling thread.
    pub threads: usize,
    /// Query rows that one task carries through all keys; they share each widened block of K and V.
    pub block_q: usize,
    /// Keys per step of the online softmax.
    pub block_kv: usize,
    /// What the lanes of a vector are.
    pub lanes: Lanes,
    /// Vectors side by side in the register tile: along the query rows of a panel, or along the head
    /// dimension.
    pub vectors: usize,
    /// Rows of the register tile, which are unrolled: keys or columns of V, or query rows.
    pub tile_rows: usize,
    /// Whose query rows a task may hold.
    pub rows: Rows,
    /// Which tasks come first.
    pub order: Order,
    /// Parts that the keys are cut into, each a task of its own; what they find is put together at the end.
    pub splits: usize,
}

/// What the lanes of a vector are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lanes {
    /// Query rows: no horizontal sums, but lanes without a row idle.
    Queries,
    /// Numbers of one row: nothing idles with a single query row, but logits are horizontal sums.
    Dims,
}

/// Whose query rows a task may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rows {
    /// One query head's.
    Head,
    /// Those of all query heads that share a key head, laid end to end.
    Group,
}

/// Which tasks come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// The last rows of every head, then those before them: under a causal mask the longest tasks, so that
    /// threads end together.
    Longest,
    /// All rows of a head, the last first, then the next head's: its keys and values are still in the cache.
    Heads,
}

/// A plan as text has it. Fields that came later may be missing, and mean what was computed before they came.
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

/// Keys of a step by default, where nothing smaller fits better; from 128 to 512 nothing changes by more than
/// 2 %.
const BLOCK_KV: usize = 128;
/// As above, with AMX, whose steps have chunks of their own.
const AMX_BLOCK_KV: usize = 256;
/// Bytes of a panel's weights in f32 that leave room for Q and O in the first cache.
const WEIGHT_BYTES: usize = 1 << 14;
/// Largest `block_q` and `block_kv`: keeps a thread's scratch memory in megabytes.
const MAX_BLOCK: usize = 4096;
/// Largest number of threads: far beyond any machine, small enough that starting them is not the work.
pub(crate) const MAX_THREADS: usize = 1024;
/// Most parts of the keys: their unfinished outputs are kept.
const MAX_SPLITS: usize = 64;

impl CpuPlan {
    /// A good plan for `problem` on this machine, for the threads of a call that names no executor
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

    /// A good plan for `problem` with the instructions of `isa`, for the threads of a call that names no
    /// executor ([`threads`]).
    pub fn with_isa(problem: &Problem, isa: Isa) -> CpuPlan {
        CpuPlan::with_isa_and_threads(problem, isa, threads())
    }

    /// Of a few plans that differ in how the work is cut, the one that costs least ([`CpuPlan::cost`]).
    fn with_isa_and_threads(problem: &Problem, isa: Isa, threads: usize) -> CpuPlan {
        let problem = &*problem.canonical();
        let threads = threads.clamp(1, MAX_THREADS);
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

    /// Ways to cut a problem into tasks for so many threads.
    fn cuts(problem: &Problem, isa: Isa, threads: usize) -> Vec<CpuPlan> {
        let rows = CpuPlan::rows_for(problem, isa);
        let together = if rows == Rows::Group { problem.group_size() } else { 1 };
        // No rows at all are cut as one would be.
        let all = (problem.seq_q * together).max(1);
        let (panel, lanes) = (isa.panel_rows(), isa.lanes());
        // Making integers or terms of K and V is dearer than widening them, and AMX's panels are half as
        // wide.
        let (most, block_kv) = match isa {
            Isa::Amx | Isa::PortableTerms => (64, AMX_BLOCK_KV),
            Isa::Avx512Vnni | Isa::PortableIntegers => (16, BLOCK_KV),
            _ => (8, BLOCK_KV.min(WEIGHT_BYTES / size_of::<f32>() / panel)),
        };
        // Equal blocks of whole vectors, from as few as fit in a task to as many as keep every thread busy.
        let fewest = all.div_ceil(most * panel);
        let blocks = fewest..=all.div_ceil(lanes).min(fewest + 8 * threads);
        let cut = |blocks| {
            let vectors = all.div_ceil(blocks).div_ceil(lanes);
            let plan = CpuPlan::widest(isa, threads, vectors * lanes, block_kv);
            // Panels of equal width: one vector that is left over alone costs more loads than products.
            let vectors = vectors.div_ceil(vectors.div_ceil(plan.vectors));
            CpuPlan { vectors, tile_rows: isa.tile_rows(vectors), ..plan }
        };
        let mut tiles: Vec<CpuPlan> = blocks.map(cut).collect();
        tiles.dedup();
        if all <= lanes {
            let isa = isa.wide();
            let block_kv = CpuPlan::dims_block_kv(problem);
            tiles.push(CpuPlan { lanes: Lanes::Dims, ..CpuPlan::widest(isa, threads, all, block_kv) });
        }
        // One sequence may be much longer than the others.
        let busy = problem.lengths.is_even() && problem.batch * problem.heads_q / together >= 2 * threads;
        let splits = (0..=5).map(|i| 1 << i).take_while(|&splits| {
            splits == 1 || (!busy && splits <= 4 * threads && problem.seq_kv >= 2 * splits * BLOCK_KV)
        });
        splits.flat_map(|splits| tiles.iter().map(move |plan| CpuPlan { rows, splits, ..*plan })).collect()
    }

    /// Keys of a step where lanes are dims: two blocks are to stay in the first cache, together with the
    /// widened copies that 16-bit inputs have.
    fn dims_block_kv(problem: &Problem) -> usize {
        let bytes = if computed_type(problem) == DType::F32 { 1 << 16 } else { 1 << 14 };
        let row = size_of::<f32>() * (problem.head_dim + problem.head_dim_v);
        // Heads may have no dimensions at all.
        (bytes / row.max(1) / 16 * 16).clamp(16, BLOCK_KV)
    }

    /// The plan with these blocks and the widest register tile of `isa`, its lanes query rows of one head
    /// each.
    pub fn widest(isa: Isa, threads: usize, block_q: usize, block_kv: usize) -> CpuPlan {
        let (vectors, tile_rows) = isa.tile();
        let (lanes, rows, order) = (Lanes::Queries, Rows::Head, Order::Longest);
        CpuPlan { isa, threads, block_q, block_kv, lanes, vectors, tile_rows, rows, order, splits: 1 }
    }

    /// Short sequences of the query heads that share a key head are laid end to end, so that decoding fills
    /// lanes with heads.
    fn rows_for(problem: &Problem, isa: Isa) -> Rows {
        if problem.seq_q < isa.panel_rows() { Rows::Group } else { Rows::Head }
    }

    /// Query rows of a panel, which go through each block of keys together.
    pub fn panel_rows(&self) -> usize {
        match self.lanes {
            Lanes::Queries => self.vectors * self.isa.lanes(),
            Lanes::Dims => dims::PANEL_ROWS,
        }
    }

    /// The plan that does the same for `problem` with no value larger than it takes effect, and every gene
    /// that has none as in
    /// [`CpuPlan::widest`]: equal for plans that run the same code.
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

    /// Whether this plan can compute `problem` here.
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

    /// Whether this plan can compute `problem` on a processor that has its instruction set.
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
        // Widened blocks of K and V: 16 kB each of 16-bit inputs.
        assert_eq!((of(1, DType::F32).block_kv, of(1, DType::Bf16).block_kv), (128, 32));
        let integers = CpuPlan::with_isa(&keys(Problem::new(1, 8, 1, 64, DType::F16), 2048), Isa::Avx512Vnni);
        assert_eq!((integers.isa, integers.lanes), (Isa::Avx512, Lanes::Dims));
    }

    #[test]
    fn heads_without_dimensions_or_rows_have_plans() {
        let problems = [(1, 0, DType::F32), (64, 0, DType::F16), (0, 8, DType::F32), (0, 0, DType::Bf16)];
        for problem in problems.map(|(rows, dim, dtype)| Problem::new(1, 2, rows, dim, dtype)) {
            // Without key heads nothing can be computed, which is for `attention` to say.
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
            // Not worth a thread's waking.
            assert_eq!(plan(&Problem::new(1, 4, 32, 32, DType::F32)).threads, 1);
            // One head's rows in as many equal parts as there are threads, or a multiple.
            let p = keys(Problem::new(1, 1, 96 * threads, 64, DType::F32), 4096);
            let tasks = plan(&p).cost(&p).tasks;
            assert!(tasks.is_multiple_of(threads), "{tasks} tasks, {threads} threads");
            // One row: its keys.
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
