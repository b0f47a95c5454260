//! Equal bits of a row in every batch and phase.

use crate::{Attention, Element, Invariant};

impl<Q: Element, K: Element, V: Element> Attention<'_, Q, K, V> {
    /// Gives each row the same bits whatever else is in the call: with [`Invariant::Batch`] in every batch
    /// and on every number of SMs, with [`Invariant::Phase`] also with any number of query rows, so that
    /// decode repeats a prefill. The keys of a sequence are then cut at fixed places. On GPUs the family
    /// `decode` computes: tensors of 16 bits, or an 8-bit cache, with one head dim, a multiple of 32 (of 64
    /// for such a cache) up to 256, and without programs. The backward pass makes no such promise.
    ///
    /// ```
    /// use flashcore::{Invariant, Layout, TensorView, attention};
    ///
    /// let x: Vec<f32> = (0..3 * 40 * 8).map(|i| (i * 37 % 64) as f32 / 16.0).collect();
    /// let of = |batch: usize| TensorView::dense(&x[..batch * 40 * 8], [batch, 1, 40, 8], Layout::Bhsd);
    /// let run = |batch| attention(of(batch)?, of(batch)?, of(batch)?).invariant(Invariant::Batch).run();
    /// assert_eq!(run(1)?.data, run(3)?.data[..40 * 8]);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn invariant(mut self, invariant: Invariant) -> Self {
        self.invariant = Some(invariant);
        self
    }
}
