//! Serves a small model with the shape of Llama (RMS norm, RoPE, grouped heads, SwiGLU) and random weights
//! from
//! [`PagedCache`]s: requests join and leave between steps (continuous batching). It prints the tokens per
//! second, and compares all tokens with those of the same model without a cache:
//!
//! ```sh
//! cargo run --release -p flashcore --example serve
//! ```

use std::error::Error;
use std::time::Instant;

use flashcore::cache::{PagedCache, SequenceId, rotate};
use flashcore::{Layout, TensorView, attention};

const VOCABULARY: usize = 256;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = WIDTH / HEADS;
const INNER: usize = 3 * WIDTH;
const LAYERS: usize = 2;
const PAGE: usize = 16;

/// Uniform numbers, by a multiplicative generator.
struct Drawn(u64);

impl Drawn {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn weight(&mut self) -> f32 {
        self.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0
    }
}

/// A linear layer: rows of weights, one for each output.
struct Linear {
    inputs: usize,
    weights: Vec<f32>,
}

impl Linear {
    fn new(drawn: &mut Drawn, inputs: usize, outputs: usize) -> Linear {
        // Uniform in ±√3/√inputs, of variance 1/inputs.
        let size = (3.0 / inputs as f32).sqrt();
        Linear { inputs, weights: (0..inputs * outputs).map(|_| size * drawn.weight()).collect() }
    }

    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum();
        let rows = x.chunks_exact(self.inputs);
        rows.flat_map(|row| self.weights.chunks_exact(self.inputs).map(move |w| product(row, w))).collect()
    }
}

struct Layer {
    qkv: [Linear; 3],
    out: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

struct Model {
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    head: Linear,
}

impl Model {
    fn new() -> Model {
        let drawn = &mut Drawn(1);
        let embedding = (0..VOCABULARY * WIDTH).map(|_| 4.0 * drawn.weight()).collect();
        let layer = |drawn: &mut Drawn| Layer {
            qkv: [HEADS, HEADS_KV, HEADS_KV].map(|heads| Linear::new(drawn, WIDTH, heads * DIM)),
            out: Linear::new(drawn, WIDTH, WIDTH),
            gate: Linear::new(drawn, WIDTH, INNER),
            up: Linear::new(drawn, WIDTH, INNER),
            down: Linear::new(drawn, INNER, WIDTH),
        };
        let layers = (0..LAYERS).map(|_| layer(drawn)).collect();
        Model { embedding, layers, head: Linear::new(drawn, WIDTH, VOCABULARY) }
    }

    /// Logits `[token, vocabulary]` of tokens at positions. `attend` gets the number of the layer and the
    /// rotated rows of Q, K and V, `[token, head, dim]`.
    fn logits(
        &self,
        tokens: &[(usize, usize)],
        mut attend: impl FnMut(usize, [&[f32]; 3]) -> Result<Vec<f32>, Box<dyn Error>>,
    ) -> Result<Vec<f32>, Box<dyn Error>> {
        let row = |&(token, _): &(usize, usize)| &self.embedding[token * WIDTH..][..WIDTH];
        let mut x: Vec<f32> = tokens.iter().flat_map(row).copied().collect();
        for (number, layer) in self.layers.iter().enumerate() {
            let normal = norm(&x);
            let [mut q, mut k, v] = [0, 1, 2].map(|i| layer.qkv[i].apply(&normal));
            for (rows, heads) in [(&mut q, HEADS), (&mut k, HEADS_KV)] {
                for (row, &(_, position)) in rows.chunks_exact_mut(heads * DIM).zip(tokens) {
                    let [cos, sin] = angles(position);
                    row.chunks_exact_mut(DIM).for_each(|head| rotate(head, &cos, &sin, false));
                }
            }
            add(&mut x, &layer.out.apply(&attend(number, [&q, &k, &v])?));
            let normal = norm(&x);
            let (gate, up) = (layer.gate.apply(&normal), layer.up.apply(&normal));
            let inner: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(&mut x, &layer.down.apply(&inner));
        }
        Ok(self.head.apply(&norm(&x)))
    }

    /// The likeliest token after each token of a sequence, by one call of attention for each layer.
    fn without_cache(&self, tokens: &[usize]) -> Result<Vec<usize>, Box<dyn Error>> {
        let placed: Vec<(usize, usize)> = tokens.iter().enumerate().map(|(at, &token)| (token, at)).collect();
        let logits = self.logits(&placed, |_, [q, k, v]| {
            let view = |x, heads| TensorView::dense(x, [1, heads, tokens.len(), DIM], Layout::Bshd);
            let out = attention(view(q, HEADS)?, view(k, HEADS_KV)?, view(v, HEADS_KV)?).causal().run()?.data;
            // From `[head, token, dim]` to `[token, head, dim]`.
            let at = |i: usize| (i / DIM % HEADS * tokens.len() + i / WIDTH) * DIM + i % DIM;
            Ok((0..out.len()).map(|i| out[at(i)]).collect())
        })?;
        Ok(logits.chunks_exact(VOCABULARY).map(likeliest).collect())
    }
}

fn norm(x: &[f32]) -> Vec<f32> {
    let scale = |row: &[f32]| (row.iter().map(|x| x * x).sum::<f32>() / WIDTH as f32 + 1e-6).sqrt().recip();
    x.chunks_exact(WIDTH).flat_map(|row| row.iter().map(move |x| x * scale(row))).collect()
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Cosines and sines of RoPE.
fn angles(position: usize) -> [Vec<f32>; 2] {
    let angle = |i: usize| position as f32 * 10_000f32.powf(-2.0 * i as f32 / DIM as f32);
    [(0..DIM / 2).map(|i| angle(i).cos()).collect(), (0..DIM / 2).map(|i| angle(i).sin()).collect()]
}

fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
}

struct Request {
    /// The prompt, then the tokens made so far.
    tokens: Vec<usize>,
    prompt: usize,
    /// The number of tokens when the request is done.
    wanted: usize,
    /// The request's sequence in the cache of each layer.
    sequences: Vec<SequenceId>,
}

struct Server<'a> {
    model: &'a Model,
    caches: Vec<PagedCache<f32>>,
    running: Vec<Request>,
}

impl Server<'_> {
    /// Pages that the running requests do not have yet and will need.
    fn promised(&self) -> usize {
        let rows =
            |request: &Request| request.wanted.div_ceil(PAGE) - (request.tokens.len() - 1).div_ceil(PAGE);
        self.running.iter().map(rows).sum()
    }

    /// Admits requests while there are pages for all of their tokens. A prompt is computed in one call, which
    /// makes the first token.
    fn admit(&mut self, waiting: &mut Vec<Request>) -> Result<(), Box<dyn Error>> {
        while let Some(request) = waiting.last() {
            if self.promised() + request.wanted.div_ceil(PAGE) > self.caches[0].free_pages() {
                break;
            }
            let mut request = waiting.pop().expect("there is a last one");
            request.sequences = self.caches.iter_mut().map(PagedCache::create).collect();
            let (caches, sequences) = (&mut self.caches, &request.sequences);
            let placed: Vec<_> = request.tokens.iter().enumerate().map(|(at, &token)| (token, at)).collect();
            let logits = self.model.logits(&placed, |layer, [q, k, v]| {
                caches[layer].append(sequences[layer], k, v)?;
                Ok(caches[layer].attend(&[sequences[layer]], q, HEADS, None)?)
            })?;
            request.tokens.push(likeliest(&logits[logits.len() - VOCABULARY..]));
            self.running.push(request);
        }
        Ok(())
    }

    /// Makes one token of each running request that is not done, in one call; returns those that are done.
    fn step(&mut self) -> Result<Vec<Request>, Box<dyn Error>> {
        let is_done = |request: &Request| request.tokens.len() == request.wanted;
        let (done, mut batch): (Vec<_>, Vec<_>) = self.running.drain(..).partition(is_done);
        for request in &done {
            for (cache, &id) in self.caches.iter_mut().zip(&request.sequences) {
                cache.free(id)?;
            }
        }
        let last = |request: &Request| (request.tokens[request.tokens.len() - 1], request.tokens.len() - 1);
        let placed: Vec<_> = batch.iter().map(last).collect();
        let caches = &mut self.caches;
        let logits = self.model.logits(&placed, |layer, [q, k, v]| {
            let ids: Vec<_> = batch.iter().map(|request| request.sequences[layer]).collect();
            let rows = k.chunks_exact(HEADS_KV * DIM).zip(v.chunks_exact(HEADS_KV * DIM));
            for (&id, (k, v)) in ids.iter().zip(rows) {
                caches[layer].append(id, k, v)?;
            }
            Ok(caches[layer].attend(&ids, q, HEADS, None)?)
        })?;
        for (request, logits) in batch.iter_mut().zip(logits.chunks_exact(VOCABULARY)) {
            request.tokens.push(likeliest(logits));
        }
        self.running = batch;
        Ok(done)
    }
}

/// The counts of a run.
pub struct Served {
    /// New tokens, and those of them that equal the tokens without a cache.
    pub tokens: [usize; 2],
    /// Steps, and the most requests in one of them.
    pub steps: [usize; 2],
    /// New tokens in a second.
    pub rate: f64,
}

/// Serves requests with random prompts from caches of `pages` pages for each layer.
pub fn serve(requests: usize, pages: usize) -> Result<Served, Box<dyn Error>> {
    let (model, drawn) = (Model::new(), &mut Drawn(2));
    let mut waiting: Vec<Request> = (0..requests)
        .map(|_| {
            let prompt = 1 + drawn.below(60);
            let tokens = (0..prompt).map(|_| drawn.below(VOCABULARY)).collect();
            Request { tokens, prompt, wanted: prompt + 1 + drawn.below(40), sequences: Vec::new() }
        })
        .collect();
    let cache = || PagedCache::new(pages, PAGE, HEADS_KV, [DIM, DIM]);
    let caches = (0..LAYERS).map(|_| cache()).collect::<Result<_, _>>()?;
    let mut server = Server { model: &model, caches, running: Vec::new() };
    let (mut done, mut steps, begun) = (Vec::new(), [0, 0], Instant::now());
    while done.len() < requests {
        server.admit(&mut waiting)?;
        if server.running.is_empty() {
            return Err(format!("a cache of {pages} pages has no room for the next request").into());
        }
        steps = [steps[0] + 1, steps[1].max(server.running.len())];
        done.extend(server.step()?);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let mut tokens = [0, 0];
    for request in &done {
        let expected = model.without_cache(&request.tokens[..request.tokens.len() - 1])?;
        let pairs = request.tokens[request.prompt..].iter().zip(&expected[request.prompt - 1..]);
        tokens = [tokens[0] + pairs.len(), tokens[1] + pairs.filter(|(made, wanted)| made == wanted).count()];
    }
    Ok(Served { tokens, steps, rate: tokens[0] as f64 / seconds })
}

#[allow(dead_code, reason = "a test compiles this file as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let Served { tokens: [made, equal], steps: [steps, widest], rate } = serve(32, 64)?;
    println!("32 requests, {made} new tokens, {steps} steps, up to {widest} requests at once");
    println!("{rate:.0} new tokens/s; {equal} of {made} tokens equal those without a cache");
    if equal == made { Ok(()) } else { Err("tokens differ from those without a cache".into()) }
}
