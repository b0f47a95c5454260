//! A thread's position in its CTA.

use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};

use crate::divide;

/// A thread's position in its one-dimensional CTA, read once at the start of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// Threads of the CTA.
    pub count: u32,
    /// Index in the CTA.
    pub index: R32,
    /// Lane in the warp.
    pub lane: R32,
    /// Warp in the CTA.
    pub warp: R32,
    /// `lane / 4`: the lane's row in each 8-row half of an accumulator tile.
    pub quad: R32,
    /// `2 · (lane mod 4)`: the first of the two columns of an 8-column tile that the lane holds.
    pub column: R32,
    /// Index of the warp's group of rows in the CTA.
    pub row_warp: R32,
    /// Number of warps that share a group of rows and divide the columns or the k dimension of each KV block.
    pub kv_warps: u32,
    /// Index of the warp's part; `None` if the warp computes all parts.
    pub part: Option<R32>,
}

impl Threads {
    /// Reads the thread's position in a CTA of `count` threads, where `kv_warps` warps share each group of
    /// rows.
    pub fn new(k: &mut Builder, count: u32, kv_warps: u32) -> Threads {
        let index = k.special(SpecialReg::TidX);
        let lane = k.and(index, 31);
        let warp = k.shr_u(index, 5);
        let quad = k.shr_u(lane, 2);
        let in_quad = k.and(lane, 3);
        let column = k.shl(in_quad, 1);
        let (row_warp, part) = if kv_warps == 1 {
            (warp, None)
        } else {
            let row_warps = count / 32 / kv_warps;
            let part = divide(k, warp, row_warps);
            let before = k.mul(part, row_warps);
            (k.sub(warp, before), Some(part))
        };
        Threads { count, index, lane, warp, quad, column, row_warp, kv_warps, part }
    }

    /// Whether the thread stores the per-row values: the first lane of each quad, in one of the warps that
    /// share the rows.
    pub fn elected_for_row(&self, k: &mut Builder) -> Pred {
        match self.part {
            None => k.setp_u(CmpOp::Eq, self.column, 0),
            Some(part) => {
                let either = k.or(part, self.column);
                k.setp_u(CmpOp::Eq, either, 0)
            }
        }
    }

    /// The position of a warp that computes all columns of its rows, even if other warps compute the same
    /// columns.
    #[must_use]
    pub const fn of_all_columns(self) -> Threads {
        Threads { part: None, ..self }
    }

    /// Warps of the CTA.
    pub const fn warps(&self) -> u32 {
        self.count / 32
    }

    /// Number of row groups in the CTA.
    pub const fn row_warps(&self) -> u32 {
        self.warps() / self.kv_warps
    }
}
