//! Judges a run: what it wrote and kept, and its outputs against the references.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use emu::{Buffer, EmuError, Options};
use judge::gradients::GradientReferences;
use judge::outputs::{ErrorFigures, References, written_between};
use judge::values::{Inputs, Values};
use kernels::BufferKind;
use problem::{Operand, Problem, ProblemError};
use ptx::Access;

use super::CheckReport;
use super::feed::Feed;
use super::kept;
use super::quantised::distance;
use super::rows::OutputRows;
use crate::launchfile::{Bound, Init, Memory, Role};
use crate::reference::ReferenceError;

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The launch contract does not fit the kernel.
    #[error("the kernel cannot be launched: {0}")]
    Launch(EmuError),
    #[error("the oracle rejects the problem: {0}")]
    Oracle(#[from] ProblemError),
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    #[error("{0}")]
    Other(String),
}

/// One run of all kernels of a program, up to the first one with a hazard that fails the check.
pub(super) struct RunOutcome<'a> {
    pub bound: &'a Bound,
    pub feed: &'a Feed,
    pub options: &'a Options,
    pub rows: &'a OutputRows,
    /// The bytes of the buffers before the run.
    pub before: &'a [Vec<u8>],
    /// The buffers after the run, and their bytes.
    pub buffers: &'a [Buffer],
    pub after: Vec<Vec<u8>>,
    /// Whether all kernels ran.
    pub complete: bool,
    /// Whether all kernels ran without an access outside their memory.
    pub whole: bool,
    /// The variables of the module that each kernel changed.
    pub changed: Vec<Vec<String>>,
}

impl RunOutcome<'_> {
    /// Judges what the run wrote and kept, and its outputs.
    ///
    /// # Errors
    /// When the oracle or a reference rejects the problem.
    pub(super) fn judge(&self, check: &mut CheckReport) -> Result<(), GateError> {
        self.judge_memory(check);
        self.judge_outputs(check)
    }

    /// Judges what the run wrote and kept, apart from the values of the outputs.
    fn judge_memory(&self, check: &mut CheckReport) {
        let RunOutcome { bound, complete, .. } = *self;
        let count = bound.steps().count();
        for (number, changed) in (1..count).zip(&self.changed) {
            if !changed.is_empty() {
                let names = ptx::quote::list(changed);
                check.leave_incomplete(format!(
                    "launch {number} of {count} changes {names}, and variables of a module start anew in each launch \
                     here; use a buffer"
                ));
            }
        }
        if complete && count > 1 {
            check_written(bound, &self.rows.must_write, self.buffers, check);
        }
        for ((spec, role), buffer) in bound.kernel.buffers.iter().zip(&bound.roles).zip(self.buffers) {
            if complete
                && matches!(role, Role::Fill(Memory { init: Init::Uninitialised, .. }))
                && buffer.is_uninitialised()
            {
                check.warn(format!("a run wrote nothing to the uninitialised buffer {}", spec.name));
            }
        }
        check_inputs_kept(bound, self.before, &self.after, check);
        if bound.problem.is_some() {
            // State that one launch leaves for the next may be a cached output.
            for name in self.changed.iter().flatten() {
                check.fail(format!("the kernel keeps something in {name} from one launch to the next"));
            }
        }
    }

    /// Compares the outputs with their references. A wrong output that follows from an access outside its
    /// memory, or from a kernel that was not run after a failed one, is not reported again.
    fn judge_outputs(&self, check: &mut CheckReport) -> Result<(), GateError> {
        let RunOutcome { bound, feed, options, whole, .. } = *self;
        let some_ctas = options.only.is_some();
        if whole {
            judge_references(bound, feed, options, self.before, self.buffers, check)?;
        }
        let rows = if some_ctas { self.written_rows() } else { None };
        if let Some((_, in_part @ 1..)) = rows {
            check.warn(format!(
                "the CTAs that ran wrote a part of {in_part} rows of the output, which were not judged"
            ));
        }
        let rows = rows.as_ref().map(|(rows, _)| rows.as_slice());
        if whole && let Some(references) = feed.references_of(bound, rows)? {
            feed.check_outputs(bound, self.rows, &references, &self.after, rows, check);
        }
        if check.quantisation.is_none() && !some_ctas {
            check.quantisation = feed.quantisation(bound)?;
        }
        Ok(())
    }

    /// The rows that a run of some CTAs wrote completely, in the order of the LSE, and the number of rows
    /// that it wrote in part. `None` when the kernel has no output of a problem.
    fn written_rows(&self) -> Option<(Vec<bool>, usize)> {
        let RunOutcome { bound, rows, buffers, .. } = self;
        let problem = bound.problem.as_ref()?;
        let buffer = |wanted: Role| bound.roles.iter().position(|&r| r == wanted).map(|i| &buffers[i]);
        let (out, lse) = (buffer(Role::Operand(Operand::OUT))?, buffer(Role::Operand(Operand::Lse)));
        let (size, mut whole, mut in_part) = (problem.dtypes.out.bytes(), vec![false; problem.lse_len()], 0);
        let places = rows.dense.iter().zip(&rows.lse);
        for (range, (&row, &place)) in rows.elements[Operand::OUT].iter().zip(places) {
            let bytes = range.start * size..range.end * size;
            let missing = out.missing(bytes.clone()).map_or(0, |(_, count)| count);
            let has_lse = lse.is_none_or(|lse| lse.missing(4 * place..4 * place + 4).is_none());
            whole[row] = missing == 0 && has_lse;
            in_part += usize::from(!whole[row] && missing < bytes.len());
        }
        Some((whole, in_part))
    }
}

/// Checks that several launches together wrote their outputs completely. The emulator checks an output that
/// one kernel alone must write.
fn check_written(
    bound: &Bound,
    must_write: &HashMap<usize, Vec<Range<usize>>>,
    buffers: &[Buffer],
    check: &mut CheckReport,
) {
    let alone = |index: usize| bound.steps().any(|kernel| kernel.buffers[index].access == Access::Write);
    for (&index, ranges) in must_write {
        if alone(index) || bound.memory(index).is_some() {
            continue;
        }
        let missing = ranges.iter().filter_map(|range| buffers[index].missing(range.clone()));
        let bytes: usize = missing.map(|(_, bytes)| bytes).sum();
        if bytes > 0 {
            let name = &bound.kernel.buffers[index].name;
            check.fail(format!("{bytes} bytes of {name} were never written"));
        }
    }
}

/// Compares outputs with their references.
fn judge_references(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    before: &[Vec<u8>],
    after: &[Buffer],
    check: &mut CheckReport,
) -> Result<(), GateError> {
    for reference in &bound.references {
        let (buffer, memory) = (&after[reference.output], reference.memory);
        let size = memory.dtype.bytes();
        if memory.init == Init::Uninitialised && options.only.is_none() {
            let unwritten = |place: &usize| buffer.missing(place * size..(place + 1) * size).is_some();
            let (view, elements) = (memory.shaped(), memory.shaped().len());
            let missing = view.places().filter(unwritten).count();
            if missing > 0 {
                check.fail(format!(
                    "{missing} of {elements} elements of {} were never written",
                    reference.name
                ));
                continue;
            }
        }
        // A run of some CTAs is judged on the elements that it wrote. If the output had other contents
        // before, on the elements that it changed.
        let contents = buffer.to_bytes();
        let is_judged = |place: usize| {
            let bytes = place * size..(place + 1) * size;
            options.only.is_none()
                || match memory.init {
                    Init::Uninitialised => buffer.missing(bytes).is_none(),
                    _ => contents.get(bytes.clone()) != before[reference.output].get(bytes),
                }
        };
        match reference.expect(before, || feed.buffers(bound), options) {
            Ok(expected) => {
                let judgement = reference.judge(&expected, &contents, is_judged);
                if judgement.elements > 0 || options.only.is_none() {
                    check.judge(judgement);
                }
            }
            Err(error @ ReferenceError::Kernel { .. }) => check.leave_incomplete(error.to_string()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl Feed {
    /// The inputs for the reference: for a quantised kernel, the values that the codes represent.
    fn judged(&self) -> Option<&Inputs> {
        self.codes.as_ref().map(|codes| &codes.decoded).or(self.drawn.as_deref())
    }

    /// The expected outputs; `None` when the kernel has no problem.
    ///
    /// # Errors
    /// When the oracle rejects the problem.
    pub fn references(&self, bound: &Bound) -> Result<Option<Arc<References>>, ProblemError> {
        self.references_of(bound, None)
    }

    /// Like [`Feed::references`]; with `wanted`, only for the rows whose element is set, in the order of the
    /// LSE.
    fn references_of(
        &self,
        bound: &Bound,
        wanted: Option<&[bool]>,
    ) -> Result<Option<Arc<References>>, ProblemError> {
        let Some((problem, inputs)) = bound.problem.as_ref().zip(self.judged()) else { return Ok(None) };
        if let (None, None, Some(drawn)) = (wanted, &self.codes, &self.drawn) {
            return kept::references(problem, drawn).map(Some);
        }
        let references = References::of_rows(problem, inputs, wanted)?;
        Ok(Some(Arc::new(references.of_gpu(problem))))
    }

    /// The oracle's gradients.
    #[cfg(test)]
    pub(super) fn gradients(&self, problem: &Problem) -> problem::OperandMap<Vec<f64>> {
        let inputs = self.drawn.as_ref().expect("a kernel with a problem has inputs");
        oracle::gradients(problem, &inputs.elements()).expect("the problem is valid").values
    }

    /// The error that quantising the inputs causes; `None` for inputs that are not quantised.
    fn quantisation(&self, bound: &Bound) -> Result<Option<f64>, ProblemError> {
        let (Some(problem), Some(drawn), Some(codes)) = (&bound.problem, &self.drawn, &self.codes) else {
            return Ok(None);
        };
        Ok(Some(distance(&codes.decoded.oracle(problem)?.out, &drawn.oracle(problem)?.out)))
    }

    /// The error figures of the outputs; `None` when the kernel has no output of a problem.
    pub fn judge(&self, bound: &Bound, references: &References, after: &[Vec<u8>]) -> Option<ErrorFigures> {
        let mut check = CheckReport::empty();
        self.check_outputs(bound, &self.rows(bound), references, after, None, &mut check);
        check.error
    }

    /// Compares the outputs with the references, which have the rows of `wanted` if that is given.
    pub(super) fn check_outputs(
        &self,
        bound: &Bound,
        rows: &OutputRows,
        references: &References,
        after: &[Vec<u8>],
        wanted: Option<&[bool]>,
        check: &mut CheckReport,
    ) {
        let Some(problem) = &bound.problem else { return };
        if let Some(gradients) = references.gradients() {
            return self.check_gradients((bound, problem), rows, gradients, after, check);
        }
        let contents = |wanted: Role| bound.roles.iter().position(|&r| r == wanted).map(|i| &after[i]);
        let Some(out) = contents(Role::Operand(Operand::OUT)) else {
            return check.leave_incomplete("nothing was judged: the kernel has no `out`".to_owned());
        };
        let lse = contents(Role::Operand(Operand::Lse));
        if problem.pass.lse() && lse.is_none() {
            return check.leave_incomplete("nothing was judged: the kernel has no `lse`".to_owned());
        }
        let is_wanted = |&row: &usize| wanted.is_none_or(|wanted| wanted[row]);
        let judged: Vec<bool> = rows.dense.iter().map(is_wanted).collect();
        if let Some(bytes) = lse.filter(|_| !problem.lengths.is_even()) {
            let rows: Vec<_> = rows.lse.iter().map(|&row| row..row + 1).collect();
            check_gaps("lse", bytes, &rows, 4, check);
        }
        let lse = lse.map(|bytes| {
            let values = Values::from_bytes(problem::DType::F32, bytes);
            let at = |(&row, _): (&usize, &bool)| values.get(row).map_or(f64::NAN, f64::from);
            rows.lse.iter().zip(&judged).filter(|(_, judged)| **judged).map(at).collect::<Vec<f64>>()
        });
        let elements = &rows.elements[Operand::OUT];
        check_gaps("out", out, elements, problem.dtypes.out.bytes(), check);
        // With nothing to judge, all figures would be 0.
        if !judged.is_empty() && !judged.contains(&true) {
            return;
        }
        let values = Values::from_bytes(problem.dtypes.out, out);
        let elements = elements.iter().zip(judged).filter(|(_, judged)| *judged);
        let dense: Vec<f64> = elements.flat_map(|(row, _)| values.wide(row.clone())).collect();
        let figures = references.judge(&dense, lse.as_deref());
        for reason in figures.reasons() {
            check.fail(format!("wrong answer on {} inputs: {reason}", self.style.name()));
        }
        check.error = Some(check.error.map_or(figures, |worst| worst.worst(figures)));
    }

    /// Compares all gradients with the references.
    fn check_gradients(
        &self,
        (bound, problem): (&Bound, &Problem),
        rows: &OutputRows,
        references: &GradientReferences,
        after: &[Vec<u8>],
        check: &mut CheckReport,
    ) {
        for operand in references.operands() {
            let name = operand.name();
            let Some(index) = bound.roles.iter().position(|&role| role == Role::Operand(operand)) else {
                return check.leave_incomplete(format!("nothing was judged: the kernel has no `{name}`"));
            };
            let dense: Vec<f64> = match operand {
                Operand::Tensor(tensor) => {
                    let (rows, dtype) = (&rows.elements[operand], problem.dtypes.of(tensor));
                    check_gaps(name, &after[index], rows, dtype.bytes(), check);
                    let values = Values::from_bytes(dtype, &after[index]);
                    rows.iter().flat_map(|row| values.wide(row.clone())).collect()
                }
                _ => {
                    let values = Values::from_bytes(problem::DType::F32, &after[index]);
                    values.wide(0..values.len())
                }
            };
            let Some(figures) = references.judge(operand, &dense) else { continue };
            for reason in figures.reasons() {
                check.fail(format!("wrong {name} on {} inputs: {reason}", self.style.name()));
            }
            check.error = Some(check.error.map_or(figures, |worst| worst.worst(figures)));
        }
    }
}

/// Checks that the kernel left its inputs unchanged and its counter ready for the next launch.
pub(super) fn check_inputs_kept(
    bound: &Bound,
    before: &[Vec<u8>],
    after: &[Vec<u8>],
    check: &mut CheckReport,
) {
    let specs = bound.kernel.buffers.iter().zip(&bound.roles);
    for ((spec, role), (before, after)) in specs.zip(before.iter().zip(after)) {
        let input = match role {
            Role::Operand(_) => !bound.is_output(*role),
            Role::Codes(_) | Role::Scales => true,
            Role::Internal(_) | Role::Fill(_) | Role::Words(_) => false,
        };
        if *role == Role::Internal(BufferKind::Counter) && before != after {
            check.fail(format!("the kernel left its {} at another value than 0", spec.name));
        }
        if input && before != after {
            check.fail(format!("the kernel changed its input {}", spec.name));
        }
    }
}

/// Checks that the gaps between rows still hold the initial pattern.
fn check_gaps(name: &str, out: &[u8], rows: &[Range<usize>], bytes: usize, check: &mut CheckReport) {
    if let Some(at) = written_between(out, rows, bytes) {
        check.fail(format!("byte {at} of {name} lies between output rows and was written"));
    }
}
