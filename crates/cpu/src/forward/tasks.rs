//! The tasks of a call: the rows and keys of each, the order in which they are started, and the threads that
//! run them.

use std::cell::Cell;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering};

use problem::{KeyRange, Sequence, Tensor};

use super::{Call, Scratch};
use crate::arithmetic::{Dotted, Faster, Wide};
use crate::dims::PANEL_ROWS;
use crate::parts::Parts;
use crate::plan::{Lanes, Order};
use crate::simd::Simd;
use crate::tile::Panel;

/// Query rows that read the keys of one head together: rows `first..last` of the concatenated rows of `heads`
/// query heads, the first of which is `head`. The task reads only part `part` of the keys.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) part: usize,
}

/// Most tasks that a thread computes in turns: the state of each is some kilobytes.
const MOST_IN_TURNS: usize = 32;
/// Least number of groups of tasks for each thread, if tasks are computed in turns.
const GROUPS_OF_A_THREAD: usize = 2;

thread_local! {
    static SCRATCH: Cell<Vec<Scratch>> = Cell::default();
}

impl Call<'_> {
    pub(super) fn run_tasks<S: Simd>(&self, simd: S, faster: &impl Faster, parts: Option<&Parts<'_>>) {
        let tasks = self.tasks();
        let groups = Call::groups(&tasks, self.most_in_turns(tasks.len()));
        let next = AtomicUsize::new(0);
        let work = || {
            // The scratch is taken out of the thread-local cell, not borrowed: an executor that runs other
            // code in `is_stopped` may call `attention` there.
            let mut scratch = SCRATCH.take();
            while !self.executor.is_stopped()
                && let Some(&group) = groups.get(next.fetch_add(1, Ordering::Relaxed))
            {
                scratch.resize_with(scratch.len().max(group.len()), Scratch::default);
                match group {
                    [task] => self.run_task(simd, faster, *task, &mut scratch[0], parts),
                    _ => self.run_in_turns(simd, group, &mut scratch, parts),
                }
            }
            SCRATCH.set(scratch);
        };
        match self.plan.threads.min(groups.len()) {
            0 | 1 => work(),
            threads => self.executor.run(threads, &work),
        }
    }

    /// Runs a task, some blocks of keys at a time. In between, the processor is not set up for an arithmetic,
    /// so an executor may run other code in `is_stopped`.
    fn run_task<S: Simd>(
        &self,
        simd: S,
        faster: &impl Faster,
        task: Task,
        scratch: &mut Scratch,
        parts: Option<&Parts<'_>>,
    ) {
        let mut keys = None;
        loop {
            let is_faster = faster.compute(task.batch, task.head, |arithmetic| {
                self.advance(simd, arithmetic, task, scratch, parts, (&mut keys, usize::MAX));
            });
            match self.plan.lanes {
                _ if is_faster => {}
                Lanes::Queries => {
                    self.advance(simd, Wide(simd), task, scratch, parts, (&mut keys, usize::MAX))
                }
                Lanes::Dims => {
                    self.advance(simd, Dotted(simd), task, scratch, parts, (&mut keys, usize::MAX))
                }
            }
            if keys.is_none_or(KeyRange::is_empty) || self.executor.is_stopped() {
                return;
            }
        }
    }

    /// Runs tasks with lanes along the head dim, a block of keys of each at a time.
    fn run_in_turns<S: Simd>(
        &self,
        simd: S,
        tasks: &[Task],
        scratch: &mut [Scratch],
        parts: Option<&Parts<'_>>,
    ) {
        let mut keys = [None; MOST_IN_TURNS];
        loop {
            for ((&task, scratch), keys) in tasks.iter().zip(&mut *scratch).zip(&mut keys) {
                if !keys.is_some_and(KeyRange::is_empty) {
                    self.advance(simd, Dotted(simd), task, scratch, parts, (keys, self.plan.block_kv));
                }
            }
            let is_done = keys[..tasks.len()].iter().all(|keys| keys.is_some_and(|keys| keys.is_empty()));
            if is_done || self.executor.is_stopped() {
                return;
            }
        }
    }

    /// Number of keys of a part, a multiple of the block size.
    pub(super) fn part_keys(&self) -> usize {
        let blocks = self.problem.seq_kv.div_ceil(self.plan.block_kv).max(1);
        blocks.div_ceil(self.plan.splits) * self.plan.block_kv
    }

    /// Number of parts of the keys. No part is empty.
    pub(super) fn parts(&self) -> usize {
        self.problem.seq_kv.div_ceil(self.part_keys()).max(1)
    }

    /// The tasks in the order in which they are started. Those of a part of a sequence's keys follow one
    /// another.
    fn tasks(&self) -> Vec<Task> {
        let p = self.problem;
        let (together, block_q, part_keys) = (self.together, self.plan.block_q, self.part_keys());
        let places = || {
            (0..p.batch).flat_map(move |batch| {
                let parts = self.sequences[batch].kv.len.div_ceil(part_keys).max(1);
                (0..parts).flat_map(move |part| {
                    (0..p.heads_q).step_by(together).map(move |head| (batch, part, head))
                })
            })
        };
        let rows = |batch: usize| self.sequences[batch].q.len * together;
        let task = |(batch, part, head), first: usize| {
            let last = (first + block_q).min(rows(batch));
            Task { batch, head, first, last, part }
        };
        let by_places = || {
            let of_place = |place: (usize, usize, usize)| {
                (0..rows(place.0)).step_by(block_q).rev().map(move |first| task(place, first))
            };
            places().flat_map(of_place).collect()
        };
        match self.plan.order {
            Order::Longest if p.lengths.is_even() => {
                let blocks = (0..p.seq_q * together).step_by(block_q).rev();
                blocks.flat_map(|first| places().map(move |place| task(place, first))).collect()
            }
            Order::Longest => {
                let mut tasks: Vec<Task> = by_places();
                tasks.sort_by_cached_key(|&task| Reverse(self.scores(task)));
                tasks
            }
            Order::Heads => by_places(),
        }
    }

    /// How many tasks of several heads, with the same rows and keys, a thread may compute in turns, some keys
    /// of each at a time. Where rows of heads alternate in memory, the thread then reads whole lines of rows.
    fn most_in_turns(&self, tasks: usize) -> usize {
        let alternate =
            |tensor, columns: usize| self.problem.strides(tensor).row.unsigned_abs() > columns as u64;
        let p = self.problem;
        let reads_rows = self.plan.lanes == Lanes::Dims && p.seq_q * self.together <= 2 * PANEL_ROWS;
        if !reads_rows || !alternate(Tensor::K, p.head_dim) || !alternate(Tensor::V, p.head_dim_v) {
            return 1;
        }
        // Each thread has some of these groups, so that all end at about the same time.
        (tasks / (GROUPS_OF_A_THREAD * self.plan.threads)).clamp(1, MOST_IN_TURNS)
    }

    /// The tasks, in groups that a thread computes in turns.
    fn groups(tasks: &[Task], most: usize) -> Vec<&[Task]> {
        let alike = |a: &Task, b: &Task| {
            (a.batch, a.part, a.first, a.last) == (b.batch, b.part, b.first, b.last) && a.head != b.head
        };
        tasks.chunk_by(alike).flat_map(|alike| alike.chunks(most)).collect()
    }

    /// Upper bound of the number of scores of a task: its rows times the keys from the first to the last one
    /// that they see.
    fn scores(&self, task: Task) -> usize {
        let Sequence { q, kv } = self.sequences[task.batch];
        let ((of_first, first), (of_last, last)) =
            (self.place(task, task.first), self.place(task, task.last - 1));
        let (first, last) = if of_first == of_last { (first, last) } else { (0, q.len - 1) };
        let seen = |row| self.problem.band.keys(row, q.len, kv.len);
        let part = task.part * self.part_keys();
        let keys =
            KeyRange { start: seen(first).start.max(part), end: seen(last).end.min(part + self.part_keys()) };
        (task.last - task.first) * keys.len()
    }

    /// Query head and row of the `index`-th row of a task's concatenated heads.
    pub(super) fn place(&self, task: Task, index: usize) -> (usize, usize) {
        let rows = self.sequences[task.batch].q.len;
        match index.checked_sub(rows) {
            None => (task.head, index), // the common case, without a division
            Some(_) => (task.head + index / rows, index % rows),
        }
    }

    /// The keys that a task reads. They begin at the start of a block.
    pub(super) fn keys(&self, task: Task, panels: &[Panel]) -> KeyRange {
        let seen = panels.iter().map(|panel| panel.by_any).filter(|r| !r.is_empty());
        let block_kv = self.plan.block_kv;
        // Blocks have the same boundaries in all tasks: `Heads` has checked the windows of which the blocks
        // consist.
        let part = task.part * self.part_keys();
        let start = (seen.clone().map(|r| r.start).min().unwrap_or(0) / block_kv * block_kv).max(part);
        let end = seen.map(|r| r.end).max().unwrap_or(0).min(part + self.part_keys());
        KeyRange { start, end: end.max(start) }
    }

    /// Number of panels of a task.
    pub(super) fn panels(&self, task: Task) -> usize {
        (task.last - task.first).div_ceil(self.plan.panel_rows())
    }
}
