//! Checks that a plan fits a problem and an architecture.

use attend::{Sums, Tiles};
use problem::{Band, DType, Problem, Tensor};
use tile::{Handout, RowStore, Tail, Turns};

use super::fp8::transposes_values;
use super::plan::{
    Diagonal, Ends, FEEDING_REGISTERS, Probabilities, Rescaling, Share, Store, WgmmaPlan, largest_limit,
    largest_threshold,
};
use crate::error::accept;
use crate::forward::contract::{band, check_tensor_map, check_tensor_maps, misaligned, most_rows, out_half};
use crate::forward::lengths::{check_lengths, check_ragged};
use crate::forward::packing::check_packing;
use crate::{Arch, PlanError};

const FAMILY: &str = "wgmma";

/// Rejects a gene's value outside `low..=high`.
fn within(what: &'static str, value: u32, low: u32, high: u32) -> Result<(), PlanError> {
    accept(what, value.into(), (low..=high).contains(&value), &format!("{low} to {high}"))
}

impl WgmmaPlan {
    /// Whether the plan fits the problem and the architecture.
    ///
    /// # Errors
    /// The first reason why the plan does not fit.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        accept("sm", arch.sm.into(), arch.has_warpgroup_products(), "90, whose target is sm_90a")?;
        self.check_problem(problem)?;
        self.check_genes(problem)?;
        self.check_share(problem)?;
        self.check_uneven(problem)?;
        self.check_pages(problem, FAMILY)?;
        self.check_lists(problem)?;
        self.check_tables(problem, FAMILY)?;
        self.check_resources(problem, arch)?;
        self.check_tail(problem, arch)?;
        let tiles = self.tile_count(problem);
        let most = (1 << 31) / u64::from(if self.handout == Handout::Grid { self.cluster } else { 1 });
        accept(
            "tiles of query rows",
            tiles,
            tiles < most,
            "fewer than 2^31, or than 2^31 / cluster with handout = grid",
        )
    }

    pub(super) fn check_problem(&self, problem: &Problem) -> Result<(), PlanError> {
        if problem.dtypes.q == DType::F32 || problem.dtypes.has_narrow_cache() {
            let (family, accepted) = (FAMILY, "f16, bf16, or 8-bit queries and keys");
            return Err(PlanError::DType { family, dtype: problem.dtypes, accepted });
        }
        WgmmaPlan::check_fp8_problem(problem, FAMILY)?;
        let dims = [("head_dim", problem.head_dim, 576), ("head_dim_v", problem.head_dim_v, 512)];
        for (what, dim, most) in dims {
            accept(what, dim as u64, (1..=most).contains(&dim), &format!("1 to {most}"))?;
        }
        let (most, accepted) = most_rows(problem);
        let accepted = format!("1 {}: a tensor map has no empty dimension", accepted.replacen("up ", "", 1));
        for (what, n) in [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)] {
            accept(what, n as u64, (1..=most).contains(&n), &accepted)?;
        }
        for (what, side) in [("packed queries", problem.lengths.q), ("packed keys", problem.lengths.kv)] {
            accept(what, 0, side.packed != Some(0), &accepted)?;
        }
        check_tensor_maps(problem, FAMILY)?;
        check_ragged(problem, Tensor::V, FAMILY)?;
        match misaligned(problem, Tensor::Out, RowStore::Pairs.elements()) {
            None => Ok(()),
            Some((what, stride)) => {
                let what = format!("out {what}");
                Err(PlanError::unsupported(FAMILY, what, stride, "multiples of 2 elements"))
            }
        }
    }

    /// Checks that the warpgroups can divide a tile in the plan's way.
    fn check_share(&self, problem: &Problem) -> Result<(), PlanError> {
        let dim = problem.head_dim_v as u64;
        if self.share == Share::Rows {
            return accept("head_dim_v", dim, dim <= 256, "1 to 256 with share = rows");
        }
        let refuse = |what: &str, value: &str, accepted: &str| {
            let accepted = format!("{accepted} with share = head_dim");
            Err(PlanError::unsupported(FAMILY, what, value, accepted))
        };
        if problem.dtypes.q.is_fp8() {
            return refuse("types", &problem.dtypes.to_string(), "16-bit inputs");
        }
        // The two warpgroups have the same rows, and meet at a barrier after the scores of each block.
        for (what, value, accepted) in [
            ("consumers", self.consumers, 2),
            ("resident_ctas", self.resident_ctas, 1),
            ("exps_by_fma", self.exps_by_fma, 0),
        ] {
            if value != accepted {
                return refuse(what, &value.to_string(), &accepted.to_string());
            }
        }
        if self.tiles != Tiles::InTurn {
            return refuse("tiles", "overlapped", "in_turn");
        }
        if self.turns != Turns::Free {
            return refuse("turns", "ping_pong", "free");
        }
        if self.ends != Ends::Common {
            return refuse("ends", "own", "common");
        }
        if self.tail != Tail::Whole {
            return refuse("tail", "shared", "whole");
        }
        if self.store != Store::Direct {
            return refuse("store", self.store.name(), "direct");
        }
        if self.sums != Sums::Lanes {
            return refuse("sums", "product", "lanes");
        }
        if self.probabilities != Probabilities::Registers {
            return refuse("probabilities", "shared", "registers");
        }
        match self.rescale {
            Rescaling::Speculative { .. } => refuse("rescale", "speculative", "always or beyond"),
            Rescaling::Always | Rescaling::Beyond(_) => Ok(()),
        }
    }

    /// Checks that the plan supports uneven lengths.
    fn check_uneven(&self, problem: &Problem) -> Result<(), PlanError> {
        if problem.lengths.is_even() {
            return Ok(());
        }
        let refuse = |what: &str, value: &str, accepted: &str| {
            let what = format!("{what} with uneven lengths");
            Err(PlanError::unsupported(FAMILY, what, value, accepted))
        };
        // CTAs of a cluster share the loads of keys, and the tiles of a shared last wave must have equal
        // numbers of blocks.
        if self.cluster > 1 {
            return refuse("cluster", &self.cluster.to_string(), "1");
        }
        if self.tail == Tail::Shared {
            return refuse("tail", "shared", "whole");
        }
        check_lengths(problem, self.tile_rows(problem), self.packed_heads(problem))
    }

    /// Checks that blocks can be listed: all warpgroups of a tile, and no other tile, must visit the blocks
    /// of its list.
    fn check_lists(&self, problem: &Problem) -> Result<(), PlanError> {
        let Some(tiles) = self.list_tiles(problem) else { return Ok(()) };
        let refuse = |what: &str, value: &str, accepted: &str| {
            let what = format!("{what} with visits = listed");
            Err(PlanError::unsupported(FAMILY, what, value, accepted))
        };
        if self.cluster > 1 {
            return refuse("cluster", &self.cluster.to_string(), "1");
        }
        if self.tail == Tail::Shared {
            return refuse("tail", "shared", "whole");
        }
        if self.ends == Ends::Own {
            return refuse("ends", "own", "common");
        }
        if self.diagonal == Diagonal::Halved {
            return refuse("diagonal", "halved", "whole");
        }
        tiles.check(problem)
    }

    fn check_genes(&self, problem: &Problem) -> Result<(), PlanError> {
        within("consumers", self.consumers, 1, 3)?;
        within("resident_ctas", self.resident_ctas, 1, 4)?;
        within("cluster", self.cluster, 1, 2)?;
        let keys = self.block_n.is_multiple_of(16) && (16..=256).contains(&self.block_n);
        accept("block_n", self.block_n.into(), keys, "multiples of 16 up to 256")?;
        let heads = self.packed_heads(problem);
        let accepted = "up to a tile's rows (64 · consumers) with packing = packed";
        check_packing(problem, heads, heads <= self.block_m(), accepted)?;
        within("stages", self.stages, 1, 8)?;
        within("section_mib", self.section_mib, 1, 4096)?;
        self.check_diagonal(problem)?;
        within("queries_ahead", self.queries_ahead, 0, 2)?;
        if let Some(registers) = self.producer_registers {
            let most = self.registers_at_launch();
            let fits = registers.is_multiple_of(8) && (FEEDING_REGISTERS..=most).contains(&registers);
            let accepted = format!("multiples of 8 from {FEEDING_REGISTERS} to {most}");
            accept("producer_registers", registers.into(), fits, &accepted)?;
        }
        if self.exps_by_fma > 0 {
            within("exps_by_fma", self.exps_by_fma, 0, 8)?;
            let guesses = matches!(self.rescale, Rescaling::Speculative { .. });
            let fits = guesses || transposes_values(problem);
            accept("exps_by_fma", self.exps_by_fma.into(), fits, "0 without rescale = speculative")?;
        }
        if self.store.by_tma() {
            self.check_bulk_store(problem)?;
        }
        let second = self.store != Store::OverQueries || self.query_stages() > 1;
        let accepted = "1 or 2 with store = over_queries and tiles = in_turn";
        accept("queries_ahead", self.queries_ahead.into(), second, accepted)?;
        self.check_fp8_genes(problem, FAMILY)?;
        within("chains.max", self.chains.max, 1, 8)?;
        within("chains.sum", self.chains.sum, 1, 8)?;
        self.check_sums(problem)?;
        let turns = self.turns == Turns::Free || self.consumers > 1;
        accept("consumers", self.consumers.into(), turns, "2 or 3 with turns = ping_pong")?;
        self.check_rescaling(problem)
    }

    /// Checks that the blocks on the diagonal can be halved, if the plan halves them.
    fn check_diagonal(&self, problem: &Problem) -> Result<(), PlanError> {
        if self.diagonal == Diagonal::Whole {
            return Ok(());
        }
        if band(problem).after.is_none() {
            let accepted = "masks with a bound after the diagonal, with diagonal = halved";
            return Err(PlanError::unsupported(FAMILY, "mask", problem.band, accepted));
        }
        if self.ends != Ends::Own {
            return Err(PlanError::unsupported(FAMILY, "ends", "common", "own with diagonal = halved"));
        }
        let halves = self.block_n.is_multiple_of(32);
        accept("block_n", self.block_n.into(), halves, "multiples of 32 with diagonal = halved")
    }

    /// Checks that products can compute the row sums, if they do in the plan.
    fn check_sums(&self, problem: &Problem) -> Result<(), PlanError> {
        if self.sums == Sums::Lanes {
            return Ok(());
        }
        let dim = problem.head_dim_v as u64;
        accept("head_dim_v", dim, dim == 64, "64 with sums = product")?;
        if problem.dtypes.weights() != DType::Bf16 {
            let accepted = "bf16 with sums = product, which need its range";
            return Err(PlanError::unsupported(FAMILY, "dtype", problem.dtypes, accepted));
        }
        if problem.pass.lse() {
            let accepted = "lanes where the LSE is returned: products sum rounded probabilities";
            return Err(PlanError::unsupported(FAMILY, "sums", "product", accepted));
        }
        Ok(())
    }

    /// Checks that probabilities stay in the range of their type.
    fn check_rescaling(&self, problem: &Problem) -> Result<(), PlanError> {
        let threshold_fits = |threshold: u8| {
            let weights = problem.dtypes.weights();
            let most = largest_threshold(weights);
            let accepted = format!("0 to {most} in {weights}");
            accept("rescale.beyond", threshold.into(), threshold <= most, &accepted)
        };
        match self.rescale {
            Rescaling::Always => Ok(()),
            Rescaling::Beyond(threshold) => threshold_fits(threshold),
            Rescaling::Speculative { beyond, limit } => {
                threshold_fits(beyond)?;
                let most = largest_limit(problem.dtypes.weights(), self.sums);
                let suffix = if self.sums == Sums::Product { " with sums = product" } else { "" };
                let accepted = format!("{} to {most}{suffix}", beyond + 1);
                accept("rescale.limit", limit.into(), (beyond + 1..=most).contains(&limit), &accepted)
            }
        }
    }

    /// Checks that the tiles of the last wave can be shared. This requires tiles of equal length and a static
    /// schedule.
    fn check_tail(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let Some(wave) = self.last_wave(problem, arch) else { return Ok(()) };
        if !band(problem).is_full() {
            let (mask, accepted) = (problem.band, Band::FULL);
            return Err(PlanError::Mask { family: "wgmma with tail = shared", mask, accepted });
        }
        let refuse = |what: &str, value: &str, accepted: &str| {
            let what = format!("{what} beside tail = shared");
            Err(PlanError::unsupported(FAMILY, what, value, accepted))
        };
        if self.handout != Handout::Static {
            return refuse("handout", &format!("{:?}", self.handout).to_lowercase(), "static");
        }
        if self.ends != Ends::Common {
            return refuse("ends", "own", "common");
        }
        let line = wave.line();
        accept("blocks of shared tiles", line, line < 1 << 31, "fewer than 2^31")
    }

    /// Checks that TMA can store O.
    pub(super) fn check_bulk_store(&self, problem: &Problem) -> Result<(), PlanError> {
        let (dim, store) = (problem.head_dim_v as u64, self.store.name());
        let by_tma = |accepted: &str| format!("{accepted} with store = {store}");
        accept("head_dim_v", dim, dim.is_multiple_of(64), &by_tma("multiples of 64"))?;
        if self.store == Store::OverQueries {
            if problem.dtypes.q.bytes() != 2 {
                let accepted = "inputs of 16 bits with store = over_queries";
                return Err(PlanError::DType { family: FAMILY, dtype: problem.dtypes, accepted });
            }
            // The rows of a warp take a part of 64 rows of a panel of Q.
            let divides = matches!(dim, 64 | 128 | 256);
            accept("head_dim_v", dim, divides, &by_tma("64, 128 and 256"))?;
            let most = problem.head_dim as u64;
            accept("head_dim_v", dim, dim <= most, &by_tma(&format!("up to head_dim ({most})")))?;
        }
        let heads = self.packed_heads(problem);
        accept("packed heads", heads.into(), heads == 1, &by_tma("1"))?;
        if out_half(problem).is_none() {
            let accepted = "outputs of f16 and bf16 where TMA stores O";
            return Err(PlanError::DType { family: FAMILY, dtype: problem.dtypes, accepted });
        }
        check_tensor_map(problem, Tensor::Out, FAMILY)?;
        check_ragged(problem, Tensor::Out, FAMILY)
    }

    /// Checks that shared memory and registers suffice.
    pub(super) fn check_resources(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let bytes = u64::from(self.shared_bytes(problem));
        if bytes > u64::from(arch.shared_per_cta) {
            return Err(PlanError::SharedMemory { bytes, limit: arch.shared_per_cta, sm: arch.sm });
        }
        let resident = u64::from(self.resident_ctas) * (bytes + u64::from(Arch::SHARED_RESERVED));
        if self.resident_ctas > 1 && resident > u64::from(arch.shared_per_sm) {
            let limit = arch.shared_per_sm / self.resident_ctas - Arch::SHARED_RESERVED;
            return Err(PlanError::SharedMemory { bytes, limit, sm: arch.sm });
        }
        let registers = self.registers(problem);
        let limit = self.register_split().1.min(Arch::REGISTERS_PER_THREAD);
        if registers > limit {
            return Err(PlanError::Registers { registers, limit });
        }
        Ok(())
    }
}
