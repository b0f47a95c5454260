//! The ISA's spelling of each modifier, and the modifier of a spelling.

use super::*;

macro_rules! names {
    ($($ty:ident { $($variant:ident = $name:literal),* $(,)? })*) => { $(
        impl $ty {
            /// Every value with its spelling.
            pub const NAMES: &'static [($ty, &'static str)] = &[$(($ty::$variant, $name)),*];

            /// The spelling in PTX text.
            pub const fn name(self) -> &'static str {
                match self { $($ty::$variant => $name),* }
            }

            /// The value of a spelling.
            pub fn from_name(name: &str) -> Option<$ty> {
                Self::NAMES.iter().find(|(_, n)| *n == name).map(|&(v, _)| v)
            }
        }
    )* };
}

names! {
    UnaryOp {
        Abs = "abs", Neg = "neg", Not = "not", Cnot = "cnot", Popc = "popc", Clz = "clz", Brev = "brev",
        Bfind = "bfind", BfindShiftamt = "bfind.shiftamt", Rcp = "rcp", Sqrt = "sqrt", Rsqrt = "rsqrt", Sin = "sin",
        Cos = "cos", Lg2 = "lg2", Ex2 = "ex2", Tanh = "tanh",
    }
    BinaryOp {
        Add = "add", Sub = "sub", Mul = "mul", MulLo = "mul.lo", MulHi = "mul.hi", MulWide = "mul.wide",
        Mul24Lo = "mul24.lo", Mul24Hi = "mul24.hi", Div = "div", Rem = "rem", Min = "min", Max = "max", And = "and",
        Or = "or", Xor = "xor", Shl = "shl", Shr = "shr", Copysign = "copysign",
    }
    TernaryOp {
        Fma = "fma", Mad = "mad", MadLo = "mad.lo", MadHi = "mad.hi", MadWide = "mad.wide", Mad24Lo = "mad24.lo",
        Mad24Hi = "mad24.hi", Sad = "sad",
    }
    CarryOp {
        AddCc = "add.cc", Addc = "addc", AddcCc = "addc.cc", SubCc = "sub.cc", Subc = "subc", SubcCc = "subc.cc",
        MadLoCc = "mad.lo.cc", MadHiCc = "mad.hi.cc", MadcLo = "madc.lo", MadcHi = "madc.hi",
        MadcLoCc = "madc.lo.cc", MadcHiCc = "madc.hi.cc",
    }
    CmpOp {
        Eq = "eq", Ne = "ne", Lt = "lt", Le = "le", Gt = "gt", Ge = "ge", Lo = "lo", Ls = "ls", Hi = "hi", Hs = "hs",
        Equ = "equ", Neu = "neu", Ltu = "ltu", Leu = "leu", Gtu = "gtu", Geu = "geu", Num = "num", Nan = "nan",
    }
    BoolOp { And = "and", Or = "or", Xor = "xor" }
    TestpOp {
        Finite = "finite", Infinite = "infinite", Number = "number", NotANumber = "notanumber", Normal = "normal",
        Subnormal = "subnormal",
    }
    ShiftDirection { Left = "l", Right = "r" }
    ShfMode { Clamp = "clamp", Wrap = "wrap" }
    DotHalf { Lo = "lo", Hi = "hi" }
    Scope { Cta = "cta", Cluster = "cluster", Gpu = "gpu", Sys = "sys" }
    CacheOp { Ca = "ca", Cg = "cg", Cs = "cs", Lu = "lu", Cv = "cv", Wb = "wb", Wt = "wt" }
    Eviction {
        Normal = "evict_normal", Unchanged = "evict_unchanged", First = "evict_first", Last = "evict_last",
        NoAllocate = "no_allocate",
    }
    AtomicOp {
        And = "and", Or = "or", Xor = "xor", Exch = "exch", Cas = "cas", Add = "add", Inc = "inc", Dec = "dec",
        Min = "min", Max = "max",
    }
    MatrixOrder { Row = "row", Col = "col" }
    BitOp { Xor = "xor", And = "and" }
    MatrixShape { M8N8 = "m8n8", M16N8 = "m16n8", M16N16 = "m16n16", M8N16 = "m8n16" }
    ShflMode { Up = "up", Down = "down", Bfly = "bfly", Idx = "idx" }
    VoteMode { All = "all", Any = "any", Uni = "uni", Ballot = "ballot" }
    MatchMode { Any = "any", All = "all" }
    ReduxOp { Add = "add", Min = "min", Max = "max", And = "and", Or = "or", Xor = "xor" }
    FenceSem { Sc = "sc", AcqRel = "acq_rel", Acquire = "acquire", Release = "release" }
    ProxyFence {
        Alias = "alias", Async = "async", AsyncGlobal = "async.global", AsyncSharedCta = "async.shared::cta",
        AsyncSharedCluster = "async.shared::cluster",
    }
    RegisterChange { Inc = "inc", Dec = "dec" }
    GridDependency { LaunchDependents = "launch_dependents", Wait = "wait" }
}

impl PrmtMode {
    /// Every mode with its suffix in PTX text.
    pub const SUFFIXES: [(PrmtMode, &'static str); 7] = [
        (PrmtMode::Generic, ""),
        (PrmtMode::F4e, ".f4e"),
        (PrmtMode::B4e, ".b4e"),
        (PrmtMode::Rc8, ".rc8"),
        (PrmtMode::Ecl, ".ecl"),
        (PrmtMode::Ecr, ".ecr"),
        (PrmtMode::Rc16, ".rc16"),
    ];

    /// The suffix in PTX text.
    pub fn suffix(self) -> &'static str {
        PrmtMode::SUFFIXES.iter().find(|(mode, _)| *mode == self).map_or("", |(_, suffix)| suffix)
    }
}

impl BarKind {
    /// The first modifier in PTX text.
    pub const fn name(self) -> &'static str {
        match self {
            BarKind::Sync => "sync",
            BarKind::Arrive => "arrive",
            BarKind::RedPopc | BarKind::RedAnd | BarKind::RedOr => "red",
        }
    }
}

impl ClusterBarrier {
    /// The whole mnemonic in PTX text.
    pub const fn name(self) -> &'static str {
        match self {
            ClusterBarrier::Arrive { aligned: false, relaxed: false } => "barrier.cluster.arrive",
            ClusterBarrier::Arrive { aligned: true, relaxed: false } => "barrier.cluster.arrive.aligned",
            ClusterBarrier::Arrive { aligned: false, relaxed: true } => "barrier.cluster.arrive.relaxed",
            ClusterBarrier::Arrive { aligned: true, relaxed: true } => {
                "barrier.cluster.arrive.relaxed.aligned"
            }
            ClusterBarrier::Wait { aligned: false } => "barrier.cluster.wait",
            ClusterBarrier::Wait { aligned: true } => "barrier.cluster.wait.aligned",
        }
    }
}

impl MbarrierOp {
    /// Every operation with its name in PTX text.
    pub const NAMES: [(MbarrierOp, &'static str); 15] = [
        (MbarrierOp::Init, "init"),
        (MbarrierOp::Inval, "inval"),
        (MbarrierOp::ExpectTx, "expect_tx"),
        (MbarrierOp::CompleteTx, "complete_tx"),
        (MbarrierOp::Arrive, "arrive"),
        (MbarrierOp::ArriveNoComplete, "arrive.noComplete"),
        (MbarrierOp::ArriveExpectTx, "arrive.expect_tx"),
        (MbarrierOp::ArriveDrop, "arrive_drop"),
        (MbarrierOp::ArriveDropNoComplete, "arrive_drop.noComplete"),
        (MbarrierOp::ArriveDropExpectTx, "arrive_drop.expect_tx"),
        (MbarrierOp::TestWait, "test_wait"),
        (MbarrierOp::TestWaitParity, "test_wait.parity"),
        (MbarrierOp::TryWait, "try_wait"),
        (MbarrierOp::TryWaitParity, "try_wait.parity"),
        (MbarrierOp::PendingCount, "pending_count"),
    ];

    /// The name in PTX text.
    pub fn name(self) -> &'static str {
        MbarrierOp::NAMES.iter().find(|(op, _)| *op == self).map_or("", |(_, name)| name)
    }

    /// The operation of a name.
    pub fn from_name(name: &str) -> Option<MbarrierOp> {
        MbarrierOp::NAMES.iter().find(|(_, n)| *n == name).map(|&(op, _)| op)
    }
}
