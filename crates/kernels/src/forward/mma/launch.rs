//! The launch: the properties on which the code depends, the grid, and the parameters.

use attend::{BlockLists, DropoutParams, KeyBand, Lengths, Partials, ProgramCode, ScorePrograms, Softcap};
use problem::{Operand, OperandMap, Problem, Tensor};
use ptx::{Access, Builder, Dim3, F32, Global, Launch, R32, R64};
use tile::Sign;

use super::plan::MmaPlan;
use super::split::{self, merge_descales};
use crate::Baked;
use crate::contract::Contract;
use crate::dropout::declare_dropout;
use crate::forward::before::Before;
use crate::forward::contract::{declare_band, declare_head_strides, declare_softcap, factor_or_one};
use crate::forward::descale::{ScoreDescale, ValueDescale};
use crate::forward::lengths::{PageTable, blocks_divide, declare_lengths};
use crate::forward::lists::ListTiles;
use crate::forward::programs::declare_programs;
use crate::grid::Grid;

impl MmaPlan {
    /// The values of the problem that the code contains.
    pub(super) fn baked(&self, problem: &Problem) -> Baked {
        let baked = Baked::of(problem, false);
        Baked {
            heads_q: if self.splits > 1 { problem.heads_q } else { baked.heads_q },
            sign: if problem.softmax_scale() == 0.0 { Sign::Clear } else { baked.sign },
            listed: self.visits.lists(problem).then(|| ProgramCode::of_mask(problem, false)),
            divides: blocks_divide(problem, self.block_n),
            flat: self.needs_flat_grid(problem),
            ..baked
        }
        .with_row_bytes(problem, &Tensor::FORWARD)
    }

    /// The tiles for which blocks are listed; `None` if the plan does not list any.
    pub(super) fn list_tiles(&self, problem: &Problem) -> Option<ListTiles> {
        let tiles = ListTiles { rows: self.block_m, heads: 1, block_n: self.block_n, at_least_one: false };
        self.visits.lists(problem).then_some(tiles)
    }

    pub(super) fn launch(&self, problem: &Problem, baked: &Baked) -> Launch {
        Launch {
            grid: self.grid(problem).launch(baked.flat),
            cluster: Dim3(1, 1, 1),
            block: Dim3(self.threads(), 1, 1),
            dynamic_shared: self.shared_bytes(problem) as u32,
            overlapping: false,
        }
    }
}

/// A tensor's start, and its strides in bytes.
#[derive(Clone, Copy)]
pub(super) struct TensorStart {
    pub start: Global,
    pub batch_bytes: R64,
    pub head_bytes: R64,
}

/// The kernel's parameters.
pub(super) struct Params {
    /// Q, K, V and O. With split keys, partial results replace O and the LSE.
    pub(super) tensors: OperandMap<TensorStart>,
    pub(super) grid: Grid,
    pub(super) lse: Option<Global>,
    pub(super) partials: Option<Partials>,
    pub(super) seq_q: R32,
    pub(super) seq_kv: R32,
    pub(super) lengths: Option<Lengths>,
    pub(super) pages: Option<PageTable>,
    /// `|scale| · log2 e`.
    pub(super) factor: F32,
    pub(super) band: KeyBand,
    pub(super) softcap: Option<Softcap>,
    pub(super) programs: Option<ScorePrograms>,
    pub(super) sinks: Option<Global>,
    pub(super) before: Option<Before>,
    pub(super) dropout: Option<DropoutParams>,
    pub(super) lists: Option<BlockLists>,
    pub(super) score_descale: Option<ScoreDescale>,
    /// With split keys, the merge kernel applies the factor of a head.
    pub(super) value_descale: Option<ValueDescale>,
}

impl Params {
    pub(super) fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        baked: &Baked,
        plan: &MmaPlan,
    ) -> Params {
        let splits = plan.splits;
        let tensors = if splits > 1 { &Tensor::FORWARD[..3] } else { &Tensor::FORWARD[..] };
        let pointers: Vec<Global> = tensors.iter().map(|&tensor| c.tensor(k, tensor)).collect();
        let lse = if splits == 1 { c.operand(k, Operand::Lse) } else { None };
        let partials = (splits > 1).then(|| split::declare(k, c, problem, plan, Access::Write));
        let tensors = tensors.iter().zip(pointers).map(|(&tensor, start)| {
            let [batch_bytes, head_bytes] = declare_head_strides(k, c, problem, tensor);
            (tensor.into(), TensorStart { start, batch_bytes, head_bytes })
        });
        let tensors = tensors.collect();
        let [seq_q, seq_kv] = [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)]
            .map(|(name, length)| c.u32(k, name, length as u32));
        let lists = plan.list_tiles(problem).map(|tiles| tiles.declare(k, c, problem, Access::Read));
        Params {
            tensors,
            grid: plan.grid(problem).declare(k, c, baked.flat),
            lse,
            partials,
            seq_q,
            seq_kv,
            lengths: declare_lengths(k, c, problem, [seq_q, seq_kv]),
            pages: PageTable::declare(k, c, problem),
            factor: c.f32(k, "scale_log2e", factor_or_one(problem)),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, plan.tanh),
            programs: declare_programs(k, c, problem, baked.programs.as_ref())
                .map(|programs| if lists.is_some() { programs.masking_partial_blocks() } else { programs })
                .map(|programs| programs.on_whole_blocks(baked.divides)),
            // With split keys, the merge kernel adds the sinks.
            sinks: if splits == 1 { c.operand(k, Operand::Sinks) } else { None },
            before: Before::declare(k, c),
            dropout: declare_dropout(k, c, problem),
            lists,
            score_descale: ScoreDescale::declare(k, c, problem),
            value_descale: match splits > 1 && merge_descales(problem) {
                true => None,
                false => ValueDescale::declare(k, c, problem),
            },
        }
    }
}
