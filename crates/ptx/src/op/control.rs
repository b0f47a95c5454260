/// Direction of a shuffle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ShflMode {
    Up,
    Down,
    Bfly,
    Idx,
}

/// `vote.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum VoteMode {
    All,
    Any,
    Uni,
    Ballot,
}

/// `match.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum MatchMode {
    Any,
    All,
}

/// `redux.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ReduxOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
}

/// What a CTA barrier instruction does.
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
}

/// `setmaxnreg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum RegisterChange {
    Inc,
    Dec,
}

/// `griddepcontrol`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum GridDependency {
    LaunchDependents,
    Wait,
}
