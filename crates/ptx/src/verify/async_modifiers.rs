//! Which modifiers bulk copies, mbarriers and asynchronous stores take together.

use crate::{
    AtomicOp, BulkCopy, BulkReduce, BulkRoute, BulkTensor, FenceSem, Mbarrier, MbarrierOp, MemSem, Op,
    RedAsync, Scope, Space, StAsync, Type,
};

use super::modifiers::{ensure, one_of};

pub(super) fn check(op: &Op) -> Result<(), String> {
    match *op {
        Op::Mbarrier(m) => mbarrier(&m),
        Op::CpAsyncBulk(BulkCopy { route, multicast, cache_hint }) => copy(route, multicast, cache_hint),
        Op::CpAsyncBulkTensor(BulkTensor { route, dims, multicast, cache_hint }) => {
            dimensions(dims)?;
            ensure(route != BulkRoute::CtaToCluster, || "tensors are copied from or to .global".into())?;
            copy(route, multicast, cache_hint)
        }
        Op::CpReduceAsyncBulk(reduce) => reduction(&reduce),
        Op::CpReduceAsyncBulkTensor(reduce) => {
            dimensions(reduce.dims)?;
            let combines = !matches!(reduce.op, AtomicOp::Exch | AtomicOp::Cas);
            ensure(combines, || format!("a tensor reduction has no .{}", reduce.op.name()))
        }
        Op::CpAsyncBulkPrefetchTensor { dims, .. } => dimensions(dims),
        Op::StAsync(st) => store(&st),
        Op::RedAsync(red) => asynchronous_reduction(&red),
        Op::FenceTensormap(sem, _) => ensure(matches!(sem, FenceSem::Acquire | FenceSem::Release), || {
            "fence.proxy.tensormap takes .acquire or .release".into()
        }),
        _ => Ok(()),
    }
}

fn mbarrier(m: &Mbarrier) -> Result<(), String> {
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

fn dimensions(dims: u8) -> Result<(), String> {
    ensure((1..=5).contains(&dims), || format!("a tensor has 1 to 5 dimensions, not {dims}"))
}

fn copy(route: BulkRoute, multicast: bool, cache_hint: bool) -> Result<(), String> {
    ensure(!multicast || route == BulkRoute::GlobalToCluster, || {
        ".multicast::cluster is for copies from .global to .shared::cluster".into()
    })?;
    ensure(!cache_hint || route != BulkRoute::CtaToCluster, || "a cache policy is for .global".into())
}

/// PTX ISA, "cp.reduce.async.bulk".
fn reduction(reduce: &BulkReduce) -> Result<(), String> {
    use Type::{B32, B64, Bf16, F16, F32, F64, S32, S64, U32, U64};
    let what = format!("cp.reduce.async.bulk.{}", reduce.op.name());
    let types: &[Type] = match (reduce.route, reduce.op) {
        (BulkRoute::CtaToCluster, AtomicOp::And | AtomicOp::Or | AtomicOp::Xor) => &[B32],
        (BulkRoute::CtaToCluster, AtomicOp::Add) => &[U32, S32, U64],
        (BulkRoute::CtaToCluster, AtomicOp::Min | AtomicOp::Max) => &[U32, S32],
        (BulkRoute::CtaToCluster | BulkRoute::CtaToGlobal, AtomicOp::Inc | AtomicOp::Dec) => &[U32],
        (BulkRoute::CtaToGlobal, AtomicOp::And | AtomicOp::Or | AtomicOp::Xor) => &[B32, B64],
        (BulkRoute::CtaToGlobal, AtomicOp::Add) => &[U32, S32, U64, F32, F64, F16, Bf16],
        (BulkRoute::CtaToGlobal, AtomicOp::Min | AtomicOp::Max) => &[U32, S32, U64, S64, F16, Bf16],
        (_, AtomicOp::Exch | AtomicOp::Cas) => return Err(format!("there is no {what}")),
        _ => return Err("bulk reductions go from .shared::cta".into()),
    };
    one_of(&what, reduce.ty, types)?;
    let half_sum = reduce.op == AtomicOp::Add && matches!(reduce.ty, F16 | Bf16);
    ensure(reduce.noftz == half_sum, || {
        if half_sum {
            format!("{what}.{} must say .noftz", reduce.ty)
        } else {
            ".noftz is for sums of 16-bit floats".into()
        }
    })?;
    copy(reduce.route, false, reduce.cache_hint)
}

fn store(st: &StAsync) -> Result<(), String> {
    use Type::{B32, B64, F32, F64, S32, S64, U32, U64};
    one_of("st.async", st.ty, &[B32, U32, S32, B64, U64, S64, F32, F64])?;
    ensure(matches!(st.vector, 1 | 2 | 4) && st.bytes() <= 16, || {
        format!("st.async stores up to 16 bytes, not {} .{}", st.vector, st.ty)
    })?;
    cluster("st.async", st.space)
}

fn asynchronous_reduction(red: &RedAsync) -> Result<(), String> {
    use Type::{B32, S32, S64, U32, U64};
    let what = format!("red.async.{}", red.op.name());
    let types: &[Type] = match red.op {
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => &[B32],
        AtomicOp::Add => &[U32, S32, U64, S64],
        AtomicOp::Inc | AtomicOp::Dec => &[U32],
        AtomicOp::Min | AtomicOp::Max => &[U32, S32],
        AtomicOp::Exch | AtomicOp::Cas => return Err(format!("there is no {what}")),
    };
    one_of(&what, red.ty, types)?;
    cluster("red.async", red.space)
}

fn cluster(what: &str, space: Space) -> Result<(), String> {
    ensure(matches!(space, Space::SharedCluster | Space::Generic), || {
        format!("{what} works on .shared::cluster, not on {}", space.suffix())
    })
}
