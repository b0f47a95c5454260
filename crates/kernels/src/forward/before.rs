//! The result over other keys from which a call continues.

use attend::{load_lse_before, merge_rows};
use problem::Operand;
use ptx::{Builder, F32, Global, R32};
use tile::{AccTile, AddedRows, Threads, add_rows};

use super::contract::out_half;
use crate::Baked;
use crate::contract::Contract;

/// The addresses of its O and its LSE. O has the layout of the output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    pub out: Global,
    pub lse: Global,
}

/// The normalised rows of a warp: O, the LSE, the first row and one past the last that exists.
pub(crate) struct FinishedRows<'a> {
    pub threads: &'a Threads,
    pub o: &'a AccTile,
    pub lse: &'a [F32],
    pub limits: (R32, R32),
}

impl Before {
    /// Declares the addresses; `None` if the call begins with its own keys.
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>) -> Option<Before> {
        let out = c.operand(k, Operand::OutBefore)?;
        Some(Before { out, lse: c.operand(k, Operand::LseBefore)? })
    }

    /// Merges the rows with those of this result, and returns their LSE. `of_lse` and `of_out` give the
    /// addresses of a row. `pairs` says that words of two columns are aligned, if the columns are even.
    pub fn merge(
        &self,
        k: &mut Builder,
        baked: &Baked,
        rows: &FinishedRows<'_>,
        pairs: bool,
        of_lse: impl Fn(&mut Builder, R32) -> Global,
        of_out: impl Fn(&mut Builder, R32) -> Global,
    ) -> Vec<F32> {
        let &FinishedRows { threads, o, lse, limits: (first, limit) } = rows;
        let before = load_lse_before(k, threads, o.lane_rows(), (first, limit), of_lse);
        let merged = merge_rows(k, o, lse, &before);
        let width = baked.head_dim_v();
        let pairs = pairs && width.is_multiple_of(2);
        let rows = AddedRows { half: out_half(baked), first, limit, width, pairs };
        add_rows(k, threads, o, &merged.of_before, rows, of_out);
        k.warp_sync(); // where O takes the place of the earlier one, lanes store what others have read
        merged.lse
    }
}
