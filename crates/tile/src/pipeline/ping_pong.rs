//! Ping-pong scheduling: consumer warpgroups take the tensor cores in turn.

use ptx::{Builder, CmpOp, R32};

use crate::{Consumer, WARPGROUP_THREADS};

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
