//! Matrix products of a warpgroup (`wgmma`).

use super::memory::vector;
use super::{Builder, F32, Pred, R32, R64, Src, Value};
use crate::{Op, Operand, Type, Wgmma, WgmmaSource};

/// The dimension along which a matrix in shared memory is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// Contiguous along K: A row by row, B column by column.
    K,
    /// Contiguous along M (for A) or along N (for B).
    Mn,
}

impl Major {
    fn operand(self) -> Operand {
        Src::<R32>::from(u32::from(self == Major::Mn)).into()
    }
}

impl Builder {
    /// `sums = a · b`, or `sums += a · b` if `accumulate` is true, with m64nNkK, where K is 32 bytes of the
    /// input types. A and B are in shared memory, addressed by descriptors; 8-bit operands are K-major. If
    /// `negated` is true, the product is `−a · b`. N is twice the number of sums. No instruction may
    /// access the sums until the group has been waited for.
    pub fn wgmma_ss(
        &mut self,
        types: [Type; 2],
        sums: &[F32],
        (a, a_major): (R64, Major),
        (b, b_major): (R64, Major),
        accumulate: impl Into<Src<Pred>>,
        negated: bool,
    ) {
        let (a, b) = (Operand::Reg(a.reg()), Operand::Reg(b.reg()));
        let majors = [a_major.operand(), b_major.operand()];
        self.wgmma(types, WgmmaSource::Shared, sums, [a, b, accumulate.into().into()], negated, majors);
    }

    /// `sums = a · b`, or `sums += a · b` if `accumulate` is true, with m64nNkK, where K is 32 bytes of the
    /// input types. A is in registers (the fragment of `mma.m16n8k16`, or of `mma.m16n8k32` for 8-bit types;
    /// warp w has the rows from 16·w on), B in shared memory, addressed by a descriptor. No instruction may
    /// access the sums or `a` until the group has been waited for.
    pub fn wgmma_rs(
        &mut self,
        types: [Type; 2],
        sums: &[F32],
        a: [R32; 4],
        (b, b_major): (R64, Major),
        accumulate: impl Into<Src<Pred>>,
    ) {
        let sources = [vector(&a), Operand::Reg(b.reg()), accumulate.into().into()];
        self.wgmma(types, WgmmaSource::Registers, sums, sources, false, [b_major.operand()]);
    }

    fn wgmma<const MAJORS: usize>(
        &mut self,
        [a, b]: [Type; 2],
        source: WgmmaSource,
        sums: &[F32],
        sources: [Operand; 3],
        negated: bool,
        majors: [Operand; MAJORS],
    ) {
        let wgmma = Wgmma { b, ..Wgmma::new(2 * sums.len() as u16, Type::F32, a, source) };
        let scales = [if negated { -1 } else { 1 }, 1].map(|scale| Src::<R32>::from(scale).into());
        let majors = majors.into_iter().filter(|_| wgmma.has_transpose());
        let operands = std::iter::once(vector(sums)).chain(sources).chain(scales).chain(majors);
        self.op(Op::Wgmma(wgmma), operands);
    }

    /// Orders earlier accesses of the warpgroup to registers and shared memory before the products that
    /// follow.
    pub fn wgmma_fence(&mut self) {
        self.op(Op::WgmmaFence, []);
    }

    /// Closes the current wgmma group.
    pub fn wgmma_commit(&mut self) {
        self.op(Op::WgmmaCommitGroup, []);
    }

    /// Waits until at most the `left` latest wgmma groups are pending.
    pub fn wgmma_wait(&mut self, left: u32) {
        self.op(Op::WgmmaWaitGroup, [Src::<R32>::from(left).into()]);
    }
}
