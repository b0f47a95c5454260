//! Block lists: the KV blocks that the rows of a tile see, for mask programs that no band can express. One
//! kernel writes the lists, and the forward kernel after it visits the listed blocks.

use attend::{BlockLists, Bound, KeyBand, Lengths, ListWriter, RowRange, ScorePrograms};
use problem::program::{Input, Op, Program as Mask};
use problem::{Problem, Programs};
use ptx::{Access, Builder, CmpOp, Dim3, Launch, R32, SpecialReg, Target};
use serde::{Deserialize, Serialize};

use super::contract::declare_band;
use super::lengths::declare_lengths;
use super::programs::declare_programs;
use crate::Symptom;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::error::accept;
use crate::genes::Gene;
use crate::genes::Turn::To;
use crate::grid::{Axis, Extents, Grid};
use crate::{Baked, PlanError};

const ENTRY: &str = "flash_forward_lists";
/// The name of the temporary that holds the lists.
pub const BLOCK_LISTS: &str = "block_lists";
/// Warps of a CTA. Each warp classifies one block at a time.
const WARPS: u32 = 32;
/// Maximum size of all lists, in bytes.
const MOST_BYTES: u64 = 256 << 20;
/// Minimum number of rows and of keys for which lists are written by default. Below it, the second kernel
/// costs as much as the skipped blocks save (predicted, not yet measured).
const LEAST_ROWS: usize = 128;
const LEAST_KEYS: usize = 1024;
/// A table whose elements cover fewer scores than this is a dense mask.
const COARSE: usize = 64;

/// Which KV blocks are visited if the problem has a mask program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Visits {
    /// All blocks of the band. The mask program runs in each of them.
    #[default]
    Band,
    /// The blocks in which any row sees any key, from lists that a kernel writes first. The mask program runs
    /// only in partial blocks.
    Listed,
}

/// The parameters of the kernel that writes the lists.
struct Params {
    grid: Grid,
    lists: BlockLists,
    seq_q: R32,
    seq_kv: R32,
    lengths: Option<Lengths>,
    band: KeyBand,
    programs: Option<ScorePrograms>,
}

impl Params {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        baked: &Baked,
        tiles: ListTiles,
    ) -> Params {
        // Slots beyond a list's blocks are not written.
        let lists = tiles.declare(k, c, problem, Access::ReadWrite);
        let [seq_q, seq_kv] = [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)]
            .map(|(name, length)| c.u32(k, name, length as u32));
        Params {
            grid: tiles.grid(problem).declare(k, c, baked.flat),
            lists,
            seq_q,
            seq_kv,
            lengths: declare_lengths(k, c, problem, [seq_q, seq_kv]),
            band: declare_band(k, c, problem),
            // Lists do not depend on the score program.
            programs: declare_programs(k, c, problem, baked.listed.as_ref()),
        }
    }
}

/// The tiles for which lists are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListTiles {
    /// Rows of a tile, and query heads whose rows are packed.
    pub rows: u32,
    pub heads: u32,
    /// Keys of a block.
    pub block_n: u32,
    /// Whether each tile visits a block even if its rows see no key.
    pub at_least_one: bool,
}

impl Visits {
    /// Whether a plan with this gene value lists blocks. Without a mask program, the band determines the
    /// blocks to visit.
    pub(crate) const fn lists(self, problem: &Problem) -> bool {
        matches!(self, Visits::Listed) && problem.programs.mask.is_some()
    }

    /// Lists, if there are enough scores. A mask that only reads a dense tensor is not listed, because the
    /// tensor would be read twice.
    pub(crate) fn default_for(problem: &Problem) -> Visits {
        let Some(mask) = &problem.programs.mask else { return Visits::Band };
        let large = problem.seq_q >= LEAST_ROWS && problem.seq_kv >= LEAST_KEYS;
        let [dense, coarse] = reads(mask, problem);
        if large && (coarse || !dense) { Visits::Listed } else { Visits::Band }
    }
}

/// The gene of the blocks to visit, which has no effect without a mask program.
pub(crate) fn visits_gene(problem: &Problem) -> Gene {
    let values: &[&str] = if problem.programs.mask.is_some() { &["band", "listed"] } else { &[] };
    Gene::new("visits").searched(values.iter().copied()).curing(&[
        (Symptom::Tensor, To("listed")),
        (Symptom::Mufu, To("listed")),
        (Symptom::SmallGrid, To("band")),
    ])
}

/// Whether the mask reads, by query and key, a table with an element for each score or for a few scores, and
/// whether it reads one with an element for many scores.
fn reads(mask: &Mask, problem: &Problem) -> [bool; 2] {
    let depends = mask.dependences();
    let scores = problem.seq_q.saturating_mul(problem.seq_kv);
    let mut found = [false; 2];
    for (op, on) in mask.ops().iter().zip(&depends) {
        if let (Op::Load { table, .. }, true) = (op, on.query && on.key) {
            let coarse = problem.programs.tables[*table as usize].span() < scores / COARSE;
            found[usize::from(coarse)] = true;
        }
    }
    found
}

/// Whether the mask differs between the values of an input. A dimension of a table with stride 0 does not
/// count.
fn varies_with(mask: &Mask, programs: &Programs, input: Input) -> bool {
    let mut varies: Vec<bool> = Vec::with_capacity(mask.ops().len());
    for op in mask.ops() {
        let own = match op {
            Op::Input(other) => *other == input,
            Op::Load { table, index, .. } => {
                let table = &programs.tables[*table as usize];
                let moves = |dimension: usize| table.strides[dimension] != 0 && table.extents[dimension] > 1;
                index.iter().enumerate().any(|(dimension, &id)| varies[id] && moves(dimension))
            }
            op => op.reads().iter().any(|&id| varies[id]),
        };
        varies.push(own);
    }
    varies.last() == Some(&true)
}

impl ListTiles {
    /// The number of tiles of a head (of the longest sequence), of heads and of batch entries that have
    /// separate lists.
    fn extents(&self, problem: &Problem) -> [u64; 3] {
        let rows = (problem.seq_q as u64).saturating_mul(self.heads.into());
        let Some(mask) = &problem.programs.mask else { return [0; 3] };
        let varies = |input| varies_with(mask, &problem.programs, input);
        let heads = problem.heads_q as u64 / u64::from(self.heads.max(1));
        let of_batch = !problem.lengths.is_even() || varies(Input::Batch);
        [
            rows.div_ceil(self.rows.max(1).into()),
            if varies(Input::Head) { heads } else { 1 },
            if of_batch { problem.batch as u64 } else { 1 },
        ]
    }

    /// The extents of the grid.
    pub fn grid(&self, problem: &Problem) -> Extents {
        Extents(self.extents(problem))
    }

    fn capacity(&self, problem: &Problem) -> u64 {
        BlockLists::capacity((problem.seq_kv as u64).div_ceil(self.block_n.max(1).into()).max(1))
    }

    fn bytes(&self, problem: &Problem) -> u64 {
        let lists = self.extents(problem).into_iter().fold(1u64, u64::saturating_mul);
        BlockLists::bytes(lists, self.capacity(problem))
    }

    /// Checks that the lists can be written.
    pub fn check(&self, problem: &Problem) -> Result<(), PlanError> {
        let bytes = self.bytes(problem);
        accept("bytes of block lists", bytes, bytes <= MOST_BYTES, "up to 2^28 with visits = listed")?;
        self.grid(problem).check("CTAs that list blocks")
    }

    /// Declares the lists in a kernel.
    pub fn declare(
        &self,
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        access: Access,
    ) -> BlockLists {
        let [tiles, heads, batch] = self.extents(problem);
        let step = |shared: bool, lists: u64| if shared { 0 } else { lists as u32 };
        BlockLists {
            start: c.temporary(k, BLOCK_LISTS, self.bytes(problem).max(16) as usize, access),
            capacity: c.u32(k, "list_capacity", self.capacity(problem) as u32),
            batch_step: c.u32(k, "list_batch_step", step(batch == 1, tiles * heads)),
            head_step: c.u32(k, "list_head_step", step(heads == 1, tiles)),
        }
    }

    /// The kernel that writes the lists. The plan has been checked.
    pub fn draft<'a>(self, problem: &Problem, baked: &'a Baked, target: Target) -> Draft<'a> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(32 * WARPS);
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, problem, baked, self);
        let launch = Launch::new(self.grid(problem).launch(baked.flat), Dim3(32 * WARPS, 1, 1));
        let body = move |k: &mut Builder| self.body(k, &params, baked);
        Draft::new(k, contract, (ENTRY, launch), target, body)
    }

    /// Each CTA writes the list of one tile.
    fn body(self, k: &mut Builder, params: &Params, baked: &Baked) {
        let Params { grid, lists, seq_q, seq_kv, lengths, band, programs } = params;
        let codes = k.shared_array("codes", 4, 4 * WARPS);

        let [tile, head, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| grid.index(k, axis));
        let thread = k.special(SpecialReg::TidX);
        let [warp, lane] = [k.shr_u(thread, 5), k.and(thread, 31)];
        let [seq_q, seq_kv] = match lengths {
            None => [*seq_q, *seq_kv],
            Some(lengths) => {
                let sequence = lengths.sequence(k, batch);
                [sequence.q.len, sequence.kv.len]
            }
        };
        let first = k.mul(tile, self.rows);
        let rows = RowRange { first, rows: self.rows, seq_q, seq_kv, heads: self.heads };
        let mut bound = Bound::new(k, band, &rows, self.block_n, baked.divides);
        if lengths.is_some() {
            // Rows beyond the end of a sequence see no key.
            let limit = k.mul(seq_q, self.heads);
            let exists = k.setp_u(CmpOp::Lt, first, limit);
            bound.end = k.selp(bound.end, 0, exists);
        }
        let Some(mask) =
            programs.as_ref().and_then(|programs| programs.tile_mask(k, lane, &rows, [head, batch]))
        else {
            return;
        };
        let judge = |k: &mut Builder, block: R32| {
            let origin = k.mul(block, self.block_n);
            mask.judge(k, origin, self.block_n)
        };
        let writer = ListWriter { warp, lane, warps: WARPS, codes };
        lists.write(k, [batch, head, tile], &bound, self.at_least_one, writer, judge);
    }
}
