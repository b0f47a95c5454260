//! Warp specialisation: warpgroup 0 is the producer, the others are consumers.

use ptx::{BarKind, Builder, CmpOp, Op, Operand, Pred, R32, SpecialReg, Src, Value};

use crate::{Handover, Threads, WARPGROUP_THREADS};

/// One producer warpgroup and `consumers` consumer warpgroups, with the register split that `setmaxnreg`
/// makes.
#[derive(Clone, Copy, Debug)]
pub struct Roles {
    /// Number of consumer warpgroups.
    pub consumers: u32,
    /// Registers of a producer thread.
    pub feeds_with: u32,
    /// Registers of a consumer thread.
    pub computes_with: u32,
}

/// A thread's position among the consumers.
#[derive(Clone, Copy, Debug)]
pub struct Consumer {
    /// Index of the consumer warpgroup, from 0; ptxas knows that it is warp-uniform.
    pub group: R32,
    /// The thread's position. Its rows are those of `row_warp`, counted over all consumers.
    pub threads: Threads,
    /// The elected lane of each warp, which arrives on mbarriers for the warp.
    pub speaks: Pred,
}

impl Roles {
    /// Threads of the CTA.
    pub const fn threads(&self) -> u32 {
        WARPGROUP_THREADS * (1 + self.consumers)
    }

    /// Number of consumer warps.
    pub const fn consumer_warps(&self) -> u32 {
        4 * self.consumers
    }

    /// Initialises the barriers of rings that the producer thread fills and the consumer warps release, and
    /// makes them visible to the CTA and to bulk copies.
    pub fn prepare(&self, k: &mut Builder, handovers: impl IntoIterator<Item = Handover>) {
        let index = k.special(SpecialReg::TidX);
        let first = k.setp_u(CmpOp::Eq, index, 0);
        let mut peers = None;
        k.if_(first, |k| {
            for handover in handovers {
                handover.init(k, self.consumer_warps());
                peers = peers.or(handover.peers());
            }
            k.fence_mbarrier_init();
        });
        match peers {
            None => k.bar_sync(),
            Some(peers) => peers.begin(k),
        }
    }

    /// Runs `feed` in one producer thread and `compute` in all consumer threads, after `setmaxnreg` has moved
    /// registers from the producer to the consumers.
    pub fn split(
        &self,
        k: &mut Builder,
        feed: impl FnOnce(&mut Builder),
        compute: impl FnOnce(&mut Builder, &Consumer),
    ) {
        let index = k.special(SpecialReg::TidX);
        let warp = k.warp_index_uniform();
        let warpgroup = k.shr_u(warp, 2);
        let feeds = k.setp_u(CmpOp::Eq, warpgroup, 0);
        k.if_else(
            feeds,
            |k| {
                k.setmaxnreg_dec(self.feeds_with);
                let first = k.setp_u(CmpOp::Eq, index, 0);
                k.if_(first, feed);
            },
            |k| {
                k.setmaxnreg_inc(self.computes_with);
                let consumer = self.consumer(k, index, warp, warpgroup);
                compute(k, &consumer);
            },
        );
    }

    fn consumer(&self, k: &mut Builder, index: R32, warp: R32, warpgroup: R32) -> Consumer {
        let lane = k.and(index, 31);
        let in_quad = k.and(lane, 3);
        let threads = Threads {
            count: WARPGROUP_THREADS * self.consumers,
            index,
            lane,
            warp,
            quad: k.shr_u(lane, 2),
            column: k.shl(in_quad, 1),
            row_warp: k.sub(warp, 4),
            kv_warps: 1,
            part: None,
        };
        Consumer { group: k.sub(warpgroup, 1), threads, speaks: k.setp_u(CmpOp::Eq, lane, 0) }
    }
}

/// Whether the consumer warpgroups use the tensor cores in turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Turns {
    /// Each warpgroup issues its products as soon as it can.
    #[default]
    Free,
    /// Ping-pong scheduling (FlashAttention-3): one warpgroup computes exponentials while the next one has
    /// the tensor cores.
    PingPong,
}

/// The warp scheduler barriers of ping-pong scheduling. Named barrier `1 + group` is the warpgroup's turn:
/// the warpgroup syncs on it, and the warpgroup before it arrives.
#[derive(Clone, Copy, Debug)]
pub struct Circle {
    own: R32,
    next: R32,
}

impl Circle {
    /// Warpgroup 0 has the first turn, so it arrives on its own barrier.
    pub fn new(k: &mut Builder, consumer: &Consumer, consumers: u32) -> Circle {
        let circle = Circle { own: k.add(consumer.group, 1), next: k.add(consumer.group, 2) };
        let last = k.setp_u(CmpOp::Eq, consumer.group, consumers - 1);
        k.guarded(last, |k| k.mov_to(circle.next, 1));
        let first = k.setp_u(CmpOp::Eq, consumer.group, 0);
        k.if_(first, |k| k.named_barrier_arrive(circle.own, 2 * WARPGROUP_THREADS));
        circle
    }

    /// Waits for the warpgroup's turn.
    pub fn take(&self, k: &mut Builder) {
        k.named_barrier_sync(self.own, 2 * WARPGROUP_THREADS);
    }

    /// Passes the turn to the next warpgroup.
    pub fn pass(&self, k: &mut Builder) {
        k.named_barrier_arrive(self.next, 2 * WARPGROUP_THREADS);
    }
}

/// Warpgroup-wide synchronisation and vote on a named barrier.
#[derive(Clone, Copy, Debug)]
pub struct Agreement(R32);

impl Agreement {
    /// Named barriers 8 to 15 belong to the warpgroups, one each; 0 is the CTA's, 1 to 7 are those of
    /// [`Circle`].
    const FIRST: u32 = 8;

    /// For warpgroup `warpgroup` of its CTA, below 8.
    pub fn new(k: &mut Builder, warpgroup: R32) -> Agreement {
        Agreement(k.add(warpgroup, Agreement::FIRST))
    }

    /// Waits until all threads of the warpgroup have arrived.
    pub fn meet(&self, k: &mut Builder) {
        k.named_barrier_sync(self.0, WARPGROUP_THREADS);
    }

    /// Whether the predicate holds in all threads of the warpgroup (`bar.red.and`). The `vote` that follows
    /// does not change the value but tells ptxas that it is uniform. Without the vote, ptxas treats a branch
    /// on the barrier's result as divergent and moves the matrix descriptors out of uniform registers.
    pub fn all(&self, k: &mut Builder, holds: Pred) -> Pred {
        let all: Pred = k.reg();
        let barrier =
            [Operand::Reg(all.reg()), Operand::Reg(self.0.reg()), Src::<R32>::from(WARPGROUP_THREADS).into()];
        k.op(
            Op::Bar { kind: BarKind::RedAnd, aligned: true },
            barrier.into_iter().chain([Operand::Reg(holds.reg())]),
        );
        k.vote_all(all)
    }
}
