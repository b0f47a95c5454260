//! Tolerances, and the comparison of an output with its expected elements.

use serde::Serialize;

use super::Tolerance;
use super::builtin::Element;
use crate::launchfile::BufferType;
use crate::numbers::Number;

/// Number of roundings of the accumulator's type that a built-in's magnitude allows. Approximate instructions
/// (`ex2.approx`, `rsqrt.approx`) have errors of two units in the last place.
const ROUNDINGS: f64 = 8.0;

/// From here on, f64 does not have every integer: 2^53.
const INEXACT: f64 = 9_007_199_254_740_992.0;

/// The expected elements of an output, with the error that each may have.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    dtype: BufferType,
    values: Vec<Number>,
    allowed: Vec<f64>,
}

impl Expected {
    /// Elements with the magnitudes to which errors are proportional. The output may have an error of two
    /// roundings of its type, plus [`ROUNDINGS`] roundings of the accumulator's type (`accumulator`: its unit
    /// roundoff) on the magnitude. Integers from 2^53 on were rounded to f64 and are compared as f64.
    pub(super) fn of_magnitudes(
        dtype: BufferType,
        elements: &[Element],
        accumulator: f64,
        tolerance: Tolerance,
    ) -> Expected {
        let u = dtype.unit_roundoff();
        let model = |&(value, size): &Element| {
            2.0 * u * value.abs() + ROUNDINGS * accumulator * size + smallest_step(dtype)
        };
        let allowed =
            elements.iter().map(|element| allowed(tolerance, element.0, || model(element))).collect();
        let number = |&(value, _): &Element| match Number::Real(value) {
            number if value.abs() < INEXACT => number.in_type(dtype),
            number => number,
        };
        Expected { dtype, values: elements.iter().map(number).collect(), allowed }
    }

    /// Elements that another implementation rounded, whose magnitudes are unknown. The tolerance is a number
    /// of roundings of the output's type on the element and on the root mean square of all elements: 64 for
    /// f32 and f64, which sums of some thousand terms need, 4 for 16-bit types, whose sums are in f32, and 2
    /// for 8-bit types.
    pub(super) fn of_values(dtype: BufferType, values: Vec<Number>, tolerance: Tolerance) -> Expected {
        let roundings = match dtype.bytes() {
            1 => 2.0,
            2 => 4.0,
            _ => 64.0,
        };
        let finite = || values.iter().map(|x| x.value()).filter(|x| x.is_finite());
        let mean = (finite().map(|x| x * x).sum::<f64>() / finite().count().max(1) as f64).sqrt();
        let part = roundings * dtype.unit_roundoff();
        let allowed = values
            .iter()
            .map(|x| x.value())
            .map(|x| allowed(tolerance, x, || part * (x.abs() + mean) + smallest_step(dtype)))
            .collect();
        Expected { dtype, values: values.into_iter().map(|x| x.in_type(dtype)).collect(), allowed }
    }

    /// Compares the elements that were found. An element that is `None` is not judged.
    pub(super) fn judge(
        &self,
        output: &str,
        by: &str,
        found: impl Iterator<Item = Option<Number>>,
        shape: &[usize],
    ) -> Judgement {
        let mut judgement = Judgement {
            output: output.to_owned(),
            by: by.to_owned(),
            elements: 0,
            wrong: 0,
            error: 0.0,
            allowed: 0.0,
            worst: None,
        };
        let mut excess = -1.0;
        for (at, ((&wanted, &allowed), found)) in self.values.iter().zip(&self.allowed).zip(found).enumerate()
        {
            let Some(found) = found else { continue };
            let error = self.error(found, wanted);
            judgement.elements += 1;
            // An exact element is neither above nor below its tolerance.
            let ratio = if error == 0.0 { 0.0 } else { error / allowed.max(f64::MIN_POSITIVE) };
            judgement.wrong += usize::from(error > allowed);
            if ratio > excess || ratio.is_nan() && !f64::is_nan(excess) {
                (excess, judgement.error, judgement.allowed) = (ratio, error, allowed);
                judgement.worst = Some(Worst { index: index_of(at, shape), found, wanted });
            }
        }
        judgement
    }

    /// The distance of two elements. That of integers is computed exactly. The distance is 0 if both are NaN
    /// or both are the same infinity, and infinite if only one is. A number beyond the type's range counts as
    /// infinity.
    fn error(&self, found: Number, wanted: Number) -> f64 {
        if let (Number::Integer(found), Number::Integer(wanted)) = (found, wanted) {
            return found.abs_diff(wanted) as f64;
        }
        let (found, wanted) = (found.value(), wanted.value());
        let rounded =
            if self.dtype.is_float() { self.dtype.decode(&self.dtype.encode(wanted)) } else { wanted };
        if found == wanted || found == rounded || found.is_nan() && wanted.is_nan() {
            return 0.0;
        }
        let error = (found - wanted).abs();
        if error.is_nan() { f64::INFINITY } else { error }
    }
}

/// The stated tolerance or, without one, the model's.
fn allowed(tolerance: Tolerance, value: f64, model: impl Fn() -> f64) -> f64 {
    let allowed = match (tolerance.atol, tolerance.rtol) {
        (None, None) => model(),
        (atol, rtol) => atol.unwrap_or(0.0) + rtol.unwrap_or(0.0) * value.abs(),
    };
    if allowed.is_finite() { allowed } else { 0.0 }
}

/// The distance of neighbouring numbers near 0, to which small results are rounded.
const fn smallest_step(dtype: BufferType) -> f64 {
    match dtype {
        BufferType::E4m3 => 0.001_953_125,
        BufferType::E5m2 => 1.525_878_906_25e-5,
        BufferType::F16 => 5.960_464_477_539_063e-8,
        // GPUs may flush subnormal numbers, and the steps of f64 are below any error.
        BufferType::Bf16 | BufferType::F32 => f32::MIN_POSITIVE as f64,
        _ => 0.0,
    }
}

/// The index of an element of an array with this shape.
fn index_of(at: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = at;
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&extent| {
            let i = rest % extent;
            rest /= extent;
            i
        })
        .collect();
    index.reverse();
    index
}

/// The result of comparing an output with its expected elements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judgement {
    /// The name of the argument.
    pub output: String,
    /// The reference that judged the output, in words.
    pub by: String,
    pub elements: usize,
    /// Number of elements beyond their tolerance.
    pub wrong: usize,
    /// The error of the element that is worst relative to its tolerance, and that tolerance.
    pub error: f64,
    pub allowed: f64,
    pub worst: Option<Worst>,
}

/// The element that is worst relative to its tolerance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    pub index: Vec<usize>,
    pub found: Number,
    pub wanted: Number,
}

impl Judgement {
    /// Why the output is wrong; `None` when it is right.
    pub fn reason(&self) -> Option<String> {
        let worst = self.worst.as_ref().filter(|_| self.wrong > 0)?;
        let index = worst.index.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let (wrong, elements) = (self.wrong, self.elements);
        Some(format!(
            "wrong answer in {}: {wrong} of {elements} elements; [{index}] is {}, {} says {} with an error of at most \
             {:.1e}",
            self.output, worst.found, self.by, worst.wanted, self.allowed
        ))
    }

    /// The worse of two runs.
    pub fn worst(self, other: Judgement) -> Judgement {
        let excess =
            |j: &Judgement| if j.error == 0.0 { 0.0 } else { j.error / j.allowed.max(f64::MIN_POSITIVE) };
        if excess(&other) > excess(&self) || other.wrong > self.wrong { other } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(dtype: BufferType, wanted: &[f64], found: &[f64], tolerance: Tolerance) -> Judgement {
        let [wanted, found] =
            [wanted, found].map(|values| values.iter().map(|&x| Number::Real(x).in_type(dtype)).collect());
        compare(dtype, wanted, found, tolerance)
    }

    fn compare(
        dtype: BufferType,
        wanted: Vec<Number>,
        found: Vec<Number>,
        tolerance: Tolerance,
    ) -> Judgement {
        let shape = [wanted.len()];
        let expected = Expected::of_values(dtype, wanted, tolerance);
        expected.judge("y", "the file y.npy", found.into_iter().map(Some), &shape)
    }

    #[test]
    fn integers_are_compared_exactly() {
        let none = Tolerance::default();
        let big = 1i128 << 60;
        let integers = |dtype, wanted, found, tolerance| {
            compare(dtype, vec![Number::Integer(wanted)], vec![Number::Integer(found)], tolerance)
        };
        for (dtype, sign) in [(BufferType::U64, 1), (BufferType::I64, -1)] {
            assert_eq!(integers(dtype, sign * big, sign * big, none).wrong, 0);
            let wrong = integers(dtype, sign * big, sign * (big + 1), none);
            assert_eq!((wrong.wrong, wrong.error), (1, 1.0));
            let reason = wrong.reason().unwrap();
            assert!(reason.contains(&format!("[0] is {}, the file", sign * (big + 1))), "{reason}");
            serde_json::to_value(&wrong).unwrap();
            let wide = Tolerance { atol: Some(1.0), rtol: None };
            assert_eq!(integers(dtype, sign * big, sign * (big + 1), wide).wrong, 0);
        }
        // A function may return floats for integers.
        let real =
            compare(BufferType::U64, vec![Number::Real(big as f64)], vec![Number::Integer(big + 1)], none);
        assert_eq!(real.wrong, 1);
        // A built-in computes in f64, which has no 2^60 + 1.
        for (wanted, found, wrong) in [(big as f64, big + 1, 0), (7.0, 7, 0), (7.0, 8, 1)] {
            let expected = Expected::of_magnitudes(BufferType::U64, &[(wanted, 0.0)], 0.0, none);
            let judgement = expected.judge("y", "", [Some(Number::Integer(found))].into_iter(), &[1]);
            assert_eq!(judgement.wrong, wrong, "{found}");
        }
    }

    #[test]
    fn types_and_stated_tolerances_decide() {
        let none = Tolerance::default();
        assert_eq!(judge(BufferType::F32, &[1.0, 2.0], &[1.0, 2.000_001], none).wrong, 0);
        assert_eq!(judge(BufferType::F32, &[1.0, 2.0], &[1.0, 2.001], none).wrong, 1);
        assert_eq!(judge(BufferType::F16, &[1.0, 2.0], &[1.001, 2.001], none).wrong, 0);
        assert_eq!(judge(BufferType::I32, &[1.0, 2.0], &[1.0, 3.0], none).wrong, 1);
        let wide = Tolerance { atol: Some(0.5), rtol: Some(0.25) };
        assert_eq!(judge(BufferType::I32, &[1.0, 2.0], &[1.0, 3.0], wide).wrong, 0);
        let wrong = judge(BufferType::F32, &[1.0, 2.0], &[1.0, 2.5], none);
        let reason = wrong.reason().unwrap();
        assert!(
            reason.starts_with("wrong answer in y: 1 of 2 elements; [1] is 2.5e0, the file y.npy says 2e0"),
            "{reason}"
        );
    }

    #[test]
    fn values_that_are_not_finite_must_agree() {
        let none = Tolerance::default();
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert_eq!(judge(BufferType::F32, &[nan, inf, -inf], &[nan, inf, -inf], none).wrong, 0);
        for (wanted, found) in [(nan, 1.0), (1.0, nan), (inf, -inf), (inf, 1.0), (1.0, inf)] {
            assert_eq!(judge(BufferType::F32, &[wanted], &[found], none).wrong, 1, "{wanted} {found}");
        }
        // 1e6 is beyond f16.
        assert_eq!(judge(BufferType::F16, &[1e6], &[inf], none).wrong, 0);
    }
}
