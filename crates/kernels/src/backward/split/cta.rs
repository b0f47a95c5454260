//! The parts that both kernels share: their parameters, the rows that a CTA owns, and the tensors in memory.

use attend::{
    BlockRing, Bound, DropoutMask, DropoutParams, GradientPrograms, KeyBand, Lengths, Masker, ProgramCode,
    RingBlock, RowRange, ScoreGradient, ScorePrograms, Sequence, Softcap, SoftcapSlope, Tanh,
};
use problem::{Operand, OperandMap, Problem, Tensor};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Half, Launch, Pointer, R32, R64, Shared};
use tile::{
    AccTile, MatrixReader, MmaType, OperandA, OperandB, RowsOut, Sign, Threads, TileCopy, TileLayout, divide,
    store_rows,
};

use super::plan::{FAMILY, Side, SplitPlan, SplitTiles};
use crate::backward::sums::SinkParts;
use crate::contract::Contract;
use crate::derivatives::{TableGradient, code_of_scores};
use crate::draft::Draft;
use crate::dropout::declare_dropout;
use crate::forward::contract::{
    declare_band, declare_head_strides, declare_softcap, factor_or_one, half, is_wide, lse_of_row,
};
use crate::forward::lengths::{blocks_divide, declare_lengths};
use crate::forward::mma::{QueryHome, axis_of_rows, head_and_batch};
use crate::forward::programs::declare_programs;
use crate::grid::{Extents, Grid};
use crate::{Arch, Baked};

impl Side {
    const fn entry(self) -> &'static str {
        match self {
            Side::Queries => "flash_backward_dq",
            Side::Keys => "flash_backward_dkv",
        }
    }

    /// The tensors that the kernel reads and writes.
    const fn tensors(self) -> &'static [Tensor] {
        match self {
            Side::Queries => &[Tensor::Q, Tensor::K, Tensor::V, Tensor::Out, Tensor::DOut, Tensor::Dq],
            Side::Keys => &[Tensor::Q, Tensor::K, Tensor::V, Tensor::DOut, Tensor::Dk, Tensor::Dv],
        }
    }
}

impl SplitPlan {
    /// What the code depends on.
    pub(super) fn baked(&self, problem: &Problem) -> Baked {
        let baked = Baked::of(problem, false);
        Baked {
            lse: problem.pass.d_lse(),
            heads_q: problem.heads_q,
            sign: if problem.softmax_scale() == 0.0 { Sign::Clear } else { baked.sign },
            divides: blocks_divide(problem, self.dq_keys),
            flat: self.needs_flat_grid(problem),
            programs: code_of_scores(problem),
            table_gradients: TableGradient::all(problem, FAMILY).unwrap_or_default(), // checked with the plan
            ..baked
        }
        .with_row_bytes(problem, &Tensor::ALL)
    }

    /// A kernel of the plan, which has been checked.
    pub(super) fn draft<'a>(
        &'a self,
        problem: &Problem,
        baked: &'a Baked,
        arch: &Arch,
        side: Side,
    ) -> Draft<'a> {
        let tiles = self.tiles(side);
        let mut k = Builder::kernel(side.entry());
        k.max_threads(tiles.threads());
        if let Some(resident) = tiles.resident_ctas {
            k.min_ctas_per_sm(resident);
        }
        let mut contract = Contract::new(problem);
        let code = match side {
            Side::Queries => baked.programs.clone(),
            Side::Keys => baked.programs.as_ref().map(ProgramCode::transposed),
        };
        let (own, grid) = (side.tensors(), self.grid(problem, side));
        let reads_lse = side == Side::Queries;
        let params = SplitParams::declare(
            &mut k,
            &mut contract,
            (problem, baked),
            (own, reads_lse, grid, self.tanh),
            code.as_ref(),
        );
        let sinks =
            reads_lse.then(|| SinkParts::declare(&mut k, &mut contract, problem, self.sink_counts(problem)));
        let sinks = sinks.flatten();
        let launch = Launch {
            dynamic_shared: tiles.shared_bytes(problem),
            ..Launch::new(self.grid(problem, side).launch(baked.flat), Dim3(tiles.threads(), 1, 1))
        };
        let body = move |k: &mut Builder| {
            let cta = Cta::new(k, self, baked, (params, sinks), side);
            match side {
                Side::Queries => cta.compute_dq(k),
                Side::Keys => cta.compute_dk_and_dv(k),
            }
        };
        Draft::new(k, contract, (side.entry(), launch), arch.target(), body)
    }
}

/// The parameters of a kernel.
pub(super) struct SplitParams {
    /// Pointers, and the bytes between batch entries and between heads.
    tensors: OperandMap<(Global, [R64; 2])>,
    pub grid: Grid,
    /// The LSE and, if it has one, its gradient.
    pub lse: Option<Global>,
    pub d_lse: Option<Global>,
    /// `[batch][head][row]` as in the LSE: −L·log2 e and −D.
    pub minus_log_sums: Global,
    pub minus_deltas: Global,
    pub seq_q: R32,
    pub seq_kv: R32,
    pub lengths: Option<Lengths>,
    /// The factor of scores in the exponent: `|scale| · log2 e` without a softcap.
    factor: F32,
    /// The factor of dQ and dK.
    scale: F32,
    pub band: KeyBand,
    softcap: Option<Softcap>,
    inverse_cap: Option<F32>,
    programs: Option<ScorePrograms>,
    pub dropout: Option<DropoutParams>,
}

impl SplitParams {
    /// Declares the parameters of a kernel with these tensors. The kernel that reads the LSE writes the
    /// numbers of rows; the others read them.
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        (tensors, reads_lse, grid, tanh): (&[Tensor], bool, Extents, Tanh),
        code: Option<&ProgramCode>,
    ) -> SplitParams {
        let tensors = tensors.iter().map(|&tensor| {
            let start = c.tensor(k, tensor);
            (tensor.into(), (start, declare_head_strides(k, c, problem, tensor)))
        });
        let tensors = tensors.collect();
        let (lse, access) = match reads_lse {
            false => (None, Access::Read),
            // With uneven lengths, rows that belong to no sequence are not written.
            true if problem.lengths.is_even() => (c.operand(k, Operand::Lse), Access::Write),
            true => (c.operand(k, Operand::Lse), Access::ReadWrite),
        };
        let d_lse = lse.and_then(|_| c.operand(k, Operand::DLse));
        let mut of_rows = |k: &mut Builder, name| c.temporary(k, name, 4 * problem.lse_len(), access);
        let [minus_log_sums, minus_deltas] = ["minus_log_sums", "minus_deltas"].map(|name| of_rows(k, name));
        let [seq_q, seq_kv] = [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)]
            .map(|(name, length)| c.u32(k, name, length as u32));
        // After a score program, the program multiplies wide logits.
        let cap = problem.score.softcap.filter(|_| is_wide(problem) && problem.programs.score.is_none());
        SplitParams {
            tensors,
            grid: grid.declare(k, c, baked.flat),
            lse,
            d_lse,
            minus_log_sums,
            minus_deltas,
            seq_q,
            seq_kv,
            lengths: declare_lengths(k, c, problem, [seq_q, seq_kv]),
            factor: c.f32(k, "scale_log2e", factor_or_one(problem)),
            scale: c.f32(k, "scale", problem.softmax_scale()),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, tanh),
            inverse_cap: cap.map(|cap| c.f32(k, "inverse_cap", 1.0 / (cap * std::f32::consts::LOG2_E))),
            programs: declare_programs(k, c, problem, code),
            dropout: declare_dropout(k, c, problem),
        }
    }

    /// The programs for warps that hold `warp_rows` of the rows each.
    pub fn programs(
        &self,
        k: &mut Builder,
        threads: &Threads,
        rows: &RowRange,
        warp_rows: u32,
        at: (Option<R32>, R32),
    ) -> Option<GradientPrograms<'_>> {
        self.programs.as_ref().map(|programs| programs.for_gradients(k, threads, rows, warp_rows, at))
    }

    /// The gradient of the softmax. `of_table` leaves out the slope of the softcap.
    pub fn score_gradient<'b>(
        &'b self,
        mask: &'b Masker,
        programs: Option<&'b GradientPrograms<'b>>,
        of_table: bool,
    ) -> ScoreGradient<'b> {
        let &SplitParams { ref softcap, inverse_cap, factor, .. } = self;
        let slope = if of_table { SoftcapSlope::None } else { SoftcapSlope::OfTangent };
        ScoreGradient { softcap: softcap.as_ref(), inverse_cap, programs, slope, mask, factor }
    }

    /// Row 0 of a head of a sequence in a tensor.
    pub fn start(
        &self,
        k: &mut Builder,
        baked: &Baked,
        tensor: Tensor,
        (sequence, batch, head): (Option<Sequence>, R32, R32),
    ) -> Global {
        let (start, [batch_bytes, head_bytes]) = self.tensors[tensor.into()];
        // Packed tensors have a batch stride of 0.
        let [batch, head] = [batch, head].map(|n| k.zext(n));
        let of_batch = k.mad(batch, batch_bytes, start.base);
        let of_head = k.mad(head, head_bytes, of_batch);
        let first_row = sequence.and_then(|sequence| sequence.side(tensor).start);
        let base = first_row.map_or(of_head, |row| {
            let row = k.zext(row);
            k.mad(row, baked.row_bytes(tensor), of_head)
        });
        Global { base, ..start }
    }

    /// The address of a query row's number in an array `[batch][head][row]`. `row` counts from the start of
    /// the sequence.
    pub fn number_of_row(
        &self,
        k: &mut Builder,
        baked: &Baked,
        array: Global,
        ((sequence, batch, head), row): ((Option<Sequence>, R32, R32), R32),
    ) -> Global {
        let is_packed = self.lengths.is_some_and(|lengths| lengths.q.packed.is_some());
        let batch = if is_packed { k.mov(0) } else { batch };
        let row = sequence.map_or(row, |sequence| sequence.q.row(k, row));
        lse_of_row(k, baked, (array, self.rows_of_head()), [batch, head, row])
    }

    /// Rows of a head in an array `[batch][head][row]`.
    pub fn rows_of_head(&self) -> R32 {
        self.lengths.map_or(self.seq_q, |lengths| lengths.q.tensor_rows())
    }
}

/// State of the CTA in registers, with the values known at emission.
pub(super) struct Cta<'a> {
    plan: &'a SplitPlan,
    pub tiles: SplitTiles,
    side: Side,
    pub baked: &'a Baked,
    pub params: SplitParams,
    pub sinks: Option<SinkParts>,
    pub threads: Threads,
    /// The rows that the CTA owns. For keys, queries and keys have changed places.
    pub rows: RowRange,
    /// The rows of the CTA's batch entry; `None` if it has all rows of the tensors.
    pub sequence: Option<Sequence>,
    pub shared: Shared,
}

/// A tensor whose blocks pass through the ring.
pub(super) struct Streamed {
    copy: TileCopy,
    /// The thread's pointer into block 0 of the first head.
    start: Global,
    head_bytes: R64,
    block_bytes: i64,
    /// The place of the tile in a stage.
    at: i64,
}

impl Streamed {
    /// Requests a block, of one of `heads` heads. Rows from `limit` on are zeros.
    pub fn load(&self, k: &mut Builder, block: &RingBlock, heads: u32, limit: Option<R32>) {
        let index = k.zext(block.block);
        let mut from = k.mad(index, self.block_bytes, self.start.base);
        if heads > 1 {
            let head = k.zext(block.head);
            from = k.mad(head, self.head_bytes, from);
        }
        self.copy.load(k, block.stage.at(self.at), Global { base: from, ..self.start }, limit);
    }
}

impl<'a> Cta<'a> {
    fn new(
        k: &mut Builder,
        plan: &'a SplitPlan,
        baked: &'a Baked,
        (params, sinks): (SplitParams, Option<SinkParts>),
        side: Side,
    ) -> Cta<'a> {
        let tiles = plan.tiles(side);
        let (rows, sequence) = owned_rows(k, plan, &params, side);
        if sequence.is_some() && sinks.is_none() {
            let empty = k.setp_u(CmpOp::Eq, rows.seq_q, 0);
            k.exit_if(empty);
        }
        let threads = Threads::new(k, tiles.threads(), tiles.dim_warps);
        let shared = k.dynamic_shared(128);
        Cta { plan, tiles, side, baked, params, sinks, threads, rows, sequence, shared }
    }

    /// The type of all tensors.
    pub fn half(&self) -> Half {
        half(self.baked)
    }

    pub fn ty(&self) -> MmaType {
        MmaType::Half(self.half())
    }

    /// The batch entry, head and tile in the grid.
    pub fn grid_place(&self, k: &mut Builder) -> [R32; 3] {
        let [head, batch] = self.grid_head(k);
        [batch, head, self.params.grid.index(k, axis_of_rows(self.plan.tile_order))]
    }

    /// The CTA's head and batch entry in the grid.
    fn grid_head(&self, k: &mut Builder) -> [R32; 2] {
        head_and_batch(k, self.plan.tile_order, self.params.grid)
    }

    /// The CTA's head of a tensor of queries, or of keys. For the queries of a KV head, the first of the
    /// group.
    pub fn first_head(&self, k: &mut Builder, of_keys: bool) -> R32 {
        let [head, _] = self.grid_head(k);
        match (self.side, of_keys) {
            (Side::Queries, true) => divide(k, head, self.baked.group_size()),
            (Side::Keys, false) => k.mul(head, self.baked.group_size()),
            _ => head,
        }
    }

    /// Row 0 of the CTA's sequence and head in a tensor.
    fn start(&self, k: &mut Builder, tensor: Tensor) -> Global {
        let batch = self.batch(k);
        let head = self.first_head(k, tensor.is_of_keys());
        self.params.start(k, self.baked, tensor, (self.sequence, batch, head))
    }

    /// The CTA's batch entry.
    pub fn batch(&self, k: &mut Builder) -> R32 {
        let [_, batch] = self.grid_head(k);
        self.sequence.map_or(batch, |sequence| sequence.batch)
    }

    /// The address of a query row's number in an array `[batch][head][row]`. `row` counts from the start of
    /// the sequence, and the head is the CTA's first query head.
    pub fn number_of_row(&self, k: &mut Builder, array: Global, row: R32) -> Global {
        let batch = self.batch(k);
        let head = self.first_head(k, false);
        self.params.number_of_row(k, self.baked, array, ((self.sequence, batch, head), row))
    }

    /// Elements of a tensor's row.
    fn width(&self, tensor: Tensor) -> u32 {
        match tensor.primal() {
            Tensor::Q | Tensor::K => self.baked.dims.head_dim as u32,
            _ => self.baked.head_dim_v(),
        }
    }

    /// A copy of tiles of a tensor, of one of two layouts: that of Q and K, or that of V and dO.
    fn copy(&self, k: &mut Builder, tensor: Tensor, [of_q, of_v]: [TileLayout; 2]) -> TileCopy {
        let layout = if matches!(tensor.primal(), Tensor::Q | Tensor::K) { of_q } else { of_v };
        let copy = TileCopy::new(k, &self.threads, layout, self.baked.row_bytes(tensor), self.plan.copy);
        copy.of_width(k, 2 * self.width(tensor))
    }

    /// Requests the copy of the CTA's own rows of a tensor.
    pub fn load_own(&self, k: &mut Builder, tensor: Tensor, to: Shared) {
        let [own, _] = self.tiles.layouts(self.baked);
        let copy = self.copy(k, tensor, own);
        let head = self.start(k, tensor);
        let from = copy.start(k, head, self.rows.first);
        let limit = k.sub(self.rows.seq_q, self.rows.first);
        copy.load(k, to, from, Some(limit));
    }

    /// A tensor whose tiles lie `at` bytes after the start of a stage.
    pub fn streamed(&self, k: &mut Builder, tensor: Tensor, at: u32) -> Streamed {
        let [_, streamed] = self.tiles.layouts(self.baked);
        let copy = self.copy(k, tensor, streamed);
        let head = self.start(k, tensor);
        let zero = k.mov(0);
        let start = copy.start(k, head, zero);
        let (_, [_, head_bytes]) = self.params.tensors[tensor.into()];
        let block_bytes = i64::from(self.tiles.streamed).wrapping_mul(self.baked.row_bytes(tensor));
        Streamed { copy, start, head_bytes, block_bytes, at: at.into() }
    }

    /// The places of the CTA's own two tiles.
    pub fn own_tiles(&self) -> [Shared; 2] {
        let [[first, _], _] = self.tiles.layouts(self.baked);
        [self.shared, self.shared.at(first.bytes().into())]
    }

    fn ring_start(&self) -> Shared {
        let [[first, second], _] = self.tiles.layouts(self.baked);
        self.shared.at((first.bytes() + second.bytes()).into())
    }

    /// The place of the last stage, which the first visit fills.
    pub fn last_stage(&self) -> Shared {
        let before = (self.tiles.stages - 1) * self.tiles.stage_bytes(self.baked);
        self.ring_start().at(before.into())
    }

    /// The place after the ring.
    pub fn after_ring(&self) -> Shared {
        self.ring_start().at(self.tiles.ring_bytes(self.baked).into())
    }

    /// The ring over the blocks of a bound, of each of `heads` heads.
    pub fn ring(&self, k: &mut Builder, bound: &Bound, heads: u32) -> BlockRing {
        let stages = (self.tiles.stages, self.tiles.stage_bytes(self.baked));
        let from = k.mov(bound.from());
        BlockRing::new(k, self.ring_start(), stages, [from, bound.end], heads)
    }

    /// The half of the head dims that the warp computes; `None` if the warp computes all of them.
    pub fn half_of_dims(&self) -> Option<R32> {
        self.threads.part
    }

    /// The warp's rows of an own tile, which is visible, in registers or in shared memory as the plan says.
    pub fn own_operand(&self, k: &mut Builder, number: usize, sign: Sign) -> OperandA {
        let operand = self.own_rows(k, number, self.own_tiles()[number], sign);
        match self.tiles.operands {
            QueryHome::Shared => operand,
            QueryHome::Registers => operand.into_registers(k),
        }
    }

    /// The warp's rows of a tile at `tile` with the layout of own tile `number`.
    pub fn own_rows(&self, k: &mut Builder, number: usize, tile: Shared, sign: Sign) -> OperandA {
        let [own, _] = self.tiles.layouts(self.baked);
        let rows = self.tiles.warp_rows();
        let operand = OperandA::shared(k, &self.threads, self.ty(), sign, own[number], tile, rows);
        match self.half_of_dims() {
            None => operand,
            Some(half) => operand.in_halves(k, half),
        }
    }

    /// A reader of tile `number` of a stage: `MatrixReader::chunks_first` for columns along k, and
    /// `MatrixReader::rows_first` for rows along k.
    pub fn reader(
        &self,
        k: &mut Builder,
        number: usize,
        of: impl Fn(&mut Builder, &Threads, TileLayout) -> MatrixReader,
    ) -> StageReader {
        let [_, streamed] = self.tiles.layouts(self.baked);
        let reader = of(k, &self.threads, streamed[number]);
        let reader = match self.half_of_dims() {
            None => reader,
            Some(half) => reader.in_halves(k, half),
        };
        let at = if number == 0 { 0 } else { streamed[0].bytes() };
        StageReader { reader, at: at.into() }
    }

    /// A mask for the probabilities of the CTA's rows.
    pub fn mask(&self, k: &mut Builder, band: &KeyBand) -> Masker {
        let threads = self.threads.of_all_columns();
        let mask = Masker::new(k, band, &threads, &self.rows, self.tiles.warp_rows(), self.tiles.streamed);
        mask.of_probabilities()
    }

    /// The programs of the CTA's rows. Blocks of queries have their own heads.
    pub fn programs(&self, k: &mut Builder) -> Option<GradientPrograms<'_>> {
        self.params.programs.as_ref()?;
        let head = (self.side == Side::Queries).then(|| self.first_head(k, false));
        let batch = self.batch(k);
        self.params.programs(k, &self.threads, &self.rows, self.tiles.warp_rows(), (head, batch))
    }

    /// The dropout of the CTA's rows, and the index of the CTA's first query head among all.
    pub fn dropout(&self, k: &mut Builder) -> Option<(DropoutMask, R32)> {
        let params = self.params.dropout?;
        let size = (self.tiles.warp_rows(), self.tiles.streamed);
        let threads = self.threads.of_all_columns();
        let mask = DropoutMask::new(k, params, &threads, &self.rows, size, self.side == Side::Keys);
        let (head, batch) = (self.first_head(k, false), self.batch(k));
        Some((mask, k.mad(batch, self.baked.heads_q as u32, head)))
    }

    /// The query head of a block of the CTA of keys, if a program may read it.
    pub fn head_of_block(&self, k: &mut Builder, block: &RingBlock) -> Option<R32> {
        self.params.programs.as_ref()?;
        let first = self.first_head(k, false);
        Some(k.add(first, block.head))
    }

    /// Multiplies a gradient of Q or K by the scale.
    pub fn scale(&self, k: &mut Builder, gradient: &AccTile) {
        for row in 0..gradient.lane_rows() {
            gradient.scale_row(k, row, self.params.scale);
        }
    }

    /// Waits until no warp reads the CTA's own tiles, and no copy to them is in flight.
    pub fn release_own_tiles(&self, k: &mut Builder) {
        k.cp_async_wait(0); // A CTA without blocks has not waited for its tiles yet.
        k.bar_sync();
    }

    /// Stores a gradient of the CTA's own rows through an own tile that was released.
    pub fn store(&self, k: &mut Builder, tensor: Tensor, gradient: &AccTile, tile: Shared) {
        let rows = RowsOut {
            tensor: self.start(k, tensor),
            first: self.rows.first,
            limit: self.rows.seq_q,
            row_bytes: self.baked.row_bytes(tensor),
        };
        store_rows(k, &self.threads, self.half(), gradient, tile, rows, self.width(tensor), self.plan.copy);
    }
}

/// Reads a tile of a stage as a B operand.
pub(super) struct StageReader {
    reader: MatrixReader,
    at: i64,
}

impl StageReader {
    pub fn open(&self, k: &mut Builder, block: &RingBlock) -> OperandB {
        OperandB { tile: self.reader.open(k, block.stage.at(self.at)), tail: None }
    }
}

/// The rows that the CTA owns. With uneven lengths, a CTA may have none.
fn owned_rows(
    k: &mut Builder,
    plan: &SplitPlan,
    params: &SplitParams,
    side: Side,
) -> (RowRange, Option<Sequence>) {
    let own = plan.tiles(side).own;
    let block = owned_block(k, plan, params, side);
    let (index, sequence) = match &params.lengths {
        None => (block, None),
        Some(lengths) => {
            let [_, batch] = head_and_batch(k, plan.tile_order, params.grid);
            let (sequence, index) = match side {
                Side::Queries => lengths.tile(k, batch, block, own, 1),
                Side::Keys => lengths.key_tile(k, batch, block, own),
            };
            (index, Some(sequence))
        }
    };
    let [seq_q, seq_kv] = match sequence {
        None => [params.seq_q, params.seq_kv],
        Some(sequence) => [sequence.q.len, sequence.kv.len],
    };
    let [seq_q, seq_kv] = if side == Side::Queries { [seq_q, seq_kv] } else { [seq_kv, seq_q] };
    (RowRange { first: k.mul(index, own), rows: own, seq_q, seq_kv, heads: 1 }, sequence)
}

/// The index of the CTA's rows. With a causal mask, the last query rows see the most keys and the first keys
/// are seen by the most rows: those come first.
fn owned_block(k: &mut Builder, plan: &SplitPlan, params: &SplitParams, side: Side) -> R32 {
    let axis = axis_of_rows(plan.tile_order);
    let index = params.grid.index(k, axis);
    if side == Side::Keys || params.band.is_full() {
        return index;
    }
    let count = params.grid.extent(k, axis);
    let last = k.sub(count, 1);
    k.sub(last, index)
}
