use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};

use crate::divide;

/// Where a thread stands in its CTA, read once at the start of a kernel. One-dimensional CTAs.
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
    /// `lane / 4`: the row of an accumulator's 8-row half that the lane holds.
    pub quad: R32,
    /// `2 · (lane mod 4)`: the first of the two columns of an 8-column tile that the lane holds.
    pub column: R32,
    /// Which of the CTA's groups of rows the warp takes.
    pub row_warp: R32,
    /// Warps that share a group of rows and divide each block of keys among them.
    pub kv_warps: u32,
    /// Which part of each block of keys the warp takes; `None` where it takes all of it.
    pub part: Option<R32>,
}

impl Threads {
    /// Reads the thread's place in a CTA of `count` threads, of which `kv_warps` warps share each group of
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

    /// Whether the thread stores what there is one of in a row: the first lane of a quad, of one of the warps
    /// that share the rows.
    pub(crate) fn speaks_for_row(&self, k: &mut Builder) -> Pred {
        match self.part {
            None => k.setp_u(CmpOp::Eq, self.column, 0),
            Some(part) => {
                let either = k.or(part, self.column);
                k.setp_u(CmpOp::Eq, either, 0)
            }
        }
    }

    /// Warps of the CTA.
    pub const fn warps(&self) -> u32 {
        self.count / 32
    }

    /// Groups of rows in the CTA.
    pub const fn row_warps(&self) -> u32 {
        self.warps() / self.kv_warps
    }
}
