use super::{MemSem, Scope};
use crate::Space;

/// What is done with an mbarrier object (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MbarrierOp {
    /// `[mbar], count`.
    Init,
    /// `[mbar]`.
    Inval,
    /// `[mbar], bytes`: raises the transactions that the phase waits for.
    ExpectTx,
    /// `[mbar], bytes`: counts transactions as done, as a bulk copy does.
    CompleteTx,
    /// `state, [mbar], count?`.
    Arrive,
    /// `state, [mbar], count`: arrives without completing the phase.
    ArriveNoComplete,
    /// `state, [mbar], bytes`: `expect_tx`, then one arrival.
    ArriveExpectTx,
    /// `state, [mbar], count?`: arrives, and is not expected in later phases.
    ArriveDrop,
    /// `state, [mbar], count`.
    ArriveDropNoComplete,
    /// `state, [mbar], bytes`.
    ArriveDropExpectTx,
    /// `p, [mbar], state`.
    TestWait,
    /// `p, [mbar], parity`.
    TestWaitParity,
    /// `p, [mbar], state, hint?`; the hint is a time in nanoseconds.
    TryWait,
    /// `p, [mbar], parity, hint?`.
    TryWaitParity,
    /// `count, state`.
    PendingCount,
}

impl MbarrierOp {
    /// Whether it arrives, and so has a state as its result.
    pub const fn arrives(self) -> bool {
        matches!(
            self,
            MbarrierOp::Arrive
                | MbarrierOp::ArriveNoComplete
                | MbarrierOp::ArriveExpectTx
                | MbarrierOp::ArriveDrop
                | MbarrierOp::ArriveDropNoComplete
                | MbarrierOp::ArriveDropExpectTx
        )
    }

    /// Whether it arrives for the last time: later phases expect one thread fewer.
    pub const fn drops(self) -> bool {
        matches!(
            self,
            MbarrierOp::ArriveDrop | MbarrierOp::ArriveDropNoComplete | MbarrierOp::ArriveDropExpectTx
        )
    }

    /// Whether it raises the transactions that the phase waits for.
    pub const fn expects_bytes(self) -> bool {
        matches!(self, MbarrierOp::ExpectTx | MbarrierOp::ArriveExpectTx | MbarrierOp::ArriveDropExpectTx)
    }

    /// Whether it tests a phase, and so has a predicate as its result.
    pub const fn waits(self) -> bool {
        matches!(
            self,
            MbarrierOp::TestWait
                | MbarrierOp::TestWaitParity
                | MbarrierOp::TryWait
                | MbarrierOp::TryWaitParity
        )
    }

    /// Whether it names the phase by its parity.
    pub const fn by_parity(self) -> bool {
        matches!(self, MbarrierOp::TestWaitParity | MbarrierOp::TryWaitParity)
    }

    /// The ordering that holds where none is written: arrivals release, waits acquire, counting bytes is relaxed.
    pub const fn default_sem(self) -> MemSem {
        match self {
            MbarrierOp::ExpectTx | MbarrierOp::CompleteTx => MemSem::Relaxed,
            _ if self.arrives() => MemSem::Release,
            _ if self.waits() => MemSem::Acquire,
            _ => MemSem::Default,
        }
    }
}

/// An operation on an mbarrier object in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mbarrier {
    /// What is done.
    pub op: MbarrierOp,
    /// `Shared`, `SharedCluster` for an object of any CTA of the cluster, or `Generic` where no space is written.
    pub space: Space,
    /// The ordering in force, written or not: `Release`, `Acquire` or `Relaxed`; `Default` for operations without one.
    pub sem: MemSem,
    /// The scope of the ordering: `Cta` or `Cluster`.
    pub scope: Scope,
}

impl Mbarrier {
    /// The operation on an object of the own CTA, ordered as when no ordering is written.
    pub const fn new(op: MbarrierOp) -> Mbarrier {
        let space = match op {
            MbarrierOp::PendingCount => Space::Generic,
            _ => Space::Shared,
        };
        Mbarrier { op, space, sem: op.default_sem(), scope: Scope::Cta }
    }

    /// Whether the text must name the ordering.
    pub fn says_ordering(&self) -> bool {
        (self.sem, self.scope) != (self.op.default_sem(), Scope::Cta)
    }
}
