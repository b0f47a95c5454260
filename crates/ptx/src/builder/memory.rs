//! Loads, stores, atomics and asynchronous copies.

use super::{Builder, F32, Global, Int, Pointer, R32, R64, Shared, Src, Value};
use crate::{Atomic, AtomicOp, CacheOp, CpAsync, Eviction, MemSem, Memory, Op, Operand, Scope, Type};

impl Builder {
    /// Loads one element.
    pub fn ld<V: Value>(&mut self, from: impl Pointer) -> V {
        self.ld_as(V::TYPE, from)
    }

    /// Loads one element of a narrower type and extends it to the width of the register.
    pub fn ld_as<V: Value, P: Pointer>(&mut self, ty: Type, from: P) -> V {
        let d = self.reg();
        self.ld_as_to(d, ty, from);
        d
    }

    /// Loads one element that no thread writes during the kernel, of type `ty`, extended to the width of the
    /// register.
    pub fn ld_read_only<V: Value>(&mut self, ty: Type, from: Global) -> V {
        let d = self.reg();
        let memory = Memory { non_coherent: true, ..Memory::plain(Global::SPACE, ty) };
        self.compute(d, Op::Ld(memory), [Operand::Address(from.address())]);
        d
    }

    /// Loads `N` = 2 or 4 consecutive elements that no thread writes during the kernel to `d`.
    pub fn ld_read_only_vec_to<V: Value, const N: usize>(&mut self, d: [V; N], from: Global) {
        const { assert!(N == 2 || N == 4, "PTX has vectors of 2 and 4") };
        let memory = Memory { non_coherent: true, ..Memory::vector(Global::SPACE, V::TYPE, N as u8) };
        self.op(Op::Ld(memory), [vector(&d), Operand::Address(from.address())]);
    }

    /// Loads one element to `d`.
    pub fn ld_to<V: Value, P: Pointer>(&mut self, d: V, from: P) {
        self.ld_as_to(d, V::TYPE, from);
    }

    fn ld_as_to<V: Value, P: Pointer>(&mut self, d: V, ty: Type, from: P) {
        self.compute(d, Op::Ld(Memory::plain(P::SPACE, ty)), [Operand::Address(from.address())]);
    }

    /// Loads `N` = 2 or 4 consecutive elements.
    pub fn ld_vec<V: Value, const N: usize>(&mut self, from: impl Pointer) -> [V; N] {
        let d = self.regs();
        self.ld_vec_to(d, from);
        d
    }

    /// Loads `N` = 2 or 4 consecutive elements to `d`.
    pub fn ld_vec_to<V: Value, P: Pointer, const N: usize>(&mut self, d: [V; N], from: P) {
        const { assert!(N == 2 || N == 4, "PTX has vectors of 2 and 4") };
        let memory = Memory::vector(P::SPACE, V::TYPE, N as u8);
        self.op(Op::Ld(memory), [vector(&d), Operand::Address(from.address())]);
    }

    /// Stores one element.
    pub fn st<V: Value, P: Pointer>(&mut self, to: P, value: V) {
        self.st_as(V::TYPE, to, value);
    }

    /// Loads one element, and acquires what the thread released that stored it ([`Builder::st_release`]). The
    /// scope is gpu.
    pub fn ld_acquire<V: Value>(&mut self, from: Global) -> V {
        let d = self.reg();
        let memory = strong(V::TYPE, MemSem::Acquire);
        self.compute(d, Op::Ld(memory), [Operand::Address(from.address())]);
        d
    }

    /// Stores one element, and releases the thread's earlier accesses to threads that acquire it. The scope
    /// is gpu.
    pub fn st_release<V: Value>(&mut self, to: Global, value: V) {
        let memory = strong(V::TYPE, MemSem::Release);
        self.op(Op::St(memory), [Operand::Address(to.address()), Operand::Reg(value.reg())]);
    }

    /// Stores the low bits of `value` as an element of a narrower type.
    pub fn st_as<V: Value, P: Pointer>(&mut self, ty: Type, to: P, value: impl Into<Src<V>>) {
        let memory = Memory::plain(P::SPACE, ty);
        self.op(Op::St(memory), [Operand::Address(to.address()), value.into().into()]);
    }

    /// Stores `N` = 2 or 4 consecutive elements.
    pub fn st_vec<V: Value, P: Pointer, const N: usize>(&mut self, to: P, values: [V; N]) {
        const { assert!(N == 2 || N == 4, "PTX has vectors of 2 and 4") };
        let memory = Memory::vector(P::SPACE, V::TYPE, N as u8);
        self.op(Op::St(memory), [Operand::Address(to.address()), vector(&values)]);
    }

    /// Relaxed atomic that returns the old value. The scope is gpu for global memory and cta for shared
    /// memory.
    pub fn atom<V: Int, P: Pointer>(&mut self, op: AtomicOp, at: P, value: impl Into<Src<V>>) -> V {
        let d: V = self.reg();
        let ty = match op {
            AtomicOp::And | AtomicOp::Or | AtomicOp::Xor | AtomicOp::Exch | AtomicOp::Cas => V::TYPE,
            _ => V::UNSIGNED,
        };
        self.compute(d, Op::Atom(atomic::<P>(op, ty)), [Operand::Address(at.address()), value.into().into()]);
        d
    }

    /// Atomic add without a result, relaxed.
    pub fn red_add<V: Value, P: Pointer>(&mut self, at: P, value: V) {
        let ty = if V::TYPE.is_bits() {
            if V::TYPE.bits() == 64 { Type::U64 } else { Type::U32 }
        } else {
            V::TYPE
        };
        let op = Op::Red(atomic::<P>(AtomicOp::Add, ty));
        self.op(op, [Operand::Address(at.address()), Operand::Reg(value.reg())]);
    }

    /// Atomic adds of four f32 to consecutive elements of global memory, relaxed and each by itself, without
    /// a result (sm_90).
    pub fn red_add_vec4(&mut self, at: Global, values: [F32; 4]) {
        let op = Op::Red(Atomic { vector: 4, ..atomic::<Global>(AtomicOp::Add, Type::F32) });
        self.op(op, [Operand::Address(at.address()), vector(&values)]);
    }

    // ---- addresses
    // ---------------------------------------------------------------------------------------------

    /// `pointer + bytes`, for an amount in a register or too large for a constant offset.
    pub fn advance(&mut self, pointer: Global, bytes: impl Into<Src<R64>>) -> Global {
        Global { base: self.add(pointer.base, bytes), offset: pointer.offset }
    }

    /// Adds `bytes` to the base register of `pointer`. Other pointers with the same base register change too.
    pub fn advance_to(&mut self, pointer: Global, bytes: impl Into<Src<R64>>) {
        self.add_to(pointer.base, pointer.base, bytes);
    }

    /// Address of element `i` (unsigned) of an array whose elements have `size` bytes.
    pub fn index(&mut self, array: Global, i: R32, size: u32) -> Global {
        Global { base: self.mad_wide_u(i, size, array.base), offset: array.offset }
    }

    /// `pointer + bytes` in shared memory.
    pub fn shared_advance(&mut self, pointer: Shared, bytes: impl Into<Src<R32>>) -> Shared {
        Shared { base: self.add(pointer.base, bytes), offset: pointer.offset }
    }

    /// Address of element `i` (unsigned) of a shared array whose elements have `size` bytes.
    pub fn shared_index(&mut self, array: Shared, i: R32, size: u32) -> Shared {
        Shared { base: self.mad(i, size, array.base), offset: array.offset }
    }

    // ---- asynchronous copies
    // -----------------------------------------------------------------------------------

    /// Copies 4, 8 or 16 bytes from global to shared memory asynchronously, 16 bytes bypassing L1. With
    /// `read`, only so many bytes are read, and the rest is filled with zeros. With 0, global memory is not
    /// accessed.
    pub fn cp_async(&mut self, to: Shared, from: Global, bytes: u32, read: Option<R32>) {
        let op = Op::CpAsync(CpAsync {
            // Only copies of 16 bytes may bypass L1.
            cache: if bytes == 16 { CacheOp::Cg } else { CacheOp::Ca },
            l2_prefetch: None,
            cache_hint: false,
            ignore_src: false,
            shared_cta: false,
        });
        let size: Src<R32> = bytes.into();
        let operands = [Operand::Address(to.address()), Operand::Address(from.address()), size.into()];
        self.op(op, operands.into_iter().chain(read.map(|r| Operand::Reg(r.reg()))));
    }

    /// Closes the current group of copies of this thread.
    pub fn cp_async_commit(&mut self) {
        self.op(Op::CpAsyncCommitGroup, []);
    }

    /// Waits until at most the `pending` latest groups of this thread are incomplete. To wait for other
    /// threads' copies, a barrier is needed as well.
    pub fn cp_async_wait(&mut self, pending: u32) {
        let pending: Src<R32> = pending.into();
        self.op(Op::CpAsyncWaitGroup, [pending.into()]);
    }

    /// Loads 16 bytes that no thread writes during the kernel, without allocating in L1.
    pub fn ld_stream16(&mut self, from: Global) -> [R32; 4] {
        let d: [R32; 4] = self.regs();
        let mut memory = Memory::vector(Global::SPACE, Type::B32, 4);
        memory.non_coherent = true;
        memory.l1 = Some(Eviction::NoAllocate);
        self.op(Op::Ld(memory), [vector(&d), Operand::Address(from.address())]);
        d
    }
}

pub(super) fn vector<V: Value>(values: &[V]) -> Operand {
    Operand::Vector(values.iter().map(|v| Operand::Reg(v.reg())).collect())
}

/// An access to global memory that synchronises threads of the GPU.
fn strong(ty: Type, sem: MemSem) -> Memory {
    Memory { sem, scope: Some(Scope::Gpu), ..Memory::plain(Global::SPACE, ty) }
}

fn atomic<P: Pointer>(op: AtomicOp, ty: Type) -> Atomic {
    let scope = if P::SPACE == crate::Space::Shared { Scope::Cta } else { Scope::Gpu };
    Atomic {
        op,
        space: P::SPACE,
        ty,
        vector: 1,
        sem: MemSem::Relaxed,
        scope: Some(scope),
        noftz: false,
        cache_hint: false,
    }
}
