//! mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

use smallvec::smallvec;

use super::requirement::{need, when};
use super::signature::{address, optional, read, value, write};
use super::syntax::{names, start};
use super::{MemSem, Scope};
use crate::verify::rules::{constant, ensure, range};
use crate::verify::{Rule, fault};
use crate::{Instruction, Op, Operand, Requirement, Signature, Space, Type};

/// An operation on an mbarrier object with its operands (PTX ISA, "Parallel Synchronization and Communication
/// Instructions: mbarrier").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MbarrierOp {
    /// `[mbar], count`.
    Init,
    /// `[mbar]`.
    Inval,
    /// `[mbar], bytes`: increases the tx-count, the number of bytes that the phase waits for.
    ExpectTx,
    /// `[mbar], bytes`: decreases the tx-count, as a bulk copy does when its bytes arrive.
    CompleteTx,
    /// `state, [mbar], count?`.
    Arrive,
    /// `state, [mbar], count`: arrives, and must not complete the phase.
    ArriveNoComplete,
    /// `state, [mbar], bytes`: `expect_tx`, then one arrival.
    ArriveExpectTx,
    /// `state, [mbar], count?`: arrives and decreases the expected count of later phases.
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
    /// Whether the operation arrives. Its result is a state.
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

    /// Whether the operation arrives and decreases the expected count of later phases.
    pub const fn drops(self) -> bool {
        matches!(
            self,
            MbarrierOp::ArriveDrop | MbarrierOp::ArriveDropNoComplete | MbarrierOp::ArriveDropExpectTx
        )
    }

    /// Whether the operation increases the tx-count.
    pub const fn expects_bytes(self) -> bool {
        matches!(self, MbarrierOp::ExpectTx | MbarrierOp::ArriveExpectTx | MbarrierOp::ArriveDropExpectTx)
    }

    /// Whether the operation tests a phase. Its result is a predicate.
    pub const fn waits(self) -> bool {
        matches!(
            self,
            MbarrierOp::TestWait
                | MbarrierOp::TestWaitParity
                | MbarrierOp::TryWait
                | MbarrierOp::TryWaitParity
        )
    }

    /// Whether the operation names the phase by its parity.
    pub const fn by_parity(self) -> bool {
        matches!(self, MbarrierOp::TestWaitParity | MbarrierOp::TryWaitParity)
    }

    /// The ordering when none is written: arrivals release, waits acquire, changes of the tx-count are
    /// relaxed.
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
    /// The operation.
    pub op: MbarrierOp,
    /// `Shared`, `SharedCluster` for an object of any CTA of the cluster, or `Generic` when no space is
    /// written.
    pub space: Space,
    /// The ordering in effect, written or default: `Release`, `Acquire` or `Relaxed`; `Default` for
    /// operations without an ordering.
    pub sem: MemSem,
    /// The scope of the ordering: `Cta` or `Cluster`.
    pub scope: Scope,
}

impl Mbarrier {
    /// An operation on an object of the thread's own CTA, with the default ordering.
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

names! {
    MbarrierOp {
        Init = "init", Inval = "inval", ExpectTx = "expect_tx", CompleteTx = "complete_tx", Arrive = "arrive",
        ArriveNoComplete = "arrive.noComplete", ArriveExpectTx = "arrive.expect_tx",
        ArriveDrop = "arrive_drop",
        ArriveDropNoComplete = "arrive_drop.noComplete", ArriveDropExpectTx = "arrive_drop.expect_tx",
        TestWait = "test_wait", TestWaitParity = "test_wait.parity", TryWait = "try_wait",
        TryWaitParity = "try_wait.parity", PendingCount = "pending_count",
    }
}

start! {
    Mbarrier = Mbarrier::new(MbarrierOp::Init);
}

instructions! { ($) mbarrier mbarrier_list

    /// An operation on an mbarrier object. [`MbarrierOp`] gives the operands. PTX ISA, "mbarrier.init",
    /// "mbarrier.arrive", "mbarrier.test_wait" and so on.
    Mbarrier(mbarrier: Mbarrier) => {
        text: |m| {
            m.head("mbarrier")?;
            let mut op = mbarrier.op;
            m.one(&mut op, "an operation such as `.init`", MbarrierOp::NAMES)?;
            if op != mbarrier.op {
                *mbarrier = Mbarrier::new(op);
            }
            if op == MbarrierOp::PendingCount {
                return m.word("b64");
            }
            let (mut sem, mut scope) = (MemSem::Default, None);
            if mbarrier.says_ordering() {
                (sem, scope) = (mbarrier.sem, Some(mbarrier.scope));
            }
            m.ordering(&mut sem, &mut scope)?;
            match (sem, scope) {
                (MemSem::Default, None) => {}
                (MemSem::Relaxed | MemSem::Acquire | MemSem::Release, Some(scope)) => {
                    *mbarrier = Mbarrier { sem, scope, ..*mbarrier };
                }
                _ => m.refuse(ORDERING)?,
            }
            m.space(&mut mbarrier.space)?;
            m.word("b64")
        },
        operands: mbarrier_operands(mbarrier),
        accepts: available(&mbarrier),
        needs: mbarrier_requirement(&mbarrier),
        check: |inst| {
            if let Some(result) = inst.operands.first()
                && mbarrier.space == Space::SharedCluster
                && mbarrier.op.arrives()
                && *result != Operand::Sink
            {
                return fault(Rule::Operand, "an arrival at .shared::cluster has no state: `_` belongs here");
            }
            match mbarrier.op {
                MbarrierOp::Init => range("the arrivals of an mbarrier", constant(inst, 1), 1, (1 << 20) - 1),
                op if op.by_parity() => range("the parity of a phase", constant(inst, 2), 0, 1),
                _ => Ok(()),
            }
        },
        accesses: |_position| Some(8),
    }
}

const ORDERING: &str =
    "`mbarrier` takes `.relaxed`, `.acquire` or `.release` together with `.cta` or `.cluster`";

fn mbarrier_operands(mbarrier: Mbarrier) -> Signature {
    use MbarrierOp as M;
    let (state, count, pred) = (value(Type::B64), value(Type::U32), value(Type::Pred));
    let bar = address(mbarrier.space);
    match mbarrier.op {
        M::Init | M::ExpectTx | M::CompleteTx => smallvec![bar, read(count)],
        M::Inval => smallvec![bar],
        M::Arrive | M::ArriveDrop => smallvec![write(state), bar, optional(count)],
        M::ArriveNoComplete | M::ArriveDropNoComplete | M::ArriveExpectTx | M::ArriveDropExpectTx => {
            smallvec![write(state), bar, read(count)]
        }
        M::TestWait => smallvec![write(pred), bar, read(state)],
        M::TestWaitParity => smallvec![write(pred), bar, read(count)],
        M::TryWait => smallvec![write(pred), bar, read(state), optional(count)],
        M::TryWaitParity => smallvec![write(pred), bar, read(count), optional(count)],
        M::PendingCount => smallvec![write(value(Type::U32)), read(state)],
    }
}

/// A count on an arrival that may complete the phase needs a later `.version` and target than the arrival
/// (PTX ISA, "mbarrier.arrive").
pub(super) fn arrival_count(inst: &Instruction) -> Requirement {
    let counted = match inst.op {
        Op::Mbarrier(m) => {
            matches!(m.op, MbarrierOp::Arrive | MbarrierOp::ArriveDrop) && inst.operands.len() > 2
        }
        _ => false,
    };
    when(counted, need(78, 90))
}

fn mbarrier_requirement(m: &Mbarrier) -> Requirement {
    let operation = match m.op {
        MbarrierOp::TryWait | MbarrierOp::TryWaitParity => need(78, 90),
        MbarrierOp::TestWaitParity => need(71, 80),
        MbarrierOp::ExpectTx
        | MbarrierOp::CompleteTx
        | MbarrierOp::ArriveExpectTx
        | MbarrierOp::ArriveDropExpectTx => need(80, 90),
        _ => need(70, 80),
    };
    let counts_bytes = matches!(m.op, MbarrierOp::ExpectTx | MbarrierOp::CompleteTx);
    operation
        .and(when(m.space == Space::SharedCluster || m.scope == Scope::Cluster, need(80, 90)))
        .and(when(m.sem == MemSem::Relaxed && !counts_bytes, need(86, 90)))
}

fn available(m: &Mbarrier) -> Result<(), String> {
    let name = m.op.name();
    let remote = matches!(m.op, MbarrierOp::ExpectTx | MbarrierOp::CompleteTx)
        || m.op.arrives() && !matches!(m.op, MbarrierOp::ArriveNoComplete | MbarrierOp::ArriveDropNoComplete);
    let near = matches!(m.space, Space::Shared | Space::Generic);
    ensure(near || m.space == Space::SharedCluster && remote, || {
        let accepted = if remote { ".shared::cta or .shared::cluster" } else { ".shared::cta" };
        format!("mbarrier.{name} works on {accepted}, not on {}", m.space.suffix())
    })?;
    let default = m.op.default_sem();
    let plain = matches!(m.op, MbarrierOp::ArriveNoComplete | MbarrierOp::ArriveDropNoComplete);
    let ordered = default != MemSem::Default && !plain;
    ensure(m.sem == default || ordered && m.sem == MemSem::Relaxed, || {
        let accepted = match default {
            MemSem::Release if !plain => ".release or .relaxed",
            MemSem::Release => ".release",
            MemSem::Acquire => ".acquire or .relaxed",
            MemSem::Relaxed => ".relaxed",
            _ => "no ordering",
        };
        format!("mbarrier.{name} takes {accepted}")
    })?;
    ensure(m.scope == Scope::Cta || ordered && m.scope == Scope::Cluster, || {
        format!("mbarrier.{name} takes {}", if ordered { ".cta or .cluster" } else { ".cta" })
    })
}
