//! Score and mask programs in the backward pass: the logit of each score, and the factor on its gradient.

use ptx::{Builder, F32, Pred, R32};
use tile::{AccTile, Threads};

use super::program::{Memo, RowPrograms, Scope, ScorePrograms};
use crate::{Coverage, RowRange};

/// The programs for the rows of a tile in the backward pass.
#[derive(Clone, Debug)]
pub struct GradientPrograms<'a> {
    of_rows: RowPrograms<'a>,
    /// The position of the lane's first row.
    first: R32,
    batch: R32,
}

/// The results of the programs for one score.
#[derive(Clone, Copy, Debug)]
pub struct ProgramScore {
    /// The logit; `None` without a score program.
    pub logit: Option<F32>,
    /// Whether the mask program shows the key; `None` without one.
    pub sees: Option<Pred>,
    /// The factor on the gradient of the logit; `None` for 1.
    pub slope: Option<F32>,
}

impl ScorePrograms {
    /// The programs for the gradients of warps that hold `warp_rows` rows of the range each.
    ///
    /// `head` is the query head of all blocks. With `None`, blocks have their own heads, and every value is
    /// computed in the block.
    pub fn for_gradients(
        &self,
        k: &mut Builder,
        threads: &Threads,
        rows: &RowRange,
        warp_rows: u32,
        (head, batch): (Option<R32>, R32),
    ) -> GradientPrograms<'_> {
        let threads = threads.of_all_columns();
        let first = k.mad(threads.row_warp, warp_rows, rows.first);
        let first = k.add(first, threads.quad);
        let of_rows = match head {
            Some(head) => self.for_rows(k, &threads, rows, (warp_rows, 0), [head, batch]),
            None => {
                let none: Memo = vec![None; self.code.nodes.len()];
                let of_rows = vec![none.clone(); warp_rows as usize / 8];
                let last_key = last(k, rows.seq_kv);
                let (rows, column) = (*rows, threads.column);
                RowPrograms { programs: self, rows, column, last_key, once: none, of_rows, ahead: Vec::new() }
            }
        };
        GradientPrograms { of_rows, first, batch }
    }
}

impl GradientPrograms<'_> {
    /// Whether gradients of logits have a factor.
    pub(crate) fn has_slope(&self) -> bool {
        self.of_rows.programs.code.slope.is_some()
    }

    /// Runs the programs on the products of a block whose columns begin at `origin`, in the columns' order.
    /// `head` is the block's query head, where blocks have their own. `take` gets the row and the column of
    /// the lane with the results.
    pub(crate) fn each(
        &self,
        k: &mut Builder,
        s: &AccTile,
        block: (R32, Option<R32>),
        mut take: impl FnMut(&mut Builder, [usize; 2], ProgramScore),
    ) {
        let ScorePrograms { code, wide, .. } = self.of_rows.programs;
        let scores: Vec<Vec<F32>> = (0..s.lane_rows()).map(|i| s.row(i).collect()).collect();
        self.walk(k, s, block, |k, at, [row, column]| {
            at.score = Some(scores[row][column]);
            let sees = code.mask.map(|id| at.value(k, id).bool());
            let logit = code.score.map(|id| at.value(k, id).float());
            let logit = match logit {
                Some(logit) if *wide => Some(k.mul(logit, std::f32::consts::LOG2_E)),
                logit => logit,
            };
            let slope = code.slope.map(|id| at.value(k, id).float());
            take(k, [row, column], ProgramScore { logit, sees, slope });
        });
    }

    /// Computes the indices of [`ProgramCode::of_gradient_at`](crate::ProgramCode::of_gradient_at) for each
    /// score of a tile, as `GradientPrograms::each`. They do not depend on the score.
    pub fn each_target(
        &self,
        k: &mut Builder,
        tile: &AccTile,
        block: (R32, Option<R32>),
        mut take: impl FnMut(&mut Builder, [usize; 2], &[R32]),
    ) {
        let target = &self.of_rows.programs.code.target;
        self.walk(k, tile, block, |k, at, place| {
            let indices: Vec<R32> = target.iter().map(|&id| at.value(k, id).int()).collect();
            take(k, place, &indices);
        });
    }

    /// Visits the scores of a tile with the positions of each.
    fn walk(
        &self,
        k: &mut Builder,
        tile: &AccTile,
        (origin, head): (R32, Option<R32>),
        mut visit: impl FnMut(&mut Builder, &mut Scope<'_>, [usize; 2]),
    ) {
        let RowPrograms { programs, rows, column, last_key, ref once, ref of_rows, .. } = self.of_rows;
        let mut at = Scope::new(programs, &rows);
        at.once.clone_from(once);
        (at.head, at.batch) = (head, Some(self.batch));
        let first = k.add(origin, column);
        (at.first_key, at.last_key) = (Some((first, Coverage::Partial)), Some(last_key));
        let positions = head.map(|_| self.positions(k));
        let mut of_rows = of_rows.clone();
        let none: Memo = vec![None; programs.code.nodes.len()];
        for number in 0..2 * tile.n_tiles() {
            at.offset = number / 2 * 8 + number % 2;
            at.column.clone_from(&none);
            for (row, of_row) in of_rows.iter_mut().enumerate() {
                std::mem::swap(&mut at.row, of_row);
                at.element.clone_from(&none);
                at.query = positions.as_ref().map(|positions| positions[row]);
                visit(k, &mut at, [row, number as usize]);
                std::mem::swap(&mut at.row, of_row);
            }
        }
    }

    /// The positions of the lane's rows. A row beyond the last one has the position of the last one.
    fn positions(&self, k: &mut Builder) -> Vec<R32> {
        let RowPrograms { rows, ref of_rows, .. } = self.of_rows;
        let last = last(k, rows.seq_q);
        let position = |i: u32| {
            let row = k.add(self.first, i / 2 * 16 + i % 2 * 8);
            k.min_u(row, last)
        };
        (0..of_rows.len() as u32).map(position).collect()
    }
}

/// The last of `count` positions, or 0 if there is none.
fn last(k: &mut Builder, count: R32) -> R32 {
    let last = k.sub(count, 1);
    k.max_s(last, 0)
}
