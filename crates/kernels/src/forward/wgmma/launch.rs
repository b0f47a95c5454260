//! The launch: the properties on which the code depends, the grid, and the parameters.

use attend::{BlockLists, KeyBand, Lengths, ProgramCode, ScorePrograms, Softcap, StreamKMerge};
use problem::{Operand, Problem, Tensor};
use ptx::{Access, Builder, Dim3, F32, Global, Launch, R32, R64, TensorMapPtr};
use tile::{BulkStore, COUNTER_BYTES, Handout, Pieces, RowStore, StreamK, SwizzledTile, Tail, TileGrid};

use super::fp8::transposes_values;
use super::plan::{WgmmaPlan, boxes};
use super::transpose::TransposedValues;
use crate::contract::Contract;
use crate::forward::before::Before;
use crate::forward::contract::{
    declare_band, declare_head_strides, declare_map, declare_softcap, factor_or_least, misaligned, out_half,
};
use crate::forward::descale::{ScoreDescale, ValueDescale};
use crate::forward::lengths::{PageTable, batch_rows, blocks_divide, declare_lengths};
use crate::forward::lists::ListTiles;
use crate::forward::programs::declare_programs;
use crate::grid::Extents;
use crate::{Arch, Baked};

/// The tensors that are loaded through tensor maps.
pub(super) const LOADED: [Tensor; 3] = [Tensor::Q, Tensor::K, Tensor::V];
/// Estimated registers that reading tables ahead needs in addition to the elements.
const AHEAD_REGISTERS: u32 = 8;

impl WgmmaPlan {
    /// The values of the problem that the code contains.
    pub(super) fn baked(&self, problem: &Problem) -> Baked {
        let packed = self.packed_heads(problem) > 1;
        let baked = Baked::of(problem, packed).with_maps(problem, &LOADED);
        let baked = Baked {
            programs: baked.programs.map(|code| self.staging(problem, code)),
            listed: self.visits.lists(problem).then(|| ProgramCode::of_mask(problem, packed)),
            // A bound on later keys is compared with the last key as well. Programs read tables at each key.
            divides: (baked.band.after.is_none() || !problem.programs.is_empty())
                && blocks_divide(problem, self.block_n),
            flat: self.needs_flat_grid(problem),
            ..baked
        };
        // A call that continues reads rows of an earlier O.
        let with_rows = |baked: Baked| baked.with_row_bytes(problem, &[Tensor::Out]);
        if self.store.by_tma() {
            return if baked.continues { with_rows(baked) } else { baked };
        }
        let aligned = misaligned(problem, Tensor::Out, RowStore::Chunks.elements()).is_none();
        let chunks_out = out_half(problem).is_some() && aligned && problem.head_dim_v.is_multiple_of(8);
        Baked { chunks_out, ..with_rows(baked) }
    }

    /// The tiles for which blocks are listed; `None` if the plan does not list any.
    pub(super) fn list_tiles(&self, problem: &Problem) -> Option<ListTiles> {
        let heads = self.packed_heads(problem);
        let rows = self.tile_rows(problem);
        let tiles = ListTiles { rows, heads, block_n: self.block_n, at_least_one: true };
        self.visits.lists(problem).then_some(tiles)
    }

    /// Whether a kernel before the main kernel needs a flat grid.
    fn needs_flat_grid(&self, problem: &Problem) -> bool {
        let values = transposes_values(problem).then(|| TransposedValues::new(problem).grid());
        let lists = self.list_tiles(problem).map(|tiles| tiles.grid(problem));
        values.into_iter().chain(lists).any(Extents::need_flat)
    }

    pub(super) fn launch(&self, problem: &Problem, arch: &Arch) -> Launch {
        let takers = self.takers(problem, arch) as u32;
        Launch {
            grid: Dim3(takers * self.cluster, 1, 1),
            cluster: Dim3(self.cluster, 1, 1),
            block: Dim3(self.threads(), 1, 1),
            dynamic_shared: self.shared_bytes(problem),
            overlapping: false,
        }
    }

    /// Declares the score and mask programs, with the tables that come from shared memory.
    fn declare_score_programs(
        &self,
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        baked: &Baked,
    ) -> Option<ScorePrograms> {
        let code = baked.programs.as_ref()?;
        let programs = declare_programs(k, c, problem, Some(code))?;
        let programs = programs.with_staged(self.declare_tables(k, c, problem, code));
        let listed = self.list_tiles(problem).is_some();
        let programs = if listed { programs.masking_partial_blocks() } else { programs };
        let programs = programs.on_whole_blocks(baked.divides);
        let ahead = programs.registers_ahead((16, self.block_n)) + AHEAD_REGISTERS;
        let fits = self.registers(problem) + ahead <= self.register_split().1;
        Some(if fits { programs.reading_ahead() } else { programs })
    }

    /// Tiles of Q, K and V as the kernel loads them.
    pub(super) fn loaded_tiles(&self, baked: &Baked) -> [SwizzledTile; 3] {
        let [q, key, value] = self.tile_shapes(baked);
        let boxes = baked.pages.map_or(1, |rows| boxes(rows, self.block_n));
        // Rows of a page beyond the last key may hold anything.
        let ragged = baked.keys_are_uneven() || baked.pages.is_some();
        [q, key.in_boxes(boxes), value.in_boxes(boxes).ragged(ragged)]
    }
}

/// The kernel's parameters.
pub(super) struct Params {
    pub(super) maps: [TensorMapPtr; 3],
    pub(super) out_map: Option<TensorMapPtr>,
    pub(super) out: Global,
    pub(super) lse: Option<Global>,
    pub(super) counter: Option<Global>,
    /// The parts and the counters of [`StreamKMerge`].
    pub(super) parts: Option<[Global; 2]>,
    pub(super) out_batch_bytes: R64,
    pub(super) out_head_bytes: R64,
    pub(super) seq_q: R32,
    pub(super) seq_kv: R32,
    pub(super) lengths: Option<Lengths>,
    pub(super) pages: Option<PageTable>,
    /// The batch stride of V in rows, if tiles of V are ragged.
    pub(super) value_batch_rows: Option<R32>,
    /// The batch stride of O in rows, if tiles of O are ragged.
    pub(super) out_batch_rows: Option<R32>,
    pub(super) grid: TileGrid,
    pub(super) stream_k: Option<StreamK>,
    /// `|scale| · log2 e`.
    pub(super) factor: F32,
    pub(super) band: KeyBand,
    pub(super) softcap: Option<Softcap>,
    pub(super) programs: Option<ScorePrograms>,
    pub(super) sinks: Option<Global>,
    pub(super) before: Option<Before>,
    pub(super) lists: Option<BlockLists>,
    pub(super) score_descale: Option<ScoreDescale>,
    pub(super) value_descale: Option<ValueDescale>,
}

impl Params {
    pub(super) fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        plan: &WgmmaPlan,
        arch: &Arch,
    ) -> Params {
        let [q, key, value] = plan.loaded_tiles(baked);
        let maps = [(Tensor::Q, q), (Tensor::K, key), (Tensor::V, value)].map(|(tensor, tile)| {
            if tensor == Tensor::V && transposes_values(problem) {
                TransposedValues::new(problem).declare_map(k, c, tile)
            } else {
                declare_map(k, c, problem, (tensor, tile))
            }
        });
        let rows_out = BulkStore::tile(problem.head_dim_v as u32, !baked.lengths.q.is_even());
        let out_map = plan.store.by_tma().then(|| declare_map(k, c, problem, (Tensor::Out, rows_out)));
        let out = c.tensor(k, Tensor::Out);
        let lse = c.operand(k, Operand::Lse);
        let counter = (plan.handout == Handout::Dynamic).then(|| c.counter(k, COUNTER_BYTES));
        let parts = (plan.tail == Tail::Shared).then(|| {
            // The sizes do not depend on the lengths and are never 0, because an empty buffer has no address.
            let (room, warps) = (plan.room(arch), plan.tile_warps());
            let bytes = StreamKMerge::bytes(room, warps, problem.head_dim_v as u32).max(16);
            let counter_bytes = StreamKMerge::counter_bytes(room, warps).max(16);
            [c.scratch(k, bytes as usize), c.counter(k, counter_bytes as usize)]
        });
        let [out_batch_bytes, out_head_bytes] = declare_head_strides(k, c, problem, Tensor::Out);
        let seq_q = c.u32(k, "seq_q", problem.seq_q as u32);
        let seq_kv = c.u32(k, "seq_kv", problem.seq_kv as u32);
        let lengths = declare_lengths(k, c, problem, [seq_q, seq_kv]);
        let pages = PageTable::declare(k, c, problem);
        let mut rows_of_batch = |name: &str, tensor| c.u32(k, name, batch_rows(problem, tensor) as u32);
        let value_batch_rows = value.ragged.then(|| rows_of_batch("v_batch_rows", Tensor::V));
        let out_batch_rows =
            (out_map.is_some() && rows_out.ragged).then(|| rows_of_batch("out_batch_rows", Tensor::Out));
        let grid = TileGrid {
            order: plan.tile_order,
            tiles: c.u32(k, "tiles", plan.tile_count(problem) as u32),
            row_blocks: c.u32(k, "row_blocks", plan.row_blocks(problem) as u32),
            heads: c.u32(k, "heads", plan.tile_heads(problem) as u32),
            section: c.u32(k, "section", plan.section(problem) as u32),
            last_section: None,
        };
        let stream_k = plan.last_wave(problem, arch).map(|wave| StreamK {
            blocks: c.u32(k, "blocks", wave.blocks as u32),
            whole: c.u32(k, "whole_tiles", wave.whole() as u32),
            pieces: Pieces {
                piece: c.u32(k, "piece", wave.piece() as u32),
                longer: c.u32(k, "longer", wave.longer() as u32),
            },
        });
        let factor = c.f32(k, "scale_log2e", factor_or_least(problem));
        Params {
            maps,
            out_map,
            out,
            lse,
            counter,
            parts,
            out_batch_bytes,
            out_head_bytes,
            seq_q,
            seq_kv,
            lengths,
            pages,
            value_batch_rows,
            out_batch_rows,
            grid,
            stream_k,
            factor,
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, plan.tanh),
            programs: plan.declare_score_programs(k, c, problem, baked),
            sinks: c.operand(k, Operand::Sinks),
            before: Before::declare(k, c),
            lists: plan.list_tiles(problem).map(|tiles| tiles.declare(k, c, problem, Access::Read)),
            score_descale: ScoreDescale::declare(k, c, problem),
            value_descale: ValueDescale::declare(k, c, problem),
        }
    }
}
