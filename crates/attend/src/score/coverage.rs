//! Classifies KV blocks by the mask program: whether the rows of a tile see none, some or all of the keys.
//! One warp computes this.

use problem::program::Id;
use ptx::{Builder, CmpOp, R32};

use super::bounds::{BoundsOf, TileBounds, leaves, of_leaves};
use super::lower::ValuePlace;
use super::program::{Memo, Scope, ScorePrograms};
use crate::{Coverage, RowRange};

/// The mask program over the rows of a tile, for a warp that classifies KV blocks.
pub struct TileMask<'a> {
    programs: &'a ScorePrograms,
    mask: Id,
    rows: RowRange,
    head: R32,
    lane: R32,
    once: Memo,
    of_rows: BoundsOf,
    last: [R32; 2],
}

const LANES: u32 = 32;
/// Rows at either end that a search for visible and hidden elements evaluates together, so that their loads
/// overlap.
const SEARCHED_ROWS: u32 = 2;

impl ScorePrograms {
    /// The mask over the rows of a tile, which has at least one row. `head` is the tile's query head, or
    /// group of packed heads. `None` if there is no mask program.
    pub fn tile_mask<'a>(
        &'a self,
        k: &mut Builder,
        lane: R32,
        rows: &RowRange,
        [head, batch]: [R32; 2],
    ) -> Option<TileMask<'a>> {
        let mask = self.code.mask?;
        let last = [rows.seq_q, rows.seq_kv].map(|length| {
            let last = k.sub(length, 1);
            k.max_s(last, 0)
        });
        let mut at = Scope::new(self, rows);
        (at.head, at.batch) = (Some(head), Some(batch));
        // Code in conditional branches reads these values, so they are computed here.
        for id in self.code.needed_at(ValuePlace::Once) {
            at.value(k, id);
        }
        let once = at.once.clone();
        let leaves = leaves(&self.code, ValuePlace::Row);
        let of_rows = of_leaves(k, &mut at, &leaves, rows.rows.div_ceil(LANES), |k, at, part| {
            let row = k.add(lane, LANES * part);
            let row = k.min_u(row, rows.rows - 1);
            let row = k.add(row, rows.first);
            set_row(k, at, (rows, head, last[0]), row);
        });
        Some(TileMask { programs: self, mask, rows: *rows, head, lane, once, of_rows, last })
    }
}

/// Moves to a row of the tile. A row that does not exist is replaced by a row of the last position.
fn set_row(k: &mut Builder, at: &mut Scope, (rows, head, last): (&RowRange, R32, R32), row: R32) {
    let [head, position] = rows.head_and_position(k, head, row);
    at.head = Some(head);
    at.query = Some(k.min_u(position, last));
    at.row.fill(None);
}

impl TileMask<'_> {
    /// Returns, as 1 or 0, whether any row sees any of the `block_n` keys from `origin` on, and whether every
    /// row sees all of these keys that exist. All lanes have the result. At least one of the keys exists.
    pub fn judge(&self, k: &mut Builder, origin: R32, block_n: u32) -> [R32; 2] {
        let code = &self.programs.code;
        let mut at = Scope::new(self.programs, &self.rows);
        at.once.clone_from(&self.once);
        let first = k.add(origin, self.lane);
        at.first_key = Some((first, Coverage::Partial));
        let end = k.add(origin, block_n - 1);
        at.last_key = Some(k.min_u(end, self.last[1]));

        let parts = block_n.div_ceil(LANES);
        let set = |_: &mut Builder, at: &mut Scope, part: u32| {
            at.offset = LANES * part;
            at.column.fill(None);
        };
        let mut known = of_leaves(k, &mut at, &leaves(code, ValuePlace::Column), parts, set);
        for (bounds, of_rows) in known.iter_mut().zip(&self.of_rows) {
            *bounds = bounds.or(*of_rows);
        }
        let bounds = TileBounds { code, at: &mut at, known }.of(k, self.mask);
        let (any, all) = match bounds {
            Some(bounds) => (k.mov(bounds.high), k.mov(bounds.low)),
            None => (k.mov(1), k.mov(0)),
        };
        let undecided = k.setp_s(CmpOp::Ne, any, all);
        k.if_(undecided, |k| self.judge_elements(k, &mut at, parts, [any, all]));
        [any, all]
    }

    /// Evaluates the mask from the first and the last row inwards, until a visible and a hidden element are
    /// found. Rows of two groups, such as two documents, differ between the ends.
    fn judge_elements(&self, k: &mut Builder, at: &mut Scope, parts: u32, [any, all]: [R32; 2]) {
        let of_columns: Vec<Memo> = (0..parts)
            .map(|part| {
                at.offset = LANES * part;
                at.column.fill(None);
                for id in self.programs.code.needed_at(ValuePlace::Column) {
                    at.value(k, id);
                }
                at.column.clone()
            })
            .collect();
        k.mov_to(any, 0);
        k.mov_to(all, 1);
        let rows = self.rows;
        let limit = k.mul(rows.seq_q, rows.heads);
        let end = k.add(rows.first, rows.rows);
        let end = k.min_u(end, limit);
        let last = k.sub(end, 1);
        let inwards: R32 = k.mov(0);
        k.do_while(|k| {
            let (from_first, from_last) = (k.add(rows.first, inwards), k.sub(last, inwards));
            let ends = (0..SEARCHED_ROWS).flat_map(|further| {
                let (below, above) = (k.add(from_first, further), k.sub(from_last, further));
                [k.min_s(below, last), k.max_s(above, rows.first)]
            });
            let ends: Vec<R32> = ends.collect();
            let mut found: Option<[_; 2]> = None;
            for row in ends {
                set_row(k, at, (&rows, self.head, self.last[0]), row);
                for (part, of_column) in (0..).zip(&of_columns) {
                    at.offset = LANES * part;
                    at.column.clone_from(of_column);
                    at.element.fill(None);
                    let sees = at.value(k, self.mask).bool();
                    found = Some(match found {
                        None => [sees, sees],
                        Some([any, all]) => [k.or_pred(any, sees), k.and_pred(all, sees)],
                    });
                }
            }
            let [some, every] = found.expect("a block has keys");
            let (some, every) = (k.vote_any(some), k.vote_all(every));
            k.selp_to(any, 1, any, some);
            k.selp_to(all, all, 0, every);
            k.add_to(inwards, inwards, SEARCHED_ROWS);
            let (from_first, from_last) = (k.add(rows.first, inwards), k.sub(last, inwards));
            let more = k.setp_s(CmpOp::Le, from_first, from_last);
            // The search continues until both answers are known: any = 1 and all = 0.
            let open = k.setp_s(CmpOp::Le, any, all);
            k.and_pred(open, more)
        });
    }
}
