//! Checks one run on any machine, in particular on a GPU, with the same criteria as the emulator's runs. The
//! emulator sees every access; on other machines, guards and poison show the effects. Every buffer lies
//! between two guards, and outputs start as a NaN pattern.

use emu::Buffer;
use judge::outputs::{ErrorFigures, References};
use kernels::{Arch, KernelError, Plan};
use problem::{Operand, Problem, ProblemError};
use ptx::{Access, Arg, Kernel, Machine};

use super::feed::Feed;
use super::outcome::check_inputs_kept;
use super::rows::OutputRows;
use super::{CheckReport, Verdict};
use crate::launchfile::{Bound, Role};

/// Bytes of a guard: more than a tile's row, and a multiple of every alignment.
const GUARD: usize = 4096;
/// Contents of a guard: a byte value that a kernel is unlikely to write by chance.
const GUARD_BYTE: u8 = 0xA5;

/// The outcome of a run.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Why the run is wrong; empty when it is right.
    pub reasons: Vec<String>,
    /// The error against the oracle; `None` when there was nothing to judge.
    pub error: Option<ErrorFigures>,
    /// The buffers after the run.
    pub after: Vec<Vec<u8>>,
}

impl Trial {
    pub fn is_right(&self) -> bool {
        self.reasons.is_empty()
    }

    /// The concatenated bytes of the outputs.
    pub fn outputs(&self, bound: &Bound) -> Vec<u8> {
        let written = bound.roles.iter().zip(&self.after).filter(|(role, _)| bound.is_output(**role));
        written.flat_map(|(_, bytes)| bytes.iter().copied()).collect()
    }
}

/// Why there is no outcome.
#[derive(Debug, thiserror::Error)]
pub enum TrialError<E: std::error::Error> {
    #[error(transparent)]
    Machine(E),
    #[error("the oracle rejects the problem: {0}")]
    Oracle(#[from] ProblemError),
}

/// Emits the kernels of a plan and assigns roles to their buffers.
///
/// # Errors
/// When the kernel cannot be emitted.
pub fn bind(plan: &Plan, problem: &Problem, arch: &Arch) -> Result<Bound, KernelError> {
    Ok(Bound::of_program(kernels::emit(problem, plan, arch)?, problem))
}

/// Runs `bound` once on `feed`. `references` belong to the feed and are computed by the caller, so that
/// several kernels can share them.
///
/// # Errors
/// When the machine fails.
pub fn trial<M: Machine>(
    machine: &mut M,
    bound: &Bound,
    feed: &Feed,
    references: Option<&References>,
) -> Result<Trial, TrialError<M::Error>> {
    Ok(launch(machine, bound, feed)?.check(bound, feed, references))
}

/// The unchecked result of a run. Keeping it separate lets the machine continue without waiting for the
/// check.
pub struct Launched {
    before: Vec<Vec<u8>>,
    after: Vec<Vec<u8>>,
    check: CheckReport,
}

/// The first half of a [`trial`]: the run.
///
/// # Errors
/// When the machine fails.
pub fn launch<M: Machine>(
    machine: &mut M,
    bound: &Bound,
    feed: &Feed,
) -> Result<Launched, TrialError<M::Error>> {
    let before: Vec<Vec<u8>> = feed.buffers(bound).iter().map(Buffer::to_bytes).collect();
    let mut check = CheckReport::empty();
    let after = run_guarded(machine, bound, &before, &mut check).map_err(TrialError::Machine)?;
    Ok(Launched { before, after, check })
}

impl Launched {
    /// The second half of a [`trial`]: the check.
    pub fn check(self, bound: &Bound, feed: &Feed, references: Option<&References>) -> Trial {
        let Launched { before, after, mut check } = self;
        let rows = feed.rows(bound);
        check_inputs_kept(bound, &before, &after, &mut check);
        check_written(bound, &rows, &after, &mut check);
        if let Some(references) = references {
            feed.check_outputs(bound, &rows, references, &after, None, &mut check);
        }
        debug_assert_eq!(check.verdict == Verdict::Passed, check.reasons.is_empty());
        Trial { reasons: check.reasons, error: check.error, after }
    }
}

/// Runs the kernels with guards and returns the buffers without the guards.
fn run_guarded<M: Machine>(
    machine: &mut M,
    bound: &Bound,
    before: &[Vec<u8>],
    check: &mut CheckReport,
) -> Result<Vec<Vec<u8>>, M::Error> {
    let kernel = guarded(&bound.kernel);
    let mut buffers = Vec::with_capacity(before.len());
    for (spec, data) in kernel.buffers.iter().zip(before) {
        let mut bytes = vec![GUARD_BYTE; spec.bytes];
        bytes[GUARD..GUARD + data.len()].copy_from_slice(data);
        let mut buffer = machine.allocate(bytes.len())?;
        machine.upload(&mut buffer, &bytes)?;
        buffers.push(buffer);
    }
    machine.launch(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>())?;
    for kernel in &bound.then {
        machine.launch(&guarded(kernel), &mut buffers.iter_mut().collect::<Vec<_>>())?;
    }
    let mut after = Vec::with_capacity(before.len());
    for ((spec, data), buffer) in kernel.buffers.iter().zip(before).zip(&buffers) {
        let mut bytes = vec![0; spec.bytes];
        machine.download(buffer, &mut bytes)?;
        let whole = |guard: &[u8]| guard.iter().all(|&byte| byte == GUARD_BYTE);
        if !whole(&bytes[..GUARD]) || !whole(&bytes[GUARD + data.len()..]) {
            check.fail(format!("memory beside {} was written", spec.name));
        }
        after.push(bytes[GUARD..GUARD + data.len()].to_vec());
    }
    Ok(after)
}

/// The kernel with a guard before and after each buffer.
fn guarded(kernel: &Kernel) -> Kernel {
    let mut kernel = kernel.clone();
    for buffer in &mut kernel.buffers {
        buffer.bytes += 2 * GUARD;
        // A kernel that must write its whole buffer must still not write the guards.
        if buffer.access == Access::Write {
            buffer.access = Access::ReadWrite;
        }
    }
    kernel.args.iter_mut().for_each(skip_guard);
    for map in &mut kernel.tensor_maps {
        map.offset += GUARD as u64;
    }
    kernel
}

/// Moves the addresses in an argument behind the guard.
fn skip_guard(arg: &mut Arg) {
    match arg {
        Arg::Buffer { offset, .. } => *offset += GUARD as u64,
        Arg::Struct(value) => value.fields.iter_mut().for_each(|(_, field)| skip_guard(field)),
        _ => {}
    }
}

/// Checks that no output element still has the initial pattern of ones. Arithmetic produces a different NaN.
fn check_written(bound: &Bound, rows: &OutputRows, after: &[Vec<u8>], check: &mut CheckReport) {
    for (index, (bytes, role)) in
        after.iter().zip(&bound.roles).enumerate().filter(|(_, (_, r))| bound.is_output(**r))
    {
        let size = match (role, &bound.problem) {
            (Role::Operand(Operand::Tensor(tensor)), Some(problem)) => problem.dtypes.of(*tensor).bytes(),
            _ => 4,
        };
        let whole = 0..bytes.len();
        let ranges = rows.must_write.get(&index).map_or(std::slice::from_ref(&whole), Vec::as_slice);
        let elements = ranges.iter().flat_map(|range| bytes[range.clone()].chunks_exact(size));
        let unwritten = elements.filter(|element| element.iter().all(|&byte| byte == 0xff)).count();
        if unwritten > 0 {
            check.fail(format!(
                "{unwritten} elements of {} were never written",
                bound.kernel.buffers[index].name
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use emu::{Checks, Emulator, Options};
    use ptx::Dim3;

    use super::*;
    use judge::inputs::Style;

    fn emulator() -> Emulator {
        Emulator::new(Options {
            checks: Checks { races: false, uninitialised: false, unwritten: false },
            ..Options::default()
        })
    }

    fn fused() -> Bound {
        let (problem, arch) = (Problem::new(1, 2, 80, 64, problem::DType::F16), Arch::SM_80);
        bind(&Plan::default_for(&problem, &arch).unwrap(), &problem, &arch).unwrap()
    }

    fn reasons(bound: &Bound) -> Vec<String> {
        let feed = Feed::draw(bound, Style::Normal, 1).unwrap();
        let references = feed.references(bound).unwrap();
        trial(&mut emulator(), bound, &feed, references.as_deref()).unwrap().reasons
    }

    #[test]
    fn a_right_kernel_is_right() {
        assert_eq!(reasons(&fused()), [""; 0]);
    }

    /// A machine whose kernel writes the oracle's gradients, and `wrong` with another factor.
    struct GradientMachine<'a> {
        problem: &'a Problem,
        feed: &'a Feed,
        wrong: Option<Operand>,
    }

    impl Machine for GradientMachine<'_> {
        type Buffer = Vec<u8>;
        type Error = std::convert::Infallible;

        fn allocate(&mut self, bytes: usize) -> Result<Vec<u8>, Self::Error> {
            Ok(vec![0; bytes])
        }

        fn upload(&mut self, buffer: &mut Vec<u8>, data: &[u8]) -> Result<(), Self::Error> {
            buffer[..data.len()].copy_from_slice(data);
            Ok(())
        }

        fn launch(&mut self, kernel: &Kernel, buffers: &mut [&mut Vec<u8>]) -> Result<(), Self::Error> {
            let gradients = self.feed.gradients(self.problem);
            for (spec, buffer) in kernel.buffers.iter().zip(buffers) {
                let named = gradients.iter().find(|(operand, _)| operand.name() == spec.name);
                let Some((operand, values)) = named else { continue };
                let factor = if self.wrong == Some(operand) { 1.05 } else { 1.0 };
                for (element, x) in buffer[GUARD..].chunks_exact_mut(4).zip(values) {
                    element.copy_from_slice(&((x * factor) as f32).to_le_bytes());
                }
            }
            Ok(())
        }

        fn download(&mut self, buffer: &Vec<u8>, data: &mut [u8]) -> Result<(), Self::Error> {
            data.copy_from_slice(&buffer[..data.len()]);
            Ok(())
        }
    }

    /// The buffers of a backward pass: all inputs are drawn and kept, and each gradient is judged by itself.
    #[test]
    fn gradients_are_judged() {
        let mut problem = Problem::new(2, 4, 40, 32, problem::DType::F32);
        (problem.heads_kv, problem.score.sink) = (2, true);
        let wants = problem::Gradients { sinks: true, tables: 0 };
        let pass = problem::Pass::Backward { deterministic: false, d_lse: true, wants };
        let problem = problem.with_layout(problem::Layout::Bhsd).with_pass(pass);
        let mut kernel = fused().kernel;
        let buffer = |spec: problem::OperandSpec| ptx::BufferSpec {
            name: spec.operand.name().to_owned(),
            bytes: spec.bytes(),
            access: Access::ReadWrite,
        };
        kernel.buffers = problem.operands().map(buffer).collect();
        let roles = problem.operands().map(|spec| Role::Operand(spec.operand)).collect();
        let bound = Bound::of_kernel(kernel, roles, Some(problem.clone()));
        let feed = &Feed::draw(&bound, Style::Normal, 1).unwrap();
        let references = feed.references(&bound).unwrap();
        let outputs = problem.outputs().map(|spec| Some(spec.operand));
        for wrong in outputs.chain([None]) {
            let mut machine = GradientMachine { problem: &problem, feed, wrong };
            let reasons = trial(&mut machine, &bound, feed, references.as_deref()).unwrap().reasons;
            match wrong {
                None => assert_eq!(reasons, [""; 0]),
                Some(operand) => assert!(
                    !reasons.is_empty()
                        && reasons
                            .iter()
                            .all(|reason| reason.starts_with(&format!("wrong {operand} on normal"))),
                    "{operand}: {reasons:?}"
                ),
            }
        }
    }

    #[test]
    fn rows_left_out_are_found() {
        let mut bound = fused();
        bound.kernel.launch.grid = Dim3(1, 1, 1);
        let reasons = reasons(&bound);
        assert!(reasons.iter().any(|r| r.contains("never written")), "{reasons:?}");
    }

    #[test]
    fn writes_beside_a_buffer_are_found() {
        let mut bound = fused();
        let out = bound.roles.iter().position(|r| bound.is_output(*r)).unwrap();
        for arg in &mut bound.kernel.args {
            if let Arg::Buffer { index, offset } = arg
                && *index == out
            {
                *offset += 16;
            }
        }
        let reasons = reasons(&bound);
        assert!(reasons.iter().any(|r| r.contains("beside out")), "{reasons:?}");
    }
}
