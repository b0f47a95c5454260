//! Control over clusters of the grid that have not started (PTX ISA, "clusterlaunchcontrol").

use smallvec::smallvec;

use super::requirement::{need, need_specific};
use super::signature::{address, read, value, write};
use super::syntax::names;
use crate::{SlotKind, Space, Type};

/// The field that `clusterlaunchcontrol.query_cancel` reads from a response, and its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CancelQuery {
    /// `p`: whether a cluster was cancelled.
    IsCanceled,
    /// `{x, y, z, unused}`: the index of the first CTA of the cancelled cluster.
    FirstCtaid,
    /// `x`.
    FirstCtaidX,
    /// `y`.
    FirstCtaidY,
    /// `z`.
    FirstCtaidZ,
}

names! {
    CancelQuery {
        IsCanceled = "is_canceled.pred", FirstCtaid = "get_first_ctaid.v4.b32",
        FirstCtaidX = "get_first_ctaid::x.b32", FirstCtaidY = "get_first_ctaid::y.b32",
        FirstCtaidZ = "get_first_ctaid::z.b32",
    }
}

instructions! { ($) launch launch_list

    /// `[response], [mbar]`: asks that a cluster which has not started never starts. The response of 16 bytes
    /// arrives asynchronously. PTX ISA, "clusterlaunchcontrol.try_cancel".
    TryCancel {
        /// `Shared` or `Generic`.
        space: Space,
        /// `.multicast::cluster::all`: each CTA of the cluster gets the response.
        multicast: bool,
    } => {
        text: |m| {
            m.head("clusterlaunchcontrol.try_cancel.async")?;
            m.optional(space, Space::Generic, &[(Space::Shared, "shared::cta")])?;
            m.word("mbarrier::complete_tx::bytes")?;
            m.flag(multicast, "multicast::cluster::all")?;
            m.word("b128")
        },
        operands: smallvec![address(space), address(space)],
        needs: if multicast { need_specific(86, 100) } else { need(86, 100) },
        accesses: |position| Some(if position == 0 { 16 } else { 8 }),
    }

    /// A result and the response. [`CancelQuery`] gives the result. PTX ISA,
    /// "clusterlaunchcontrol.query_cancel".
    QueryCancel(query: CancelQuery) => {
        text: |m| {
            m.head("clusterlaunchcontrol.query_cancel")?;
            m.one(query, "`.is_canceled.pred` or `.get_first_ctaid`", CancelQuery::NAMES)?;
            m.word("b128")
        },
        operands: {
            let result = match query {
                CancelQuery::IsCanceled => value(Type::Pred),
                CancelQuery::FirstCtaid => SlotKind::Vector(Type::B32, 4),
                _ => value(Type::B32),
            };
            smallvec![write(result), read(value(Type::B128))]
        },
        needs: need(86, 100),
    }
}
