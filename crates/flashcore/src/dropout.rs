//! Dropout of a call.

use problem::Element;

use crate::Attention;

impl<Q: Element, K: Element, V: Element> Attention<'_, Q, K, V> {
    /// Dropout: each normalised probability is replaced by 0 with probability `p`, and multiplied by
    /// `1 / (1 − p)` otherwise. The mask depends on the seed and on the element's batch entry, query head,
    /// query and key alone ([`Dropout`](problem::Dropout)): on every device the forward and the backward pass
    /// have one mask. The LSE is that without dropout. On GPUs, the families `mma` and `split` compute it.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let x = [1.0f32; 64 * 8];
    /// let x = TensorView::dense(&x, [1, 1, 64, 8], Layout::Bhsd)?;
    /// let call = attention(x, x, x).dropout(0.25, 7);
    /// let out = call.clone().run()?;
    /// assert_ne!(out.data[0], 1.0); // the weights that are kept do not sum to 1 in each row
    /// assert_eq!(out, call.run()?);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn dropout(mut self, p: f32, seed: u64) -> Self {
        let state = [seed as i32, (seed >> 32) as i32, 0, 0];
        self.features.dropout = (p != 0.0).then_some((p, state));
        self
    }
}
