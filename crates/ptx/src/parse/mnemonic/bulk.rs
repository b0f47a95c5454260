//! Bulk asynchronous copies and the asynchronous stores to other CTAs of the cluster.

use super::super::Failure;
use super::super::modifiers::Modifiers;
use crate::*;

/// `cp.async.bulk` and `cp.reduce.async.bulk`, behind `bulk`.
pub(super) fn copy(m: &mut Modifiers<'_>, reduces: bool) -> Result<Op, Failure> {
    if m.take("commit_group") {
        return Ok(Op::CpAsyncBulkCommitGroup);
    }
    if m.take("wait_group") {
        return Ok(Op::CpAsyncBulkWaitGroup { read: m.take("read") });
    }
    let tensor = m.take("tensor");
    if m.take("prefetch") {
        return prefetch(m, tensor);
    }
    let dims = if tensor { Some(box_dims(m)?) } else { None };
    let (destination, source) = (m.space(), m.space());
    let Some(route) = BulkRoute::between(source, destination) else {
        let message = format!(
            "no bulk copy goes from `{}` to `{}`; it goes from .global to .shared::cluster or .shared::cta, from .shared::cta to \
             .shared::cluster or .global",
            source.suffix(),
            destination.suffix()
        );
        return Err(Failure::at(m.offset, message));
    };
    m.require(if route.has_mbarrier() { "mbarrier::complete_tx::bytes" } else { "bulk_group" })?;
    let (multicast, cache_hint) = (m.take("multicast::cluster"), m.take("L2::cache_hint"));
    if !reduces {
        return Ok(match dims {
            Some(dims) => Op::CpAsyncBulkTensor(BulkTensor { route, dims, multicast, cache_hint }),
            None => Op::CpAsyncBulk(BulkCopy { route, multicast, cache_hint }),
        });
    }
    if multicast {
        return Err(Failure::at(m.offset, "a reduction has no `.multicast::cluster`"));
    }
    let op = m.one("an operation such as `.add`", AtomicOp::from_name)?;
    match dims {
        None => {
            let noftz = m.take("noftz");
            Ok(Op::CpReduceAsyncBulk(BulkReduce { route, op, ty: m.ty()?, noftz, cache_hint }))
        }
        Some(dims) if route == BulkRoute::CtaToGlobal => {
            Ok(Op::CpReduceAsyncBulkTensor(BulkTensorReduce { dims, op, cache_hint }))
        }
        Some(_) => {
            Err(Failure::at(m.offset, "a tensor reduction goes from `.shared::cta` to `.global` only"))
        }
    }
}

/// `.1d` to `.5d` and `.tile`, which is meant where no mode is written.
fn box_dims(m: &mut Modifiers<'_>) -> Result<u8, Failure> {
    let dims = m.one("the dimensions of the tensor, `.1d` to `.5d`", |word| match word {
        "1d" => Some(1),
        "2d" => Some(2),
        "3d" => Some(3),
        "4d" => Some(4),
        "5d" => Some(5),
        _ => None,
    })?;
    m.take("tile");
    let other =
        m.find(|word| (word.starts_with("im2col") || word.starts_with("tile::")).then(|| word.to_owned()));
    match other {
        None => Ok(dims),
        Some(mode) => Err(Failure::at(
            m.offset,
            format!("`.{mode}` is not supported: tensors are copied in `.tile` mode"),
        )),
    }
}

/// `.prefetch` to L2.
fn prefetch(m: &mut Modifiers<'_>, tensor: bool) -> Result<Op, Failure> {
    let dims = if tensor { Some(box_dims(m)?) } else { None };
    m.require("L2")?;
    m.require("global")?;
    let cache_hint = m.take("L2::cache_hint");
    Ok(match dims {
        Some(dims) => Op::CpAsyncBulkPrefetchTensor { dims, cache_hint },
        None => Op::CpAsyncBulkPrefetch { cache_hint },
    })
}

/// `st.async` and `red.async`, behind `async`.
pub(super) fn store(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    m.require("mbarrier::complete_tx::bytes")?;
    let space = m.space();
    if !matches!(space, Space::Generic | Space::SharedCluster) {
        let message = format!("`{}.async` goes to `.shared::cluster`", m.base);
        return Err(Failure::at(m.offset, message));
    }
    if m.base == "st" {
        m.take("weak");
        return Ok(Op::StAsync(StAsync { space, vector: m.vector(), ty: m.ty()? }));
    }
    m.require("relaxed")?;
    m.require("cluster")?;
    let op = m.one("an operation such as `.add`", AtomicOp::from_name)?;
    Ok(Op::RedAsync(RedAsync { space, op, ty: m.ty()? }))
}
