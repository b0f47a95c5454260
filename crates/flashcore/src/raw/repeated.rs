//! A call on a GPU that was prepared, to be launched again on other addresses and other streams.

use std::sync::Arc;

use driver::{DeviceSlice, StreamRef};
use problem::{Operand, OperandSpec};
use smallvec::SmallVec;

use super::{On, Ready};
use crate::AttentionError;
use crate::gpu::Prepared;

/// A prepared call without its addresses and its stream. A caller that makes the same call again, in shapes,
/// strides, types and options, needs no other check.
#[derive(Clone, Debug)]
pub struct Repeated {
    prepared: Arc<Prepared>,
    /// The operands of the problem in their order.
    operands: SmallVec<[RepeatedOperand; 8]>,
    /// The indices of the addresses of K and V, if V is a view of K: they are equal.
    view: Option<[usize; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct RepeatedOperand {
    bytes: usize,
    /// The index of its address among those that the caller hands over.
    index: usize,
    /// The distance from its lowest element to that address.
    below: u64,
}

impl Ready<'_> {
    /// The call, to be repeated with addresses in the order of `given`, which are the addresses of this call
    /// with their operands. `None` in host memory, and for calls that append to a cache, write slots or have
    /// no rows.
    pub fn repeated(&self, given: &[(Option<Operand>, u64)]) -> Option<Repeated> {
        let On::Stream { prepared, write: None, .. } = &self.on else { return None };
        let operand = |&(spec, lowest): &(OperandSpec, u64)| {
            let index = given.iter().position(|(operand, _)| *operand == Some(spec.operand))?;
            Some(RepeatedOperand { bytes: spec.bytes(), index, below: given[index].1.wrapping_sub(lowest) })
        };
        let index = |wanted| given.iter().position(|(operand, _)| *operand == Some(wanted));
        let view = match prepared.problem().v_in_k {
            true => Some([index(Operand::K)?, index(Operand::V)?]),
            false => None,
        };
        Some(Repeated {
            view,
            prepared: prepared.clone(),
            operands: self.memory.iter().map(operand).collect::<Option<_>>()?,
        })
    }
}

impl Repeated {
    /// Whether the kernels compute the call at these addresses, given as in [`Repeated::enqueue`]. Kernels of
    /// a V that is a view of K do not read V at another address.
    pub fn fits(&self, address: impl Fn(usize) -> u64) -> bool {
        self.view.is_none_or(|[k, v]| address(k) == address(v))
    }

    /// Enqueues the call on a stream of its GPU, by the driver's handle. `address` gives the addresses, by
    /// their index in those of [`Ready::repeated`].
    ///
    /// # Errors
    /// As [`Ready::enqueue`].
    ///
    /// # Safety
    /// As [`Ready::enqueue`], for operands of the shapes, strides and types of the first call, at addresses
    /// that [fit](Repeated::fits).
    pub unsafe fn enqueue(&self, handle: u64, address: impl Fn(usize) -> u64) -> Result<(), AttentionError> {
        let slice = |number: usize| {
            let RepeatedOperand { bytes, index, below } = self.operands[number];
            // SAFETY: this function's own contract.
            unsafe { DeviceSlice::from_raw(address(index).wrapping_sub(below), bytes) }
        };
        // SAFETY: the caller vouches for the handle.
        let stream = unsafe { StreamRef::from_raw(self.prepared.context(), handle) };
        self.prepared.launch(stream, slice)
    }
}
