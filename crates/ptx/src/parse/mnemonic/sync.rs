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
    if m.take("tensormap::generic") {
        let sem = m.one("`.acquire` or `.release`", |word| match word {
            "acquire" => Some(FenceSem::Acquire),
            "release" => Some(FenceSem::Release),
            _ => None,
        })?;
        return Ok(Op::FenceTensormap(sem, m.one("a scope such as `.gpu`", Scope::from_name)?));
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

pub(super) fn mbarrier(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    use MbarrierOp as M;
    // The first word: `arrive` stands before its `expect_tx`.
    let base = m.one("an operation such as `.init`", M::from_name)?;
    let op = match base {
        M::Arrive if m.take("noComplete") => M::ArriveNoComplete,
        M::Arrive if m.take("expect_tx") => M::ArriveExpectTx,
        M::ArriveDrop if m.take("noComplete") => M::ArriveDropNoComplete,
        M::ArriveDrop if m.take("expect_tx") => M::ArriveDropExpectTx,
        M::TestWait if m.take("parity") => M::TestWaitParity,
        M::TryWait if m.take("parity") => M::TryWaitParity,
        other => other,
    };
    m.require("b64")?;
    let mut mbarrier = Mbarrier::new(op);
    if op == M::PendingCount {
        return Ok(Op::Mbarrier(mbarrier));
    }
    mbarrier.space = m.space();
    match m.ordering() {
        (MemSem::Default, None) => {}
        (sem @ (MemSem::Relaxed | MemSem::Acquire | MemSem::Release), Some(scope)) => {
            mbarrier = Mbarrier { sem, scope, ..mbarrier };
        }
        _ => {
            let message =
                "`mbarrier` takes `.relaxed`, `.acquire` or `.release` together with `.cta` or `.cluster`";
            return Err(Failure::at(m.offset, message));
        }
    }
    Ok(Op::Mbarrier(mbarrier))
}
