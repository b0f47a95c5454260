//! The score function: scale, softcap and attention sink.

use std::hash::Hash;

use serde::{Deserialize, Serialize};

use crate::{Gradients, Operand, ProblemError};

/// How the product of a query and a key becomes a logit: `t = scale · q·k`. With a cap,
/// `t = softcap · tanh(scale · q·k / softcap)` (Gemma 2). The band hides keys after the cap is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Factor on Q Kᵀ. `None` means `1/√head_dim`.
    pub scale: Option<f32>,
    /// Upper bound of the logits' magnitude. `None` means no cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f32>,
    /// Whether each query head has an attention sink: a logit that is part of the softmax's denominator and
    /// has no value row (GPT-OSS). The sink is neither scaled nor capped, and is part of the LSE. A row that
    /// sees no key has O = 0 and LSE = the sink. The sinks are an operand of a call: f32, `[head]`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sink: bool,
}

impl Score {
    /// The operands of a score: each has a value per query head, f32.
    pub const OPERANDS: [Operand; 1] = [Operand::Sinks];

    /// Whether the score has one of [`Score::OPERANDS`].
    pub fn has(mut self, operand: Operand) -> bool {
        self.flag(operand).is_some_and(|has| *has)
    }

    /// States whether the score has one of [`Score::OPERANDS`].
    pub fn set(&mut self, operand: Operand, has: bool) {
        if let Some(flag) = self.flag(operand) {
            *flag = has;
        }
    }

    const fn flag(&mut self, operand: Operand) -> Option<&mut bool> {
        match operand {
            Operand::Sinks => Some(&mut self.sink),
            _ => None,
        }
    }

    /// A score with those of [`Score::OPERANDS`] that `has` names.
    pub fn with_operands(self, has: impl Fn(Operand) -> bool) -> Score {
        let mut score = self;
        Score::OPERANDS.into_iter().for_each(|operand| score.set(operand, has(operand)));
        score
    }

    /// Whether the logits are scaled products, and the softmax takes nothing else.
    pub fn is_plain(&self) -> bool {
        *self == Score { scale: self.scale, ..Score::default() }
    }

    /// The values that tell scores apart, floats by their bits. `scale` is the resolved factor.
    pub fn key(&self, scale: f32) -> impl Eq + Hash + use<> {
        let &Score { scale: _, softcap, sink } = self;
        (scale.to_bits(), softcap.map(f32::to_bits), sink)
    }

    /// The logit of one product of a query and a key, in f64, for reference implementations. `scale` is the
    /// resolved factor.
    pub fn logit(&self, scale: f64, product: f64) -> f64 {
        let t = scale * product;
        match self.softcap.map(f64::from) {
            Some(cap) => cap * (t / cap).tanh(),
            None => t,
        }
    }

    /// Rejects scores without derivatives, and gradients of operands that the score does not have.
    pub(crate) fn check_backward(&self, wants: Gradients) -> Result<(), ProblemError> {
        if wants.sinks && !self.sink {
            let reason = "the gradients of the sinks are wanted, but the problem has no sinks";
            return Err(ProblemError::Backward { reason });
        }
        Ok(())
    }

    /// Rejects a cap that is not positive, or not finite in the units that kernels use.
    pub(crate) fn check(&self, scale: f32) -> Result<(), ProblemError> {
        let Some(cap) = self.softcap else { return Ok(()) };
        let log2e = std::f32::consts::LOG2_E;
        let fits = cap > 0.0 && (cap * log2e).is_finite() && (2.0 * log2e * scale / cap).is_finite();
        if fits { Ok(()) } else { Err(ProblemError::Softcap { value: cap.to_string() }) }
    }
}
