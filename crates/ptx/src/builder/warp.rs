//! Exchanges within a warp, barriers and fences.

use super::{Builder, F32, Guard, Pred, R32, Src, Value};
use crate::{BarKind, FenceSem, Op, Operand, ReduxOp, Scope, ShflMode, Type, VoteMode};

/// Member mask of all 32 lanes.
const FULL: u32 = 0xFFFF_FFFF;

/// A 32-bit register that a shuffle can move.
pub trait Word: Value {}
impl Word for R32 {}
impl Word for F32 {}

impl Builder {
    /// The value of `a` in lane `i xor mask`, for lane `i`.
    pub fn shfl_xor<V: Word>(&mut self, a: V, mask: u32) -> V {
        self.shfl(ShflMode::Bfly, a, mask, 0x1F)
    }

    /// The value of `a` in lane `lane`.
    pub fn shfl_idx<V: Word>(&mut self, a: V, lane: impl Into<Src<R32>>) -> V {
        self.shfl(ShflMode::Idx, a, lane, 0x1F)
    }

    /// The value of `a` in lane `i + delta`, for lane `i`. Beyond the last lane, the lane's own value.
    pub fn shfl_down<V: Word>(&mut self, a: V, delta: u32) -> V {
        self.shfl(ShflMode::Down, a, delta, 0x1F)
    }

    fn shfl<V: Word>(&mut self, mode: ShflMode, a: V, b: impl Into<Src<R32>>, clamp: u32) -> V {
        let d = self.reg();
        let (clamp, mask): (Src<R32>, Src<R32>) = (clamp.into(), FULL.into());
        self.compute::<V>(
            d,
            Op::Shfl(mode),
            [Operand::Reg(a.reg()), b.into().into(), clamp.into(), mask.into()],
        );
        d
    }

    /// The sum of `a` over the lanes of the warp, from sm_80 on.
    pub fn redux_add(&mut self, a: R32) -> R32 {
        self.redux(ReduxOp::Add, a)
    }

    /// The unsigned maximum of `a` over the lanes of the warp, from sm_80 on.
    pub fn redux_max_u(&mut self, a: R32) -> R32 {
        self.redux(ReduxOp::Max, a)
    }

    fn redux(&mut self, op: ReduxOp, a: R32) -> R32 {
        let d = self.reg();
        let mask: Src<R32> = FULL.into();
        self.compute::<R32>(
            d,
            Op::Redux { op, ty: Type::U32, abs: false, nan: false },
            [Operand::Reg(a.reg()), mask.into()],
        );
        d
    }

    /// Whether the predicate is true in any lane.
    pub fn vote_any(&mut self, a: impl Into<Guard>) -> Pred {
        self.vote(VoteMode::Any, a.into())
    }

    /// Whether the predicate is true in every lane.
    pub fn vote_all(&mut self, a: impl Into<Guard>) -> Pred {
        self.vote(VoteMode::All, a.into())
    }

    /// The mask of the lanes in which the predicate is true.
    pub fn ballot(&mut self, a: impl Into<Guard>) -> R32 {
        self.vote(VoteMode::Ballot, a.into())
    }

    fn vote<V: Value>(&mut self, mode: VoteMode, a: Guard) -> V {
        let d = self.reg();
        let mask: Src<R32> = FULL.into();
        self.compute::<V>(d, Op::Vote(mode), [a.into(), mask.into()]);
        d
    }

    /// Barrier of the warp. Orders the memory accesses of its lanes.
    pub fn warp_sync(&mut self) {
        let mask: Src<R32> = FULL.into();
        self.op(Op::BarWarpSync, [mask.into()]);
    }

    /// Barrier of the CTA.
    pub fn bar_sync(&mut self) {
        self.barrier(BarKind::Sync, 0.into(), None);
    }

    /// Arrives at barrier `id` (0–15) and waits until `threads` threads (a multiple of 32) have arrived.
    pub fn named_barrier_sync(&mut self, id: impl Into<Src<R32>>, threads: u32) {
        self.barrier(BarKind::Sync, id.into(), Some(threads));
    }

    /// Arrives at barrier `id` (0–15) without waiting. The barrier counts `threads` threads (a multiple of
    /// 32), including those that wait.
    pub fn named_barrier_arrive(&mut self, id: impl Into<Src<R32>>, threads: u32) {
        self.barrier(BarKind::Arrive, id.into(), Some(threads));
    }

    fn barrier(&mut self, kind: BarKind, id: Src<R32>, threads: Option<u32>) {
        let threads = threads.map(|n| Src::<R32>::from(n).into());
        self.op(Op::Bar { kind, aligned: true }, std::iter::once(id.into()).chain(threads));
    }

    /// `fence.acq_rel` at a scope.
    pub fn fence(&mut self, scope: Scope) {
        self.op(Op::Fence(FenceSem::AcqRel, scope, false), []);
    }

    /// The value of lane 0 in all lanes. ptxas then knows that the register is uniform.
    pub fn uniform(&mut self, a: R32) -> R32 {
        self.shfl_idx(a, 0)
    }

    /// Reads a 64-bit special register (`%clock64`, `%globaltimer`).
    pub fn special64(&mut self, register: crate::SpecialReg) -> super::R64 {
        let d = self.reg();
        self.compute(d, Op::Mov(Type::U64), [Operand::Special(register)]);
        d
    }
}
