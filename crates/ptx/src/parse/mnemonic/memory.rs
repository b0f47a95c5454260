//! Addresses, loads, stores, atomics and asynchronous copies.

use super::super::Failure;
use super::super::modifiers::Modifiers;
use super::bulk;
use crate::*;

pub(super) fn address(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let to_space = m.take("to");
    let space = m.space();
    match m.base {
        "isspacep" => return Ok(Op::Isspacep(space)),
        "mapa" => return Ok(Op::Mapa { space, ty: m.ty()? }),
        "getctarank" => return Ok(Op::Getctarank { space, ty: m.ty()? }),
        _ => {}
    }
    if space == Space::Generic {
        return Err(Failure::at(m.offset, "`cvta` needs a state space such as `.global`"));
    }
    Ok(Op::Cvta { space, to_space, ty: m.ty()? })
}

pub(super) fn load_store(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.base == "st" && m.take("async") {
        return bulk::store(m);
    }
    let (sem, scope) = m.ordering();
    let memory = Memory {
        sem,
        scope,
        space: m.space(),
        cache: m.find(CacheOp::from_name),
        non_coherent: m.take("nc"),
        l1: m.eviction("L1::"),
        l2: m.eviction("L2::"),
        cache_hint: m.take("L2::cache_hint"),
        l2_prefetch: m.l2_prefetch(),
        vector: m.vector(),
        ty: m.ty()?,
        unified: m.take("unified"),
        ldu: m.base == "ldu",
    };
    Ok(if m.base == "st" { Op::St(memory) } else { Op::Ld(memory) })
}

pub(super) fn atomic(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.base == "red" && m.take("async") {
        return bulk::store(m);
    }
    let (sem, scope) = m.ordering();
    let atomic = Atomic {
        sem,
        scope,
        space: m.space(),
        op: m.one("an operation such as `.add`", AtomicOp::from_name)?,
        noftz: m.take("noftz"),
        cache_hint: m.take("L2::cache_hint"),
        vector: m.vector(),
        ty: m.ty()?,
    };
    Ok(if m.base == "red" { Op::Red(atomic) } else { Op::Atom(atomic) })
}

pub(super) fn prefetch(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let space = m.space();
    let uniform = m.base == "prefetchu";
    let level = m.one("a cache level such as `.L2`", |word| {
        Some(match word {
            "L1" if uniform => PrefetchLevel::UniformL1,
            "L1" => PrefetchLevel::L1,
            "L2" => PrefetchLevel::L2,
            "L2::evict_last" => PrefetchLevel::L2EvictLast,
            "L2::evict_normal" => PrefetchLevel::L2EvictNormal,
            "tensormap" => PrefetchLevel::TensorMap,
            _ => return None,
        })
    })?;
    if uniform && (space, level) != (Space::Generic, PrefetchLevel::UniformL1) {
        return Err(m.unknown());
    }
    Ok(Op::Prefetch(space, level))
}

pub(super) fn discard(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    m.require("L2")?;
    Ok(Op::Discard(m.space()))
}

pub(super) fn create_policy(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    m.require("fractional")?;
    m.require("b64")?;
    let Some(primary) = m.eviction("L2::") else {
        return Err(Failure::at(m.offset, "`createpolicy` needs a priority such as `.L2::evict_last`"));
    };
    Ok(Op::CreatePolicy(CreatePolicy { primary, secondary: m.eviction("L2::") }))
}

/// `cp.async` and `cp.reduce.async`.
pub(super) fn copy(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let reduces = m.take("reduce");
    if !m.take("async") {
        return Err(m.unknown());
    }
    if m.take("bulk") {
        return bulk::copy(m, reduces);
    }
    if reduces {
        return Err(m.unknown());
    }
    if m.take("commit_group") {
        return Ok(Op::CpAsyncCommitGroup);
    }
    if m.take("wait_group") {
        return Ok(Op::CpAsyncWaitGroup);
    }
    if m.take("wait_all") {
        return Ok(Op::CpAsyncWaitAll);
    }
    if m.take("mbarrier") {
        m.require("arrive")?;
        m.require("b64")?;
        return Ok(Op::CpAsyncMbarrierArrive { noinc: m.take("noinc"), space: m.space() });
    }
    let cache = m.one("`.ca` or `.cg`", |word| match word {
        "ca" => Some(CacheOp::Ca),
        "cg" => Some(CacheOp::Cg),
        _ => None,
    })?;
    let shared_cta = m.take("shared::cta");
    if !shared_cta {
        m.require("shared")?;
    }
    m.require("global")?;
    let (cache_hint, l2_prefetch) = (m.take("L2::cache_hint"), m.l2_prefetch());
    Ok(Op::CpAsync(CpAsync { cache, l2_prefetch, cache_hint, ignore_src: false, shared_cta }))
}
