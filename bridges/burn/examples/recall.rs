//! A layer of attention learns to name the letter before each letter, on the CPU: from equal weights, once
//! with FlashCore's attention and its backward pass, once with burn's.
//!
//! ```sh
//! cargo run --release --example recall
//! ```

use burn::tensor::activation::log_softmax;
use burn::tensor::module::attention as own_attention;
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_flashcore::{AttentionModuleOptions, attention};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const LETTERS: usize = 8;
const WIDTH: usize = 32;
const HEADS: usize = 2;
const ROWS: usize = 24;
const BATCH: usize = 16;
const RATE: f64 = 0.5;

/// Attention of `[batch, head, row, dim]`.
type AttentionFn = fn(Tensor<4>, Tensor<4>, Tensor<4>) -> Outcome<Tensor<4>>;

const OPTIONS: AttentionModuleOptions =
    AttentionModuleOptions { scale: None, softcap: None, is_causal: true };

fn ours(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Outcome<Tensor<4>> {
    Ok(attention(q, k, v, OPTIONS)?)
}

fn theirs(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Outcome<Tensor<4>> {
    Ok(own_attention(q, k, v, None, None, OPTIONS))
}

/// The letters' and the positions' vectors, the projections to Q, K and V, and the one to letters.
#[derive(Clone)]
struct Model([Tensor<2>; 6]);

impl Model {
    fn new(device: &Device) -> Model {
        let draw = |rows: usize, columns: usize, size: f64| {
            Tensor::random([rows, columns], Distribution::Uniform(-size, size), device).require_grad()
        };
        let square = || draw(WIDTH, WIDTH, 0.3);
        let vectors = [draw(LETTERS, WIDTH, 1.0), draw(ROWS, WIDTH, 1.0)];
        let [letters, positions] = vectors;
        Model([letters, positions, square(), square(), square(), draw(WIDTH, LETTERS, 0.3)])
    }

    fn loss(&self, text: &Tensor<2, Int>, attention: AttentionFn) -> Outcome<Tensor<1>> {
        let [letters, positions, wq, wk, wv, out] = self.0.clone();
        let rows = letters.select(0, text.clone().reshape([BATCH * ROWS]));
        let rows = rows.reshape([BATCH, ROWS, WIDTH]) + positions.unsqueeze::<3>();
        let heads = |weight: Tensor<2>| {
            let projected = rows.clone().matmul(weight.unsqueeze::<3>());
            projected.reshape([BATCH, ROWS, HEADS, WIDTH / HEADS]).swap_dims(1, 2)
        };
        let attended = attention(heads(wq), heads(wk), heads(wv))?;
        let logits = attended.swap_dims(1, 2).reshape([BATCH, ROWS, WIDTH]).matmul(out.unsqueeze::<3>());
        // Row i names letter i - 1.
        let logits = log_softmax(logits.slice([0..BATCH, 1..ROWS]), 2);
        let before = text.clone().slice([0..BATCH, 0..ROWS - 1]).unsqueeze_dim::<3>(2);
        Ok(-logits.gather(2, before).mean())
    }

    /// A step of gradient descent. Returns the loss before it.
    fn step(&mut self, text: &Tensor<2, Int>, attention: AttentionFn) -> Outcome<f32> {
        let loss = self.loss(text, attention)?;
        let gradients = loss.backward();
        for weight in &mut self.0 {
            if let Some(gradient) = weight.grad(&gradients) {
                let next = weight.clone().inner() - gradient * RATE;
                *weight = Tensor::from_inner(next).require_grad();
            }
        }
        Ok(loss.into_scalar::<f32>())
    }
}

/// Trains both models. Returns the losses of each step, FlashCore's first.
pub fn train(steps: usize) -> Outcome<Vec<[f32; 2]>> {
    let device = Device::flex().autodiff();
    let mut with_ours = Model::new(&device);
    let mut with_theirs = Model(with_ours.0.clone().map(|weight| weight.detach().require_grad()));
    let mut losses = Vec::with_capacity(steps);
    for _ in 0..steps {
        let draw = Tensor::<2>::random([BATCH, ROWS], Distribution::Uniform(0.0, LETTERS as f64), &device);
        let text = draw.int();
        losses.push([with_ours.step(&text, ours)?, with_theirs.step(&text, theirs)?]);
    }
    Ok(losses)
}

fn main() -> Outcome<()> {
    for (step, [ours, theirs]) in train(400)?.into_iter().enumerate() {
        if (step + 1) % 50 == 0 {
            println!("step {:3}: loss {ours:.4} with FlashCore, {theirs:.4} with burn's attention", step + 1);
        }
    }
    Ok(())
}
