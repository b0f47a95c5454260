//! The score function: scale, temperature, softcap and attention sink.

use std::hash::Hash;

use serde::{Deserialize, Serialize};

use crate::{Gradients, Operand, Operands, ProblemError};

/// How the product of a query and a key becomes a logit: `t = scale · q·k`. With a cap, `t = softcap ·
/// tanh(scale · q·k / softcap)` (Gemma 2). With a temperature, each head has its own factor beside the scale.
/// The band hides keys after the cap is applied.
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
    /// Whether each query head has a factor on its scaled products, before the cap. The factors are an
    /// operand of a call: f32, `[head]`, finite and not negative. A GPU makes NaN of rows of a head whose
    /// factor is not accepted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub temperature: bool,
}

impl Score {
    /// The operands of a score: each has a value per query head, f32.
    pub const OPERANDS: [Operand; 2] = [Operand::Sinks, Operand::Temperature];

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
            Operand::Temperature => Some(&mut self.temperature),
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
        let &Score { scale: _, softcap, sink, temperature } = self;
        (scale.to_bits(), softcap.map(f32::to_bits), sink, temperature)
    }

    /// The logit of one product of a query and a key, in f64, for reference implementations. `scale` is the
    /// resolved factor, times the temperature of the head.
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
        if self.temperature {
            let reason =
                "the temperature has no gradient; expected the factors as a table of a score program";
            return Err(ProblemError::Backward { reason });
        }
        Ok(())
    }

    /// Rejects factors that are negative, infinite or NaN.
    pub(crate) fn check_values(&self, inputs: &Operands<'_>) -> Result<(), ProblemError> {
        let argument = Operand::Temperature.name();
        let values = inputs.floats(Operand::Temperature);
        let Some(index) = values.iter().position(|value| !(value.is_finite() && *value >= 0.0)) else {
            return Ok(());
        };
        let (value, expected) = (values[index].to_string(), "a finite number of 0 or more".to_owned());
        Err(ProblemError::Length { argument, index, value, expected })
    }

    /// Rejects a cap that is not positive, or not finite in the units that kernels use.
    pub(crate) fn check(&self, scale: f32) -> Result<(), ProblemError> {
        let Some(cap) = self.softcap else { return Ok(()) };
        let log2e = std::f32::consts::LOG2_E;
        let fits = cap > 0.0 && (cap * log2e).is_finite() && (2.0 * log2e * scale / cap).is_finite();
        if fits { Ok(()) } else { Err(ProblemError::Softcap { value: cap.to_string() }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pass, Problem};

    #[test]
    fn temperatures_are_factors_without_gradients() {
        let mut p = Problem::mission();
        p.score.temperature = true;
        p.check().unwrap();
        let check = |third: f32| {
            let values = [1.0, 0.0, third, 1.0, 2.0, 1.0, 1.0, 1.0];
            p.check_length_values(&Operands::default().with(Operand::Temperature, &values[..]))
        };
        check(0.5).unwrap();
        for (value, told) in [(-1.0, "-1"), (f32::INFINITY, "inf"), (f32::NAN, "NaN")] {
            let expected =
                format!("invalid value '{told}' for temperature[2]: expected a finite number of 0 or more");
            assert_eq!(check(value).unwrap_err().to_string(), expected);
        }
        let refused = p.clone().with_pass(Pass::DETERMINISTIC).check().unwrap_err().to_string();
        assert!(refused.contains("the temperature has no gradient"), "{refused}");
    }
}
