//! Instructions of clusters, warp roles and dependent launches.

use super::{Builder, ClusterShared, Pred, R32, Shared, Src};
use crate::{ClusterBarrier, GridDependency, Op, Operand, RegisterChange, Space, SpecialReg, Type};

impl Builder {
    /// Arrives at the cluster's barrier and releases the earlier memory accesses. All lanes of the warp
    /// execute it together.
    pub fn cluster_arrive(&mut self) {
        self.op(Op::BarrierCluster(ClusterBarrier::Arrive { aligned: true, relaxed: false }), []);
    }

    /// Like [`Builder::cluster_arrive`], but releases nothing (`.relaxed`).
    pub fn cluster_arrive_relaxed(&mut self) {
        self.op(Op::BarrierCluster(ClusterBarrier::Arrive { aligned: true, relaxed: true }), []);
    }

    /// Waits until all threads of the cluster have arrived, and acquires what they released.
    pub fn cluster_wait(&mut self) {
        self.op(Op::BarrierCluster(ClusterBarrier::Wait { aligned: true }), []);
    }

    /// The address of `at` in the shared memory of the CTA with this rank in the cluster.
    pub fn mapa(&mut self, at: Shared, rank: impl Into<Src<R32>>) -> ClusterShared {
        let base: R32 = self.reg();
        let op = Op::Mapa { space: Space::SharedCluster, ty: Type::U32 };
        self.compute(base, op, [Src::from(at.base).into(), rank.into().into()]);
        ClusterShared { base, offset: at.offset }
    }

    /// Raises the register limit to `registers` per thread (a multiple of 8, 24 to 256). All warps of the
    /// warpgroup execute it together.
    pub fn setmaxnreg_inc(&mut self, registers: u32) {
        self.op(Op::Setmaxnreg(RegisterChange::Inc), [Src::<R32>::from(registers).into()]);
    }

    /// Lowers the register limit to `registers` per thread (a multiple of 8, 24 to 256). All warps of the
    /// warpgroup execute it together.
    pub fn setmaxnreg_dec(&mut self, registers: u32) {
        self.op(Op::Setmaxnreg(RegisterChange::Dec), [Src::<R32>::from(registers).into()]);
    }

    /// True in exactly one of the lanes of the mask `lanes`, the elected lane. These lanes, and no others,
    /// execute the instruction.
    pub fn elect(&mut self, lanes: u32) -> Pred {
        let pred: Pred = self.reg();
        let mask: Src<R32> = lanes.into();
        self.op(Op::Elect, [Operand::Pair(None, Some(super::Value::reg(pred))), mask.into()]);
        pred
    }

    /// The index of the warp in its one-dimensional CTA, computed so that ptxas knows that the value is
    /// uniform in the warp.
    pub fn warp_index_uniform(&mut self) -> R32 {
        let thread = self.special(SpecialReg::TidX);
        let warp = self.shr_u(thread, 5);
        self.uniform(warp)
    }

    /// Waits until the previous launches have completed and their writes are visible.
    pub fn griddep_wait(&mut self) {
        self.op(Op::Griddepcontrol(GridDependency::Wait), []);
    }

    /// Allows dependent launches to start once all CTAs of this launch have executed this instruction or
    /// exited.
    pub fn griddep_launch_dependents(&mut self) {
        self.op(Op::Griddepcontrol(GridDependency::LaunchDependents), []);
    }
}
