use problem::{DType, Problem};
use serde::{Deserialize, Serialize};

use crate::{CpuError, Isa};

/// How to compute: pure data, comparable and serialisable, so that a search can range over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CpuPlan {
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Threads that share the work, at most; 1 computes on the calling thread.
    pub threads: usize,
    /// Query rows that one task carries through all keys; they share each widened block of K and V.
    pub block_q: usize,
    /// Keys per step of the online softmax.
    pub block_kv: usize,
}

/// Largest `block_q` and `block_kv`: keeps a thread's scratch memory in megabytes.
const MAX_BLOCK: usize = 4096;
/// Largest number of threads: far beyond any machine, small enough that starting them is not the work.
const MAX_THREADS: usize = 1024;

impl CpuPlan {
    /// A good plan for `problem` on this machine.
    pub fn for_problem(problem: &Problem) -> CpuPlan {
        let isa = match (Isa::best(), problem.dtype) {
            (Isa::Avx512Vnni, DType::F32) => Isa::Avx512, // the same but for 16-bit inputs
            (isa, _) => isa,
        };
        CpuPlan::with_isa(problem, isa)
    }

    /// A good plan for `problem` with the instructions of `isa`.
    pub fn with_isa(problem: &Problem, isa: Isa) -> CpuPlan {
        let threads = rayon::current_num_threads().clamp(1, MAX_THREADS);
        let panel = isa.panel_rows();
        // Panels of a task share each block of K and V, widened and in cache; at least four tasks a thread balance.
        let rows = problem.heads_q.saturating_mul(problem.batch).saturating_mul(problem.seq_q);
        let per_thread = rows / (threads * 4);
        // Making integers of K and V is dearer than widening them.
        let most = if isa == Isa::Avx512Vnni { 16 } else { 8 };
        let block_q = (per_thread / panel).clamp(1, most) * panel;
        CpuPlan { isa, threads, block_q, block_kv: 128 }
    }

    /// Whether this plan can compute `problem` here.
    ///
    /// # Errors
    /// [`CpuError::Plan`] or [`CpuError::Isa`] with the field, its value and what is accepted, or the problem's own
    /// error.
    pub fn check(&self, problem: &Problem) -> Result<(), CpuError> {
        problem.check()?;
        let fields = [
            ("threads", self.threads, MAX_THREADS, "1 to 1024"),
            ("block_q", self.block_q, MAX_BLOCK, "1 to 4096"),
            ("block_kv", self.block_kv, MAX_BLOCK, "1 to 4096"),
        ];
        for (field, value, most, accepted) in fields {
            if value == 0 || value > most {
                return Err(CpuError::Plan { field, value, accepted });
            }
        }
        if !self.isa.is_available() {
            let names: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
            return Err(CpuError::Isa { isa: self.isa, available: names.join(", ") });
        }
        Ok(())
    }
}
