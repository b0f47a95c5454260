//! Bulk asynchronous copies, with and without tensor maps (TMA).

use super::{
    Builder, ClusterShared, Global, Pointer, R16, R32, R64, Shared, SharedPointer, Src, TensorMapPtr, Value,
};
use crate::{
    Address, AtomicOp, Base, BulkCopy, BulkReduce, BulkRoute, BulkTensor, BulkTensorReduce, Op, Operand,
    PrefetchLevel, ProxyFence, Space, StAsync, Type,
};

use super::memory::vector;

/// Options of a bulk copy.
#[derive(Clone, Copy, Debug, Default)]
pub struct BulkOptions {
    /// Mask of CTAs of the cluster, one bit each. Each CTA in the mask receives the bytes at the same shared
    /// address, and its own mbarrier counts them.
    pub multicast: Option<R16>,
    /// An L2 cache policy.
    pub policy: Option<R64>,
}

impl BulkOptions {
    fn operands(self) -> impl Iterator<Item = Operand> {
        let mask = self.multicast.map(|r| Operand::Reg(r.reg()));
        mask.into_iter().chain(self.policy.map(|r| Operand::Reg(r.reg())))
    }
}

/// The operands `[map, {coords}]`.
fn boxed(map: TensorMapPtr, coords: &[Src<R32>]) -> [Operand; 2] {
    let map = Address { base: Base::Reg(map.base.reg()), offset: 0 };
    let coords = coords.iter().cloned().map(Operand::from).collect();
    [Operand::Address(map), Operand::Vector(coords)]
}

impl Builder {
    /// Copies the box at `coords` (innermost first, one per dimension) to shared memory. `bar` counts the
    /// bytes. With `multicast`, the destination and `bar` are addresses in every CTA of the mask.
    pub fn tma_load<P: SharedPointer>(
        &mut self,
        to: P,
        map: TensorMapPtr,
        coords: &[Src<R32>],
        bar: P,
        options: BulkOptions,
    ) {
        let op = Op::CpAsyncBulkTensor(BulkTensor {
            route: BulkRoute::GlobalToCluster,
            dims: coords.len() as u8,
            multicast: options.multicast.is_some(),
            cache_hint: options.policy.is_some(),
        });
        let [map, coords] = boxed(map, coords);
        let operands = [Operand::Address(to.address()), map, coords, Operand::Address(bar.address())];
        self.op(op, operands.into_iter().chain(options.operands()));
    }

    /// Copies shared memory to the box at `coords`. The copy joins the current bulk group.
    pub fn tma_store(&mut self, map: TensorMapPtr, coords: &[Src<R32>], from: Shared) {
        let op = Op::CpAsyncBulkTensor(BulkTensor {
            route: BulkRoute::CtaToGlobal,
            dims: coords.len() as u8,
            multicast: false,
            cache_hint: false,
        });
        let [map, coords] = boxed(map, coords);
        self.op(op, [map, coords, Operand::Address(from.address())]);
    }

    /// Combines shared memory with the box at `coords` by `op`. The reduction joins the current bulk group.
    pub fn tma_reduce(&mut self, op: AtomicOp, map: TensorMapPtr, coords: &[Src<R32>], from: Shared) {
        let dims = coords.len() as u8;
        let op = Op::CpReduceAsyncBulkTensor(BulkTensorReduce { dims, op, cache_hint: false });
        let [map, coords] = boxed(map, coords);
        self.op(op, [map, coords, Operand::Address(from.address())]);
    }

    /// Prefetches a tensor map into the cache that bulk copies read tensor maps from.
    pub fn prefetch_tensor_map(&mut self, map: TensorMapPtr) {
        let address = Address { base: Base::Reg(map.base.reg()), offset: 0 };
        self.op(Op::Prefetch(Space::Generic, PrefetchLevel::TensorMap), [Operand::Address(address)]);
    }

    /// Copies `bytes` bytes, a multiple of 16, from global to shared memory. `bar` counts the bytes.
    pub fn bulk_load<P: SharedPointer>(
        &mut self,
        to: P,
        from: Global,
        bytes: impl Into<Src<R32>>,
        bar: P,
        options: BulkOptions,
    ) {
        let op = Op::CpAsyncBulk(BulkCopy {
            route: BulkRoute::GlobalToCluster,
            multicast: options.multicast.is_some(),
            cache_hint: options.policy.is_some(),
        });
        let (to, from) = (Operand::Address(to.address()), Operand::Address(from.address()));
        let operands = [to, from, bytes.into().into(), Operand::Address(bar.address())];
        self.op(op, operands.into_iter().chain(options.operands()));
    }

    /// Copies `bytes` bytes, a multiple of 16, from shared to global memory. The copy joins the current bulk
    /// group.
    pub fn bulk_store(&mut self, to: Global, from: Shared, bytes: impl Into<Src<R32>>) {
        let op =
            Op::CpAsyncBulk(BulkCopy { route: BulkRoute::CtaToGlobal, multicast: false, cache_hint: false });
        let operands =
            [Operand::Address(to.address()), Operand::Address(from.address()), bytes.into().into()];
        self.op(op, operands);
    }

    /// Adds `bytes` bytes of f32 numbers, a multiple of 16, in shared memory to those in global memory. The
    /// reduction joins the current bulk group.
    pub fn bulk_add(&mut self, to: Global, from: Shared, bytes: impl Into<Src<R32>>) {
        let op = Op::CpReduceAsyncBulk(BulkReduce {
            route: BulkRoute::CtaToGlobal,
            op: AtomicOp::Add,
            ty: Type::F32,
            noftz: false,
            cache_hint: false,
        });
        let operands =
            [Operand::Address(to.address()), Operand::Address(from.address()), bytes.into().into()];
        self.op(op, operands);
    }

    /// Copies `bytes` bytes, a multiple of 16, to another CTA of the cluster. `bar`, in that CTA, counts the
    /// bytes.
    pub fn bulk_send(
        &mut self,
        to: ClusterShared,
        from: Shared,
        bytes: impl Into<Src<R32>>,
        bar: ClusterShared,
    ) {
        let op =
            Op::CpAsyncBulk(BulkCopy { route: BulkRoute::CtaToCluster, multicast: false, cache_hint: false });
        let (to, from) = (Operand::Address(to.address()), Operand::Address(from.address()));
        self.op(op, [to, from, bytes.into().into(), Operand::Address(bar.address())]);
    }

    /// Closes the current bulk group of the thread.
    pub fn bulk_commit(&mut self) {
        self.op(Op::CpAsyncBulkCommitGroup, []);
    }

    /// Waits until at most the `left` latest bulk groups of the thread are pending.
    pub fn bulk_wait(&mut self, left: u32) {
        self.op(Op::CpAsyncBulkWaitGroup { read: false }, [Src::<R32>::from(left).into()]);
    }

    /// Waits until all but the `left` latest bulk groups of the thread have read their sources.
    pub fn bulk_wait_read(&mut self, left: u32) {
        self.op(Op::CpAsyncBulkWaitGroup { read: true }, [Src::<R32>::from(left).into()]);
    }

    /// Stores a value to another CTA of the cluster. `bar`, in that CTA, counts the bytes.
    pub fn st_async<V: Value>(&mut self, to: ClusterShared, value: V, bar: ClusterShared) {
        self.store_async(V::TYPE, 1, to, Operand::Reg(value.reg()), bar);
    }

    /// Stores `N` = 2 or 4 values to another CTA of the cluster. `bar`, in that CTA, counts the bytes.
    pub fn st_async_vec<V: Value, const N: usize>(
        &mut self,
        to: ClusterShared,
        values: [V; N],
        bar: ClusterShared,
    ) {
        const { assert!(N == 2 || N == 4, "PTX has vectors of 2 and 4") };
        self.store_async(V::TYPE, N as u8, to, vector(&values), bar);
    }

    fn store_async(&mut self, ty: Type, count: u8, to: ClusterShared, value: Operand, bar: ClusterShared) {
        let op = Op::StAsync(StAsync { space: Space::SharedCluster, vector: count, ty });
        self.op(op, [Operand::Address(to.address()), value, Operand::Address(bar.address())]);
    }

    /// Orders the thread's earlier accesses to all memory before later accesses of the asynchronous proxy
    /// (TMA, `wgmma`), and the reverse.
    pub fn fence_proxy_async(&mut self) {
        self.op(Op::FenceProxy(ProxyFence::Async), []);
    }

    /// Like [`Builder::fence_proxy_async`], but only for the own CTA's shared memory.
    pub fn fence_proxy_async_shared(&mut self) {
        self.op(Op::FenceProxy(ProxyFence::AsyncSharedCta), []);
    }
}
