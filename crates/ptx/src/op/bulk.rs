//! Bulk asynchronous copies (PTX ISA, "Data Movement and Conversion Instructions: Bulk copy").

use super::AtomicOp;
use crate::{Space, Type};

/// From where to where bulk copies go, which also says how their end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BulkRoute {
    /// `.shared::cluster.global`: from global memory to shared memory of a CTA of the cluster; an mbarrier counts the bytes.
    GlobalToCluster,
    /// `.shared::cta.global`: to the own CTA's shared memory (`.version` 8.6).
    GlobalToCta,
    /// `.shared::cluster.shared::cta`: from the own CTA to another; an mbarrier of that one counts the bytes.
    CtaToCluster,
    /// `.global.shared::cta`: from shared to global memory; bulk groups.
    CtaToGlobal,
}

impl BulkRoute {
    /// Every route.
    pub const ALL: [BulkRoute; 4] =
        [BulkRoute::GlobalToCluster, BulkRoute::GlobalToCta, BulkRoute::CtaToCluster, BulkRoute::CtaToGlobal];

    /// Where the bytes come from.
    pub const fn source(self) -> Space {
        match self {
            BulkRoute::GlobalToCluster | BulkRoute::GlobalToCta => Space::Global,
            BulkRoute::CtaToCluster | BulkRoute::CtaToGlobal => Space::Shared,
        }
    }

    /// Where they go.
    pub const fn destination(self) -> Space {
        match self {
            BulkRoute::GlobalToCluster | BulkRoute::CtaToCluster => Space::SharedCluster,
            BulkRoute::GlobalToCta => Space::Shared,
            BulkRoute::CtaToGlobal => Space::Global,
        }
    }

    /// Whether an mbarrier counts the bytes (`.mbarrier::complete_tx::bytes`); otherwise bulk groups tell the end.
    pub const fn has_mbarrier(self) -> bool {
        !matches!(self, BulkRoute::CtaToGlobal)
    }

    /// The route between these spaces.
    pub fn between(source: Space, destination: Space) -> Option<BulkRoute> {
        BulkRoute::ALL.into_iter().find(|r| (r.source(), r.destination()) == (source, destination))
    }
}

/// `cp.async.bulk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkCopy {
    /// From where to where.
    pub route: BulkRoute,
    /// `.multicast::cluster`: to the same place in every CTA of a mask.
    pub multicast: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `cp.reduce.async.bulk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkReduce {
    /// `CtaToCluster` or `CtaToGlobal`.
    pub route: BulkRoute,
    /// How elements are combined with those at the destination.
    pub op: AtomicOp,
    /// Type of the elements.
    pub ty: Type,
    /// `.noftz` (f16 and bf16, add).
    pub noftz: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `cp.async.bulk.tensor`, tile mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkTensor {
    /// `GlobalToCluster`, `GlobalToCta` or `CtaToGlobal`.
    pub route: BulkRoute,
    /// Dimensions of the tensor, 1 to 5.
    pub dims: u8,
    /// `.multicast::cluster`.
    pub multicast: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `cp.reduce.async.bulk.tensor`, tile mode, from shared to global memory; the elements' type is the tensor map's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkTensorReduce {
    /// Dimensions of the tensor, 1 to 5.
    pub dims: u8,
    /// How elements are combined.
    pub op: AtomicOp,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `st.async{.shared::cluster}.mbarrier::complete_tx::bytes{.vec}.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StAsync {
    /// `SharedCluster`, or `Generic` where no space is written.
    pub space: Space,
    /// Elements: 1, 2 or 4.
    pub vector: u8,
    /// Type of an element.
    pub ty: Type,
}

impl StAsync {
    /// Bytes that the mbarrier counts.
    pub const fn bytes(&self) -> u32 {
        self.ty.bytes() * self.vector as u32
    }
}

/// `red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.op.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RedAsync {
    /// `SharedCluster`, or `Generic` where no space is written.
    pub space: Space,
    /// How the value is combined.
    pub op: AtomicOp,
    /// Type of the element.
    pub ty: Type,
}
