//! What the warpgroups of a CTA do: the first feeds, the others compute.

use ptx::{BarKind, Builder, CmpOp, Op, Operand, Pred, R32, SpecialReg, Src, Value};

use crate::{Handover, Threads, WARPGROUP_THREADS};

/// One warpgroup that feeds and `consumers` that compute, with the registers that a thread of each keeps.
#[derive(Clone, Copy, Debug)]
pub struct Roles {
    /// Warpgroups that compute.
    pub consumers: u32,
    /// Registers of a thread that feeds.
    pub feeds_with: u32,
    /// Registers of a thread that computes.
    pub computes_with: u32,
}

/// Where a thread stands among those that compute.
#[derive(Clone, Copy, Debug)]
pub struct Consumer {
    /// The warpgroup, counted from 0; ptxas knows that it is uniform.
    pub group: R32,
    /// The thread's place: its rows are those of `row_warp`, counted over all consumers.
    pub threads: Threads,
    /// One lane of each warp, which speaks for it.
    pub speaks: Pred,
}

impl Roles {
    /// Threads of the CTA.
    pub const fn threads(&self) -> u32 {
        WARPGROUP_THREADS * (1 + self.consumers)
    }

    /// Warps that compute.
    pub const fn consumer_warps(&self) -> u32 {
        4 * self.consumers
    }

    /// Prepares the barriers of rings that the one thread fills and the consumers' warps empty, and makes
    /// them known to the CTA and to bulk copies.
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

    /// Runs `feed` in one thread, and `compute` in all threads of the consumers, with the registers moved
    /// from the one to the others.
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

/// Whether warpgroups take turns at the tensor cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Turns {
    /// Each issues its products when it can.
    #[default]
    Free,
    /// In a circle: a warpgroup takes exponentials while the next one has the tensor cores (FlashAttention-3,
    /// "pingpong scheduling").
    PingPong,
}

/// A warpgroup's place in the circle: named barrier `1 + group` is its turn, for which it waits together with
/// the arrival of the warpgroup before it.
#[derive(Clone, Copy, Debug)]
pub struct Circle {
    own: R32,
    next: R32,
}

impl Circle {
    /// The first warpgroup's turn comes first.
    pub fn new(k: &mut Builder, consumer: &Consumer, consumers: u32) -> Circle {
        let circle = Circle { own: k.add(consumer.group, 1), next: k.add(consumer.group, 2) };
        let last = k.setp_u(CmpOp::Eq, consumer.group, consumers - 1);
        k.guarded(last, |k| k.mov_to(circle.next, 1));
        let first = k.setp_u(CmpOp::Eq, consumer.group, 0);
        k.if_(first, |k| k.named_barrier_arrive(circle.own, 2 * WARPGROUP_THREADS));
        circle
    }

    /// Waits for the turn.
    pub fn take(&self, k: &mut Builder) {
        k.named_barrier_sync(self.own, 2 * WARPGROUP_THREADS);
    }

    /// Gives it to the next warpgroup.
    pub fn pass(&self, k: &mut Builder) {
        k.named_barrier_arrive(self.next, 2 * WARPGROUP_THREADS);
    }
}

/// Lets a warpgroup agree, on a named barrier of its own.
#[derive(Clone, Copy, Debug)]
pub struct Agreement(R32);

impl Agreement {
    /// Named barriers 8 to 15 are the warpgroups', one each; 0 is the CTA's, 1 to 7 are the [`Circle`]'s.
    const FIRST: u32 = 8;

    /// For a warpgroup of that number, below 8, in its CTA.
    pub fn new(k: &mut Builder, warpgroup: R32) -> Agreement {
        Agreement(k.add(warpgroup, Agreement::FIRST))
    }

    /// Waits until all threads of the warpgroup have come here.
    pub fn meet(&self, k: &mut Builder) {
        k.named_barrier_sync(self.0, WARPGROUP_THREADS);
    }

    /// Whether the predicate holds in all threads of the warpgroup. The vote changes nothing but what ptxas
    /// knows: without it a branch on the barrier's result counts as divergent, and matrix descriptors leave
    /// the uniform registers.
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
