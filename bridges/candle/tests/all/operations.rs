//! Attention of one sequence, of candle's operations.

use candle::{Result, Tensor};

use crate::plain::Options;

/// `[row, head, dim]` of one sequence. Every row sees a key.
pub fn eager([q, k, v]: [&Tensor; 3], options: &Options) -> Result<Tensor> {
    let (rows, heads, _) = q.dims3()?;
    let (keys, heads_kv, _) = k.dims3()?;
    let group = heads / heads_kv;
    let by_head = |x: &Tensor| x.transpose(0, 1)?.contiguous();
    // [head_kv, 1, row, dim] for each head of the group
    let repeated = |x: &Tensor| {
        let x = by_head(x)?.unsqueeze(1)?;
        let (heads_kv, _, rows, dim) = x.dims4()?;
        x.broadcast_as((heads_kv, group, rows, dim))?.contiguous()?.reshape((heads, rows, dim))
    };
    let mut scores =
        (by_head(q)?.matmul(&repeated(k)?.transpose(1, 2)?.contiguous()?)? * f64::from(options.scale))?;
    if let Some(cap) = options.softcap.map(f64::from) {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    let bias = (0..heads * rows * keys).map(|i| {
        let (head, row, key) = (i / keys / rows, i / keys % rows, i % keys);
        let (level, key) = (row as i64 + keys as i64 - rows as i64, key as i64);
        let slope = options.slopes.as_ref().map_or(0.0, |slopes| slopes[head]);
        if options.sees(level, key) { -slope * (level - key).abs() as f32 } else { f32::NEG_INFINITY }
    });
    let bias = Tensor::from_iter(bias, q.device())?.reshape((heads, rows, keys))?;
    let weights = candle_nn::ops::softmax(&(scores + bias)?, 2)?;
    weights.matmul(&repeated(v)?)?.transpose(0, 1)
}
