//! The backward pass: dQ, dK, dV and the gradients of sinks and tables.
//!
//! A task has some keys of one KV head and all query rows of the head's group, so that dK and dV belong to
//! one task. If there are fewer KV heads than threads, the keys of a head are divided among tasks; each then
//! has its own sums of dQ, which are added in the order of the tasks. The result does not depend on the order
//! in which tasks run.
//!
//! All sums are in f32, whatever the type of the inputs.

mod call;
mod programs;
mod tile;

use problem::{ElementsMut, Operand, OperandMap, PassKind, Problem, ProblemError, Tensor};

pub(crate) use tile::{TileStep, run};

use crate::output::Output;
use crate::threads::with_default;
use crate::view::{arrays, origin};
use crate::{CallingThread, CpuError, CpuPlan, Executor, Input};
use call::BackwardCall;
use programs::TableValues;

/// Computes the gradients of a backward problem with its inputs, into buffers of its outputs. Of the plan,
/// the threads and the instruction set are used. Rows of tensors that belong to no sequence are left as they
/// are.
///
/// # Errors
/// [`CpuError::Problem`] if the problem is no backward pass or an operand does not fit it, and the plan's
/// own errors.
pub fn gradients(
    problem: &Problem,
    inputs: &OperandMap<Input<'_>>,
    outputs: OperandMap<ElementsMut<'_>>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    if plan.threads == 1 {
        return gradients_on(&CallingThread, problem, inputs, outputs, plan);
    }
    with_default(|executor| gradients_on(executor, problem, inputs, outputs, plan))
}

/// Like [`gradients`], with the threads of an executor.
///
/// # Errors
/// As [`gradients`]. [`CpuError::Stopped`] if the executor stopped the call; the outputs are then
/// unspecified.
pub fn gradients_on(
    executor: &dyn Executor,
    problem: &Problem,
    inputs: &OperandMap<Input<'_>>,
    mut outputs: OperandMap<ElementsMut<'_>>,
    plan: &CpuPlan,
) -> Result<(), CpuError> {
    plan.check(problem)?;
    problem.expect_pass(PassKind::Backward)?;
    problem.check_inputs(inputs, Input::type_and_len)?;
    let operands = &arrays(inputs);
    problem.check_length_values(operands)?;
    let mut take = |operand: Operand, expected: usize| {
        let missing = ProblemError::Lengths { argument: operand.name(), len: 0, expected };
        outputs.remove(operand).ok_or(missing)
    };
    let mut tensors = Vec::with_capacity(3);
    for tensor in Tensor::GRADIENTS {
        let (needed, _) = problem.span(tensor).unwrap_or_default(); // the problem's check has computed it
        let buffer = take(tensor.into(), needed)?;
        let dtype = buffer.dtype();
        let origin = origin(problem, tensor, (dtype.into(), buffer.len()))?;
        let [.., dim] = problem.extents(tensor);
        let (argument, expected) = (tensor.name(), problem.dtypes.of(tensor).name());
        let wrong = ProblemError::OperandType { argument, dtype: dtype.name(), expected };
        tensors.push(Output::new(buffer, origin, problem.strides(tensor), dim).ok_or(wrong)?);
    }
    let mut floats = Vec::new();
    for spec in problem.outputs().filter(|spec| !matches!(spec.operand, Operand::Tensor(_))) {
        let (argument, expected) = (spec.operand.name(), spec.elements);
        match take(spec.operand, expected)? {
            ElementsMut::F32(buffer) if buffer.len() == expected => floats.push((spec.operand, buffer)),
            ElementsMut::F32(buffer) => {
                return Err(ProblemError::Lengths { argument, len: buffer.len(), expected }.into());
            }
            other => {
                let dtype = other.dtype().name();
                return Err(ProblemError::OperandType { argument, dtype, expected: "f32" }.into());
            }
        }
    }
    let sequences = &problem.sequences(operands)?;
    let tables = TableValues::of(problem, inputs);
    let [dq, dk, dv] = <[Output<'_>; 3]>::try_from(tensors).unwrap_or_else(|_| unreachable!("three tensors"));
    let call =
        BackwardCall::new(executor, problem, inputs, operands, sequences, &tables, [dq, dk, dv], plan)?;
    let sums = call.run();
    for (operand, buffer) in floats {
        buffer.copy_from_slice(sums.get(operand).map_or(&[][..], Vec::as_slice));
    }
    if executor.is_stopped() { Err(CpuError::Stopped) } else { Ok(()) }
}
