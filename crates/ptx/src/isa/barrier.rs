//! Barriers of the CTA, the warp and the cluster, and fences (PTX ISA, "Parallel Synchronization and
//! Communication Instructions").

use smallvec::smallvec;

use super::Scope;
use super::requirement::{need, scope as scope_requirement, when};
use super::signature::{MASK, address, optional, read, value, write};
use super::syntax::{names, start};
use crate::verify::rules::{constant, ensure, member_mask, multiple, range};
use crate::{LaunchBounds, Signature, SlotKind, Space, TensorMapSpec, Type};

/// The operation of a CTA barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum BarKind {
    Sync,
    Arrive,
    /// `.red.popc.u32`
    RedPopc,
    /// `.red.and.pred`
    RedAnd,
    /// `.red.or.pred`
    RedOr,
}

/// `barrier.cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClusterBarrier {
    /// `.arrive{.release}`.
    Arrive {
        /// `.aligned`.
        aligned: bool,
        /// `.relaxed`.
        relaxed: bool,
    },
    /// `.wait{.acquire}`.
    Wait {
        /// `.aligned`.
        aligned: bool,
    },
}

/// Ordering of a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum FenceSem {
    Sc,
    AcqRel,
    Acquire,
    Release,
}

/// `fence.proxy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProxyFence {
    /// `.alias`.
    Alias,
    /// `.async`, all spaces.
    Async,
    /// `.async.global`.
    AsyncGlobal,
    /// `.async.shared::cta`.
    AsyncSharedCta,
    /// `.async.shared::cluster`.
    AsyncSharedCluster,
    /// `.async::generic.acquire.sync_restrict::shared::cluster.cluster`.
    AsyncAcquire,
    /// `.async::generic.release.sync_restrict::shared::cta.cluster`.
    AsyncRelease,
}

names! {
    BarKind {
        Sync = "sync", Arrive = "arrive", RedPopc = "red.popc.u32", RedAnd = "red.and.pred",
        RedOr = "red.or.pred",
    }
    FenceSem { Sc = "sc", AcqRel = "acq_rel", Acquire = "acquire", Release = "release" }
    ProxyFence {
        Alias = "alias", Async = "async", AsyncGlobal = "async.global", AsyncSharedCta = "async.shared::cta",
        AsyncSharedCluster = "async.shared::cluster",
        AsyncAcquire = "async::generic.acquire.sync_restrict::shared::cluster.cluster",
        AsyncRelease = "async::generic.release.sync_restrict::shared::cta.cluster",
    }
}

impl ClusterBarrier {
    /// Every form with its modifiers in PTX text.
    const FORMS: &'static [(ClusterBarrier, &'static str)] = &[
        (ClusterBarrier::Arrive { aligned: false, relaxed: false }, "arrive"),
        (ClusterBarrier::Arrive { aligned: true, relaxed: false }, "arrive.aligned"),
        (ClusterBarrier::Arrive { aligned: false, relaxed: true }, "arrive.relaxed"),
        (ClusterBarrier::Arrive { aligned: true, relaxed: true }, "arrive.relaxed.aligned"),
        (ClusterBarrier::Wait { aligned: false }, "wait"),
        (ClusterBarrier::Wait { aligned: true }, "wait.aligned"),
    ];
}

start! {
    ClusterBarrier = ClusterBarrier::Wait { aligned: false };
}

const KIND: &str = "`.sync`, `.arrive`, `.red.popc.u32`, `.red.and.pred` or `.red.or.pred`";
const SCOPE: &str = "a scope such as `.cta`";

instructions! { ($) barrier barrier_list

    /// `bar`/`barrier`: `a, b?` for sync, `a, b` for arrive, `p-or-d, a, b?, c` for reductions. `a` is the
    /// index of the barrier, `b` the number of threads, `c` a predicate that may be negated. PTX ISA, "bar,
    /// barrier".
    Bar {
        /// What the barrier does.
        kind: BarKind,
        /// Whether all threads of a warp execute the instruction together (`bar`, `barrier….aligned`).
        aligned: bool,
    } => {
        text: |m| {
            m.name(aligned, &[(true, "bar"), (false, "barrier")])?;
            m.redundant("cta");
            // `bar` means `barrier….aligned`.
            *aligned |= m.redundant("aligned");
            m.one(kind, KIND, BarKind::NAMES)
        },
        operands: barrier_operands(kind),
        check: |inst| {
            // The operands of a reduction begin with a result and end with a predicate.
            let first = usize::from(!matches!(kind, BarKind::Sync | BarKind::Arrive));
            range("a barrier", constant(inst, first), 0, 15)?;
            let threads = constant(inst, first + 1);
            range("the threads of a barrier", threads, 32, LaunchBounds::MOST_THREADS)?;
            multiple("the threads of a barrier", threads, 32)
        },
    }

    /// `membermask`. PTX ISA, "bar.warp.sync".
    BarWarpSync => {
        text: |m| m.name(&mut (), &[((), "bar.warp.sync"), ((), "barrier.warp.sync")]),
        operands: smallvec![read(MASK)],
        check: |inst| member_mask(constant(inst, 0)),
    }

    /// No operands. PTX ISA, "barrier.cluster".
    BarrierCluster(barrier: ClusterBarrier) => {
        text: |m| {
            m.head("barrier.cluster")?;
            m.one(barrier, "`.arrive` or `.wait`", ClusterBarrier::FORMS)?;
            m.redundant(if matches!(barrier, ClusterBarrier::Wait { .. }) { "acquire" } else { "release" });
            Ok(())
        },
        operands: Signature::new(),
        needs: match barrier {
            ClusterBarrier::Arrive { relaxed: true, .. } => need(80, 90),
            _ => need(78, 90),
        },
    }

    /// No operands. `membar.cta`, `.gl` and `.sys` are the older spelling of `fence.sc` at that scope. PTX
    /// ISA, "membar".
    Membar(scope: Scope) => {
        text: |m| {
            m.head("membar")?;
            let scopes = &[(Scope::Cta, "cta"), (Scope::Gpu, "gl"), (Scope::Sys, "sys")];
            m.one(scope, "`.cta`, `.gl` or `.sys`", scopes)
        },
        operands: Signature::new(),
        accepts: ensure(scope != Scope::Cluster, || "membar takes .cta, .gl or .sys".into()),
    }

    /// No operands. With `restricted`, an acquire orders accesses to the shared memory of the cluster only, a
    /// release those to the shared memory of the CTA (`.sync_restrict`). PTX ISA, "fence".
    Fence(sem: FenceSem, scope: Scope, restricted: bool) => {
        text: |m| {
            m.head("fence")?;
            let mut written = Some(*sem);
            m.maybe(&mut written, FenceSem::NAMES)?;
            *sem = written.unwrap_or(FenceSem::AcqRel);
            let space = if *sem == FenceSem::Release { "cta" } else { "cluster" };
            m.flag(restricted, &format!("sync_restrict::shared::{space}"))?;
            m.one(scope, SCOPE, Scope::NAMES)
        },
        operands: Signature::new(),
        accepts: {
            let one_way = matches!(sem, FenceSem::Acquire | FenceSem::Release);
            ensure(!restricted || one_way && scope == Scope::Cluster, || {
                "fence takes .sync_restrict with .acquire.cluster or .release.cluster only".into()
            })
        },
        needs: {
            let one_way = matches!(sem, FenceSem::Acquire | FenceSem::Release);
            scope_requirement(Some(scope)).and(when(one_way, need(86, 90)))
        },
    }

    /// No operands. PTX ISA, "fence.proxy".
    FenceProxy(fence: ProxyFence) => {
        text: |m| { m.head("fence.proxy")?; m.one(fence, "`.alias` or `.async`", ProxyFence::NAMES) },
        operands: Signature::new(),
        needs: match fence {
            ProxyFence::Alias => need(75, 75),
            ProxyFence::AsyncAcquire | ProxyFence::AsyncRelease => need(86, 90),
            _ => need(80, 90),
        },
    }

    /// `[map], 128` with `Acquire`, no operands with `Release`: `fence.proxy.tensormap::generic`. PTX ISA,
    /// "fence.proxy".
    FenceTensormap(sem: FenceSem, scope: Scope) => {
        text: |m| {
            m.head("fence.proxy.tensormap::generic")?;
            let orderings = &[(FenceSem::Acquire, "acquire"), (FenceSem::Release, "release")];
            m.one(sem, "`.acquire` or `.release`", orderings)?;
            m.one(scope, SCOPE, Scope::NAMES)
        },
        operands: match sem {
            FenceSem::Acquire => smallvec![address(Space::Generic), read(SlotKind::Constant)],
            _ => Signature::new(),
        },
        accepts: ensure(matches!(sem, FenceSem::Acquire | FenceSem::Release), || {
            "fence.proxy.tensormap takes .acquire or .release".into()
        }),
        needs: need(83, 90),
        check: |inst| range("the bytes of a tensor map", constant(inst, 1), 128, 128),
        accesses: |_position| Some(TensorMapSpec::BYTES),
    }

    /// No operands: `fence.mbarrier_init.release.cluster`. PTX ISA, "fence.mbarrier_init".
    FenceMbarrierInit => {
        text: |m| { m.head("fence.mbarrier_init")?; m.word("release")?; m.word("cluster") },
        operands: Signature::new(),
        needs: need(80, 90),
    }
}

fn barrier_operands(kind: BarKind) -> Signature {
    let (id, threads) = (value(Type::U32), value(Type::U32));
    match kind {
        BarKind::Sync => smallvec![read(id), optional(threads)],
        BarKind::Arrive => smallvec![read(id), read(threads)],
        BarKind::RedPopc => {
            smallvec![write(value(Type::U32)), read(id), optional(threads), read(value(Type::Pred))]
        }
        BarKind::RedAnd | BarKind::RedOr => {
            smallvec![write(value(Type::Pred)), read(id), optional(threads), read(value(Type::Pred))]
        }
    }
}
