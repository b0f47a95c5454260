//! One running softmax of two warpgroups that have the same rows, compute the scores of the blocks in turn
//! and hold half of the columns of O each: the row max of a block passes from one to the other with its P.

use ptx::{Builder, CmpOp, F32, Pointer, Pred, R32, Shared};
use tile::{AccTile, Threads, WARPGROUP_ROWS, WARPGROUP_THREADS};

use crate::{DeferredRescale, OnlineSoftmax};

/// Bytes of the row max and the rescale factor of a row.
const ROW_BYTES: u32 = 8;
/// Bytes of a lane's two row sums.
const LANE_BYTES: u32 = 8;
/// Rows between the two rows of a lane.
const BELOW: i64 = 8;

/// The shared memory through which two warpgroups pass on the state of their rows: a warp's lanes write what
/// the lanes of the warp of the same rows read. Barriers of the caller order both.
#[derive(Clone, Copy, Debug)]
pub struct SharedRowMax {
    own_rows: Shared,
    other_rows: Shared,
    /// The memory of the sums.
    sums: Shared,
    threads: Threads,
}

impl SharedRowMax {
    /// Bytes of shared memory.
    pub const BYTES: u32 = 2 * (WARPGROUP_ROWS * ROW_BYTES + WARPGROUP_THREADS * LANE_BYTES);

    /// For a warp whose [part](Threads::part) is the index of its warpgroup, 0 or 1. `room` has
    /// [`SharedRowMax::BYTES`] bytes, at a multiple of 8.
    pub fn new(k: &mut Builder, room: Shared, threads: &Threads) -> SharedRowMax {
        let part = threads.part.expect("two warpgroups divide the columns");
        let peer = k.xor(part, 1);
        let row = k.mad(threads.row_warp, 16, threads.quad);
        let rows = k.shared_index(room, row, ROW_BYTES);
        let [own_rows, other_rows] =
            [part, peer].map(|part| k.shared_index(rows, part, WARPGROUP_ROWS * ROW_BYTES));
        let sums = room.at((2 * WARPGROUP_ROWS * ROW_BYTES).into());
        SharedRowMax { own_rows, other_rows, sums, threads: *threads }
    }

    /// The place of the lane's sums in warpgroup `part`. It is not kept in a register.
    fn sums(&self, k: &mut Builder, part: R32) -> Shared {
        let lane = k.mad(self.threads.row_warp, 32, self.threads.lane);
        let lane = k.mad(part, WARPGROUP_THREADS, lane);
        k.shared_index(self.sums, lane, LANE_BYTES)
    }

    fn part(&self) -> R32 {
        self.threads.part.expect("two warpgroups divide the columns")
    }

    /// Writes the row max of a block, and by how much it rescales what came before.
    pub fn pass_on(&self, k: &mut Builder, softmax: &OnlineSoftmax, rescale: &DeferredRescale) {
        let due: Vec<F32> = softmax.row_max.iter().map(|_| k.mov(1.0f32)).collect();
        rescale.defer(k, &due);
        let writes = k.setp_u(CmpOp::Eq, self.threads.column, 0);
        k.guarded(writes, |k| {
            for (i, (&row_max, due)) in (0..).zip(softmax.row_max.iter().zip(due)) {
                k.st_vec(self.own_rows.at(i * BELOW * i64::from(ROW_BYTES)), [row_max, due]);
            }
        });
    }

    /// Takes the row max of the other warpgroup's block, and rescales `o` and the sums by it.
    pub fn take(&self, k: &mut Builder, softmax: &OnlineSoftmax, o: &AccTile) {
        let passed: Vec<[F32; 2]> = (0..)
            .zip(&softmax.row_max)
            .map(|(i, _)| k.ld_vec(self.other_rows.at(i * BELOW * i64::from(ROW_BYTES))))
            .collect();
        let mut changes: Option<Pred> = None;
        for ((&row_max, &sum), &[next, factor]) in softmax.row_max.iter().zip(&softmax.sum).zip(&passed) {
            k.mov_to(row_max, next);
            k.mul_to(sum, sum, factor);
            changes = Some(match changes {
                None => k.setp_f(CmpOp::Ne, factor, 1.0f32),
                Some(other) => k.setp_f_or(CmpOp::Ne, factor, 1.0f32, other),
            });
        }
        let any = k.vote_any(changes.expect("a tile has rows"));
        k.if_(any, |k| {
            for (row, [_, factor]) in (0..).zip(passed) {
                o.scale_row(k, row, factor);
            }
        });
    }

    /// Writes the lane's sums over the blocks of its warpgroup.
    pub fn write_sums(&self, k: &mut Builder, softmax: &OnlineSoftmax) {
        let own = self.sums(k, self.part());
        k.st_vec(own, [softmax.sum[0], softmax.sum[1]]);
    }

    /// Adds the sums over the blocks of the other warpgroup.
    pub fn add_sums(&self, k: &mut Builder, softmax: &OnlineSoftmax) {
        let peer = k.xor(self.part(), 1);
        let from = self.sums(k, peer);
        let others: [F32; 2] = k.ld_vec(from);
        softmax.add_sums(k, &others);
    }
}
