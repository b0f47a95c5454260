//! A thread's position in its CTA.

use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};

use crate::divide;

/// A thread's position among the threads that hold query rows: all threads of a one-dimensional CTA
/// ([`Threads::new`]), or its [consumers](crate::Consumer). Read once at the start of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// Threads of the CTA that hold query rows; without the producer's.
    pub count: u32,
    /// Index in the CTA, counted from the producer's threads if there is a producer. Only without a producer
    /// is it an index below `count`.
    pub index: R32,
    /// Lane in the warp.
    pub lane: R32,
    /// Warp in the CTA, counted like `index`.
    pub warp: R32,
    /// `lane / 4`: the lane's row in each 8-row half of an accumulator tile.
    pub quad: R32,
    /// `2 · (lane mod 4)`: the first of the two columns of an 8-column tile that the lane holds.
    pub column: R32,
    /// Index of the warp's group of rows among those of the CTA.
    pub row_warp: R32,
    /// Number of warps that share a group of rows and divide the columns or the k dimension of each KV block.
    /// If CTAs of a cluster share rows, the warps of all of them count.
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

    /// Warps of the CTA that hold query rows.
    pub const fn warps(&self) -> u32 {
        self.count / 32
    }

    /// Number of row groups in the CTA, if all warps that share a group are in it.
    pub const fn row_warps(&self) -> u32 {
        self.warps() / self.kv_warps
    }
}
