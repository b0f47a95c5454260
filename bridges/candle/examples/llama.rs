//! A model with the shape of Llama (RMSNorm, RoPE, grouped heads, SwiGLU, a cache of keys) and random weights
//! generates the same tokens with FlashCore's attention as with attention of candle's operations:
//!
//! ```sh
//! cargo run --release --example llama
//! ```

mod eager;

use candle::{DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder, VarMap, linear_no_bias, ops::silu, rms_norm};
use eager::AttentionFn;

const VOCABULARY: usize = 256;
const WIDTH: usize = 128;
const HEADS: usize = 8;
const HEADS_KV: usize = 2;
const DIM: usize = WIDTH / HEADS;
const LAYERS: usize = 4;
const LONGEST: usize = 256;

struct Layer {
    norms: [RmsNorm; 2],
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

struct Model {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    /// Cosines and sines of RoPE, `[row, dim / 2]`.
    angles: [Tensor; 2],
}

/// Keys and values of a layer so far, `[batch, row, head, dim]`.
type Cache = Option<[Tensor; 2]>;

impl Layer {
    fn new(vb: VarBuilder) -> Result<Layer> {
        let linear = |from: usize, to: usize, name: &str| linear_no_bias(from, to, vb.pp(name));
        Ok(Layer {
            norms: [rms_norm(WIDTH, 1e-5, vb.pp("norm_1"))?, rms_norm(WIDTH, 1e-5, vb.pp("norm_2"))?],
            q: linear(WIDTH, HEADS * DIM, "q")?,
            k: linear(WIDTH, HEADS_KV * DIM, "k")?,
            v: linear(WIDTH, HEADS_KV * DIM, "v")?,
            out: linear(HEADS * DIM, WIDTH, "out")?,
            gate: linear(WIDTH, 3 * WIDTH, "gate")?,
            up: linear(WIDTH, 3 * WIDTH, "up")?,
            down: linear(3 * WIDTH, WIDTH, "down")?,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        angles: &[Tensor; 2],
        cache: &mut Cache,
        attention: AttentionFn,
    ) -> Result<Tensor> {
        let (batch, rows, _) = x.dims3()?;
        let normed = self.norms[0].forward(x)?;
        let heads =
            |linear: &Linear, heads: usize| linear.forward(&normed)?.reshape((batch, rows, heads, DIM));
        let rope = |x: Tensor| {
            let x = x.transpose(1, 2)?.contiguous()?;
            candle_nn::rotary_emb::rope(&x, &angles[0], &angles[1])?.transpose(1, 2)
        };
        let (q, k, v) =
            (rope(heads(&self.q, HEADS)?)?, rope(heads(&self.k, HEADS_KV)?)?, heads(&self.v, HEADS_KV)?);
        let [k, v] = match cache.take() {
            Some([before_k, before_v]) => [Tensor::cat(&[before_k, k], 1)?, Tensor::cat(&[before_v, v], 1)?],
            None => [k, v],
        };
        let attended = attention(&q, &k, &v, 1.0 / (DIM as f32).sqrt(), true)?;
        *cache = Some([k, v]);
        let x = (x + self.out.forward(&attended.reshape((batch, rows, HEADS * DIM))?)?)?;
        let normed = self.norms[1].forward(&x)?;
        let inner = (silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?;
        x + self.down.forward(&inner)?
    }
}

impl Model {
    fn new(vb: VarBuilder) -> Result<Model> {
        let angle =
            |i: usize| (i / (DIM / 2)) as f32 / 10_000f32.powf((i % (DIM / 2)) as f32 * 2.0 / DIM as f32);
        let angles = Tensor::from_iter((0..LONGEST * DIM / 2).map(angle), vb.device())?;
        let angles = angles.reshape((LONGEST, DIM / 2))?;
        let layers: Result<_> = (0..LAYERS).map(|i| Layer::new(vb.pp(format!("layer_{i}")))).collect();
        Ok(Model {
            embedding: candle_nn::embedding(VOCABULARY, WIDTH, vb.pp("embedding"))?,
            layers: layers?,
            norm: rms_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            head: linear_no_bias(WIDTH, VOCABULARY, vb.pp("head"))?,
            angles: [angles.cos()?, angles.sin()?],
        })
    }

    /// The most likely tokens after `prompt`, one after the other.
    fn generate(&self, prompt: &[u32], count: usize, attention: AttentionFn) -> Result<Vec<u32>> {
        let mut caches: Vec<Cache> = vec![None; LAYERS];
        let (mut next, mut position, mut tokens) = (prompt.to_vec(), 0, Vec::new());
        while tokens.len() < count {
            let mut x = self
                .embedding
                .forward(&Tensor::new(&next[..], self.head.weight().device())?.unsqueeze(0)?)?;
            let angles = [0, 1].map(|i| self.angles[i].narrow(0, position, next.len()));
            let [cos, sin] = angles;
            let angles = [cos?, sin?];
            for (layer, cache) in self.layers.iter().zip(&mut caches) {
                x = layer.forward(&x, &angles, cache, attention)?;
            }
            let last = self.norm.forward(&x)?.i((0, next.len() - 1))?;
            let logits = self.head.forward(&last.unsqueeze(0)?)?.squeeze(0)?;
            position += next.len();
            next = vec![logits.argmax(0)?.to_scalar::<u32>()?];
            tokens.extend(&next);
        }
        Ok(tokens)
    }
}

/// The tokens with candle's operations and with FlashCore.
pub fn tokens(count: usize) -> Result<[Vec<u32>; 2]> {
    let weights = VarMap::new();
    let model = Model::new(VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu))?;
    let prompt: Vec<u32> = "Attention is all you need".bytes().map(u32::from).collect();
    Ok([
        model.generate(&prompt, count, eager::attention)?,
        model.generate(&prompt, count, candle_flashcore::flash_attn)?,
    ])
}

fn main() -> Result<()> {
    let [theirs, ours] = tokens(64)?;
    println!("candle's operations: {theirs:?}\nFlashCore:           {ours:?}");
    if theirs != ours {
        candle::bail!("the tokens differ")
    }
    Ok(())
}
