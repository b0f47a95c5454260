//! Descale factors of 8-bit inputs, one for each batch entry and KV head. The factors of Q and K are
//! multiplied with the factor of the scores, the factor of V with the division by the row sums.

use problem::{Problem, Tensor};
use ptx::{Builder, CmpOp, F32, Global, R32};

use crate::contract::Contract;

/// The factors of one tensor.
#[derive(Clone, Copy, Debug)]
struct Descale {
    start: Global,
    /// Elements between batch entries.
    batch: R32,
    /// Elements between KV heads.
    head: R32,
}

impl Descale {
    /// The factors of a tensor; `None` if it has none.
    fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem, tensor: Tensor) -> Option<Descale> {
        let (start, layout) = c.descale(k, tensor).zip(problem.scales.of(tensor))?;
        let mut stride =
            |of: &str, elements: i64| c.u32(k, &format!("descale_{}_{of}", tensor.name()), elements as u32);
        let (batch, head) = (stride("batch", layout.batch), stride("head", layout.head));
        Some(Descale { start, batch, head })
    }

    fn load(&self, k: &mut Builder, [batch, head]: [R32; 2]) -> F32 {
        let before = k.mul_wide_u(batch, self.batch);
        let own = k.mul_wide_u(head, self.head);
        let index = k.add(before, own);
        let base = k.mad(index, 4, self.start.base);
        k.ld(Global { base, offset: self.start.offset })
    }
}

/// The factors of Q and K.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreDescale([Option<Descale>; 2]);

impl ScoreDescale {
    /// Declares the factors; `None` if neither tensor has factors.
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem) -> Option<ScoreDescale> {
        let factors = [Tensor::Q, Tensor::K].map(|tensor| Descale::declare(k, c, problem, tensor));
        factors.iter().any(Option::is_some).then_some(ScoreDescale(factors))
    }

    /// The product of the factors of a batch entry and a KV head. A negative product becomes NaN, as
    /// [`problem::Scales`] requires.
    pub fn load(&self, k: &mut Builder, at: [R32; 2]) -> F32 {
        let factors = self.0.map(|of| of.map(|of| of.load(k, at)));
        let product = factors.into_iter().flatten().reduce(|a, b| k.mul(a, b)).expect("a factor");
        let valid = k.setp_f(CmpOp::Ge, product, 0.0f32);
        k.selp(product, f32::NAN, valid)
    }
}

/// `factor · descale`, the factor of scores in the exponent: positive or NaN.
pub(crate) fn descaled(k: &mut Builder, factor: F32, descale: F32) -> F32 {
    let factor = k.mul(factor, descale);
    // With a factor of 0, the −∞ of masked scores would become NaN.
    k.max_nan_to(factor, factor, f32::MIN_POSITIVE);
    factor
}

/// The factors of V.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueDescale(Descale);

impl ValueDescale {
    /// Declares the factors; `None` if V has no factors.
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem) -> Option<ValueDescale> {
        Descale::declare(k, c, problem, Tensor::V).map(ValueDescale)
    }

    /// The factor of a batch entry and a KV head.
    pub fn load(&self, k: &mut Builder, at: [R32; 2]) -> F32 {
        self.0.load(k, at)
    }
}
