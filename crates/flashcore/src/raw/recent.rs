//! The calls on GPUs that a thread prepared last. The layers of a model repeat a few calls, in which only
//! addresses differ: such a call skips the statement of its problem, its hash and its comparison.

use std::cell::RefCell;
use std::sync::Arc;

use problem::{Operand, OperandMap, OperandSpec};

use super::{CallOptions, Memory, Tensor, View, v_in_k};
use crate::gpu::{Gpu, Prepared};

/// Calls that a thread remembers.
const MOST: usize = 8;

thread_local! {
    static RECENT: RefCell<Vec<RecentCall>> = const { RefCell::new(Vec::new()) };
}

struct RecentCall {
    /// The device of the call. There is one value for each device, which lives as long as the process.
    gpu: *const Gpu,
    views: Vec<(Operand, View)>,
    options: CallOptions,
    /// Whether V is a view of K, as the addresses say.
    v_in_k: bool,
    prepared: Arc<Prepared>,
    /// In place of addresses, the distances from the lowest elements to the addresses.
    specs: Memory,
}

/// The prepared kernels of a call with these operands, and the addresses of the operands' lowest elements.
pub(super) fn find(
    gpu: &Gpu,
    operands: &OperandMap<Tensor>,
    options: &CallOptions,
) -> Option<(Arc<Prepared>, Memory)> {
    let v_in_k = v_in_k(operands);
    RECENT.with_borrow(|all| {
        let call = all.iter().find(|call| {
            let views = call.views.iter().map(|(operand, view)| (*operand, view));
            std::ptr::eq(call.gpu, gpu)
                && operands.iter().map(|(operand, tensor)| (operand, &tensor.view)).eq(views)
                && call.options == *options
                && call.v_in_k == v_in_k
        })?;
        let lowest = |((_, tensor), (spec, below)): ((_, &Tensor), &(OperandSpec, u64))| {
            (*spec, tensor.address.wrapping_sub(*below))
        };
        Some((call.prepared.clone(), operands.iter().zip(&call.specs).map(lowest).collect()))
    })
}

/// Remembers a call, whose operands have their lowest elements in `memory`, in the same order.
pub(super) fn keep(
    gpu: &Gpu,
    operands: &OperandMap<Tensor>,
    options: &CallOptions,
    prepared: &Arc<Prepared>,
    memory: &[(OperandSpec, u64)],
) {
    let below = |((_, tensor), (spec, lowest)): ((_, &Tensor), &(OperandSpec, u64))| {
        (*spec, tensor.address.wrapping_sub(*lowest))
    };
    let call = RecentCall {
        gpu,
        views: operands.iter().map(|(operand, tensor)| (operand, tensor.view)).collect(),
        options: options.clone(),
        v_in_k: prepared.problem().v_in_k,
        prepared: prepared.clone(),
        specs: operands.iter().zip(memory).map(below).collect(),
    };
    RECENT.with_borrow_mut(|all| {
        if all.len() == MOST {
            all.remove(0);
        }
        all.push(call);
    });
}
