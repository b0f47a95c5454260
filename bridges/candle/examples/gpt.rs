//! A small GPT learns the letters of a licence on the CPU: from equal weights, once with FlashCore's
//! attention and its backward pass, once with attention of candle's operations and candle's autodiff.
//! PyTorch's loss, which `gpt.py` has recorded from these weights and letters, stands beside both.
//!
//! ```sh
//! cargo run --release --example gpt
//! python examples/gpt.py > examples/gpt.txt # records PyTorch's loss again
//! ```

mod eager;

use std::time::{Duration, Instant};

use candle::{DType, Device, Module, Result, Tensor};
use candle_nn::{AdamW, Embedding, Init, Linear, Optimizer, VarBuilder, VarMap, linear, loss, ops};
use eager::AttentionFn;

const TEXT: &[u8] = include_bytes!("../../../LICENSE-APACHE");
/// A line for each training: `steps batch rows`, a colon, and the loss of each step.
const PYTORCH: &str = include_str!("gpt.txt");
const VOCABULARY: usize = 128;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const LAYERS: usize = 2;

/// A layer norm with a gradient: that of candle_nn has none.
struct Norm([Tensor; 2]);

impl Norm {
    fn new(vb: VarBuilder) -> Result<Norm> {
        let weight = vb.get_with_hints(WIDTH, "weight", Init::Const(1.0))?;
        Ok(Norm([weight, vb.get_with_hints(WIDTH, "bias", Init::Const(0.0))?]))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm_slow(x, &self.0[0], &self.0[1], 1e-5)
    }
}

struct Layer {
    norms: [Norm; 2],
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

struct Gpt {
    letters: Embedding,
    positions: Embedding,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    attention: AttentionFn,
}

impl Layer {
    fn new(vb: VarBuilder) -> Result<Layer> {
        Ok(Layer {
            norms: [Norm::new(vb.pp("norm_1"))?, Norm::new(vb.pp("norm_2"))?],
            qkv: linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
            out: linear(WIDTH, WIDTH, vb.pp("out"))?,
            up: linear(WIDTH, 4 * WIDTH, vb.pp("up"))?,
            down: linear(4 * WIDTH, WIDTH, vb.pp("down"))?,
        })
    }

    fn forward(&self, x: &Tensor, attention: AttentionFn) -> Result<Tensor> {
        let (batch, rows, _) = x.dims3()?;
        let dim = WIDTH / HEADS;
        let qkv = self.qkv.forward(&self.norms[0].forward(x)?)?.reshape((batch, rows, 3 * HEADS, dim))?;
        let part = |i: usize| qkv.narrow(2, i * HEADS, HEADS);
        let attended = attention(&part(0)?, &part(1)?, &part(2)?, 1.0 / (dim as f32).sqrt(), true)?;
        let x = (x + self.out.forward(&attended.reshape((batch, rows, WIDTH))?)?)?;
        &x + self.down.forward(&self.up.forward(&self.norms[1].forward(&x)?)?.gelu()?)?
    }
}

impl Gpt {
    fn new(vb: VarBuilder, rows: usize, attention: AttentionFn) -> Result<Gpt> {
        let layers: Result<_> = (0..LAYERS).map(|i| Layer::new(vb.pp(format!("layer_{i}")))).collect();
        Ok(Gpt {
            letters: candle_nn::embedding(VOCABULARY, WIDTH, vb.pp("letters"))?,
            positions: candle_nn::embedding(rows, WIDTH, vb.pp("positions"))?,
            layers: layers?,
            norm: Norm::new(vb.pp("norm"))?,
            head: linear(WIDTH, VOCABULARY, vb.pp("head"))?,
            attention,
        })
    }

    /// The loss of predicting each next letter, `[batch, row + 1]`.
    fn loss(&self, text: &Tensor) -> Result<Tensor> {
        let rows = text.dim(1)? - 1;
        let positions = Tensor::arange(0, rows as u32, text.device())?;
        let letters = self.letters.forward(&text.narrow(1, 0, rows)?.contiguous()?)?;
        let mut x = letters.broadcast_add(&self.positions.forward(&positions)?)?;
        for layer in &self.layers {
            x = layer.forward(&x, self.attention)?;
        }
        let logits = self.head.forward(&self.norm.forward(&x)?)?;
        loss::cross_entropy(&logits.flatten_to(1)?, &text.narrow(1, 1, rows)?.flatten_all()?)
    }
}

/// Sets all weights to numbers that depend on their name's place in the alphabet, as `gpt.py` does.
fn initialize(weights: &VarMap) -> Result<()> {
    let weights = weights.data().lock().unwrap();
    let mut names: Vec<&String> = weights.keys().collect();
    names.sort();
    for (place, name) in names.into_iter().enumerate() {
        let var = &weights[name];
        let number = |i: usize| {
            let mut z = (i as u32).wrapping_add(place as u32 * 1_000_003).wrapping_mul(0x9e37_79b1);
            z = (z ^ (z >> 15)).wrapping_mul(0x85eb_ca77);
            f64::from(z ^ (z >> 13)) / f64::from(1u32 << 31) - 1.0
        };
        let width = var.dims()[var.rank() - 1] as f64;
        let value = |i: usize| match var.rank() {
            1 => f64::from(u8::from(name.contains("norm") && name.ends_with("weight"))),
            _ => number(i) / width.sqrt(),
        };
        let values = Tensor::from_iter((0..var.elem_count()).map(|i| value(i) as f32), var.device())?;
        var.set(&values.reshape(var.shape())?)?;
    }
    Ok(())
}

/// PyTorch's loss of each step, if it was recorded.
fn pytorch(steps: usize, batch: usize, rows: usize) -> Option<Vec<f32>> {
    let losses = PYTORCH.lines().find_map(|line| line.strip_prefix(&format!("{steps} {batch} {rows}: ")))?;
    Some(losses.split(' ').filter_map(|loss| loss.parse().ok()).collect())
}

/// A model in training, and the time that it took.
struct Training {
    gpt: Gpt,
    optimizer: AdamW,
    time: Duration,
}

impl Training {
    fn new(weights: &VarMap, rows: usize, attention: AttentionFn) -> Result<Training> {
        let gpt = Gpt::new(VarBuilder::from_varmap(weights, DType::F32, &Device::Cpu), rows, attention)?;
        initialize(weights)?;
        Ok(Training { gpt, optimizer: AdamW::new_lr(weights.all_vars(), 3e-3)?, time: Duration::ZERO })
    }

    fn step(&mut self, text: &Tensor) -> Result<f32> {
        let start = Instant::now();
        let loss = self.gpt.loss(text)?;
        self.optimizer.backward_step(&loss)?;
        self.time += start.elapsed();
        loss.to_scalar()
    }
}

/// Trains both models. Returns the losses of each step: with FlashCore, with candle's operations, and of
/// PyTorch.
pub fn train(steps: usize, batch: usize, rows: usize) -> Result<Vec<[f32; 3]>> {
    let (of_ours, of_theirs) = (VarMap::new(), VarMap::new());
    let mut ours = Training::new(&of_ours, rows, candle_flashcore::flash_attn)?;
    let mut theirs = Training::new(&of_theirs, rows, eager::attention)?;
    let Some(pytorch) = pytorch(steps, batch, rows).filter(|losses| losses.len() == steps) else {
        candle::bail!("gpt.txt has no losses of {steps} steps with {batch} sequences of {rows} rows")
    };
    let mut losses = Vec::with_capacity(steps);
    for step in 0..steps {
        let start = |i: usize| (step * batch + i) * 613 % (TEXT.len() - rows - 1);
        let letter = |i: usize| u32::from(TEXT[start(i / (rows + 1)) + i % (rows + 1)]);
        let text = Tensor::from_iter((0..batch * (rows + 1)).map(letter), &Device::Cpu)?;
        let text = text.reshape((batch, rows + 1))?;
        losses.push([ours.step(&text)?, theirs.step(&text)?, pytorch[step]]);
        if (step + 1) % 20 == 0 {
            let [of_ours, of_theirs, of_pytorch] = losses[step];
            let [ours, theirs] = [&ours, &theirs].map(|one| one.time.as_secs_f64() * 1e3 / (step + 1) as f64);
            println!(
                "step {:3}: loss {of_ours:.4} with FlashCore ({ours:.0} ms a step), {of_theirs:.4} with candle's \
                 operations ({theirs:.0} ms), {of_pytorch:.4} with PyTorch",
                step + 1
            );
        }
    }
    Ok(losses)
}

fn main() -> Result<()> {
    let losses = train(100, 2, 128)?;
    let [ours, theirs, pytorch] = losses[losses.len() - 1];
    println!(
        "{:.4} -> {ours:.4} with FlashCore, {theirs:.4} with candle's operations, {pytorch:.4} with PyTorch",
        losses[0][0]
    );
    Ok(())
}
