//! One run on any machine, a GPU above all, judged as the emulator's runs are. What the emulator sees of every access,
//! guards and poison show of the outcome: every buffer lies between two guards, and outputs start as a NaN pattern.

use cpu::CpuError;
use emu::Buffer;
use kernels::{Arch, KernelError, Plan};
use problem::{Problem, ProblemError};
use ptx::{Access, Arg, Kernel, Machine};

use super::feed::Feed;
use super::judge::{ErrorFigures, References};
use super::run::must_write;
use super::{CheckReport, Verdict};
use crate::launchfile::{Bound, Role};

/// Bytes of a guard: more than a tile's row, and a multiple of every alignment.
const GUARD: usize = 4096;
/// What guards hold; no pattern that a kernel would write by chance.
const GUARD_BYTE: u8 = 0xA5;

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Why it is wrong; empty when it is right.
    pub reasons: Vec<String>,
    /// How far from the oracle; `None` where there was nothing to judge.
    pub error: Option<ErrorFigures>,
    /// The buffers afterwards.
    pub after: Vec<Vec<u8>>,
}

impl Trial {
    /// Whether nothing is wrong.
    pub fn is_right(&self) -> bool {
        self.reasons.is_empty()
    }

    /// The bytes of the outputs, one after the other.
    pub fn outputs(&self, bound: &Bound) -> Vec<u8> {
        let written = bound.roles.iter().zip(&self.after).filter(|(role, _)| is_output(**role));
        written.flat_map(|(_, bytes)| bytes.iter().copied()).collect()
    }
}

/// Why there is no outcome.
#[derive(Debug, thiserror::Error)]
pub enum TrialError<E: std::error::Error> {
    /// The machine failed.
    #[error(transparent)]
    Machine(E),
    /// The oracle refused the problem.
    #[error("the oracle refuses the problem: {0}")]
    Oracle(#[from] CpuError),
}

/// The kernel of a plan, with the meaning of its buffers.
///
/// # Errors
/// When it cannot be made.
pub fn bind(plan: &Plan, problem: &Problem, arch: &Arch) -> Result<Bound, KernelError> {
    let kernel = kernels::emit(problem, plan, arch)?;
    // Every family names its buffers as `emit` promises.
    Bound::of_kernel(kernel, problem).map_err(|_| {
        let accepted = "q, k, v, out, lse, counter, q_codes, k_codes, v_codes, scales";
        ProblemError::UnknownName { what: "buffer of the kernel", value: plan.family().to_owned(), accepted }
            .into()
    })
}

/// Runs `bound` once on `feed`; `references` are those of the feed, made beforehand where several kernels share them.
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

/// What a run left, not yet looked at: a machine need not wait for that.
pub struct Launched {
    before: Vec<Vec<u8>>,
    after: Vec<Vec<u8>>,
    check: CheckReport,
}

/// The run of a [`trial`].
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
    let after = run_guarded(machine, &bound.kernel, &before, &mut check).map_err(TrialError::Machine)?;
    Ok(Launched { before, after, check })
}

impl Launched {
    /// The judgement of a [`trial`].
    pub fn check(self, bound: &Bound, feed: &Feed, references: Option<&References>) -> Trial {
        let Launched { before, after, mut check } = self;
        feed.check_inputs_kept(bound, &before, &after, &mut check);
        check_written(bound, &after, &mut check);
        if let Some(references) = references {
            feed.check_outputs(bound, references, &after, &mut check);
        }
        debug_assert_eq!(check.verdict == Verdict::Passed, check.reasons.is_empty());
        Trial { reasons: check.reasons, error: check.error, after }
    }
}

/// The buffers after a launch, without their guards.
fn run_guarded<M: Machine>(
    machine: &mut M,
    kernel: &Kernel,
    before: &[Vec<u8>],
    check: &mut CheckReport,
) -> Result<Vec<Vec<u8>>, M::Error> {
    let kernel = guarded(kernel);
    let mut buffers = Vec::with_capacity(before.len());
    for (spec, data) in kernel.buffers.iter().zip(before) {
        let mut bytes = vec![GUARD_BYTE; spec.bytes];
        bytes[GUARD..GUARD + data.len()].copy_from_slice(data);
        let mut buffer = machine.allocate(bytes.len())?;
        machine.upload(&mut buffer, &bytes)?;
        buffers.push(buffer);
    }
    machine.launch(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>())?;
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

/// The same kernel on buffers with a guard before and one behind.
fn guarded(kernel: &Kernel) -> Kernel {
    let mut kernel = kernel.clone();
    for buffer in &mut kernel.buffers {
        buffer.bytes += 2 * GUARD;
        // A kernel that is to write its buffer whole must not write the guards.
        if buffer.access == Access::Write {
            buffer.access = Access::ReadWrite;
        }
    }
    for arg in &mut kernel.args {
        if let Arg::Buffer { offset, .. } = arg {
            *offset += GUARD as u64;
        }
    }
    for map in &mut kernel.tensor_maps {
        map.offset += GUARD as u64;
    }
    kernel
}

const fn is_output(role: Role) -> bool {
    matches!(role, Role::Tensor(problem::Tensor::Out) | Role::Lse)
}

/// No element of an output may still be the pattern of ones that it began with: arithmetic's own NaN has another.
fn check_written(bound: &Bound, after: &[Vec<u8>], check: &mut CheckReport) {
    let rows = must_write(bound);
    for (index, (bytes, role)) in
        after.iter().zip(&bound.roles).enumerate().filter(|(_, (_, r))| is_output(**r))
    {
        let size = match (role, &bound.problem) {
            (Role::Tensor(_), Some(problem)) => problem.dtype.bytes(),
            _ => 4,
        };
        let whole = 0..bytes.len();
        let ranges = rows.get(&index).map_or(std::slice::from_ref(&whole), Vec::as_slice);
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
    use crate::gate::inputs::Style;

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
        trial(&mut emulator(), bound, &feed, references.as_ref()).unwrap().reasons
    }

    #[test]
    fn a_right_kernel_is_right() {
        assert_eq!(reasons(&fused()), [""; 0]);
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
        let out = bound.roles.iter().position(|r| is_output(*r)).unwrap();
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
