//! The inputs of one run and the checks of its outputs, independent of the machine that ran it.

use std::ops::Range;

use emu::Buffer;
use judge::gradients::GradientReferences;
use judge::inputs::{Style, draw, rows_of};
use judge::outputs::{ErrorFigures, References, dense_rows};
use judge::values::{Inputs, Values};
use kernels::BufferKind;
use problem::{Layout, Operand, Problem, ProblemError, Sequence, Tensor};
use ptx::BufferSpec;

use super::CheckReport;
use super::quantised::{Codes, distance, encode};
use crate::launchfile::{Bound, Memory, Role, fill};

/// The buffers before a run on normal draws. Outputs hold a NaN pattern.
pub fn contents(bound: &Bound, seed: u64) -> Vec<Vec<u8>> {
    let feed = Feed::draw(bound, Style::Normal, seed);
    feed.map_or_else(Vec::new, |feed| feed.buffers(bound).iter().map(Buffer::to_bytes).collect())
}

/// The inputs of one run: their style, their seed and, for quantised kernels, their codes.
pub struct Feed {
    style: Style,
    seed: u64,
    drawn: Option<Inputs>,
    codes: Option<Codes>,
}

impl Feed {
    /// Draws inputs. `None` if the kernel cannot take the style: quantised codes can represent neither NaN
    /// nor infinity.
    pub fn draw(bound: &Bound, style: Style, seed: u64) -> Option<Feed> {
        let quantises = bound.roles.contains(&Role::Scales);
        if quantises && !style.is_finite() {
            return None;
        }
        let drawn = bound.problem.as_ref().map(|problem| draw(problem, style, seed));
        let codes = bound.problem.as_ref().zip(drawn.as_ref()).filter(|_| quantises);
        let codes = codes.map(|(problem, drawn)| encode(problem, drawn));
        Some(Feed { style, seed, drawn, codes })
    }

    /// Wraps normal draws that were made elsewhere. They have the layout of the kernel's problem.
    pub fn of(inputs: Inputs) -> Feed {
        Feed { style: Style::Normal, seed: 0, drawn: Some(inputs), codes: None }
    }

    /// The rows of each batch entry; empty when the kernel has no problem.
    pub(super) fn sequences(&self, bound: &Bound) -> Vec<Sequence> {
        let drawn = bound.problem.as_ref().zip(self.drawn.as_ref());
        drawn.map_or_else(Vec::new, |(problem, inputs)| inputs.sequences(problem))
    }

    /// The inputs for the reference: for a quantised kernel, the values that the codes represent.
    fn judged(&self) -> Option<&Inputs> {
        self.codes.as_ref().map(|codes| &codes.decoded).or(self.drawn.as_ref())
    }

    /// The expected outputs; `None` when the kernel has no problem.
    ///
    /// # Errors
    /// When the oracle rejects the problem.
    pub fn references(&self, bound: &Bound) -> Result<Option<References>, ProblemError> {
        self.references_of(bound, None)
    }

    /// Like [`Feed::references`]; with `wanted`, only for the rows whose element is set, in the order of the
    /// LSE.
    pub(super) fn references_of(
        &self,
        bound: &Bound,
        wanted: Option<&[bool]>,
    ) -> Result<Option<References>, ProblemError> {
        let Some((problem, inputs)) = bound.problem.as_ref().zip(self.judged()) else { return Ok(None) };
        let references = References::of_rows(problem, inputs, wanted)?;
        Ok(Some(references.of_gpu(problem)))
    }

    /// The rows that a run of some CTAs wrote completely, in the order of the LSE, and the number of rows
    /// that it wrote in part. `None` when the kernel has no output of a problem.
    pub(super) fn written_rows(&self, bound: &Bound, buffers: &[Buffer]) -> Option<(Vec<bool>, usize)> {
        let problem = bound.problem.as_ref()?;
        let buffer = |wanted: Role| bound.roles.iter().position(|&r| r == wanted).map(|i| &buffers[i]);
        let (out, lse) = (buffer(Role::Operand(Operand::OUT))?, buffer(Role::Operand(Operand::Lse)));
        let sequences = self.sequences(bound);
        let (size, mut whole, mut in_part) = (problem.dtypes.out.bytes(), vec![false; problem.lse_len()], 0);
        let places = dense_rows(problem, &sequences).into_iter().zip(lse_rows(bound, problem, &sequences));
        for (range, (row, place)) in row_ranges(problem, Tensor::Out, &sequences).into_iter().zip(places) {
            let bytes = range.start * size..range.end * size;
            let missing = out.missing(bytes.clone()).map_or(0, |(_, count)| count);
            let has_lse = lse.is_none_or(|lse| lse.missing(4 * place..4 * place + 4).is_none());
            whole[row] = missing == 0 && has_lse;
            in_part += usize::from(!whole[row] && missing < bytes.len());
        }
        Some((whole, in_part))
    }

    /// The oracle's gradients.
    #[cfg(test)]
    pub(super) fn gradients(&self, problem: &Problem) -> problem::OperandMap<Vec<f64>> {
        let inputs = self.drawn.as_ref().expect("a kernel with a problem has inputs");
        oracle::gradients(problem, &inputs.elements()).expect("the problem is valid").values
    }

    /// The error that quantising the inputs causes; `None` for inputs that are not quantised.
    pub(super) fn quantisation(&self, bound: &Bound) -> Result<Option<f64>, ProblemError> {
        let (Some(problem), Some(drawn), Some(codes)) = (&bound.problem, &self.drawn, &self.codes) else {
            return Ok(None);
        };
        Ok(Some(distance(&codes.decoded.oracle(problem)?.out, &drawn.oracle(problem)?.out)))
    }

    /// The buffers before the run. Outputs hold a NaN pattern.
    pub fn buffers(&self, bound: &Bound) -> Vec<Buffer> {
        let (inputs, codes) = (self.drawn.as_ref(), self.codes.as_ref());
        let specs = bound.kernel.buffers.iter().zip(&bound.roles).enumerate();
        let contents = |(index, (spec, role)): (usize, (&BufferSpec, &Role))| match *role {
            Role::Operand(operand) => match inputs.and_then(|inputs| inputs.operands.get(operand)) {
                Some(values) => Buffer::from_bytes(&values.to_bytes()),
                None => match bound.memory(index) {
                    Some(memory) => self.filled(bound, index, &memory),
                    None => Buffer::uninitialised(spec.bytes),
                },
            },
            Role::Fill(ref memory) => self.filled(bound, index, memory),
            Role::Words(words) => {
                let words = bound.words.get(words).map_or(&[][..], Vec::as_slice);
                Buffer::from_bytes(&words.iter().flat_map(emu::argument_bytes).collect::<Vec<u8>>())
            }
            Role::Codes(tensor) => codes
                .and_then(|codes| codes.codes.get(tensor.into()))
                .map_or_else(|| Buffer::uninitialised(spec.bytes), |codes| Buffer::from_bytes(codes)),
            Role::Scales => {
                let scales = codes.iter().flat_map(|c| &c.scales).flat_map(|x| x.to_le_bytes());
                Buffer::from_bytes(&scales.collect::<Vec<u8>>())
            }
            Role::Internal(BufferKind::Counter) => Buffer::from_bytes(&vec![0; spec.bytes]),
            Role::Internal(_) => Buffer::uninitialised(spec.bytes),
        };
        specs.map(contents).collect()
    }

    fn filled(&self, bound: &Bound, index: usize, memory: &Memory) -> Buffer {
        let bytes = bound.kernel.buffers[index].bytes;
        match fill(memory, self.seed.wrapping_add(index as u64), &bound.data) {
            Some(contents) => Buffer::from_bytes(&contents),
            None => Buffer::uninitialised(bytes),
        }
    }

    /// The error figures of the outputs; `None` when the kernel has no output of a problem.
    pub fn judge(&self, bound: &Bound, references: &References, after: &[Vec<u8>]) -> Option<ErrorFigures> {
        let mut check = CheckReport::empty();
        self.check_outputs(bound, references, after, None, &mut check);
        check.error
    }

    /// Checks that the kernel left its inputs unchanged and its counter ready for the next launch.
    pub(super) fn check_inputs_kept(
        &self,
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

    /// Compares the outputs with the references, which have the rows of `wanted` if that is given.
    pub(super) fn check_outputs(
        &self,
        bound: &Bound,
        references: &References,
        after: &[Vec<u8>],
        wanted: Option<&[bool]>,
        check: &mut CheckReport,
    ) {
        let Some(problem) = &bound.problem else { return };
        if let Some(gradients) = references.gradients() {
            return self.check_gradients(bound, problem, gradients, after, check);
        }
        let contents = |wanted: Role| bound.roles.iter().position(|&r| r == wanted).map(|i| &after[i]);
        let Some(out) = contents(Role::Operand(Operand::OUT)) else {
            return check.leave_incomplete("nothing was judged: the kernel has no `out`".to_owned());
        };
        let lse = contents(Role::Operand(Operand::Lse));
        if problem.pass.lse() && lse.is_none() {
            return check.leave_incomplete("nothing was judged: the kernel has no `lse`".to_owned());
        }
        let sequences = self.sequences(bound);
        let lse_rows = lse_rows(bound, problem, &sequences);
        let is_wanted = |row: usize| wanted.is_none_or(|wanted| wanted[row]);
        let judged: Vec<bool> = dense_rows(problem, &sequences).into_iter().map(is_wanted).collect();
        if let Some(bytes) = lse.filter(|_| !problem.lengths.is_even()) {
            let rows: Vec<_> = lse_rows.iter().map(|&row| row..row + 1).collect();
            check_gaps("lse", bytes, &rows, 4, check);
        }
        let lse = lse.map(|bytes| {
            let values = Values::from_bytes(problem::DType::F32, bytes);
            let at = |(&row, _): (&usize, &bool)| values.get(row).map_or(f64::NAN, f64::from);
            lse_rows.iter().zip(&judged).filter(|(_, judged)| **judged).map(at).collect::<Vec<f64>>()
        });
        let rows = row_ranges(problem, Tensor::Out, &sequences);
        check_gaps("out", out, &rows, problem.dtypes.out.bytes(), check);
        // With nothing to judge, all figures would be 0.
        if !judged.is_empty() && !judged.contains(&true) {
            return;
        }
        let values = Values::from_bytes(problem.dtypes.out, out);
        let rows = rows.into_iter().zip(judged).filter(|(_, judged)| *judged);
        let dense: Vec<f64> = rows.flat_map(|(row, _)| wide(&values, row)).collect();
        let figures = references.judge(&dense, lse.as_deref());
        for reason in figures.reasons() {
            check.fail(format!("wrong answer on {} inputs: {reason}", self.style.name()));
        }
        check.error = Some(check.error.map_or(figures, |worst| worst.worst(figures)));
    }

    /// Compares all gradients with the references.
    fn check_gradients(
        &self,
        bound: &Bound,
        problem: &Problem,
        references: &GradientReferences,
        after: &[Vec<u8>],
        check: &mut CheckReport,
    ) {
        let sequences = self.sequences(bound);
        for operand in references.operands() {
            let name = operand.name();
            let Some(index) = bound.roles.iter().position(|&role| role == Role::Operand(operand)) else {
                return check.leave_incomplete(format!("nothing was judged: the kernel has no `{name}`"));
            };
            let dense: Vec<f64> = match operand {
                Operand::Tensor(tensor) => {
                    let (rows, dtype) = (row_ranges(problem, tensor, &sequences), problem.dtypes.of(tensor));
                    check_gaps(name, &after[index], &rows, dtype.bytes(), check);
                    let values = Values::from_bytes(dtype, &after[index]);
                    rows.into_iter().flat_map(|row| wide(&values, row)).collect()
                }
                _ => {
                    let values = Values::from_bytes(problem::DType::F32, &after[index]);
                    wide(&values, 0..values.len())
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

/// The index in the LSE of each row that belongs to a sequence, in the order batch entry, head, row.
pub(super) fn lse_rows(bound: &Bound, problem: &Problem, sequences: &[Sequence]) -> Vec<usize> {
    let [_, heads, rows, _] = problem.extents(Tensor::Out);
    let place = |row: usize| match bound.lse_layout {
        Layout::Bhsd => row,
        Layout::Bshd => {
            let (batch, head) = (row / rows / heads, row / rows % heads);
            (batch * rows + row % rows) * heads + head
        }
    };
    dense_rows(problem, sequences).into_iter().map(place).collect()
}

fn wide(values: &Values, range: Range<usize>) -> Vec<f64> {
    let range = range.start..range.end.min(values.len());
    range.filter_map(|i| values.get(i)).map(f64::from).collect()
}

/// The element range of each row of a tensor that belongs to a sequence, in the order (batch entry, head,
/// row).
pub(super) fn row_ranges(problem: &Problem, tensor: Tensor, sequences: &[Sequence]) -> Vec<Range<usize>> {
    let origin = problem.span(tensor).map_or(0, |(_, origin)| origin) as i64;
    let ([_, heads, _, dim], strides) = (problem.extents(tensor), problem.strides(tensor));
    rows_of(sequences, tensor, heads)
        .map(|(span, head, row)| {
            let start = (origin + strides.offset(span.batch, head, span.start + row)) as usize;
            start..start + dim
        })
        .collect()
}

/// Checks that the gaps between rows still hold the initial pattern.
fn check_gaps(name: &str, out: &[u8], rows: &[Range<usize>], bytes: usize, check: &mut CheckReport) {
    let mut covered = vec![false; out.len()];
    for row in rows {
        covered[row.start * bytes..row.end * bytes].fill(true);
    }
    let stray = out.iter().zip(&covered).position(|(&byte, &covered)| !covered && byte != 0xff);
    if let Some(at) = stray {
        check.fail(format!("byte {at} of {name} lies between output rows and was written"));
    }
}
