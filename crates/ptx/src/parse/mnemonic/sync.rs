//! Warp-wide operations, barriers and fences.

use super::super::Failure;
use super::super::modifiers::Modifiers;
use crate::*;

pub(super) fn warp(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.base == "activemask" {
        m.require("b32")?;
        return Ok(Op::Activemask);
    }
    if !m.take("sync") {
        let message = format!("`{}` without `.sync` is not supported: it is gone since sm_70", m.base);
        return Err(Failure::at(m.offset, message));
    }
    match m.base {
        "shfl" => {
            m.require("b32")?;
            Ok(Op::Shfl(m.one("`.up`, `.down`, `.bfly` or `.idx`", ShflMode::from_name)?))
        }
        "vote" => {
            let mode = m.one("`.all`, `.any`, `.uni` or `.ballot`", VoteMode::from_name)?;
            m.require(if mode == VoteMode::Ballot { "b32" } else { "pred" })?;
            Ok(Op::Vote(mode))
        }
        "match" => {
            let mode = m.one("`.any` or `.all`", MatchMode::from_name)?;
            Ok(Op::Match(mode, m.ty()?))
        }
        "redux" => {
            let op = m.one("an operation such as `.add`", ReduxOp::from_name)?;
            let (abs, nan) = (m.take("abs"), m.take("NaN"));
            Ok(Op::Redux { op, ty: m.ty()?, abs, nan })
        }
        _ => Ok(Op::Elect),
    }
}

pub(super) fn barrier(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.take("warp") {
        m.require("sync")?;
        return Ok(Op::BarWarpSync);
    }
    if m.take("cluster") {
        return cluster(m);
    }
    m.take("cta");
    // `bar` is `barrier….aligned`.
    let aligned = m.take("aligned") || m.base == "bar";
    let kind = m.one("`.sync`, `.arrive` or `.red`", |word| {
        Some(match word {
            "sync" => BarKind::Sync,
            "arrive" => BarKind::Arrive,
            "red" => BarKind::RedPopc,
            _ => return None,
        })
    })?;
    if kind != BarKind::RedPopc {
        return Ok(Op::Bar { kind, aligned });
    }
    let (kind, ty) = m.one("`.popc`, `.and` or `.or`", |word| {
        Some(match word {
            "popc" => (BarKind::RedPopc, "u32"),
            "and" => (BarKind::RedAnd, "pred"),
            "or" => (BarKind::RedOr, "pred"),
            _ => return None,
        })
    })?;
    m.require(ty)?;
    Ok(Op::Bar { kind, aligned })
}

fn cluster(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let aligned = m.take("aligned");
    if m.take("arrive") {
        let relaxed = m.take("relaxed");
        m.take("release");
        return Ok(Op::BarrierCluster(ClusterBarrier::Arrive { aligned, relaxed }));
    }
    m.require("wait")?;
    m.take("acquire");
    Ok(Op::BarrierCluster(ClusterBarrier::Wait { aligned }))
}

pub(super) fn fence(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.base == "membar" {
        let scope = m.one("`.cta`, `.gl` or `.sys`", |word| match word {
            "cta" => Some(Scope::Cta),
            "gl" => Some(Scope::Gpu),
            "sys" => Some(Scope::Sys),
            _ => None,
        })?;
        return Ok(Op::Membar(scope));
    }
    if m.take("proxy") {
        return proxy(m);
    }
    if m.take("mbarrier_init") {
        m.require("release")?;
        m.require("cluster")?;
        return Ok(Op::FenceMbarrierInit);
    }
    let sem = m.find(FenceSem::from_name).unwrap_or(FenceSem::AcqRel);
    Ok(Op::Fence(sem, m.one("a scope such as `.cta`", Scope::from_name)?))
}

fn proxy(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if m.take("alias") {
        return Ok(Op::FenceProxy(ProxyFence::Alias));
    }
    m.require("async")?;
    let fence = m.find(|word| {
        Some(match word {
            "global" => ProxyFence::AsyncGlobal,
            "shared::cta" => ProxyFence::AsyncSharedCta,
            "shared::cluster" => ProxyFence::AsyncSharedCluster,
            _ => return None,
        })
    });
    Ok(Op::FenceProxy(fence.unwrap_or(ProxyFence::Async)))
}

/// The forms of sm_80. `.acquire.cta` and `.release.cta` are what they mean when nothing is written.
pub(super) fn mbarrier(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    const KINDS: [(&str, Mbarrier); 7] = [
        ("init", Mbarrier::Init),
        ("inval", Mbarrier::Inval),
        ("arrive", Mbarrier::Arrive),
        ("arrive_drop", Mbarrier::ArriveDrop),
        ("test_wait", Mbarrier::TestWait),
        ("try_wait", Mbarrier::TryWait),
        ("pending_count", Mbarrier::PendingCount),
    ];
    let op = m.one("an operation such as `.init`", |word| {
        KINDS.iter().find(|(name, _)| *name == word).map(|&(_, op)| op)
    })?;
    m.require("b64")?;
    if op == Mbarrier::PendingCount {
        return Ok(Op::Mbarrier(op));
    }
    if m.space() != Space::Shared {
        return Err(Failure::at(m.offset, "`mbarrier` is supported with `.shared` or `.shared::cta` only"));
    }
    let op = match op {
        Mbarrier::Arrive if m.take("noComplete") => Mbarrier::ArriveNoComplete,
        Mbarrier::TestWait if m.take("parity") => Mbarrier::TestWaitParity,
        Mbarrier::TryWait if m.take("parity") => Mbarrier::TryWaitParity,
        other => other,
    };
    let default = match op {
        Mbarrier::Arrive | Mbarrier::ArriveNoComplete | Mbarrier::ArriveDrop => "release",
        Mbarrier::TestWait | Mbarrier::TestWaitParity | Mbarrier::TryWait | Mbarrier::TryWaitParity => {
            "acquire"
        }
        _ => return Ok(Op::Mbarrier(op)),
    };
    if m.take(default) {
        m.require("cta")?;
    }
    Ok(Op::Mbarrier(op))
}
