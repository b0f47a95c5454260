//! Merges the partial results of the warpgroups of a cluster for the same rows: split-KV with the merge of
//! FlashDecoding (Dao et al. 2023) through distributed shared memory.
//!
//! With `P` parts of the keys, each warpgroup ends up with one of `P` equal shares of O's columns. It sends
//! every other share to its owner in fragment layout, each thread to the thread of the same index: every
//! access is 16 bytes per lane, lanes are contiguous, and no transpose is needed. One mbarrier per owner warp
//! counts everything that is sent to that warp. Its completion also means that no other CTA still writes to
//! this CTA's shared memory, so no cluster barrier is needed at the end.

use ptx::{Builder, CmpOp, F32, Guard, Pointer, R32, Shared, SpecialReg};
use tile::{AccTile, Mbarriers, Threads, WARPGROUP_THREADS, divide};

use crate::{OnlineSoftmax, Sinks};

/// Bytes of four registers of every thread of a warpgroup.
const VECTOR_BYTES: u32 = 16 * WARPGROUP_THREADS;

/// How a cluster divides a tile: the keys among `ctas · kv_warpgroups` parts (both factors are powers of
/// two), the rows among `row_warpgroups` (1 to 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// CTAs that divide the keys of the same rows.
    pub ctas: u32,
    /// Warpgroups of a CTA that divide its keys.
    pub kv_warpgroups: u32,
    /// Warpgroups of a CTA that divide its rows.
    pub row_warpgroups: u32,
}

impl Division {
    /// Parts of the keys.
    pub const fn parts(self) -> u32 {
        self.ctas * self.kv_warpgroups
    }

    /// Warpgroups of a CTA.
    pub const fn warpgroups(self) -> u32 {
        self.kv_warpgroups * self.row_warpgroups
    }

    /// Bytes of a message to one owner: the owner's share of O and the softmax state.
    const fn message_bytes(self, columns: u32) -> u32 {
        (1 + columns / 8 / self.parts()) * VECTOR_BYTES
    }

    /// Shared memory for all messages to a CTA. `columns` is the width of O.
    pub const fn message_room(self, columns: u32) -> u32 {
        self.warpgroups() * (self.parts() - 1) * self.message_bytes(columns)
    }

    /// Mbarriers for the messages: one per warp.
    pub const fn barriers(self) -> u32 {
        if self.parts() == 1 { 0 } else { 4 * self.warpgroups() }
    }
}

/// The position of a warpgroup in its cluster.
#[derive(Clone, Copy, Debug)]
pub struct WarpgroupPlace {
    /// Warp in the CTA.
    pub warp: R32,
    /// Thread in the warpgroup.
    pub thread: R32,
    /// Index among the warpgroups that divide the CTA's rows.
    pub row_warpgroup: R32,
    /// Index among the warpgroups that divide the CTA's keys.
    pub kv_warpgroup: R32,
    /// Rank of the CTA in the cluster, which is its index among the CTAs that divide the keys.
    pub cta: R32,
}

impl WarpgroupPlace {
    /// Reads the thread's position in a cluster of `division.ctas` CTAs along x.
    pub fn new(k: &mut Builder, division: Division) -> WarpgroupPlace {
        let warp = k.warp_index_uniform();
        let index = k.special(SpecialReg::TidX);
        let thread = k.and(index, WARPGROUP_THREADS - 1);
        let warpgroup = k.shr_u(warp, 2);
        let (row_warpgroup, kv_warpgroup) = match (division.row_warpgroups, division.kv_warpgroups) {
            (1, 1) => (k.mov(0), k.mov(0)),
            (1, _) => (k.mov(0), warpgroup),
            (_, 1) => (warpgroup, k.mov(0)),
            (rows, _) => {
                let part = divide(k, warpgroup, rows);
                let before = k.mul(part, rows);
                (k.sub(warpgroup, before), part)
            }
        };
        let cta = if division.ctas > 1 { k.special(SpecialReg::ClusterCtarank) } else { k.mov(0) };
        WarpgroupPlace { warp, thread, row_warpgroup, kv_warpgroup, cta }
    }

    /// Index of the warpgroup's part of the keys.
    pub fn part(self, k: &mut Builder, division: Division) -> R32 {
        k.mad(self.cta, division.kv_warpgroups, self.kv_warpgroup)
    }

    /// The thread's position among the CTA's warps of 16 rows each, as [`Threads`]. The warps of all parts,
    /// also those of other CTAs of the cluster, share rows: [`Threads::kv_warps`] is the number of parts.
    pub fn threads(self, k: &mut Builder, division: Division) -> Threads {
        let lane = k.and(self.thread, 31);
        let in_quad = k.and(lane, 3);
        let in_warpgroup = k.and(self.warp, 3);
        Threads {
            count: division.warpgroups() * WARPGROUP_THREADS,
            index: k.special(SpecialReg::TidX),
            lane,
            warp: self.warp,
            quad: k.shr_u(lane, 2),
            column: k.shl(in_quad, 1),
            row_warp: k.mad(self.row_warpgroup, 4, in_warpgroup),
            kv_warps: division.parts(),
            part: (division.parts() > 1).then(|| self.part(k, division)),
        }
    }
}

/// The exchange, from the view of one warpgroup.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    division: Division,
    place: WarpgroupPlace,
    columns: u32,
    room: Shared,
    barriers: Mbarriers,
}

impl Exchange {
    /// Creates the exchange. `columns` is the width of O. `room` has [`Division::message_room`] bytes, and
    /// `barriers` has [`Division::barriers`] mbarriers.
    pub const fn new(
        division: Division,
        place: WarpgroupPlace,
        columns: u32,
        room: Shared,
        barriers: Mbarriers,
    ) -> Exchange {
        Exchange { division, place, columns, room, barriers }
    }

    /// Initialises the warp's mbarrier for all messages to the warp. Run by one lane of each warp, before the
    /// first cluster barrier.
    pub fn expect(&self, k: &mut Builder) {
        let Division { ctas, kv_warpgroups, .. } = self.division;
        let barrier = self.barriers.index(k, self.place.warp);
        let from_own_cta = kv_warpgroups - 1;
        let from_others = (ctas - 1) * kv_warpgroups;
        k.mbarrier_init(barrier, 1 + from_own_cta);
        if ctas > 1 {
            k.fence_mbarrier_init();
        }
        let bytes = from_others * self.division.message_bytes(self.columns) / 4;
        k.mbarrier_arrive_expect_tx(barrier, bytes);
    }

    /// Sends a share of O's columns to the peer CTA, in a cluster of two CTAs with one part of the keys each.
    pub fn send_to_peer(&self, k: &mut Builder, softmax: &OnlineSoftmax, share: &AccTile) {
        let peer = k.xor(self.place.cta, 1);
        let warpgroup = self.place.row_warpgroup;
        let slot = k.mov(0);
        self.send_to_cta(k, softmax, share, peer, (warpgroup, slot));
    }

    /// Sends each owner its share of `o` and returns the warpgroup's own share.
    pub fn send(&self, k: &mut Builder, softmax: &OnlineSoftmax, o: &AccTile) -> AccTile {
        let Division { ctas, kv_warpgroups, row_warpgroups } = self.division;
        let n_tiles = o.n_tiles() / self.division.parts();
        let own = AccTile::unset(k, 16, 8 * n_tiles);
        let part = self.place.part(k, self.division);
        for cta in 0..ctas {
            let shares = (0..kv_warpgroups).map(|warpgroup| {
                let owner = cta * kv_warpgroups + warpgroup;
                (warpgroup, owner, o.columns(owner * n_tiles, n_tiles))
            });
            let place = |k: &mut Builder, warpgroup: u32, owner: u32| {
                let to = k.add(self.place.row_warpgroup, warpgroup * row_warpgroups);
                let slot = k.sub(part, owner + 1);
                (to, k.and(slot, self.division.parts() - 1))
            };
            let is_own = k.setp_u(CmpOp::Eq, self.place.cta, cta);
            let inside = |k: &mut Builder| {
                for (warpgroup, owner, share) in shares.clone() {
                    let keep = k.setp_u(CmpOp::Eq, self.place.kv_warpgroup, warpgroup);
                    either(
                        k,
                        kv_warpgroups > 1,
                        keep,
                        |k| own.copy_from(k, &share),
                        |k| {
                            let to = place(k, warpgroup, owner);
                            self.send_inside(k, softmax, &share, to);
                        },
                    );
                }
            };
            either(k, ctas > 1, is_own, inside, |k| {
                for (warpgroup, owner, share) in shares.clone() {
                    let (to, rank) = (place(k, warpgroup, owner), k.mov(cta));
                    self.send_to_cta(k, softmax, &share, rank, to);
                }
            });
        }
        own
    }

    /// The thread's address within a message in the receiver's CTA, and the receiving warp's mbarrier.
    fn message_place(&self, k: &mut Builder, (warpgroup, slot): (R32, R32)) -> (Shared, Shared) {
        let message = self.division.message_bytes(self.columns);
        let index = k.mad(warpgroup, self.division.parts() - 1, slot);
        let of_thread = k.shared_index(self.room, self.place.thread, 16);
        let to = k.mad(index, message, of_thread.base);
        let in_warpgroup = k.and(self.place.warp, 3);
        let warps_before = k.shl(warpgroup, 2);
        let warp = k.add(warps_before, in_warpgroup);
        (Shared { base: to, offset: of_thread.offset }, self.barriers.index(k, warp))
    }

    fn send_to_cta(
        &self,
        k: &mut Builder,
        softmax: &OnlineSoftmax,
        share: &AccTile,
        rank: R32,
        to: (R32, R32),
    ) {
        let (to, barrier) = self.message_place(k, to);
        let (to, barrier) = (k.mapa(to, rank), k.mapa(barrier, rank));
        for (i, vector) in message(softmax, share) {
            k.st_async_vec(at_vector(to, i), vector, barrier);
        }
    }

    fn send_inside(&self, k: &mut Builder, softmax: &OnlineSoftmax, share: &AccTile, to: (R32, R32)) {
        let (to, barrier) = self.message_place(k, to);
        for (i, vector) in message(softmax, share) {
            k.st_vec(at_vector(to, i), vector);
        }
        k.warp_sync();
        let lane = k.and(self.place.thread, 31);
        let first = k.setp_u(CmpOp::Eq, lane, 0);
        k.if_(first, |k| k.mbarrier_arrive(barrier));
    }

    /// Waits for the messages of the other parts and merges them with the warpgroup's own share. The result
    /// is normalised by the row sums, to which the sinks are added. Returns the merged softmax.
    pub fn receive(
        &self,
        k: &mut Builder,
        softmax: OnlineSoftmax,
        own: &AccTile,
        sinks: Option<&Sinks>,
    ) -> OnlineSoftmax {
        let barrier = self.barriers.index(k, self.place.warp);
        k.mbarrier_wait_parity_cluster(barrier, 0);
        let warpgroup = k.shr_u(self.place.warp, 2);
        let first = k.mov(0);
        let (messages, _) = self.message_place(k, (warpgroup, first));
        let slots = self.division.parts() - 1;
        let vectors = self.division.message_bytes(self.columns) / VECTOR_BYTES;

        let mut parts: Vec<[F32; 4]> = vec![softmax.statistics(0)];
        parts.extend((0..slots).map(|slot| k.ld_vec(at_vector(messages, slot * vectors))));
        let mut joined = OnlineSoftmax { row_max: Vec::new(), sum: Vec::new(), ..softmax };
        let weights = joined.join(k, &parts);
        let inverses = joined.inverses(k, sinks);
        let weights: Vec<Vec<F32>> = weights
            .iter()
            .map(|rows| {
                rows.iter().zip(&inverses).map(|(&weight, &inverse)| k.mul(weight, inverse)).collect()
            })
            .collect();
        for row in 0..2 {
            own.scale_row(k, row, weights[0][row as usize]);
        }
        for (slot, weights) in (0..slots).zip(&weights[1..]) {
            for n in 0..own.n_tiles() {
                let theirs: [F32; 4] = k.ld_vec(at_vector(messages, slot * vectors + 1 + n));
                for (i, sum) in own.tile(0, n).into_iter().enumerate() {
                    k.mad_to(sum, theirs[i], weights[i / 2], sum);
                }
            }
        }
        joined
    }
}

/// A thread's vectors of a message with their indices: its share of O, then the softmax state at index 0. The
/// state is sent last although it is stored first.
fn message(softmax: &OnlineSoftmax, share: &AccTile) -> impl Iterator<Item = (u32, [F32; 4])> + use<> {
    let tiles: Vec<(u32, [F32; 4])> = (0..share.n_tiles()).map(|n| (1 + n, share.tile(0, n))).collect();
    tiles.into_iter().chain([(0, softmax.statistics(0))])
}

fn at_vector<P: Pointer>(start: P, index: u32) -> P {
    start.at(i64::from(index * VECTOR_BYTES))
}

/// Emits `if condition { then } else { otherwise }`, or only `then` if `choice` is false.
fn either(
    k: &mut Builder,
    choice: bool,
    condition: impl Into<Guard>,
    then: impl FnOnce(&mut Builder),
    otherwise: impl FnOnce(&mut Builder),
) {
    if choice { k.if_else(condition, then, otherwise) } else { then(k) }
}
