//! Operations. Each variant's documentation gives the operands in order, as the PTX ISA writes them; `d` is a result,
//! `[x]` an address, `?` marks an optional trailing operand.

mod arith;
mod async_copy;
mod bulk;
mod control;
mod mbarrier;
mod memory;
mod names;
mod tensor;
mod wgmma;
mod wmma;

pub use arith::*;
pub use async_copy::*;
pub use bulk::*;
pub use control::*;
pub use mbarrier::*;
pub use memory::*;
pub use tensor::*;
pub use wgmma::*;
pub use wmma::*;

use crate::{Space, Type};

/// An operation with all its modifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    // ---- arithmetic, logic, comparison -------------------------------------------------------------------------
    /// `d, a`.
    Unary(UnaryOp, Type, FloatMods),
    /// `d, a, b`.
    Binary(BinaryOp, Type, FloatMods),
    /// `d, a, b, c`.
    Ternary(TernaryOp, Type, FloatMods),
    /// Extended-precision integer arithmetic through the carry flag: `d, a, b` (`d, a, b, c` for mad).
    Carry(CarryOp, Type),
    /// Compare to predicates: `p[|q], a, b, c?` (`c` is a predicate, present iff `combine` is).
    Setp {
        /// The comparison.
        cmp: CmpOp,
        /// Combination with predicate `c`.
        combine: Option<BoolOp>,
        /// Type of `a` and `b`.
        ty: Type,
        /// `.ftz`.
        ftz: bool,
    },
    /// Compare to a register: all ones or 1.0 where true: `d, a, b, c?`.
    Set {
        /// The comparison.
        cmp: CmpOp,
        /// Combination with predicate `c`.
        combine: Option<BoolOp>,
        /// Type of `d`.
        to: Type,
        /// Type of `a` and `b`.
        ty: Type,
        /// `.ftz`.
        ftz: bool,
    },
    /// `d, a, b, p`: `a` where `p`, else `b`.
    Selp(Type),
    /// `d, a, b, c`: `a` where `c ≥ 0`, else `b`.
    Slct {
        /// Type of `d`, `a`, `b`.
        ty: Type,
        /// Type of `c`: s32 or f32.
        cond: Type,
        /// `.ftz`.
        ftz: bool,
    },
    /// `p, a`.
    Testp(TestpOp, Type),
    /// `d, a, b, c, immLut`; always `.b32`. With a `BoolOp`: `d|p, a, b, c, immLut, q`, where `p` is `(d ≠ 0) op q`.
    Lop3(Option<BoolOp>),
    /// Funnel shift: `d, a, b, c`; always `.b32`.
    Shf(ShiftDirection, ShfMode),
    /// Bit-field extract: `d, a, pos, len`.
    Bfe(Type),
    /// Bit-field insert: `d, a, b, pos, len`.
    Bfi(Type),
    /// Byte permute: `d, a, b, selector`; always `.b32`.
    Prmt(PrmtMode),
    /// Bit mask: `d, pos, len`; always `.b32`.
    Bmsk(ShfMode),
    /// Sign- or zero-extend from bit `b`: `d, a, b`.
    Szext(ShfMode, Type),
    /// Find n-th set bit: `d, mask, base, offset`; always `.b32`.
    Fns,
    /// Four-way byte dot product: `d, a, b, c`; the types of `a` and `b`.
    Dp4a(Type, Type),
    /// Two-way dot product of halves and bytes: `d, a, b, c`.
    Dp2a(DotHalf, Type, Type),

    // ---- movement and conversion -------------------------------------------------------------------------------
    /// `d, a`; `a` may be a register, immediate, special register or symbol; `.b32`/`.b64`/`.b128` also pack
    /// `{…} → d` and unpack `a → {…}`.
    Mov(Type),
    /// `d, a`; with `packed`, `d, a, b`: two sources, `a` in the upper half.
    Cvt(Cvt),
    /// `cvt.pack.sat`: `d, a, b, c?`: `a` and `b` saturated to the type, `b` lowest, then `a`, and above them with `chained`
    /// the low bits of `c`.
    CvtPack {
        /// Type of the packed elements.
        to: Type,
        /// Type of `a` and `b`: s32.
        from: Type,
        /// `.b32`: there is a `c`.
        chained: bool,
    },
    /// `d, a`: generic to space with `to_space`, else space to generic.
    Cvta {
        /// The space.
        space: Space,
        /// `.to`: from generic to `space`.
        to_space: bool,
        /// `.u32` or `.u64`.
        ty: Type,
    },
    /// `p, a`: whether a generic address points into the space.
    Isspacep(Space),
    /// `d, a, b`: address of `a` in the CTA of rank `b` of the cluster.
    Mapa {
        /// `SharedCluster` when `.shared::cluster` is written, `Generic` otherwise.
        space: Space,
        /// `.u32` or `.u64`.
        ty: Type,
    },
    /// `d, a`: rank of the CTA that an address belongs to.
    Getctarank {
        /// `SharedCluster` when written, `Generic` otherwise.
        space: Space,
        /// `.u32` or `.u64`.
        ty: Type,
    },

    // ---- memory ------------------------------------------------------------------------------------------------
    /// `d, [a], cache-policy?`; `d` is a vector when `vector` > 1.
    Ld(Memory),
    /// `[a], b, cache-policy?`.
    St(Memory),
    /// `d, [a], b, c?`: `c` for cas, the result `d` is the old value. Vector forms take vectors.
    Atom(Atomic),
    /// `[a], b`: atomic without a result.
    Red(Atomic),
    /// `[a]`.
    Prefetch(Space, PrefetchLevel),
    /// `[a]`; discards L2 lines of 128 bytes without writing back. The size operand is the constant 128.
    Discard(Space),
    /// `policy, primary-fraction?`.
    CreatePolicy(CreatePolicy),

    // ---- asynchronous copies -----------------------------------------------------------------------------------
    /// `[dst], [src], cp-size, src-size?, cache-policy?`: 4, 8 or 16 bytes from global to shared memory;
    /// bytes beyond `src-size` are zero. With `ignore_src` the optional operand is a predicate.
    CpAsync(CpAsync),
    /// No operands.
    CpAsyncCommitGroup,
    /// `n`.
    CpAsyncWaitGroup,
    /// No operands.
    CpAsyncWaitAll,
    /// `[mbar]`: arrive when all of the thread's earlier cp.async are complete.
    CpAsyncMbarrierArrive {
        /// `.noinc`.
        noinc: bool,
        /// `Generic` when no space is written, else `Shared`.
        space: Space,
    },

    // ---- bulk asynchronous copies; `size` counts bytes, `mask` the CTAs of a multicast -----------------------------
    /// `[dst], [src], size, [mbar]` (`size` alone to global memory), then `mask` with `multicast`, `policy` with `cache_hint`.
    CpAsyncBulk(BulkCopy),
    /// `[dst], [src], size, [mbar]`; to global memory `[dst], [src], size`, then `policy` with `cache_hint`.
    CpReduceAsyncBulk(BulkReduce),
    /// To shared memory: `[dst], [map], {coords}, [mbar]`, then `mask` with `multicast`, `policy` with `cache_hint`. To global
    /// memory: `[map], {coords}, [src]`, then `policy`. The text merges map and coordinates: `[map, {x, y}]`; coordinates are
    /// s32, the innermost first.
    CpAsyncBulkTensor(BulkTensor),
    /// `[map], {coords}, [src]`, then `policy` with `cache_hint`.
    CpReduceAsyncBulkTensor(BulkTensorReduce),
    /// `[src], size`, then `policy` with `cache_hint`: global memory to L2.
    CpAsyncBulkPrefetch {
        /// `.L2::cache_hint`.
        cache_hint: bool,
    },
    /// `[map], {coords}`, then `policy` with `cache_hint`: a box to L2.
    CpAsyncBulkPrefetchTensor {
        /// Dimensions of the tensor, 1 to 5.
        dims: u8,
        /// `.L2::cache_hint`.
        cache_hint: bool,
    },
    /// No operands.
    CpAsyncBulkCommitGroup,
    /// `n`: groups that may stay in flight.
    CpAsyncBulkWaitGroup {
        /// `.read`: until the sources have been read.
        read: bool,
    },
    /// `[dst], value, [mbar]`; a vector when `vector` > 1.
    StAsync(StAsync),
    /// `[dst], value, [mbar]`.
    RedAsync(RedAsync),

    // ---- matrices ----------------------------------------------------------------------------------------------
    /// `{r…}, [row]`.
    Ldmatrix(MatrixAccess),
    /// `[row], {r…}`.
    Stmatrix(MatrixAccess),
    /// `d, a`: transpose of an 8×8 matrix of b16.
    Movmatrix,
    /// `{d…}, {a…}, {b…}, {c…}`.
    Mma(Mma),
    /// `{r…}, [p], stride?`; the stride counts elements.
    WmmaLoad(WmmaAccess),
    /// `[p], {r…}, stride?`.
    WmmaStore(WmmaAccess),
    /// `{d…}, {a…}, {b…}, {c…}`.
    Wmma(Wmma),
    /// `{d…}, a, b-desc, scale-d`, then for floats `imm-scale-a, imm-scale-b`, then for 16-bit inputs `imm-trans-a` (A in shared
    /// memory only) and `imm-trans-b`. `a` is a descriptor or `{a0, a1, a2, a3}`; D is added to where the predicate `scale-d` holds.
    Wgmma(Wgmma),
    /// No operands: orders registers and shared memory before the `wgmma`s that follow.
    WgmmaFence,
    /// No operands.
    WgmmaCommitGroup,
    /// `n`: groups that may stay in flight.
    WgmmaWaitGroup,

    // ---- warp ----------------------------------------------------------------------------------------------------
    /// `d[|p], a, b, c, membermask`; always `.b32`, always `.sync`.
    Shfl(ShflMode),
    /// `d, a, membermask`: `d` is a predicate (b32 for ballot); `a` is a predicate and may be negated.
    Vote(VoteMode),
    /// `d[|p], a, membermask`; the type of `a`; `|p` with `all` only.
    Match(MatchMode, Type),
    /// `d, a, membermask`.
    Redux {
        /// The reduction.
        op: ReduxOp,
        /// Operand type.
        ty: Type,
        /// `.abs` (f32 only).
        abs: bool,
        /// `.NaN` (f32 only).
        nan: bool,
    },
    /// `d`.
    Activemask,
    /// `d|p, membermask`.
    Elect,

    // ---- synchronisation ---------------------------------------------------------------------------------------
    /// `bar`/`barrier`: `a, b?` for sync, `a, b` for arrive, `p-or-d, a, b?, c` for reductions. `a` names the barrier,
    /// `b` counts threads, `c` is a predicate and may be negated.
    Bar {
        /// What it does.
        kind: BarKind,
        /// Whether all threads of a warp execute it together (`bar`, `barrier….aligned`).
        aligned: bool,
    },
    /// `membermask`.
    BarWarpSync,
    /// No operands.
    BarrierCluster(ClusterBarrier),
    /// No operands. `membar.cta/gl/sys` are the older spelling of `fence.sc` at that scope.
    Membar(Scope),
    /// No operands.
    Fence(FenceSem, Scope),
    /// No operands.
    FenceProxy(ProxyFence),
    /// `[map], 128` with `Acquire`, no operands with `Release`: `fence.proxy.tensormap::generic`.
    FenceTensormap(FenceSem, Scope),
    /// No operands: `fence.mbarrier_init.release.cluster`.
    FenceMbarrierInit,
    /// Operations on an mbarrier object; see [`Mbarrier`].
    Mbarrier(Mbarrier),

    // ---- control -----------------------------------------------------------------------------------------------
    /// `label`.
    Bra {
        /// `.uni`.
        uni: bool,
    },
    /// `index, labels`.
    BrxIdx {
        /// `.uni`.
        uni: bool,
    },
    /// `(results)?, function, (arguments)?`: a `List`, a `Function`, a `List`; missing lists are empty `List`s.
    Call {
        /// `.uni`.
        uni: bool,
    },
    /// No operands.
    Ret {
        /// `.uni`.
        uni: bool,
    },
    /// No operands.
    Exit,
    /// No operands.
    Trap,
    /// No operands.
    Brkpt,
    /// `t`: nanoseconds.
    Nanosleep,
    /// `a`.
    Pmevent,
    /// `n`: registers per thread.
    Setmaxnreg(RegisterChange),
    /// No operands.
    Griddepcontrol(GridDependency),
}

impl Op {
    /// The position of a tensor map's address, behind which its coordinates stand.
    pub const fn tensor_map_operand(&self) -> Option<usize> {
        match self {
            Op::CpAsyncBulkTensor(copy) if copy.route.has_mbarrier() => Some(1),
            Op::CpAsyncBulkTensor(_)
            | Op::CpReduceAsyncBulkTensor(_)
            | Op::CpAsyncBulkPrefetchTensor { .. } => Some(0),
            _ => None,
        }
    }
}
