//! The descale factors of the CTA's head.

use attend::Softcap;
use ptx::{Builder, F32, R32};
use tile::divide;

use super::emit::Forward;
use crate::forward::descale::descaled;

impl Forward<'_> {
    /// The factor of scores in the exponent and the softcap, both with the descale factors of the CTA's head.
    pub(super) fn score_factors(&self, k: &mut Builder) -> (F32, Option<Softcap>) {
        let (factor, softcap) = (self.params.factor, self.params.softcap);
        let Some(descale) = self.params.score_descale else { return (factor, softcap) };
        let at = self.batch_and_key_head(k);
        let descale = descale.load(k, at);
        match softcap {
            Some(softcap) => (factor, Some(Softcap { factor: k.mul(softcap.factor, descale), ..softcap })),
            None => (descaled(k, factor, descale), None),
        }
    }

    /// The descale factor of the CTA's values; `None` without factors.
    pub(super) fn value_factor(&self, k: &mut Builder) -> Option<F32> {
        let descale = self.params.value_descale?;
        let at = self.batch_and_key_head(k);
        Some(descale.load(k, at))
    }

    fn batch_and_key_head(&self, k: &mut Builder) -> [R32; 2] {
        let [head, batch] = self.head_and_batch(k);
        [batch, divide(k, head, self.baked.group_size())]
    }
}
