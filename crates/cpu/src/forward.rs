//! Attention on slices: checks, tasks, threads, and the walk of one task over its keys.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use problem::{KeyRange, Problem, Strides, Tensor};

use crate::aligned::Aligned;
use crate::output::OutputRows;
use crate::simd::{Isa, Portable, Simd};
use crate::tile::{Block, MAX_WIDTH, Panel, Step};
use crate::{CpuError, CpuPlan, Element};

/// Computes `O = softmax(scale · Q Kᵀ + mask) V` and, on request, the LSE (`[batch, heads_q, seq_q]`, natural
/// logarithm). Each slice starts at the tensor's lowest element in memory, as [`Problem::span`] describes.
///
/// # Errors
/// A [`CpuError`] if the problem, a buffer or the plan is refused; nothing has been written then.
pub fn attention<T: Element>(
    problem: &Problem,
    q: &[T],
    k: &[T],
    v: &[T],
    out: &mut [T],
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    plan.check(problem)?;
    check_inputs(problem, q, k, v)?;
    let origin = check_buffer(problem, Tensor::Out, out.len())?;
    let lse_rows = problem.batch * problem.heads_q * problem.seq_q;
    if let Some(lse) = lse.as_deref().filter(|lse| lse.len() < lse_rows) {
        return Err(CpuError::BufferTooShort { tensor: "lse", len: lse.len(), needed: lse_rows });
    }
    let out = OutputRows::new(out, origin, problem.out, problem.head_dim_v);
    let (heads, rows) = (problem.heads_q as i64, problem.seq_q as i64);
    let lse_strides = Strides { batch: heads * rows, head: rows, row: 1 };
    let lse = lse.map(|lse| OutputRows::new(lse, 0, lse_strides, 1));
    let call = Call { problem, q, k, v, out, lse, plan };
    // `plan.check` has found the instruction set, so `detect` does not fail.
    match plan.isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => crate::simd::Avx512::detect().into_iter().for_each(|simd| call.run(simd)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => crate::simd::Avx2::detect().into_iter().for_each(|simd| call.run(simd)),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => crate::simd::Neon::detect().into_iter().for_each(|simd| call.run(simd)),
        Isa::Portable => call.run(Portable),
        #[allow(unreachable_patterns)] // the sets of the other architecture
        _ => {}
    }
    Ok(())
}

/// Refuses inputs of another type or too short for their tensors.
pub(crate) fn check_inputs<T: Element>(problem: &Problem, q: &[T], k: &[T], v: &[T]) -> Result<(), CpuError> {
    problem.check()?;
    if T::DTYPE != problem.dtype {
        return Err(CpuError::DType { slices: T::DTYPE, problem: problem.dtype });
    }
    for (tensor, len) in [(Tensor::Q, q.len()), (Tensor::K, k.len()), (Tensor::V, v.len())] {
        check_buffer(problem, tensor, len)?;
    }
    Ok(())
}

/// Index of element (0, 0, 0, 0) in a buffer of `len` elements.
fn check_buffer(problem: &Problem, tensor: Tensor, len: usize) -> Result<usize, CpuError> {
    let (needed, origin) =
        problem.span(tensor).ok_or(problem::ProblemError::TooLarge { tensor: tensor.name() })?;
    if len < needed {
        return Err(CpuError::BufferTooShort { tensor: tensor.name(), len, needed });
    }
    Ok(origin)
}

/// Row (`batch`, `head`, `row`) of an input that [`check_inputs`] accepted.
pub(crate) fn row_of<'a, T>(
    problem: &Problem,
    tensor: Tensor,
    data: &'a [T],
    batch: usize,
    head: usize,
    row: usize,
) -> &'a [T] {
    let origin = problem.span(tensor).map_or(0, |(_, origin)| origin);
    let start = origin as i64 + problem.strides(tensor).offset(batch, head, row);
    &data[start as usize..][..problem.extents(tensor)[3]]
}

/// One call of [`attention`], checked.
struct Call<'a, T> {
    problem: &'a Problem,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    out: OutputRows<'a, T>,
    lse: Option<OutputRows<'a, f32>>,
    plan: &'a CpuPlan,
}

/// Query rows that go through the keys of one head together: rows `first..last` of `heads` query heads' rows laid end
/// to end, the first of them `head`.
#[derive(Clone, Copy)]
struct Task {
    batch: usize,
    head: usize,
    first: usize,
    last: usize,
}

/// What a thread works in. Kept from call to call; bounded by the plan and the head dimensions.
#[derive(Default)]
struct Scratch {
    panels: Vec<Panel>,
    keys: Aligned,
    values: Aligned,
    weights: Aligned,
    rows: Aligned,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl<T: Element> Call<'_, T> {
    fn run<S: Simd>(&self, simd: S) {
        let tasks = self.tasks();
        let next = AtomicUsize::new(0);
        let work = || {
            SCRATCH.with_borrow_mut(|scratch| {
                while let Some(&task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    self.run_task(simd, task, scratch);
                }
            });
        };
        let threads = self.plan.threads.min(tasks.len());
        if threads <= 1 {
            return work();
        }
        rayon::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|_| work());
            }
            work();
        });
    }

    /// The tasks, those with most keys first. Short sequences of the query heads that share a key head are laid end
    /// to end, so that decoding fills lanes with heads.
    fn tasks(&self) -> Vec<Task> {
        let p = self.problem;
        let together = if p.seq_q < self.plan.isa.panel_rows() { p.group_size() } else { 1 };
        let rows = p.seq_q * together;
        let mut tasks = Vec::new();
        for first in (0..rows).step_by(self.plan.block_q).rev() {
            let last = (first + self.plan.block_q).min(rows);
            for batch in 0..p.batch {
                for head in (0..p.heads_q).step_by(together) {
                    tasks.push(Task { batch, head, first, last });
                }
            }
        }
        tasks
    }

    /// Query head and row of the `index`-th row of a task's heads.
    fn place(&self, task: Task, index: usize) -> (usize, usize) {
        (task.head + index / self.problem.seq_q, index % self.problem.seq_q)
    }

    fn run_task<S: Simd>(&self, simd: S, task: Task, scratch: &mut Scratch) {
        let p = self.problem;
        let Scratch { panels, keys, values, weights, rows } = scratch;
        let panels = self.fill_panels(simd, task, panels, rows);
        let seen: Vec<KeyRange> = panels.iter().map(Panel::seen_by_any).collect();
        let start = seen.iter().filter(|r| !r.is_empty()).map(|r| r.start).min().unwrap_or(0);
        let end = seen.iter().map(|r| r.end).max().unwrap_or(0);
        let block_kv = self.plan.block_kv;
        weights.resize(block_kv * MAX_WIDTH);
        let kv_head = task.head / p.group_size();
        let scale = (f64::from(p.softmax_scale().abs()) * std::f64::consts::LOG2_E) as f32;
        for first in (start..end).step_by(block_kv) {
            let range = KeyRange { start: first, end: (first + block_kv).min(end) };
            let block = Block {
                keys: range,
                k: self.widened(Tensor::K, task.batch, kv_head, range, keys),
                v: self.widened(Tensor::V, task.batch, kv_head, range, values),
                dim: p.head_dim,
                dim_v: p.head_dim_v,
            };
            for (panel, seen) in panels.iter_mut().zip(&seen) {
                if seen.start < range.end && range.start < seen.end {
                    run_step(simd, Step { panel, block, scale, weights });
                }
            }
        }
        let mut index = task.first;
        for panel in panels {
            self.finish(simd, task, index, panel, rows);
            index += panel.rows;
        }
    }

    /// Cuts the task's rows into panels and fills each with Qᵀ.
    fn fill_panels<'s, S: Simd>(
        &self,
        simd: S,
        task: Task,
        panels: &'s mut Vec<Panel>,
        rows: &mut Aligned,
    ) -> &'s mut [Panel] {
        let p = self.problem;
        let widest = S::LANES * S::MAX_VECTORS;
        let needed = (task.last - task.first).div_ceil(widest);
        panels.resize_with(panels.len().max(needed), Panel::new);
        rows.resize(MAX_WIDTH * p.head_dim.max(p.head_dim_v));
        let sign = if p.softmax_scale() < 0.0 { -1.0 } else { 1.0 };
        for (panel, first) in panels.iter_mut().zip((task.first..task.last).step_by(widest)) {
            let count = widest.min(task.last - first);
            panel.reset(count, count.next_multiple_of(S::LANES), p.head_dim, p.head_dim_v);
            for lane in 0..panel.width {
                let (head, row) = self.place(task, first + lane.min(count - 1));
                panel.seen[lane] = p.mask.keys(row, p.seq_q, p.seq_kv);
                if lane < count {
                    let q = row_of(p, Tensor::Q, self.q, task.batch, head, row);
                    let wide = &mut rows[lane * p.head_dim..][..p.head_dim];
                    T::widen(q, wide);
                    if sign < 0.0 {
                        wide.iter_mut().for_each(|x| *x = -*x);
                    }
                }
            }
            simd.transpose(rows, p.head_dim, &mut panel.q, panel.width, count, p.head_dim);
        }
        &mut panels[..needed]
    }

    /// Keys `range` of a head as dense f32: in place where they already are, otherwise widened into `room`.
    fn widened<'s>(
        &'s self,
        tensor: Tensor,
        batch: usize,
        head: usize,
        range: KeyRange,
        room: &'s mut Aligned,
    ) -> &'s [f32] {
        let p = self.problem;
        let data = if tensor == Tensor::K { self.k } else { self.v };
        let (dim, stride) = (p.extents(tensor)[3], p.strides(tensor));
        let first = row_of(p, tensor, data, batch, head, range.start);
        if stride.row == dim as i64 {
            // The rows follow each other: find the block as one slice.
            let start = (first.as_ptr() as usize - data.as_ptr() as usize) / size_of::<T>();
            let rows = &data[start..][..range.len() * dim];
            if let Some(rows) = T::as_f32(rows) {
                return rows;
            }
            T::widen(rows, room.resize(rows.len()));
            return room;
        }
        room.resize(range.len() * dim);
        for (row, wide) in (range.start..range.end).zip(room.chunks_exact_mut(dim)) {
            T::widen(row_of(p, tensor, data, batch, head, row), wide);
        }
        room
    }

    /// Normalises a panel, whose first row is the task's `index`-th, and writes its rows of O and LSE.
    fn finish<S: Simd>(&self, simd: S, task: Task, index: usize, panel: &mut Panel, rows: &mut [f32]) {
        let dim_v = self.problem.head_dim_v;
        simd.transpose(&panel.out, panel.width, rows, dim_v, dim_v, panel.rows);
        for lane in 0..panel.rows {
            let wide = &mut rows[lane * dim_v..][..dim_v];
            let sum = panel.sum[lane];
            if sum == 0.0 {
                wide.fill(0.0);
            } else {
                wide.iter_mut().for_each(|x| *x /= sum);
            }
            let (head, row) = self.place(task, index + lane);
            self.write(task.batch, head, row, wide, panel.shift[lane], sum);
        }
    }

    #[allow(unsafe_code)] // each row is written by the one task that computes it
    fn write(&self, batch: usize, head: usize, row: usize, wide: &[f32], shift: f32, sum: f32) {
        // SAFETY: tasks partition the rows, and the problem's check proved that output rows do not overlap.
        T::narrow(wide, unsafe { self.out.row(batch, head, row) });
        if let Some(lse) = &self.lse {
            let value = (f64::from(shift) + f64::from(sum).log2()) * std::f64::consts::LN_2;
            // SAFETY: as above; the LSE is dense.
            let row = unsafe { lse.row(batch, head, row) };
            row[0] = value as f32;
        }
    }
}

/// Chooses the step compiled for the panel's width.
fn run_step<S: Simd>(simd: S, step: Step<'_>) {
    match step.panel.width / S::LANES {
        4 if S::MAX_VECTORS >= 4 => simd.step::<4>(step),
        3 if S::MAX_VECTORS >= 3 => simd.step::<3>(step),
        2 => simd.step::<2>(step),
        _ => simd.step::<1>(step),
    }
}
