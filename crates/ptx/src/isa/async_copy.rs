//! Asynchronous copies of single elements (PTX ISA, "cp.async").

use smallvec::smallvec;

use super::CacheOp;
use super::memory::policy;
use super::requirement::{all, need, when};
use super::signature::{address, optional, read, value};
use super::syntax::start;
use crate::verify::rules::{constant, ensure, range};
use crate::verify::{Rule, fault};
use crate::{Signature, SlotKind, Space, Type};

/// `cp.async`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CpAsync {
    /// `.ca` (4, 8 or 16 bytes) or `.cg` (16 bytes, bypasses L1).
    pub cache: CacheOp,
    /// `.L2::64B`, `.L2::128B`, `.L2::256B`.
    pub l2_prefetch: Option<u16>,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
    /// The optional operand is a predicate: when it is true, zeros are written.
    pub ignore_src: bool,
    /// Whether `.shared::cta` is written.
    pub shared_cta: bool,
}

start! {
    CpAsync = CpAsync {
        cache: CacheOp::Ca,
        l2_prefetch: None,
        cache_hint: false,
        ignore_src: false,
        shared_cta: false,
    };
}

instructions! { ($) async_copy async_copy_list

    /// `[dst], [src], cp-size, src-size?`, then a cache policy with `cache_hint`. Copies 4, 8 or 16 bytes
    /// from global to shared memory. Bytes beyond `src-size` are written as zero. With `ignore_src` the
    /// optional operand is a predicate; in the text, only the type of the operand shows this. PTX ISA,
    /// "cp.async".
    CpAsync(copy: CpAsync) => {
        text: |m| {
            m.head("cp.async")?;
            m.one(&mut copy.cache, "`.ca` or `.cg`", &[(CacheOp::Ca, "ca"), (CacheOp::Cg, "cg")])?;
            m.one(&mut copy.shared_cta, "`.shared`", &[(false, "shared"), (true, "shared::cta")])?;
            m.word("global")?;
            m.cache_hint(&mut copy.cache_hint)?;
            m.l2_prefetch(&mut copy.l2_prefetch)
        },
        operands: {
            let src_size = value(if copy.ignore_src { Type::Pred } else { Type::U32 });
            let mut s: Signature = smallvec![
                address(Space::Shared),
                address(Space::Global),
                read(SlotKind::Constant),
                optional(src_size)
            ];
            s.extend(policy(copy.cache_hint));
            s
        },
        accepts: {
            ensure(matches!(copy.cache, CacheOp::Ca | CacheOp::Cg), || "cp.async takes .ca or .cg".into())?;
            ensure(matches!(copy.l2_prefetch, None | Some(64 | 128 | 256)), || {
                "the prefetch size is 64B, 128B or 256B".into()
            })
        },
        needs: all([
            need(70, 80),
            when(copy.cache_hint || copy.l2_prefetch.is_some(), need(74, 80)),
            when(copy.ignore_src, need(75, 80)),
            when(copy.shared_cta, need(78, 80)),
        ]),
        check: |inst| {
            let size = constant(inst, 2).unwrap_or(0);
            if copy.cache == CacheOp::Cg && size != 16 {
                return fault(Rule::Constant, format!("cp.async.cg copies 16 bytes, not {size}"));
            }
            if !matches!(size, 4 | 8 | 16) {
                return fault(Rule::Constant, format!("cp.async copies 4, 8 or 16 bytes, not {size}"));
            }
            let fourth_is_policy = copy.cache_hint && inst.operands.len() == 4;
            let read = constant(inst, 3).filter(|_| !fourth_is_policy);
            range("the bytes that cp.async reads", read, 0, size)
        },
    }

    /// No operands: closes the current group of copies. PTX ISA, "cp.async.commit_group".
    CpAsyncCommitGroup => {
        text: |m| m.head("cp.async.commit_group"),
        operands: Signature::new(),
        needs: need(70, 80),
    }

    /// `n`: waits until at most the `n` latest groups are pending. PTX ISA, "cp.async.wait_group".
    CpAsyncWaitGroup => {
        text: |m| m.head("cp.async.wait_group"),
        operands: smallvec![read(SlotKind::Constant)],
        needs: need(70, 80),
        check: |inst| range(super::PENDING_GROUPS, constant(inst, 0), 0, i64::from(u32::MAX)),
    }

    /// No operands. PTX ISA, "cp.async.wait_all".
    CpAsyncWaitAll => {
        text: |m| m.head("cp.async.wait_all"),
        operands: Signature::new(),
        needs: need(70, 80),
    }

    /// `[mbar]`: arrives when all earlier `cp.async` of the thread have completed. PTX ISA,
    /// "cp.async.mbarrier.arrive".
    CpAsyncMbarrierArrive {
        /// `.noinc`.
        noinc: bool,
        /// `Generic` when no space is written, else `Shared`.
        space: Space,
    } => {
        text: |m| {
            m.head("cp.async.mbarrier.arrive")?;
            m.flag(noinc, "noinc")?;
            m.space(space)?;
            m.word("b64")
        },
        operands: smallvec![address(space)],
        needs: need(70, 80),
        accesses: |_position| Some(8),
    }
}
