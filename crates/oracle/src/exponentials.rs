//! From products to weights.

use pulp::{Arch, Simd, WithSimd};

use crate::{Arithmetic, LANES};

/// Rounds products to logits as they are stored, in place, and raises the maxima. A NaN does not change them.
pub(crate) fn store<A: Arithmetic>(logits: &mut [[A::Real; LANES]], max: &mut [A::Real; LANES]) {
    Arch::new().dispatch(Stored::<A> { logits, max });
}

/// Turns logits into normalised weights, in place. Returns the sums of the exponentials, that of the sink
/// included. A lane without mass gets weights and sum 0. With `fp8`, the weights are not normalised.
pub(crate) fn exponentiate<A: Arithmetic>(
    weights: &mut [[A::Real; LANES]],
    max: &[A::Real; LANES],
    sink: Option<A::Real>,
    fp8: bool,
    visible: &[[bool; LANES]],
) -> [A::Real; LANES] {
    // A sink of −∞ has no weight, like a logit of −∞.
    let of_sink = |max: A::Real| match sink {
        Some(sink) if sink != A::NEG_INFINITY => A::exp(sink - max),
        _ => A::Real::default(),
    };
    let mut sum = max.map(of_sink);
    for (weights, visible) in weights.iter_mut().zip(visible) {
        for lane in 0..LANES {
            let logit = weights[lane];
            // A logit of −∞ has weight 0, even if the maximum is −∞ too.
            let nothing = !visible[lane] || logit == A::NEG_INFINITY;
            weights[lane] = if nothing { A::Real::default() } else { A::exp(logit - max[lane]) };
            sum[lane] = sum[lane] + weights[lane];
        }
    }
    if !fp8 {
        Arch::new().dispatch(Normalised::<A> { weights, sum: &sum });
    }
    sum
}

/// The arguments are a struct: unlike a closure, its method is certain to be compiled for the chosen
/// instructions.
struct Stored<'a, A: Arithmetic> {
    logits: &'a mut [[A::Real; LANES]],
    max: &'a mut [A::Real; LANES],
}

impl<A: Arithmetic> WithSimd for Stored<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut max = *self.max;
        for logits in self.logits {
            for lane in 0..LANES {
                let logit = A::store(logits[lane]);
                max[lane] = if logit > max[lane] { logit } else { max[lane] };
                logits[lane] = logit;
            }
        }
        *self.max = max;
    }
}

struct Normalised<'a, A: Arithmetic> {
    weights: &'a mut [[A::Real; LANES]],
    sum: &'a [A::Real; LANES],
}

impl<A: Arithmetic> WithSimd for Normalised<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for weights in self.weights {
            for (weight, &sum) in weights.iter_mut().zip(self.sum) {
                let massless = sum == A::Real::default();
                *weight = if massless { *weight } else { A::store_weight(*weight / sum) };
            }
        }
    }
}
