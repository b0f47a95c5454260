//! Causal attention of candle's operations, which builds the matrix of all scores.

use candle::{Result, Tensor};

/// The form of `flash_attn`, which both models take as an argument.
pub type AttentionFn = fn(&Tensor, &Tensor, &Tensor, f32, bool) -> Result<Tensor>;

/// As `candle_flashcore::flash_attn`.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, causal: bool) -> Result<Tensor> {
    let (batch, rows, heads, _) = q.dims4()?;
    let (_, keys, heads_kv, dim) = k.dims4()?;
    let by_head = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let repeated = |x: &Tensor| {
        let x = by_head(x)?.unsqueeze(2)?;
        let x = x.broadcast_as((batch, heads_kv, heads / heads_kv, keys, dim))?.contiguous()?;
        x.reshape((batch, heads, keys, dim))
    };
    let mut scores = (by_head(q)?.matmul(&repeated(k)?.t()?)? * f64::from(scale))?;
    if causal {
        let hidden = |i: usize| if i % keys > i / keys + keys - rows { f32::NEG_INFINITY } else { 0.0 };
        let mask = Tensor::from_iter((0..rows * keys).map(hidden), q.device())?.reshape((rows, keys))?;
        scores = scores.broadcast_add(&mask)?;
    }
    candle_nn::ops::softmax(&scores, candle::D::Minus1)?.matmul(&repeated(v)?)?.transpose(1, 2)
}
