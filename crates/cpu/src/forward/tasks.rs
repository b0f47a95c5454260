//! The tasks of a call: the rows and keys of each, and the order in which they are started.

use std::cmp::Reverse;

use problem::{KeyRange, Sequence};

use super::Call;
use crate::plan::Order;
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

impl Call<'_> {
    /// Number of keys of a part, a multiple of the block size.
    pub(super) fn part_keys(&self) -> usize {
        let blocks = self.problem.seq_kv.div_ceil(self.plan.block_kv).max(1);
        blocks.div_ceil(self.plan.splits) * self.plan.block_kv
    }

    /// Number of parts of the keys. No part is empty.
    pub(super) fn parts(&self) -> usize {
        self.problem.seq_kv.div_ceil(self.part_keys()).max(1)
    }

    /// The tasks in the order in which they are started.
    pub(super) fn tasks(&self) -> Vec<Task> {
        let p = self.problem;
        let (together, block_q, part_keys) = (self.together, self.plan.block_q, self.part_keys());
        let heads =
            || (0..p.batch).flat_map(|batch| (0..p.heads_q).step_by(together).map(move |head| (batch, head)));
        let rows = |batch: usize| self.sequences[batch].q.len * together;
        let task = |(batch, head), first: usize| {
            let last = (first + block_q).min(rows(batch));
            let parts = self.sequences[batch].kv.len.div_ceil(part_keys).max(1);
            (0..parts).map(move |part| Task { batch, head, first, last, part })
        };
        let by_heads = || {
            let of_head = |head: (usize, usize)| {
                (0..rows(head.0)).step_by(block_q).rev().flat_map(move |first| task(head, first))
            };
            heads().flat_map(of_head).collect()
        };
        match self.plan.order {
            Order::Longest if p.lengths.is_even() => {
                let blocks = (0..p.seq_q * together).step_by(block_q).rev();
                blocks.flat_map(|first| heads().flat_map(move |head| task(head, first))).collect()
            }
            Order::Longest => {
                let mut tasks: Vec<Task> = by_heads();
                tasks.sort_by_cached_key(|&task| Reverse(self.scores(task)));
                tasks
            }
            Order::Heads => by_heads(),
        }
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
