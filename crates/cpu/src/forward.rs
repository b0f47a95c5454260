//! Attention on slices: checks the arguments, distributes tasks over threads, and runs the loop of a task
//! over its keys.

mod tasks;

use std::cell::OnceCell;
use std::f64::consts::{LN_2, LOG2_E};

use half::{bf16, f16};
use problem::{
    DType, Dropout, ElementsMut, KeyPlaces, KeyRange, Operand, OperandMap, Operands, PassKind, Problem,
    ProblemError, Sequence, Span, Strides, Tensor,
};

use crate::aligned::Aligned;
use crate::arithmetic::{Arithmetic, Faster, HeadRows, HeadsOf, Never};
use crate::before::Before;
use crate::computed::computed_type;
use crate::decode::{self, Decoded, Factors};
use crate::dims::{InPlace, MOST_KEYS_IN_PLACE};
use crate::output::{Output, OutputRows};
use crate::parts::{self, Parts};
use crate::plan;
use crate::programs::{Compiled, Evaluators, Layout, Place, Region, Values, Verdict};
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Amx, Avx2, Avx512, Avx512Vnni};
use crate::simd::{HasTiles, Isa, Pairs, Portable, PortablePairs, PortableTiles, Rows, Simd};
use crate::threads::{CallingThread, Executor, with_default};
use crate::tile::{Block, MAX_WIDTH, Panel, Scores, Step, Tile};
use crate::view::{Input, Inputs, TableMemory, arrays, origin, tables};
use crate::{CpuError, CpuPlan, Element, narrow, terms};
use tasks::Task;

/// Computes `O = softmax(scale · Q Kᵀ + mask) V` and, if `lse` is given, the LSE (`[batch, heads_q, seq_q]`,
/// natural logarithm). Each slice starts at the tensor's lowest element in memory, as [`Problem::span`]
/// describes. If the calling thread is a worker of a rayon pool, that pool computes, else
/// [`Pool::shared`](crate::Pool::shared). The problem must not have operands other than Q, K and V.
///
/// # Errors
/// A [`CpuError`] if the problem, a buffer or the plan is rejected. Nothing has been written then.
pub fn attention<Q: Element, K: Element, V: Element, O: Element>(
    problem: &Problem,
    q: &[Q],
    k: &[K],
    v: &[V],
    out: &mut [O],
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    attention_with(problem, &qkv([q.into(), k.into(), v.into()]), out, lse, plan)
}

/// Q, K and V as the inputs of a call.
fn qkv([q, k, v]: [Input<'_>; 3]) -> OperandMap<Input<'_>> {
    OperandMap::from_iter([(Operand::Q, q), (Operand::K, k), (Operand::V, v)])
}

/// Like [`attention`], with all inputs of the problem. The LSE of packed queries is `[heads_q, rows]`.
///
/// # Errors
/// As [`attention`].
pub fn attention_with<O: Element>(
    problem: &Problem,
    inputs: &OperandMap<Input<'_>>,
    out: &mut [O],
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    if plan.threads == 1 {
        return attention_with_on(&CallingThread, problem, inputs, out, lse, plan);
    }
    with_default(|executor| attention_with_on(executor, problem, inputs, out, lse, plan))
}

/// Like [`attention`], with `[q, k, v]` as inputs and the threads of an executor.
///
/// # Errors
/// As [`attention`]. [`CpuError::Stopped`] if the executor stopped the call; the outputs are then
/// unspecified.
pub fn attention_on<O: Element>(
    executor: &dyn Executor,
    problem: &Problem,
    inputs: [Input<'_>; 3],
    out: &mut [O],
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    attention_with_on(executor, problem, &qkv(inputs), out, lse, plan)
}

/// Like [`attention_with`], with the threads of an executor.
///
/// # Errors
/// As [`attention_with`]. [`CpuError::Stopped`] if the executor stopped the call; the outputs are then
/// unspecified.
pub fn attention_with_on<O: Element>(
    executor: &dyn Executor,
    problem: &Problem,
    inputs: &OperandMap<Input<'_>>,
    out: &mut [O],
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    compute(executor, problem, inputs, O::elements_mut(out), lse, plan)
}

/// Checks a call and computes. This function is not generic, so that the kernels are compiled once, in this
/// crate, and not again in each crate that calls [`attention`].
fn compute(
    executor: &dyn Executor,
    problem: &Problem,
    inputs: &OperandMap<Input<'_>>,
    out: ElementsMut<'_>,
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    plan.check(problem)?;
    problem.expect_pass(PassKind::Forward)?;
    problem.check_inputs(inputs, Input::type_and_len)?;
    let (operands, tables) = (&arrays(inputs), &tables(inputs)[..]);
    let given = inputs;
    problem.check_length_values(operands)?;
    let inputs = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| {
        let none = || Input::empty(problem.dtypes.of(tensor).into());
        inputs.get(tensor.into()).copied().unwrap_or_else(none)
    });
    // The canonical problem has the same origins of tensors and the same operands.
    let problem = &*problem.canonical();
    let inputs = Inputs::views(problem, inputs, KeyPlaces::of(problem, operands))?;
    let sequences = problem.sequences(operands)?;
    let before = Before::new(problem, given, operands)?;
    let dtype = out.dtype();
    let origin = origin(problem, Tensor::Out, (dtype.into(), out.len()))?;
    let (argument, needed) = (Operand::Lse.name(), problem.lse_len());
    if let Some(len) = lse.as_deref().map(<[f32]>::len).filter(|&len| len < needed) {
        return Err(ProblemError::OperandTooShort { argument, len, needed }.into());
    }
    let (dtype, expected) = (dtype.name(), problem.dtypes.out.name());
    let wrong = ProblemError::OperandType { argument: Operand::OUT.name(), dtype, expected };
    let out = Output::new(out, origin, problem.out, problem.head_dim_v).ok_or(wrong)?;
    let [_, heads, rows, _] = problem.extents(Tensor::Q).map(|extent| extent as i64);
    let lse_strides = Strides { batch: heads * rows, head: rows, row: 1 };
    let lse = lse.map(|lse| OutputRows::new(lse, 0, lse_strides, 1));
    let before = before.as_ref();
    let checked = Checked { executor, sequences: &sequences, operands, tables, before, out, lse, plan };
    let factors = Factors::of_heads(problem, operands);
    if !problem.dtypes.has_fp8() || decode::is_in_place(problem, plan, &factors) {
        return checked.run(problem, inputs, &factors);
    }
    match computed_type(problem) {
        DType::F16 => checked.decode::<f16>(problem, inputs),
        DType::F32 => checked.decode::<f32>(problem, inputs),
        _ => checked.decode::<bf16>(problem, inputs),
    }
}

/// A call whose problem, operands and buffers have been checked.
struct Checked<'a> {
    executor: &'a dyn Executor,
    sequences: &'a [Sequence],
    operands: &'a Operands<'a>,
    tables: &'a [TableMemory<'a>],
    before: Option<&'a Before<'a>>,
    out: Output<'a>,
    lse: Option<OutputRows<'a, f32>>,
    plan: &'a CpuPlan,
}

impl Checked<'_> {
    /// Decodes 8-bit inputs to `T`, and computes.
    fn decode<T: Element + Default>(self, problem: &Problem, inputs: Inputs<'_>) -> Result<(), CpuError> {
        let decoded = Decoded::<T>::new(
            self.executor,
            self.plan.threads,
            problem,
            inputs,
            self.operands,
            self.sequences,
        );
        let inputs = decoded.inputs(inputs)?;
        self.run(&decoded.problem, inputs, &decoded.factors)
    }

    fn run(self, problem: &Problem, inputs: Inputs<'_>, factors: &Factors) -> Result<(), CpuError> {
        let Checked { executor, sequences, operands, tables, before, out, lse, plan } = self;
        let sinks = problem.score.sink.then(|| operands.floats(Operand::Sinks));
        let together = match plan.rows {
            plan::Rows::Group if !factors.differ => problem.group_size(),
            plan::Rows::Head | plan::Rows::Group => 1,
        };
        let programs = &Evaluators::new(problem, tables, together > 1);
        let call = Call {
            executor,
            problem,
            sequences,
            sinks,
            before,
            dropout: Dropout::of(problem, operands),
            programs,
            inputs,
            factors,
            together,
            out,
            lse,
            plan,
        };
        // `plan.check` has found the instruction set, so `detect` succeeds.
        match plan.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Amx::detect().into_iter().for_each(|amx| call.run_terms(amx)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Avx512Vnni::detect().into_iter().for_each(|vnni| call.run_integers(vnni)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect().into_iter().for_each(|simd| call.run(simd, &Never)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().into_iter().for_each(|simd| call.run(simd, &Never)),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::detect().into_iter().for_each(|simd| call.run(simd, &Never)),
            Isa::Portable => call.run(Portable::<4>, &Never),
            Isa::PortableIntegers => call.run_integers(PortablePairs),
            Isa::PortableTerms => call.run_terms(PortableTiles),
            #[allow(unreachable_patterns)] // the sets of the other architecture
            _ => {}
        }
        if executor.is_stopped() { Err(CpuError::Stopped) } else { Ok(()) }
    }
}

/// Number of multiplications (in Q Kᵀ and P V) after which a thread checks whether the call was stopped:
/// about a millisecond of work.
const PRODUCTS_BETWEEN_STOPS: usize = 1 << 24;

/// Maximum number of panels of a task that reads keys and values where they lie, instead of widening each
/// block once for all.
const MOST_PANELS_IN_PLACE: usize = 2;

/// One call of [`attention`], checked.
struct Call<'a> {
    executor: &'a dyn Executor,
    problem: &'a Problem,
    /// The rows of each batch entry.
    sequences: &'a [Sequence],
    /// A logit per query head, if the problem has sinks.
    sinks: Option<&'a [f32]>,
    /// The result from which the rows continue.
    before: Option<&'a Before<'a>>,
    dropout: Option<Dropout>,
    programs: &'a Evaluators<'a>,
    inputs: Inputs<'a>,
    factors: &'a Factors,
    /// Number of query heads whose rows are concatenated.
    together: usize,
    out: Output<'a>,
    lse: Option<OutputRows<'a, f32>>,
    plan: &'a CpuPlan,
}

/// The factors that turn products of queries and keys into exponents.
struct Scale {
    /// The factor that turns a product, or the tanh of a cap, into a logit.
    factor: f32,
    /// As [`Step::scale`].
    scale: f32,
    /// As [`Step::cap`].
    cap: Option<f32>,
}

/// Working memory of a thread. It is kept between calls. Its size is bounded by the plan and the head
/// dimensions.
#[derive(Default)]
struct Scratch {
    panels: Vec<Panel>,
    blocks: Blocks,
    rows: Aligned,
    scores: Values,
    masks: Values,
}

/// Words of a block of keys, of the block's values, of the weights of a panel, of its evaluated mask and of
/// its factors of dropout.
#[derive(Default)]
struct Blocks {
    keys: Aligned,
    values: Aligned,
    weights: Aligned,
    shown: Aligned,
    dropped: Aligned,
}

impl Call<'_> {
    /// Computes with heads as sums of bf16 numbers, multiplied by tile instructions. Dropout is computed in
    /// f32.
    fn run_terms<H: HasTiles>(&self, tiles: H) {
        let heads = || terms::Heads::new(tiles, self.heads());
        self.run(tiles.vectors(), &self.dropout.is_none().then(heads));
    }

    /// Computes with heads as 16-bit integers, unless an LSE is requested: an LSE, and the weights of rows
    /// that continue, must be as exact as with f32 logits.
    fn run_integers<P: Pairs>(&self, pairs: P) {
        let heads = || narrow::Heads::new(pairs, self.heads(), self.plan);
        let inexact = self.lse.is_none() && self.before.is_none() && self.dropout.is_none();
        self.run(pairs.vectors(), &inexact.then(heads).flatten());
    }

    fn run<S: Simd>(&self, simd: S, faster: &impl Faster) {
        let parts = self.parts();
        if parts == 1 {
            return self.run_tasks(simd, faster, None);
        }
        let mut room = parts::room(self.problem, parts);
        self.run_tasks(simd, faster, Some(&Parts::new(self.problem, parts, &mut room)));
        if self.executor.is_stopped() {
            return;
        }
        let row_room = room.len() / self.problem.lse_len();
        for (batch, sequence) in self.sequences.iter().enumerate() {
            for (head, row) in
                (0..self.problem.heads_q).flat_map(|h| (0..sequence.q.len).map(move |r| (h, r)))
            {
                let kept = &mut room[self.index_of_row(batch, head, row) * row_room..][..row_room];
                let (out, shift, sum) = parts::join(kept, parts);
                self.write(simd, [batch, head, row], out, shift, sum);
            }
        }
    }

    /// The index of a query row among all rows: the index of its LSE.
    fn index_of_row(&self, batch: usize, head: usize, row: usize) -> usize {
        let [_, heads, rows, _] = self.problem.extents(Tensor::Q);
        let Span { batch, start, .. } = self.sequences[batch].q;
        (batch * heads + head) * rows + start + row
    }

    /// Properties of the inputs that decide whether an arithmetic faster than f32 may be used.
    fn heads(&self) -> HeadsOf<'_> {
        HeadsOf {
            problem: self.problem,
            sequences: self.sequences,
            inputs: self.inputs,
            together: self.together,
            fits: self.plan.isa.is_for(self.problem),
            largest_factor: self.factors.largest_logit(),
            has_factors: !self.factors.logits.is_empty(),
        }
    }

    /// Runs a task over the next blocks of `keys`. `keys` is `None` at the start and empty at the end;
    /// `most` is how many keys are enough for now.
    fn advance<S: Simd, A: Arithmetic>(
        &self,
        simd: S,
        arithmetic: A,
        task: Task,
        scratch: &mut Scratch,
        parts: Option<&Parts<'_>>,
        (keys, most): (&mut Option<KeyRange>, usize),
    ) {
        let mut left = match *keys {
            Some(left) => left,
            None => {
                scratch.blocks.weights.resize(arithmetic.weights(self.plan.block_kv));
                self.fill_panels(simd, arithmetic, task, &mut scratch.panels, &mut scratch.rows);
                self.place_panels(simd, task, scratch);
                self.keys(task, &scratch.panels[..self.panels(task)])
            }
        };
        if !left.is_empty() {
            left.start = self.run_blocks(simd, arithmetic, task, (left, most), scratch);
        }
        let Scratch { panels, rows, .. } = scratch;
        let panels = &mut panels[..self.panels(task)];
        if left.is_empty() {
            let mut index = task.first;
            for panel in panels {
                arithmetic.rescale(&mut panel.out, panel.width);
                self.finish::<S, A>(simd, task, index, panel, rows, parts);
                index += panel.rows;
            }
        }
        *keys = Some(left);
    }

    /// Runs a task's panels over the first blocks of `keys`. Returns where the remaining blocks start.
    fn run_blocks<S: Simd, A: Arithmetic>(
        &self,
        simd: S,
        arithmetic: A,
        task: Task,
        (keys, most): (KeyRange, usize),
        scratch: &mut Scratch,
    ) -> usize {
        let Scratch { panels, blocks, scores, masks, .. } = scratch;
        let Blocks { keys: k, values: v, weights, shown, dropped } = blocks;
        let panels = &mut panels[..self.panels(task)];
        let p = self.problem;
        let tile = Tile { rows: self.plan.tile_rows, vectors: self.plan.vectors };
        let kv_head = task.head / p.group_size();
        let of_head = self.factors.logits.get(task.batch * p.heads_q + task.head).map_or(1.0, |&x| x.into());
        let Scale { factor, scale, cap } = self.scale(arithmetic.logit_factor() * of_head);
        let products_of_key = (task.last - task.first) * (p.head_dim + p.head_dim_v);
        let most = (PRODUCTS_BETWEEN_STOPS / products_of_key.max(1)).min(most);
        let most = most.saturating_add(keys.start).min(keys.end);
        // A mask program looks for values that are not finite, in widened blocks.
        let few = panels.len() <= MOST_PANELS_IN_PLACE && self.programs.mask.is_none();
        let in_place_lanes = A::IN_PLACE.filter(|_| few);
        let mut first = keys.start;
        while first < most.max(keys.start + 1) {
            let range = KeyRange { start: first, end: (first + self.plan.block_kv).min(keys.end) };
            first = range.end;
            let mut verdict = Verdict::All;
            if let Some(mask) = &self.programs.mask {
                simd.evaluate(mask, masks, Region::Block(range));
                verdict = masks.verdict(mask, 0..panels.len());
            }
            if verdict == Verdict::None {
                continue;
            }
            let is_finite = OnceCell::new();
            let (mut room, mut made) = (Some((&mut *k, &mut *v)), None);
            for (number, panel) in panels.iter_mut().enumerate() {
                if panel.by_any.end <= range.start || range.end <= panel.by_any.start {
                    continue;
                }
                let mut hidden = None;
                if let Some(mask) = self.programs.mask.as_ref().filter(|_| verdict == Verdict::Some) {
                    let keys = range.end.min(panel.by_any.end) - range.start;
                    match show::<S, A>(simd, mask, masks, (number, panel), keys, shown) {
                        (Verdict::None, _) => continue,
                        (Verdict::Some, words) => hidden = Some(words),
                        (Verdict::All, _) => {}
                    }
                }
                // Keys and values that no panel sees are not read.
                if let Some((k, v)) = room.take() {
                    if let Some(program) = &self.programs.score {
                        simd.evaluate(program, scores, Region::Block(range));
                    }
                    let of = |view, range| HeadRows::of(view, self.sequences[task.batch].kv, kv_head, range);
                    let in_place =
                        in_place_lanes.filter(|_| range.len() <= MOST_KEYS_IN_PLACE).and_then(|lanes| {
                            let left = KeyRange { start: range.start, end: keys.end };
                            InPlace::new(of(self.inputs.k, left), of(self.inputs.v, left), lanes)
                        });
                    let none = Rows { data: &[], ld: 0 };
                    let (k, v) = match in_place {
                        Some(_) => (none, none),
                        None => {
                            let of = |view| of(view, range);
                            (arithmetic.keys(of(self.inputs.k), k), arithmetic.values(of(self.inputs.v), v))
                        }
                    };
                    made = Some(Block {
                        keys: range,
                        k,
                        v,
                        dim_v: p.head_dim_v,
                        is_finite: &is_finite,
                        in_place,
                    });
                }
                let Some(block) = made.map(|block| block.up_to(panel.by_any.end)) else { continue };
                let program = self.programs.score.as_ref();
                let scores = program.map(|program| Scores { program, values: scores, panel: number, factor });
                let dropped = self.dropout.map(|dropout| {
                    self.dropped::<S, A>(&dropout, (task, number, panel), block.keys, dropped)
                });
                let shown = hidden;
                arithmetic.step(Step { panel, block, scale, cap, weights, tile, scores, shown, dropped });
            }
        }
        first
    }

    /// The factors of dropout of a panel, which has the given number in its task, in the layout of the
    /// panel's weights.
    fn dropped<'d, S: Simd, A: Arithmetic>(
        &self,
        dropout: &Dropout,
        (task, number, panel): (Task, usize, &Panel),
        keys: KeyRange,
        room: &'d mut Aligned,
    ) -> &'d [f32] {
        let line = keys.len().next_multiple_of(S::LANES);
        let [of_key, of_row] = if A::TRANSPOSED { [panel.width, 1] } else { [1, line] };
        let to = room.resize(if A::TRANSPOSED { keys.len() * panel.width } else { panel.rows * line });
        to.fill(0.0);
        let mut factors = vec![0.0; keys.len()];
        for index in 0..panel.rows {
            let (head, row) = self.place(task, task.first + number * self.plan.panel_rows() + index);
            let head = task.batch * self.problem.heads_q + head;
            dropout.factors(head, row, keys.start..keys.end, &mut factors);
            for (key, &factor) in factors.iter().enumerate() {
                to[key * of_key + index * of_row] = factor;
            }
        }
        to
    }

    /// How steps turn products of queries and keys into exponents. `logit_factor` is the arithmetic's, times
    /// the factor of the head.
    fn scale(&self, logit_factor: f64) -> Scale {
        let p = self.problem;
        let logit = f64::from(p.softmax_scale().abs()) * logit_factor;
        let softcap = p.score.softcap.map(f64::from);
        let factor = softcap.unwrap_or(logit);
        // The scale must not be 0: 0 times the −∞ of a hidden key would be NaN.
        let scale = match self.programs.score {
            None => ((factor * LOG2_E) as f32).clamp(f32::from_bits(1), f32::MAX),
            Some(_) => LOG2_E as f32,
        };
        Scale { factor: factor as f32, scale, cap: softcap.map(|softcap| (logit / softcap) as f32) }
    }

    /// Evaluates the values of programs that depend only on the rows of a task.
    fn place_panels<S: Simd>(&self, simd: S, task: Task, scratch: &mut Scratch) {
        let Scratch { panels, scores, masks, .. } = scratch;
        let Sequence { q, kv } = self.sequences[task.batch];
        let place = Place { batch: task.batch, query_length: q.len, key_length: kv.len };
        for (program, values) in [(&self.programs.score, scores), (&self.programs.mask, masks)] {
            let Some(program) = program else { continue };
            let mut first = task.first;
            for (number, panel) in panels[..self.panels(task)].iter().enumerate() {
                // Padding lanes repeat the last row.
                let of = |lane: usize| self.place(task, first + lane.min(panel.rows - 1));
                let lanes: [_; MAX_WIDTH] = std::array::from_fn(of);
                let lanes = &lanes[..panel.width];
                simd.evaluate(program, values, Region::Panel { panel: number, place, lanes });
                first += panel.rows;
            }
        }
    }

    /// Divides the task's rows into panels and fills each panel with Qᵀ.
    fn fill_panels<S: Simd, A: Arithmetic>(
        &self,
        simd: S,
        arithmetic: A,
        task: Task,
        panels: &mut Vec<Panel>,
        rows: &mut Aligned,
    ) {
        let p = self.problem;
        let Sequence { q, kv } = self.sequences[task.batch];
        let widest = self.plan.panel_rows();
        let dim = arithmetic.words(p.head_dim);
        panels.resize_with(panels.len().max(self.panels(task)), Panel::new);
        let dim_out = arithmetic.words_out(p.head_dim_v);
        rows.resize(MAX_WIDTH * dim.max(dim_out));
        for (panel, first) in panels.iter_mut().zip((task.first..task.last).step_by(widest)) {
            let count = widest.min(task.last - first);
            panel.reset(count, count.next_multiple_of(A::LANES), dim, dim_out);
            panel.set_seen(|lane| {
                let (_, row) = self.place(task, first + lane.min(count - 1));
                p.band.keys(row, q.len, kv.len)
            });
            for (lane, wide) in rows.chunks_exact_mut(dim).take(count).enumerate() {
                let (head, row) = self.place(task, first + lane);
                let query = self.inputs.q.row(q.batch, head, q.start + row);
                arithmetic.query(query, p.softmax_scale() < 0.0, wide);
            }
            if A::TRANSPOSED {
                simd.transpose(rows, dim, &mut panel.q, panel.width, count, dim);
            } else {
                panel.q.copy_from_slice(&rows[..count * dim]);
            }
        }
    }

    /// Normalises a panel, whose first row is row `index` of the task, and writes its rows of O and LSE. If
    /// the keys are split, the unnormalised rows are stored as parts instead.
    #[allow(unsafe_code)] // as in `write`
    fn finish<S: Simd, A: Arithmetic>(
        &self,
        simd: S,
        task: Task,
        index: usize,
        panel: &Panel,
        rows: &mut [f32],
        parts: Option<&Parts<'_>>,
    ) {
        let dim_v = self.problem.head_dim_v;
        let (rows, ld) = if A::TRANSPOSED {
            simd.transpose(&panel.out, panel.width, rows, dim_v, dim_v, panel.rows);
            (&*rows, dim_v)
        } else {
            (&*panel.out, panel.out.len() / panel.rows)
        };
        for lane in 0..panel.rows {
            let wide = &rows[lane * ld..][..dim_v];
            let (head, row) = self.place(task, index + lane);
            let (shift, sum) = (panel.shift[lane], panel.sum[lane]);
            match parts {
                None => self.write(simd, [task.batch, head, row], wide, shift, sum),
                Some(parts) => {
                    let row = self.index_of_row(task.batch, head, row);
                    // SAFETY: each row and part of the keys belongs to one task.
                    unsafe { parts.keep(row, task.part, wide, shift, sum) };
                }
            }
        }
    }

    /// Writes row `row` of a sequence. `wide` is O before normalisation, `shift` was subtracted in the
    /// exponents (base 2), and `sum` is the sum of the weights.
    #[allow(unsafe_code)] // each row is written by the one task that computes it
    fn write<S: Simd>(&self, simd: S, [batch, head, row]: [usize; 3], wide: &[f32], shift: f32, sum: f32) {
        let of_head = batch * self.problem.heads_kv + head / self.problem.group_size();
        let of_values = self.factors.values.get(of_head).copied().unwrap_or(1.0);
        let index = self.index_of_row(batch, head, row);
        let Span { batch, start, .. } = self.sequences[batch].q;
        let (factor, logarithm) = match self.sinks {
            None => (1.0 / sum, (f64::from(shift) + f64::from(sum).log2()) * LN_2),
            Some(sinks) => with_sink(sinks[head], shift, sum),
        };
        let (at, factor) = ([batch, head, start + row], (sum != 0.0).then_some(factor * of_values));
        let merged = self.before.map(|before| before.merge((at, index), (wide, factor, logarithm)));
        let (wide, factor, logarithm) = match &merged {
            None => (wide, factor, logarithm),
            Some((merged, logarithm)) => (&merged[..], Some(1.0), *logarithm),
        };
        // SAFETY: each row belongs to one task, and the problem's check has established that output rows do
        // not overlap.
        unsafe { self.out.write(simd, at, wide, factor) };
        if let Some(lse) = &self.lse {
            // SAFETY: as above; the LSE is dense.
            let row = unsafe { lse.row(batch, head, start + row) };
            row[0] = logarithm as f32;
        }
    }
}

/// Evaluates a mask for the first `keys` keys of a block and the panel with the given number. Returns a word
/// for each weight if the panel sees only some of the keys.
fn show<'s, S: Simd, A: Arithmetic>(
    simd: S,
    mask: &Compiled<'_>,
    masks: &mut Values,
    (number, panel): (usize, &Panel),
    keys: usize,
    room: &'s mut Aligned,
) -> (Verdict, &'s [f32]) {
    let verdict = masks.verdict(mask, number..number + 1);
    if verdict != Verdict::Some {
        return (verdict, &[]);
    }
    let (layout, words) = if A::TRANSPOSED {
        (Layout::Keys(panel.width), keys * panel.width)
    } else {
        let line = keys.next_multiple_of(S::LANES);
        (Layout::Rows(line), panel.rows * line)
    };
    let to = room.resize(words);
    simd.evaluate(mask, masks, Region::Tile { panel: number, keys, layout, factor: 1.0, to });
    (masks.shown(), to)
}

/// The factor that normalises O, and the LSE, with a sink in the denominator. A sink of −∞ has no weight.
fn with_sink(sink: f32, shift: f32, sum: f32) -> (f32, f64) {
    if sum == 0.0 {
        // As for a key, a logit of +∞ makes the row NaN.
        return (0.0, if sink == f32::INFINITY { f64::NAN } else { sink.into() });
    }
    let (shift, sink) = (f64::from(shift), f64::from(sink) * LOG2_E);
    let top = shift.max(sink);
    let of_keys = (shift - top).exp2();
    let total = f64::from(sum) * of_keys + (sink - top).exp2();
    ((of_keys / total) as f32, (top + total.log2()) * LN_2)
}
