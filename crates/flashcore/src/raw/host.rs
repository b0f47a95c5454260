//! Attention on addresses in host memory.

use std::cell::RefCell;
use std::ptr::NonNull;

use cpu::{
    CpuPlan, Element, Executor, Input, attention_with, attention_with_on, gradients, gradients_on, kept,
};
use problem::{
    ElementType, Elements, ElementsMut, LengthArray, Operand, OperandMap, OperandSpec, Operands, PassKind,
    Problem,
};

use super::append::{Appending, Rotated};
use crate::AttentionError;
use crate::error::refused;
use crate::known::{Key, Known, Wish};

/// The plan for a problem on at most `threads` threads, chosen once for each thread that calls.
///
/// # Errors
/// When the problem is not valid.
pub(crate) fn plan_for(problem: &Problem, threads: usize) -> Result<CpuPlan, AttentionError> {
    thread_local! {
        // A lock could be held by another thread when the process forks.
        static KNOWN: RefCell<Known<CpuPlan>> = RefCell::default();
    }
    let key = Key { problem: problem.clone(), wish: Wish::Threads(threads) };
    if let Some(plan) = KNOWN.with_borrow(|known| known.get(&key)) {
        return Ok(plan);
    }
    problem.check()?;
    let plan = kept::chosen(problem, threads).plan;
    Ok(KNOWN.with_borrow_mut(|known| known.keep(key, plan)))
}

/// Computes a problem on its operands, each with the address of its lowest element.
///
/// # Safety
/// As [`super::Ready::enqueue`].
pub(super) unsafe fn compute(
    executor: Option<&dyn Executor>,
    problem: &Problem,
    memory: &[(OperandSpec, u64)],
    plan: &CpuPlan,
    append: Option<&Appending>,
) -> Result<(), AttentionError> {
    let pass = problem.pass.kind();
    let mut inputs = OperandMap::default();
    let mut outputs = OperandMap::default();
    for &(spec, address) in memory {
        start(spec, address)?; // an append writes only if all addresses are valid
    }
    // SAFETY: this function's own contract.
    let mut copies = unsafe { Copied::all(problem, memory) }?;
    let rotated = match append {
        // SAFETY: as above.
        Some(append) => unsafe { appended(executor, append, problem, &mut copies) }?,
        None => None,
    };
    for &(spec, address) in memory {
        let start = start(spec, address)?;
        match spec.operand {
            // SAFETY: the memory has these elements, and lives as long as this call.
            Operand::Q if let Some(q) = &rotated => unsafe {
                inputs.insert(spec.operand, Input::from_raw_parts(spec.dtype, q.start(), q.elements));
            },
            // SAFETY: nothing else uses the outputs, by the caller's contract; `start` has checked the
            // alignment.
            operand if operand.is_output(pass) => unsafe {
                outputs.insert(operand, output(spec, start)?);
            },
            // SAFETY: the elements lie there, by the caller's contract.
            operand if in_place(operand) => unsafe {
                inputs.insert(spec.operand, Input::from_raw_parts(spec.dtype, start, spec.elements));
            },
            _ => {} // one of the copies
        }
    }
    inputs.extend(copies.iter().map(|(operand, copy)| (*operand, copy.input())));
    if pass == PassKind::Backward {
        match executor {
            Some(executor) => gradients_on(executor, problem, &inputs, outputs, plan)?,
            None => gradients(problem, &inputs, outputs, plan)?,
        }
        return Ok(());
    }
    let lse = match outputs.remove(Operand::Lse) {
        Some(ElementsMut::F32(lse)) => Some(lse),
        _ => None,
    };
    match outputs.remove(Operand::OUT) {
        Some(ElementsMut::F16(out)) => on(executor, problem, &inputs, out, lse, plan)?,
        Some(ElementsMut::Bf16(out)) => on(executor, problem, &inputs, out, lse, plan)?,
        Some(ElementsMut::F32(out)) => on(executor, problem, &inputs, out, lse, plan)?,
        _ => return Err(AttentionError::OperandWanted { operand: Operand::OUT.name(), wanted: true }),
    }
    Ok(())
}

/// The elements of an output.
///
/// # Errors
/// When no pass writes such elements.
///
/// # Safety
/// The operand's elements lie from `start` on, which is aligned, and nothing else uses them for `'a`.
unsafe fn output<'a>(spec: OperandSpec, start: NonNull<u8>) -> Result<ElementsMut<'a>, AttentionError> {
    let len = spec.elements;
    // SAFETY: the caller's contract; the types are those of the elements.
    unsafe {
        match spec.dtype {
            ElementType::F32 => {
                Ok(ElementsMut::F32(std::slice::from_raw_parts_mut(start.cast().as_ptr(), len)))
            }
            ElementType::F16 => {
                Ok(ElementsMut::F16(std::slice::from_raw_parts_mut(start.cast().as_ptr(), len)))
            }
            ElementType::Bf16 => {
                Ok(ElementsMut::Bf16(std::slice::from_raw_parts_mut(start.cast().as_ptr(), len)))
            }
            dtype => Err(refused(spec.operand.name(), "element type", dtype, "f16, bf16 or f32")),
        }
    }
}

/// Appends rows to the cache, and replaces the lengths by those after the append.
///
/// # Safety
/// As [`super::Ready::enqueue`].
unsafe fn appended(
    executor: Option<&dyn Executor>,
    append: &Appending,
    problem: &Problem,
    copies: &mut [(Operand, Copied)],
) -> Result<Option<Rotated>, AttentionError> {
    const USED: Operand = Operand::Lengths(LengthArray::UsedKv);
    let mut used = Vec::new();
    let mut others = Operands::default();
    for (operand, copy) in copies.iter() {
        match copy {
            Copied::Ints(array) if *operand == USED => used = array.clone(),
            Copied::Ints(array) => others = others.with(*operand, Elements::from(array)),
            Copied::Floats(_) => {}
        }
    }
    // SAFETY: this function's own contract.
    let rotated = unsafe { append.run(executor, problem, others, &mut used) }?;
    for (operand, copy) in copies {
        if *operand == USED {
            *copy = Copied::Ints(std::mem::take(&mut used));
        }
    }
    Ok(rotated)
}

fn on<T: Element>(
    executor: Option<&dyn Executor>,
    problem: &Problem,
    inputs: &OperandMap<Input<'_>>,
    out: &mut [T],
    lse: Option<&mut [f32]>,
    plan: &CpuPlan,
) -> Result<(), cpu::CpuError> {
    match executor {
        Some(executor) => attention_with_on(executor, problem, inputs, out, lse, plan),
        None => attention_with(problem, inputs, out, lse, plan),
    }
}

/// The lowest element of an operand. An operand without elements may have no memory.
fn start(spec: OperandSpec, address: u64) -> Result<NonNull<u8>, AttentionError> {
    let accepted = spec.dtype.bytes() as u64;
    if spec.elements == 0 {
        return Ok(NonNull::<u64>::dangling().cast());
    }
    let start = usize::try_from(address).ok().map(std::ptr::with_exposed_provenance_mut);
    let start = start.and_then(NonNull::new).filter(|_| address.is_multiple_of(accepted));
    start.ok_or(AttentionError::HostAddress { tensor: spec.operand.name(), address, accepted })
}

/// Whether an input is read where it lies: it is large.
const fn in_place(operand: Operand) -> bool {
    use Operand::{DLse, Lse, LseBefore, OutBefore, Table, Tensor};
    matches!(operand, Tensor(_) | Table(_) | Lse | DLse | OutBefore | LseBefore)
}

/// A copy of an array of lengths, sinks or factors. They are short, and what is checked in a copy stays as it
/// is when another thread writes to the array.
enum Copied {
    Ints(Vec<i32>),
    Floats(Vec<f32>),
}

impl Copied {
    /// Copies of all operands that are neither tensors nor tables.
    ///
    /// # Safety
    /// As [`super::Ready::enqueue`].
    unsafe fn all(
        problem: &Problem,
        memory: &[(OperandSpec, u64)],
    ) -> Result<Vec<(Operand, Copied)>, AttentionError> {
        let pass = problem.pass.kind();
        let mut copies = Vec::new();
        for &(spec, address) in memory {
            if !spec.operand.is_output(pass) && !in_place(spec.operand) {
                let start = start(spec, address)?;
                // SAFETY: the elements lie there, by the caller's contract; `start` has checked the
                // alignment.
                copies.push((spec.operand, unsafe { Copied::new(problem, spec, start) }));
            }
        }
        Ok(copies)
    }

    /// # Safety
    /// The operand's elements lie from `start` on, which is aligned.
    unsafe fn new(problem: &Problem, spec: OperandSpec, start: NonNull<u8>) -> Copied {
        let all = 0..spec.elements;
        // SAFETY: the positions are those of the operand's elements, by the caller's contract.
        unsafe {
            match (spec.operand, spec.dtype) {
                (Operand::Descale(tensor), _) => {
                    Copied::Floats(copied(spec.elements, start, problem.scale_positions(tensor)))
                }
                (_, ElementType::I32) => Copied::Ints(copied(spec.elements, start, all)),
                _ => Copied::Floats(copied(spec.elements, start, all)),
            }
        }
    }

    fn input(&self) -> Input<'_> {
        match self {
            Copied::Ints(copy) => Input::from(Elements::from(copy)),
            Copied::Floats(copy) => Input::from(Elements::from(copy)),
        }
    }
}

/// A copy of the elements at some positions; other elements are not read, and 0 in the copy.
///
/// # Safety
/// The elements at these positions, all below `elements`, lie from `start` on, which is aligned.
unsafe fn copied<T: Copy + Default>(
    elements: usize,
    start: NonNull<u8>,
    positions: impl IntoIterator<Item = usize>,
) -> Vec<T> {
    let mut copy = vec![T::default(); elements];
    if elements > 0 {
        for at in positions {
            // SAFETY: an element of the operand. `T` is a type of numbers, of which every bit pattern is
            // valid.
            copy[at] = unsafe { start.cast::<T>().add(at).read() };
        }
    }
    copy
}
