//! The [`attention`] function and its options.

use std::sync::OnceLock;

use cpu::{Element, Input};
use driver::DriverError;
use kernels::KernelError;
use problem::{
    Band, DType, ElementsMut, Expr, Invariant, Layout, Operand, Operands, Pass, Problem, ScaleLayout, Scales,
    Score, Tensor,
};

use crate::bands::Bands;
use crate::features::{Extents, Features, with_rust_names};
use crate::gpu::{self, Gpu};
use crate::raw::{self, CallOptions, View};
use crate::{AttentionError, LengthValues, ScaleValues, TableView, TensorView, TensorViewMut};

/// The device that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// Native kernels on the processor's cores.
    Cpu,
    /// The GPU with this ordinal of the CUDA driver; 0 is the first.
    Cuda(i32),
}

impl Device {
    /// The fastest device present: the first GPU of sm_80 or later, else the CPU, also when the driver
    /// reports an error. The driver is queried once per process. No CUDA context is created.
    pub fn best() -> Device {
        static BEST: OnceLock<Device> = OnceLock::new();
        *BEST.get_or_init(|| {
            let devices = driver::devices().unwrap_or_default();
            let first = devices.iter().find(|device| device.sm() >= gpu::OLDEST_SM);
            first.map_or(Device::Cpu, |device| Device::Cuda(device.ordinal))
        })
    }
}

/// Whether the CPU takes over from the default device: no kernel family supports the problem, device memory
/// is exhausted, or the process is a fork that cannot use the device. Other errors are reported.
fn is_for_the_cpu(error: &AttentionError) -> bool {
    matches!(
        error,
        AttentionError::Kernel(KernelError::Problem(_) | KernelError::Plan(_))
            | AttentionError::Driver(DriverError::OutOfMemory { .. } | DriverError::Forked)
    )
}

/// The result of [`Attention::run`]: dense tensors in new memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Output<T> {
    /// O as `[batch, heads_q, seq_q, head_dim_v]`, or `[1, heads_q, rows, head_dim_v]` for packed queries.
    pub data: Vec<T>,
    /// The shape of `data`.
    pub shape: [usize; 4],
    /// Log-sum-exp of the logits that the softmax takes, sinks included, natural logarithm:
    /// `[batch, heads_q, seq_q]`, or `[heads_q, rows]` for packed queries. −∞ for rows that see no key and
    /// have no sink, and for rows that belong to no sequence.
    pub lse: Vec<f32>,
}

/// An attention call with its options, made by [`attention`].
#[derive(Clone, Debug)]
#[must_use = "nothing is computed until `run` or `run_into`"]
pub struct Attention<'a, Q, K = Q, V = Q> {
    pub(crate) q: TensorView<'a, Q>,
    pub(crate) k: TensorView<'a, K>,
    pub(crate) v: TensorView<'a, V>,
    pub(crate) bands: Bands,
    pub(crate) score: Score,
    pub(crate) features: Features<'a>,
    pub(crate) tf32: bool,
    pub(crate) invariant: Option<Invariant>,
    /// `None` selects [`Device::best`], with the CPU as fallback.
    pub(crate) device: Option<Device>,
}

/// `softmax(scale · Q Kᵀ + mask) V` of `q` `[batch, heads_q, seq_q, head_dim]`, `k`
/// `[batch, heads_kv, seq_kv, head_dim]` and `v` `[batch, heads_kv, seq_kv, head_dim_v]`. The defaults are no
/// mask and `scale = 1/√head_dim`.
///
/// A logit is made in this order, whichever the order of the builder's methods: the scale, the temperature,
/// the softcap, the score program, ALiBi, the bias. A row sees the keys that the band, the mask program and
/// the mask tensor all show it, within its sequence. A row that sees no key has O = 0, and LSE = −∞ or the
/// sink.
///
/// On a GPU, a hidden key has probability 0, and the kernel multiplies its value by that 0, as every fused
/// attention does. A hidden value that is infinite or NaN can therefore make rows NaN that do not see it. The
/// CPU kernels skip hidden keys.
///
/// GPU kernels compute logits up to 1.49·10⁹ in size, or 5.8·10⁶ with V of f16 or 8 bits. With a scale above
/// 128 or a softcap above 64, and on the CPU, the limit is 2.3·10³⁸.
///
/// With Q and K in [`E4m3`](crate::E4m3) or [`E5m2`](crate::E5m2), V has one of these types or 16 bits, and
/// O's type is chosen with [`run_as`](Attention::run_as).
pub fn attention<'a, Q: Element, K: Element, V: Element>(
    q: TensorView<'a, Q>,
    k: TensorView<'a, K>,
    v: TensorView<'a, V>,
) -> Attention<'a, Q, K, V> {
    let (bands, score, features) = (Bands::FULL, Score::default(), Features::default());
    Attention { q, k, v, bands, score, features, tf32: false, invariant: None, device: None }
}

impl<T: Element> Attention<'_, T> {
    /// Computes into new memory of the inputs' type. The result is dense `[batch, heads, sequence, dim]`,
    /// also for inputs in [`Layout::Bshd`]. For 8-bit inputs, call [`run_as`](Attention::run_as).
    ///
    /// # Errors
    /// When the shapes of q, k and v disagree, when [`Problem::check`] rejects the problem, or when the
    /// device fails or does not support the problem.
    pub fn run(self) -> Result<Output<T>, AttentionError> {
        self.run_as()
    }
}

impl<'a, Q: Element, K: Element, V: Element> Attention<'a, Q, K, V> {
    /// Each query sees the keys up to its own position, counted from the end of the sequence, as in
    /// FlashAttention.
    ///
    /// `causal`, [`causal_top_left`](Attention::causal_top_left), [`window`](Attention::window) and
    /// [`band`](Attention::band) can be joined in any order. A query sees the keys that all of them show, as
    /// with `causal=True` and `window_size` of `flash_attn_func` in Python:
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let x = [0.0f32; 4 * 8];
    /// let view = || TensorView::dense(&x, [1, 1, 4, 8], Layout::Bhsd);
    /// let out = attention(view()?, view()?, view()?).window(1, 1).causal().run()?;
    /// assert_eq!(out.lse, [0.0, 2f32.ln(), 2f32.ln(), 2f32.ln()]); // the query's own key and the one before
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn causal(self) -> Self {
        self.band(Band::CAUSAL)
    }

    /// Each query sees the keys up to its own position, counted from the start of the sequence, as with
    /// PyTorch's `is_causal`. When `seq_q` = `seq_kv`, this is [`causal`](Attention::causal).
    pub fn causal_top_left(self) -> Self {
        self.band(Band::CAUSAL_TOP_LEFT)
    }

    /// A sliding window, as FlashAttention's `window_size = (before, after)`: query `i` sees key `j` if and
    /// only if `i + seq_kv − seq_q − before ≤ j ≤ i + seq_kv − seq_q + after`. A row that sees no key has O =
    /// 0 and LSE = −∞. A model's "window of W" counts the query's own key: `before = W − 1`. Blocks of keys
    /// that no query of a tile sees cost nothing.
    pub fn window(self, before: u32, after: u32) -> Self {
        self.band(Band::window(before, after))
    }

    /// Hides the keys outside a band of positions; [`Band`] has the formula. Bands of several calls are
    /// joined: a query sees the keys that all of them show. For bands of both corners, unless all sequences
    /// have as many queries as keys, the bounds at the top left are part of the mask program. A row that sees
    /// no key has O = 0 and LSE = −∞.
    pub fn band(mut self, band: Band) -> Self {
        self.bands.add(band);
        self
    }

    /// A cap on the logits (Gemma 2): `softcap · tanh(scale · q·k / softcap)`. The scale is applied first,
    /// then the cap, then the band. Positive and finite; LSE is that of the capped logits.
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.score.softcap = Some(softcap);
        self
    }

    /// The factor on Q Kᵀ; any finite number.
    pub fn scale(mut self, scale: f32) -> Self {
        self.score.scale = Some(scale);
        self
    }

    /// A temperature: a factor on the scaled products of each query head, before the softcap; finite and not
    /// negative. On GPUs the family `mma` computes it. [`backward`](Attention::backward) refuses it: there,
    /// the factors are a table of a score program.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let (q, k) = ([1.0f32; 8], [[1.0f32; 8], [0.0; 8]].concat());
    /// let q = TensorView::dense(&q, [1, 1, 1, 8], Layout::Bhsd)?;
    /// let k = TensorView::dense(&k, [1, 1, 2, 8], Layout::Bhsd)?;
    /// let out = attention(q, k, k).scale(0.25).temperature(&[0.5]).run()?;
    /// assert!((out.lse[0] - (1f32.exp() + 1.0).ln()).abs() < 1e-6); // 0.5 · 0.25 · 8 = 1
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn temperature(mut self, factors: &'a [f32]) -> Self {
        self.features.set_of_heads("temperature", Operand::Temperature, factors);
        self
    }

    /// Attention sinks (GPT-OSS): a logit per query head that takes part in the softmax's denominator and has
    /// no value. It is neither scaled nor capped, and enters the LSE.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let x = [0.0f32; 8];
    /// let view = || TensorView::dense(&x, [1, 1, 1, 8], Layout::Bhsd);
    /// let out = attention(view()?, view()?, view()?).sink(&[0.0]).run()?;
    /// assert!((out.lse[0] - 2f32.ln()).abs() < 1e-6); // of one score of 0 and a sink of 0
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn sink(mut self, logits: &'a [f32]) -> Self {
        self.features.set_of_heads("sink", Operand::Sinks, logits);
        self
    }

    /// ALiBi: `s − slope · |i + seq_kv − seq_q − j|` for query `i` and key `j`. The slopes are `[heads_q]` or
    /// `[batch, heads_q]`.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let x = [0.0f32; 16];
    /// let view = || TensorView::dense(&x, [1, 1, 2, 8], Layout::Bhsd);
    /// let out = attention(view()?, view()?, view()?).causal().alibi(&[1.0]).run()?;
    /// assert!((out.lse[1] - (1.0 + (-1f32).exp()).ln()).abs() < 1e-6); // distances 0 and 1
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn alibi(mut self, slopes: &'a [f32]) -> Self {
        self.features.slopes = Some(slopes);
        self
    }

    /// A bias that is added to the logits, of any shape that broadcasts to `[batch, heads_q, seq_q, seq_kv]`,
    /// with any strides; f32, f16 or bf16. A bias of −∞ gives a key the probability 0. If the key or its
    /// value has NaN or infinity, the row becomes NaN: hide such keys with [`Attention::mask`].
    ///
    /// ```
    /// use flashcore::{Layout, TableView, TensorView, attention};
    ///
    /// let (x, v) = ([0.0f32; 16], (0..16).map(|i| i as f32).collect::<Vec<_>>());
    /// let shape = [1, 1, 2, 8];
    /// let x = TensorView::dense(&x, shape, Layout::Bhsd)?;
    /// let bias = [0.0, f32::NEG_INFINITY]; // key 1 has the probability 0 in every row
    /// let call = attention(x, x, TensorView::dense(&v, shape, Layout::Bhsd)?);
    /// let out = call.bias(TableView::dense(&bias[..], &[1, 2])?).run()?;
    /// assert_eq!(out.data[8..], v[..8]);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn bias(mut self, bias: TableView<'a>) -> Self {
        self.features.bias = Some(bias);
        self
    }

    /// A mask tensor of any shape that broadcasts to `[batch, heads_q, seq_q, seq_kv]`, with any strides;
    /// `bool`, or `u8` or `i32` where not 0 is true. A query sees a key where the mask is true.
    ///
    /// ```
    /// use flashcore::{Layout, TableView, TensorView, attention};
    ///
    /// let (x, v) = ([0.0f32; 16], (0..16).map(|i| i as f32).collect::<Vec<_>>());
    /// let shape = [1, 1, 2, 8];
    /// let x = TensorView::dense(&x, shape, Layout::Bhsd)?;
    /// let call = attention(x, x, TensorView::dense(&v, shape, Layout::Bhsd)?);
    /// let mask = [false, true, false, false]; // row 0 sees key 1, row 1 sees nothing
    /// let out = call.mask(TableView::dense(&mask[..], &[2, 2])?).run()?;
    /// assert_eq!(out.data[..8], v[8..]);
    /// assert_eq!((out.data[8], out.lse[1]), (0.0, f32::NEG_INFINITY));
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn mask(mut self, mask: TableView<'a>) -> Self {
        self.features.mask = Some(mask);
        self
    }

    /// A program for the score: the logit that the softmax takes, as an expression of the scaled and capped
    /// score, of positions, tables and parameters. [`library`](crate::library) has the leaves and well-known
    /// programs.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention, library as lib};
    ///
    /// let x = [0.0f32; 16];
    /// let view = || TensorView::dense(&x, [1, 1, 2, 8], Layout::Bhsd);
    /// let program = lib::score() + (lib::query() + lib::key()) * 0.5;
    /// let out = attention(view()?, view()?, view()?).score(program).run()?;
    /// assert!((out.lse[0] - (1.0 + 0.5f32.exp()).ln()).abs() < 1e-6);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn score(mut self, program: Expr) -> Self {
        self.features.score_program = Some(program);
        self
    }

    /// A program for the mask: a query sees a key where it is true. Comparisons of the query's position with
    /// the key's, joined by `&`, become bounds: blocks outside of them cost no time.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention, library as lib};
    ///
    /// let x = [0.0f32; 32];
    /// let view = || TensorView::dense(&x, [1, 1, 4, 8], Layout::Bhsd);
    /// // Chunks of two positions (Llama 4). The length is parameter 0.
    /// let call = attention(view()?, view()?, view()?).mask_program(lib::chunk(lib::int(0)));
    /// let out = call.parameters(&[], &[2]).run()?;
    /// assert_eq!(out.lse, [0.0, 2f32.ln(), 0.0, 2f32.ln()]);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn mask_program(mut self, program: Expr) -> Self {
        self.features.mask_program = Some(program);
        self
    }

    /// The tables that the programs read: table `i` of an expression is element `i`.
    ///
    /// ```
    /// use flashcore::{Layout, TableView, TensorView, attention, library as lib};
    ///
    /// let x = [0.0f32; 24];
    /// let view = || TensorView::dense(&x, [1, 1, 3, 8], Layout::Bhsd);
    /// let documents = [0, 0, 1]; // the document of each position
    /// let call = attention(view()?, view()?, view()?).mask_program(lib::document(0));
    /// let out = call.tables([TableView::dense(&documents[..], &[1, 3])?]).run()?;
    /// assert_eq!(out.lse, [2f32.ln(), 2f32.ln(), 0.0]);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn tables(mut self, tables: impl IntoIterator<Item = TableView<'a>>) -> Self {
        self.features.tables = tables.into_iter().collect();
        self
    }

    /// The values of the programs' parameters. Other values need no other kernel.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention, library as lib};
    ///
    /// let x = [0.0f32; 8];
    /// let view = || TensorView::dense(&x, [1, 1, 1, 8], Layout::Bhsd);
    /// let call = attention(view()?, view()?, view()?).score(lib::score() + lib::float(0) * lib::int(0));
    /// assert_eq!(call.parameters(&[1.5], &[2]).run()?.lse, [3.0]);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn parameters(mut self, floats: &[f32], ints: &[i32]) -> Self {
        self.features.floats = floats.to_vec();
        self.features.ints = ints.to_vec();
        self
    }

    /// Sequences of different lengths. An array that is empty is not used.
    ///
    /// With `cumulative_q` the sequences of all batch entries follow each other in Q, of shape
    /// `[1, heads_q, rows, head_dim]`, and in O: entry `b` has the rows from element `b` of the array up to
    /// element `b + 1`. `cumulative_kv` states the same of K and V. `used_q` and `used_kv` are the numbers of
    /// rows that are used of each sequence, from its first on. `left_pad` is the number of rows before the
    /// first key of each sequence. Bands, programs and biases count positions within the sequence.
    ///
    /// ```
    /// use flashcore::{Layout, LengthValues, TensorView, attention};
    ///
    /// let x = [0.0f32; 5 * 8];
    /// let view = || TensorView::dense(&x, [1, 1, 5, 8], Layout::Bshd);
    /// let ends = [0, 2, 5]; // sequences of two and of three tokens
    /// let lengths = LengthValues { cumulative_q: &ends, cumulative_kv: &ends, ..LengthValues::default() };
    /// let out = attention(view()?, view()?, view()?).lengths(lengths).run()?;
    /// assert_eq!(out.lse, [2f32.ln(), 2f32.ln(), 3f32.ln(), 3f32.ln(), 3f32.ln()]);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn lengths(mut self, lengths: LengthValues<'a>) -> Self {
        self.features.lengths = lengths;
        self
    }

    /// Allows GPUs to round Q, K, V and the weights P in f32 to tf32, which has 11 significant bits, before
    /// they multiply them, as `torch.backends.cuda.matmul.allow_tf32` does for matrix products. On a GPU
    /// without this call, each product is the sum of three tf32 products, and has the precision of f32. The
    /// CPU always computes f32 in full. With Q, K or V of another type, the run returns an error that names
    /// the element types.
    ///
    /// ```
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let x = [0.5f32; 8];
    /// let view = || TensorView::dense(&x, [1, 1, 1, 8], Layout::Bhsd);
    /// assert_eq!(attention(view()?, view()?, view()?).tf32().run()?.data, x);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn tf32(mut self) -> Self {
        self.tf32 = true;
        self
    }

    /// The device that computes. The default is [`Device::best`], and the CPU when that device does not
    /// support the problem, is out of memory or cannot be used after a fork. A device that is set here
    /// computes the problem or returns an error; the call does not fall back to the CPU.
    ///
    /// On the CPU, the plan is the one that a search has kept for this problem on this machine (`flashcore
    /// evolve`, `flashcore plans`), else the default.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Descale factors of 8-bit inputs, as FlashAttention-3's `descale_q`, `descale_k` and `descale_v`: dense
    /// `[batch, heads_kv]`, for Q too; empty for none. Each element stands for the factor times the element.
    /// [`scales`](Attention::scales) takes other layouts.
    ///
    /// ```
    /// use flashcore::{E4m3, Layout, TensorView, attention};
    ///
    /// let one = [E4m3::from_f32(1.0); 8];
    /// let view = || TensorView::dense(&one, [1, 1, 1, 8], Layout::Bhsd);
    /// let out = attention(view()?, view()?, view()?).descale(&[], &[], &[0.5]).run_as::<f32>()?;
    /// assert_eq!(out.data, [0.5; 8]);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn descale(self, q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Self {
        let layout = ScaleLayout::per_head(self.k.shape[1]);
        let of = |factors: &[f32]| (!factors.is_empty()).then_some(layout);
        let layouts = Scales { q: of(q), k: of(k), v: of(v) };
        self.scales(layouts, ScaleValues { q, k, v })
    }

    /// Descale factors of 8-bit inputs with any layout, per block of rows too.
    pub fn scales(mut self, layouts: Scales, values: ScaleValues<'a>) -> Self {
        self.features.scales = (layouts, values);
        self
    }

    /// Computes into new memory of type `T`: the inputs' type, or any type of 16 or 32 bits for 8-bit Q and
    /// K. The result is dense `[batch, heads, sequence, dim]`, whatever the layout of the inputs.
    ///
    /// # Errors
    /// When the shapes of q, k and v disagree, when [`Problem::check`] rejects the problem, when there is no
    /// memory for the result, or when the device fails or does not support the problem.
    pub fn run_as<T: Element>(self) -> Result<Output<T>, AttentionError> {
        let shape = [self.q.shape[0], self.q.shape[1], self.q.shape[2], self.v.shape[3]];
        let strides = Layout::Bhsd.strides(shape[1], shape[2], shape[3]);
        let (problem, inputs) = self.problem(T::DTYPE, shape, strides, true)?;
        let elements = problem.span(Tensor::Out).map_or(0, |(elements, _)| elements);
        let mut data = filled("out", elements, T::from_f32(0.0))?;
        let mut lse = filled("lse", problem.lse_len(), f32::NEG_INFINITY)?;
        self.compute(&problem, &inputs, &mut data, Some(&mut lse))?;
        Ok(Output { data, shape, lse })
    }

    /// Computes into `out` `[batch, heads_q, seq_q, head_dim_v]` and, if given, writes the log-sum-exp to
    /// `lse`, `[batch, heads_q, seq_q]`. For packed queries they are `[1, heads_q, rows, head_dim_v]` and
    /// `[heads_q, rows]`. Rows that belong to no sequence keep their values.
    ///
    /// # Errors
    /// As [`run`](Attention::run), and when the shape of `out` or the length of `lse` does not fit. Nothing
    /// has been written then, unless a GPU failed during the call ([`AttentionError::Driver`]).
    pub fn run_into<T: Element>(
        self,
        out: TensorViewMut<'_, T>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), AttentionError> {
        let (problem, inputs) = self.problem(T::DTYPE, out.shape, out.strides, lse.is_some())?;
        let needed = problem.lse_len();
        if let Some(len) = lse.as_ref().map(|lse| lse.len()).filter(|&len| len != needed) {
            return Err(AttentionError::Lse { len, needed });
        }
        self.compute(&problem, &inputs, out.data, lse)
    }

    fn compute<T: Element>(
        &self,
        problem: &Problem,
        inputs: &Operands<'_>,
        out: &mut [T],
        mut lse: Option<&mut [f32]>,
    ) -> Result<(), AttentionError> {
        if let Some(ordinal) = self.gpu() {
            let on_gpu = Gpu::open(ordinal).and_then(|gpu| {
                let lse = lse.as_deref_mut().map(|lse| (Operand::Lse, ElementsMut::F32(lse)));
                let outputs = [(Operand::OUT, T::elements_mut(out))].into_iter().chain(lse);
                gpu::attend(&gpu, problem, inputs, outputs.collect())
            });
            if !self.goes_on(&on_gpu) {
                return on_gpu;
            }
        }
        compute_on_cpu(problem, inputs, out, lse)
    }

    /// The GPU that computes first, if any.
    pub(crate) fn gpu(&self) -> Option<i32> {
        match self.device.unwrap_or_else(Device::best) {
            Device::Cpu => None,
            Device::Cuda(ordinal) => Some(ordinal),
        }
    }

    /// Whether the CPU computes after a GPU has refused: only where the caller has named no device.
    pub(crate) fn goes_on(&self, on_gpu: &Result<(), AttentionError>) -> bool {
        self.device.is_none() && on_gpu.as_ref().is_err_and(is_for_the_cpu)
    }

    /// The problem and its inputs.
    pub(crate) fn problem(
        &self,
        dtype: DType,
        out: [usize; 4],
        out_strides: problem::Strides,
        lse: bool,
    ) -> Result<(Problem, Operands<'_>), AttentionError> {
        let (q, k) = (self.q.shape, self.k.shape);
        if dtype.is_fp8() {
            return Err(AttentionError::Unsupported {
                argument: "the element type of out",
                value: dtype.to_string(),
                accepted: "f16, bf16 or f32; for 8-bit inputs, call run_as::<half::bf16>()".to_owned(),
            });
        }
        self.features.check_of_heads(q[1])?;
        let Extents { batch, seq_q, seq_kv, lengths } = self.features.extents(q, k)?;
        let (band, bounds) = self.bands.resolve(lengths.is_even() && seq_q == seq_kv);
        let (programs, tables) = self.features.programs([batch, q[1], seq_q, seq_kv], bounds)?;
        let mut inputs = self.features.inputs(tables);
        let mut views = self.features.array_views()?;
        for (operand, dtype, shape, strides) in [
            (Operand::Q, Q::DTYPE, q, self.q.strides),
            (Operand::K, K::DTYPE, k, self.k.strides),
            (Operand::V, V::DTYPE, self.v.shape, self.v.strides),
            (Operand::OUT, dtype, out, out_strides),
        ] {
            views.insert(operand, View::rows(dtype, shape, strides));
        }
        let options = CallOptions {
            pass: Pass::Forward { lse, continues: false, invariant: self.invariant },
            band,
            scale: self.score.scale,
            softcap: self.score.softcap,
            dropout: self.features.dropout.map(|(p, _)| p),
            tf32: self.tf32,
            longest: [Some(seq_q), Some(seq_kv)],
            ..CallOptions::default()
        };
        let problem = raw::problem_of(&views, |view| view, &options)?;
        let problem = Problem { programs, scales: self.features.scales.0, ..problem };
        problem.check()?;
        inputs.insert(Operand::Q, Q::elements(self.q.data));
        inputs.insert(Operand::K, K::elements(self.k.data));
        inputs.insert(Operand::V, V::elements(self.v.data));
        problem.check_length_values(&inputs).map_err(with_rust_names)?;
        problem.check_inputs(&inputs, |elements| (elements.dtype(), elements.len()))?;
        Ok((problem, inputs))
    }
}

/// A new vector, or an error if there is no memory for it.
pub(crate) fn filled<T: Copy>(
    tensor: &'static str,
    elements: usize,
    value: T,
) -> Result<Vec<T>, AttentionError> {
    // `resize` would write every element. `vec!` takes pages of zeros from the operating system, which clears
    // a page when the computation first writes to it, but `vec!` aborts the process if there is no memory.
    // The vector that is dropped here finds out beforehand. `black_box` keeps the compiler from removing the
    // vector.
    let out_of_memory = |_| AttentionError::HostMemory { tensor, elements };
    let mut probe = Vec::<T>::new();
    probe.try_reserve_exact(elements).map_err(out_of_memory)?;
    drop(std::hint::black_box(probe));
    Ok(vec![value; elements])
}

fn compute_on_cpu<T: Element>(
    problem: &Problem,
    inputs: &Operands<'_>,
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), AttentionError> {
    let plan = raw::plan_for(problem, cpu::threads())?;
    let inputs = inputs.map(|_, &elements| Input::from(elements));
    Ok(cpu::attention_with(problem, &inputs, out, lse, &plan)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Values that every 16-bit type represents exactly.
    fn ramp<T: Element>(n: usize, step: usize) -> Vec<T> {
        (0..n).map(|i| T::from_f32(((i * step) % 17) as f32 / 8.0 - 1.0)).collect()
    }

    fn agrees_with_the_oracle<T: Element>(tolerance: f64) {
        let (q, k, v) = (ramp::<T>(4 * 5 * 8, 3), ramp::<T>(2 * 7 * 8, 5), ramp::<T>(2 * 7 * 8, 11));
        let view = |data, shape| TensorView::dense(data, shape, Layout::Bshd).unwrap();
        let full = attention(view(&q, [1, 4, 5, 8]), view(&k, [1, 2, 7, 8]), view(&v, [1, 2, 7, 8]));
        let bands = [(full.clone().causal(), Band::CAUSAL), (full.causal_top_left(), Band::CAUSAL_TOP_LEFT)];
        for (call, mask) in bands {
            let output = call.clone().run().unwrap();
            let (problem, _) =
                call.problem(T::DTYPE, [1, 4, 5, 8], Layout::Bhsd.strides(4, 5, 8), true).unwrap();
            assert_eq!(problem.band, mask);
            let oracle = oracle::oracle(&problem, &q, &k, &v).unwrap();
            for (ours, exact) in output.data.iter().zip(&oracle.out) {
                assert!((f64::from(ours.to_f32()) - exact).abs() < tolerance, "{} {exact}", ours.to_f32());
            }
            for (ours, exact) in output.lse.iter().zip(&oracle.lse) {
                assert!((f64::from(*ours) - exact).abs() < 1e-5);
            }
        }
    }

    /// The number of keys that each of five queries sees of `keys` keys.
    fn shown<'a>(
        zeros: &'a [f32],
        keys: usize,
        bands: impl Fn(Attention<'a, f32>) -> Attention<'a, f32>,
    ) -> Vec<u32> {
        let view = |rows| TensorView::dense(zeros, [1, 1, rows, 8], Layout::Bhsd).unwrap();
        let call = bands(attention(view(5), view(keys), view(keys))).device(Device::Cpu);
        call.run().unwrap().lse.iter().map(|lse| lse.exp().round() as u32).collect()
    }

    #[test]
    fn bands_are_joined_in_any_order() {
        let zeros = [0.0f32; 8 * 8];
        assert_eq!(shown(&zeros, 5, |call| call.window(2, 0).causal()), [1, 2, 3, 3, 3]);
        assert_eq!(shown(&zeros, 5, |call| call.causal().window(2, 2)), [1, 2, 3, 3, 3]);
        assert_eq!(shown(&zeros, 5, |call| call.causal_top_left().window(2, 2)), [1, 2, 3, 3, 3]);
        assert_eq!(shown(&zeros, 5, |call| call.window(3, 1).window(2, 2)), [2, 3, 4, 4, 3]);
        // Query 0 is level with key 0 at the top left, and with key 3 or −2 at the bottom right.
        for (keys, expected) in [(8, [1, 2, 2, 2, 2]), (3, [0, 0, 1, 2, 3])] {
            assert_eq!(shown(&zeros, keys, |call| call.causal_top_left().window(4, 0)), expected);
            assert_eq!(shown(&zeros, keys, |call| call.window(4, 0).causal_top_left()), expected);
        }
    }

    #[test]
    fn every_element_type_agrees_with_the_oracle() {
        agrees_with_the_oracle::<f32>(1e-6);
        agrees_with_the_oracle::<f16>(2e-3);
        agrees_with_the_oracle::<bf16>(2e-2);
    }

    #[test]
    fn strided_outputs_and_broadcast_keys() {
        let (q, k) = (ramp::<f32>(2 * 3 * 8, 3), ramp::<f32>(4 * 8, 5));
        let q = TensorView::dense(&q, [1, 2, 3, 8], Layout::Bhsd).unwrap();
        let shared =
            TensorView::strided(&k, [1, 2, 4, 8], problem::Strides { batch: 0, head: 0, row: 8 }).unwrap();
        let call = attention(q, shared, shared);
        let dense = call.clone().run().unwrap();
        let mut padded = vec![7.0; 2 * 3 * 10];
        let strides = problem::Strides { batch: 0, head: 30, row: 10 };
        let mut lse = [0.0; 6];
        let out = TensorViewMut::strided(&mut padded, [1, 2, 3, 8], strides).unwrap();
        call.run_into(out, Some(&mut lse)).unwrap();
        assert_eq!(lse.to_vec(), dense.lse);
        for (padded, dense) in padded.chunks(10).zip(dense.data.chunks(8)) {
            assert_eq!((&padded[..8], &padded[8..]), (dense, &[7.0, 7.0][..]));
        }
    }

    #[test]
    fn refusals_name_the_argument() {
        let data = vec![0.0f32; 64];
        let short = TensorView::dense(&data, [1, 1, 9, 8], Layout::Bhsd).unwrap_err().to_string();
        assert_eq!(short, "a view of shape [1, 1, 9, 8] needs 72 elements, but the slice has 64");
        let far = problem::Strides { batch: 0, head: i64::MAX, row: 8 };
        let error = TensorView::strided(&data, [1, 3, 8, 8], far).unwrap_err();
        assert!(matches!(error, AttentionError::ViewTooLarge { .. }));
        let view = |shape| TensorView::dense(&data, shape, Layout::Bhsd).unwrap();
        let error = attention(view([1, 1, 8, 8]), view([1, 1, 4, 16]), view([1, 1, 4, 8])).run().unwrap_err();
        assert_eq!(error.to_string(), "k has head_dim = 16, but q has 8; they must be equal");
        let error =
            attention(view([1, 2, 4, 8]), view([1, 1, 8, 8]), view([1, 1, 8, 8])).scale(f32::NAN).run();
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("invalid value 'NaN' for scale: expected a finite number")
        );
        let rows = problem::Strides { batch: 0, head: 0, row: 0 };
        let endless = TensorView::strided(&data, [1, 1, 1 << 50, 8], rows).unwrap();
        let error = attention(endless, view([1, 1, 8, 8]), view([1, 1, 8, 8])).run().unwrap_err();
        assert_eq!(error, AttentionError::HostMemory { tensor: "out", elements: 1 << 53 });
        let slopes = TensorView::strided(&data, [usize::MAX, 2, 4, 8], rows).unwrap();
        let error = attention(slopes, slopes, slopes).alibi(&[1.0; 3]).run().unwrap_err().to_string();
        assert_eq!(error, "invalid value '3' for the number of slopes of alibi: expected heads_q = 2");
        let eight = [problem::E4m3::from_f32(1.0); 8];
        let eight = TensorView::dense(&eight, [1, 1, 1, 8], Layout::Bhsd).unwrap();
        let error = attention(eight, eight, eight).run().unwrap_err().to_string();
        let told = "invalid value 'e4m3' for the element type of out: expected f16, bf16 or f32; for 8-bit \
                    inputs, call run_as::<half::bf16>()";
        assert_eq!(error, told);
        let factors = [1.0; 2];
        let error = attention(eight, eight, eight)
            .descale(&factors, &[], &[])
            .run_as::<f32>()
            .unwrap_err()
            .to_string();
        assert_eq!(error, "invalid value '2' for the number of elements of descale_q: expected 1");
        let mut out = vec![0.0; 64];
        let out = TensorViewMut::dense(&mut out, [1, 1, 8, 8], Layout::Bhsd).unwrap();
        let call = attention(view([1, 1, 8, 8]), view([1, 1, 8, 8]), view([1, 1, 8, 8]));
        assert_eq!(call.run_into(out, Some(&mut [0.0; 7])), Err(AttentionError::Lse { len: 7, needed: 8 }));
    }
}
