//! 8-bit inputs: the requirements on a plan, and the default plans.
//!
//! The scores are a product of 8-bit Q and K. If V has 8 bits too, P is rounded to e4m3, and a separate
//! kernel transposes V first ([`super::transpose`]), because an 8-bit B operand must be contiguous along k.
//! With 16-bit V, P and the product with V are the same as in the 16-bit kernels.

use attend::{OutputSums, Tiles};
use problem::{Problem, Tensor};
use tile::{Handout, Tail, TileOrder, Turns};

use super::plan::{Diagonal, Ends, Probabilities, Rescaling, Store, WgmmaPlan};
use super::transpose::TransposedValues;
use crate::error::accept;
use crate::forward::contract::default_tanh;
use crate::forward::fp8::{check_keys_of_factors, check_sums_of_factors, default_threshold, keys_of_factors};
use crate::forward::lengths::keys_are_uneven;
use crate::{Dims, PlanError};

/// The maximum head dim of V with factors per block of rows: with 160, causal kernels spill.
const WIDEST_BY_BLOCK: usize = 144;

/// Whether a kernel transposes V before the attention kernel.
pub(super) fn transposes_values(dims: impl Into<Dims>) -> bool {
    dims.into().dtypes.v.is_fp8()
}

/// The minimum number of keys in a block, and the step between possible numbers.
pub(super) fn key_steps(problem: &Problem) -> (u32, u32) {
    if transposes_values(problem) { (64, 32) } else { (16, 16) }
}

/// The rescaling that leaves enough of e4m3's range to keys with small weights ([`default_threshold`]).
/// Speculation with a larger threshold recomputes fewer blocks; with a threshold of 0, the range leaves no
/// room for it.
const fn default_rescaling(keys: usize) -> Rescaling {
    match default_threshold(keys) {
        0 => Rescaling::Beyond(0),
        beyond => Rescaling::Speculative { beyond, limit: 8 },
    }
}

impl WgmmaPlan {
    /// Checks that the family supports a problem with 8-bit inputs.
    pub(super) fn check_fp8_problem(problem: &Problem, family: &'static str) -> Result<(), PlanError> {
        if !problem.dtypes.q.is_fp8() {
            return Ok(());
        }
        let aligned = |dim: usize| dim.is_multiple_of(16);
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        accept("head_dim", dim as u64, aligned(dim), "multiples of 16 with 8-bit queries and keys")?;
        if transposes_values(problem) {
            accept("head_dim_v", dim_v as u64, aligned(dim_v), "multiples of 16 with 8-bit values")?;
            // P V of a block needs an accumulator of its own.
            let by_block = problem.scales.rows(Tensor::V).is_some();
            let fits = !by_block || dim_v <= WIDEST_BY_BLOCK;
            accept("head_dim_v", dim_v as u64, fits, "up to 144 with descale_v per block of rows")?;
            if keys_are_uneven(problem) {
                let accepted = "equal lengths with 8-bit values";
                return Err(PlanError::unsupported(family, "lengths of keys", "uneven", accepted));
            }
            TransposedValues::new(problem).grid().check("CTAs that transpose V")?;
            // The transposition counts the columns of all heads in 32 bits.
            let columns = problem.batch as u64 * problem.heads_kv as u64 * dim_v as u64;
            let accepted = "fewer than 2^32 with 8-bit values";
            accept("batch · heads_kv · head_dim_v", columns, columns < 1 << 32, accepted)?;
        }
        Ok(())
    }

    /// Checks that the genes are compatible with 8-bit P and with descale factors per block of rows.
    pub(super) fn check_fp8_genes(&self, problem: &Problem, family: &'static str) -> Result<(), PlanError> {
        check_sums_of_factors(problem, self.output_sums, family)?;
        check_keys_of_factors(problem, "block_n", self.block_n)?;
        if !transposes_values(problem) {
            return Ok(());
        }
        let (least, step) = key_steps(problem);
        let keys = self.block_n >= least && self.block_n.is_multiple_of(step);
        accept("block_n", self.block_n.into(), keys, "multiples of 32 from 64 to 256 with 8-bit values")?;
        let refuse = |what: &str, value: &str, accepted: &str| {
            Err(PlanError::unsupported(family, what, value, accepted))
        };
        if self.probabilities == Probabilities::Shared {
            return refuse("probabilities", "shared", "registers with 8-bit values");
        }
        if self.diagonal == Diagonal::Halved && !self.block_n.is_multiple_of(64) {
            return refuse("diagonal", "halved", "whole unless 64 divides block_n, with 8-bit values");
        }
        Ok(())
    }

    /// The nearest genes that 8-bit P and descale factors per block of rows allow.
    pub(super) fn fitted_to_fp8(mut self, problem: &Problem) -> WgmmaPlan {
        if transposes_values(problem) {
            let (least, step) = key_steps(problem);
            self.block_n = (self.block_n / step * step).max(least);
            self.probabilities = Probabilities::Registers;
        }
        self.block_n = keys_of_factors(problem, self.block_n, key_steps(problem).1);
        if problem.scales.rows(Tensor::V).is_some() {
            self.output_sums = OutputSums::ByBlock;
        }
        if transposes_values(problem) && !self.block_n.is_multiple_of(64) {
            self.diagonal = Diagonal::Whole;
        }
        self
    }

    /// The default plan before it is fitted to the problem. Tiles, turns and sums are those of the fastest
    /// variants in single timings on an H200 (16k tokens, hidden size 2048). With 8-bit V,
    /// the order of tiles, the shared tail and the store are those that won races on an H100 (2k to 16k keys,
    /// full and causal). The rescaling follows from the range of e4m3 ([`default_rescaling`]).
    ///
    /// P V is summed by block ([`OutputSums::ByBlock`]) wherever a second accumulator of O fits: up to head
    /// dim 128. In these timings it was as fast as one accumulator.
    pub(super) fn default_for_fp8(problem: &Problem) -> WgmmaPlan {
        let causal = problem.band.is_causal();
        let dim = problem.head_dim.max(problem.head_dim_v);
        let base = WgmmaPlan {
            consumers: 2,
            block_n: 128,
            stages: 3,
            rescale: default_rescaling(problem.seq_kv),
            output_sums: OutputSums::ByBlock,
            ends: if causal { Ends::Own } else { Ends::Common },
            handout: if causal { Handout::Dynamic } else { Handout::Static },
            tile_order: if causal { TileOrder::LongestFirst } else { TileOrder::InOrder },
            tanh: default_tanh(problem),
            ..WgmmaPlan::PLAIN
        };
        let plan = match dim {
            ..=64 => WgmmaPlan { consumers: 3, block_n: 96, stages: 4, tiles: Tiles::Overlapped, ..base },
            65..=128 => base,
            _ => WgmmaPlan { stages: 2, output_sums: OutputSums::Running, turns: Turns::PingPong, ..base },
        };
        let plan = if problem.programs.is_empty() {
            plan
        } else {
            // Biases make single keys heavy, so P in e4m3 keeps its whole range.
            let threshold = if transposes_values(problem) { 0 } else { default_threshold(problem.seq_kv) };
            WgmmaPlan { rescale: Rescaling::Beyond(threshold), ..plan }
        };
        // ptxas spills registers of wider blocks and of overlapped tiles, except where a score program is
        // alone and two warpgroups have O of at most 128 columns.
        let narrow =
            problem.programs.mask.is_some() || problem.programs.score.is_some() && !(65..=128).contains(&dim);
        if narrow {
            return WgmmaPlan { block_n: 64, tiles: Tiles::InTurn, ..plan };
        }
        if !transposes_values(problem) {
            return plan;
        }
        let full = problem.band.is_full() && problem.programs.is_empty();
        match dim {
            ..=64 if full => WgmmaPlan { store: Store::Bulk, ..plan },
            ..=64 => plan,
            65..=128 if full => WgmmaPlan { tiles: Tiles::Overlapped, tail: Tail::Shared, ..plan },
            65..=128 => WgmmaPlan { tiles: Tiles::Overlapped, store: Store::Bulk, ..plan },
            _ if full && problem.seq_kv > 4096 => WgmmaPlan { tail: Tail::Shared, ..plan },
            _ => WgmmaPlan { queries_ahead: 1, ..plan },
        }
    }
}
