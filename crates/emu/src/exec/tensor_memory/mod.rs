//! Executes the instructions of tensor memory (PTX ISA, "TensorCore 5th Generation Family Instructions").
//!
//! The emulator computes a product, a copy, a load or a store when it is issued. Its accesses belong to an
//! actor of the issuing warp, so that no thread may touch what they touch before a thread has waited: for
//! products and copies on the mbarrier of a `tcgen05.commit`, for loads and stores with `tcgen05.wait`.
//! Products and copies that one thread issues execute in order of issue.

mod access;
mod allocation;
mod commit;
mod copy;
mod moves;
mod operands;
mod product;
mod scaled;

use ptx::Op;

use super::Env;
use super::run::Flow;
use super::warp::{Split, Warp};
use crate::decode::Inst;
use crate::order::TensorPipe;

impl Env<'_> {
    /// Executes an instruction of tensor memory.
    pub(super) fn tensor(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        match inst.op {
            Op::Tcgen05Mma(product) => self.tensor_products(warp, inst, product, mask),
            Op::Tcgen05Cp { group, shape, .. } => self.tensor_copies(warp, inst, (group, shape), mask),
            Op::Tcgen05Commit { multicast, .. } => self.tensor_commit(warp, inst, multicast, mask),
            Op::Tcgen05Fence { after } => self.tensor_fence(warp, after, mask),
            _ => return self.tensor_collective(warp, split, inst, mask),
        }
        Flow::Next
    }

    /// Executes an instruction that the lanes of a warp execute together.
    fn tensor_collective(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        if let Some(wait) = self.converge(warp, split, inst, mask) {
            return wait;
        }
        match inst.op {
            Op::Tcgen05Alloc { .. } => return self.tensor_alloc(warp, split, inst),
            Op::Tcgen05Dealloc { .. } => self.tensor_dealloc(warp, inst),
            Op::Tcgen05Relinquish { .. } => self.tensors.relinquish(self.facts.rank(warp.index)),
            Op::Tcgen05Ld(moved) => self.move_to_registers(warp, inst, &moved),
            Op::Tcgen05St(moved) => self.move_from_registers(warp, inst, &moved),
            Op::Tcgen05Wait { stores } => {
                let pipe = if stores { TensorPipe::Store } else { TensorPipe::Load };
                let epoch = self.tensors.queues[warp.index].close(pipe);
                let actor = self.facts.actors.tensor(warp.index, pipe);
                warp.view.learn(!0, warp.live, (actor, !0), epoch);
            }
            _ => {}
        }
        Flow::Next
    }
}
