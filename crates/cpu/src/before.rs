//! The result over other keys from which a call continues.

use problem::{KeyPlaces, Operand, OperandMap, Operands, Problem, Tensor};

use crate::CpuError;
use crate::view::{Any, Input};

/// O and the LSE of that result.
pub(crate) struct Before<'a> {
    out: Any<'a>,
    lse: &'a [f32],
}

impl<'a> Before<'a> {
    /// The result, if the problem has one. The inputs have been checked.
    pub(crate) fn new(
        problem: &Problem,
        inputs: &OperandMap<Input<'a>>,
        arrays: &Operands<'a>,
    ) -> Result<Option<Before<'a>>, CpuError> {
        if !problem.pass.continues() {
            return Ok(None);
        }
        let none = || Input::empty(problem.dtypes.out.into());
        let out = inputs.get(Operand::OutBefore).copied().unwrap_or_else(none);
        let out = Any::new(problem, Tensor::Out, out, KeyPlaces::ROWS)?;
        Ok(Some(Before { out, lse: arrays.floats(Operand::LseBefore) }))
    }

    /// O and the LSE of a row over the keys of both results. `wide` times `factor` is O over the call's own
    /// keys, and `lse` its LSE; without a factor the row has no key. `index` is the index of the row's LSE.
    pub(crate) fn merge(
        &self,
        ([batch, head, row], index): ([usize; 3], usize),
        (wide, factor, lse): (&[f32], Option<f32>, f64),
    ) -> (Vec<f32>, f64) {
        let before = f64::from(self.lse[index]);
        let top = lse.max(before);
        let weigh = |lse: f64| if lse == f64::NEG_INFINITY { 0.0 } else { (lse - top).exp() };
        let (own, before) = (weigh(lse), weigh(before));
        let sum = own + before;
        let mut merged = vec![0.0; wide.len()];
        if sum == 0.0 {
            return (merged, f64::NEG_INFINITY);
        }
        if before != 0.0 {
            self.out.row(batch, head, row).widen(&mut merged);
            let share = (before / sum) as f32;
            merged.iter_mut().for_each(|x| *x *= share);
        }
        if let Some(factor) = factor {
            let share = (f64::from(factor) * (own / sum)) as f32;
            merged.iter_mut().zip(wide).for_each(|(sum, &x)| *sum += share * x);
        }
        (merged, top + sum.ln())
    }
}
