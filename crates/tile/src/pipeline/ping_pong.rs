//! Ping-pong scheduling: consumer warpgroups take the tensor cores in turn.

use ptx::{Builder, CmpOp, R32};

use crate::named_barriers::FIRST_TURN;
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

/// The warp scheduler barriers of ping-pong scheduling. Each warpgroup has a named barrier for its turn: the
/// warpgroup syncs on it, and the warpgroup before it arrives.
#[derive(Clone, Copy, Debug)]
pub struct PingPong {
    own: R32,
    next: R32,
}

impl PingPong {
    /// Warpgroup 0 has the first turn, so it arrives on its own barrier.
    pub fn new(k: &mut Builder, consumer: &Consumer, consumers: u32) -> PingPong {
        let ping_pong =
            PingPong { own: k.add(consumer.group, FIRST_TURN), next: k.add(consumer.group, FIRST_TURN + 1) };
        let last = k.setp_u(CmpOp::Eq, consumer.group, consumers - 1);
        k.guarded(last, |k| k.mov_to(ping_pong.next, FIRST_TURN));
        let first = k.setp_u(CmpOp::Eq, consumer.group, 0);
        k.if_(first, |k| k.named_barrier_arrive(ping_pong.own, 2 * WARPGROUP_THREADS));
        ping_pong
    }

    /// Waits for the warpgroup's turn on the tensor cores.
    pub fn wait(&self, k: &mut Builder) {
        k.named_barrier_sync(self.own, 2 * WARPGROUP_THREADS);
    }

    /// Passes the turn on the tensor cores to the next warpgroup.
    pub fn arrive(&self, k: &mut Builder) {
        k.named_barrier_arrive(self.next, 2 * WARPGROUP_THREADS);
    }
}
