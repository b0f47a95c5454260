//! The result over other keys from which a call continues.

use problem::{Operand, Operands, Problem, Tensor};

use crate::rows::Rows;

/// O and the LSE of that result.
pub(crate) struct Before<'a> {
    out: Rows<'a>,
    lse: &'a [f32],
}

/// How a row continues.
pub(crate) struct Continued {
    /// The weight of the row over the call's own keys.
    pub own: f64,
    /// O over the other keys, times its weight.
    pub out: Vec<f64>,
    /// The LSE over the keys of both.
    pub lse: f64,
}

impl<'a> Before<'a> {
    pub(crate) fn new(problem: &Problem, inputs: &Operands<'a>) -> Option<Before<'a>> {
        let given = inputs.get(Operand::OutBefore).copied();
        let out = Operands::from_iter(given.map(|out| (Operand::OUT, out)));
        let before =
            || Before { out: Rows::new(problem, Tensor::Out, &out), lse: inputs.floats(Operand::LseBefore) };
        problem.pass.continues().then(before)
    }

    /// How a row with an LSE of `own` over the call's keys continues. `index` is the index of its LSE.
    pub(crate) fn row(&self, [batch, head, row]: [usize; 3], index: usize, own: f64) -> Continued {
        let before = f64::from(self.lse[index]);
        let top = own.max(before);
        let weigh = |lse: f64| if lse == f64::NEG_INFINITY { 0.0 } else { (lse - top).exp() };
        let (own, before) = (weigh(own), weigh(before));
        let sum = own + before;
        let [own, before] = [own, before].map(|weight| if sum == 0.0 { 0.0 } else { weight / sum });
        let elements = self.out.row(batch, head, row);
        let mut wide = vec![0.0; elements.len()];
        elements.widen(&mut wide);
        let weighed = |x: f32| if before == 0.0 { 0.0 } else { before * f64::from(x) };
        Continued { own, out: wide.into_iter().map(weighed).collect(), lse: top + sum.ln() }
    }
}
