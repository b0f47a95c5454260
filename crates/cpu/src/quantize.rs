//! Quantisation of Q, K and V to 8-bit floats with descale factors.

use problem::{DType, Element, Layout, Problem, ProblemError, ScaleLayout, Tensor};
use rayon::prelude::*;

use crate::CpuError;
use crate::view::Input;
use crate::view::origin;

/// How a tensor is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// `E4m3` or `E5m2`.
    pub dtype: DType,
    /// Rows that share a factor: 64 or 128. `None` means one factor per KV head; Q's factors are shared by
    /// the query heads of a KV head.
    pub rows: Option<u32>,
    /// Rotates rows of Q and K by a Hadamard matrix with random signs, which this seed determines. The
    /// rotation spreads outliers over the head dim. It must be the same for Q and K: it is orthogonal, so it
    /// does not change their products. Its blocks have the size of the largest power of two that divides the
    /// head dim.
    pub hadamard: Option<u64>,
    /// Subtracts the mean of the head's keys from each key. Every logit of a row changes by the same number,
    /// which does not affect the softmax; the LSE changes by that number.
    pub smooth_keys: bool,
}

impl Quantization {
    /// One factor per KV head, without rotation and smoothing.
    pub const fn per_head(dtype: DType) -> Quantization {
        Quantization { dtype, rows: None, hadamard: None, smooth_keys: false }
    }
}

/// A quantised tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The codes, dense `[batch, heads, rows, dim]`.
    pub codes: Vec<u8>,
    /// The descale factors, dense `[batch, KV heads]` or `[batch, KV heads, blocks]`.
    pub factors: Vec<f32>,
    /// Where the factors are.
    pub layout: ScaleLayout,
}

/// Why a tensor cannot be quantised.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantizeError {
    /// The problem or the buffer is rejected.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// An option has a value that is not accepted.
    #[error("invalid value '{value}' for {option}: expected {accepted}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// The accepted values.
        accepted: &'static str,
    },
}

impl From<ProblemError> for QuantizeError {
    fn from(error: ProblemError) -> Self {
        QuantizeError::Cpu(error.into())
    }
}

/// Quantises Q, K or V of a problem. `data` starts at the tensor's lowest element in memory.
///
/// The factor of a block is its largest finite magnitude divided by the largest number of the type, so that
/// this element becomes that number. A block of zeros has factor 1. NaN stays NaN, and infinities become the
/// largest number.
///
/// # Errors
/// A [`QuantizeError`] that names the option. Problems with lengths are rejected too, because the rows of a
/// packed tensor belong to sequences that only the arrays of a call define.
pub fn quantize<T: Element>(
    problem: &Problem,
    tensor: Tensor,
    data: &[T],
    options: &Quantization,
) -> Result<Quantized, QuantizeError> {
    check(problem, tensor, options)?;
    let start = origin(problem, tensor, data.len())?;
    let [batch, heads, rows, dim] = problem.extents(tensor);
    let strides = problem.strides(tensor);
    // A group of heads shares its factors.
    let group = heads / problem.heads_kv;
    let block = options.rows.map_or(rows, |rows| rows as usize).max(1);
    let blocks = rows.div_ceil(block);
    let rotation = options.hadamard.filter(|_| tensor != Tensor::V).map(|seed| Rotation::new(seed, dim));
    let quantise_group = |index: usize| {
        let (entry, head_kv) = (index / problem.heads_kv, index % problem.heads_kv);
        let mut wide = vec![0.0; group * rows * dim];
        for (i, to) in wide.chunks_exact_mut(dim).enumerate() {
            let (head, row) = (head_kv * group + i / rows, i % rows);
            let first = (start as i64 + strides.offset(entry, head, row)) as usize;
            T::elements(&data[first..first + dim]).widen(to);
        }
        if options.smooth_keys && tensor == Tensor::K {
            subtract_mean(&mut wide, dim);
        }
        if let Some(rotation) = &rotation {
            wide.chunks_exact_mut(dim).for_each(|row| rotation.apply(row));
        }
        let of_block = |i: usize| i % rows / block;
        let mut largest = vec![0.0f32; blocks];
        for (i, row) in wide.chunks_exact(dim).enumerate() {
            let most = &mut largest[of_block(i)];
            *most = row.iter().filter(|x| x.is_finite()).fold(*most, |most, x| most.max(x.abs()));
        }
        let factors: Vec<f32> = largest.iter().map(|&most| factor(most, options.dtype)).collect();
        let rows = wide.chunks_exact(dim).enumerate();
        let codes = rows.flat_map(|(i, row)| {
            let factor = factors[of_block(i)];
            row.iter().map(move |&x| code(x / factor, options.dtype))
        });
        (codes.collect::<Vec<u8>>(), factors)
    };
    let groups: Vec<_> = (0..batch * problem.heads_kv).into_par_iter().map(quantise_group).collect();
    let layout = match options.rows {
        None => ScaleLayout::per_head(problem.heads_kv),
        Some(of_block) => ScaleLayout::per_block(problem.heads_kv, rows, of_block),
    };
    let (codes, factors): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
    Ok(Quantized { codes: codes.concat(), factors: factors.concat(), layout })
}

/// The problem for quantised tensors: dense inputs of the codes' type with factors. `of` contains the results
/// of [`quantize`] for Q, K and V. If [`Problem::dtypes`] has no output of 16 or 32 bits, O is bf16.
pub fn quantized_problem(problem: &Problem, dtype: DType, of: [&Quantized; 3]) -> Problem {
    let mut quantised = problem.clone();
    quantised.dtypes = problem::DTypes { out: problem.dtypes.out, ..dtype.into() };
    for (tensor, strides) in
        [(Tensor::Q, &mut quantised.q), (Tensor::K, &mut quantised.k), (Tensor::V, &mut quantised.v)]
    {
        let [_, heads, rows, dim] = problem.extents(tensor);
        *strides = Layout::Bhsd.strides(heads, rows, dim);
    }
    let [q, k, v] = of.map(|quantised| Some(quantised.layout));
    quantised.scales = problem::Scales { q, k, v };
    // The default scale does not depend on anything that quantisation changes.
    quantised
}

fn check(problem: &Problem, tensor: Tensor, options: &Quantization) -> Result<(), QuantizeError> {
    problem.check()?;
    let refuse = |option, value: String, accepted| Err(QuantizeError::Option { option, value, accepted });
    if !options.dtype.is_fp8() {
        return refuse("dtype", options.dtype.to_string(), "e4m3 or e5m2");
    }
    if tensor == Tensor::Out {
        return refuse("tensor", "out".to_owned(), "q, k or v");
    }
    if let Some(rows) = options.rows.filter(|rows| ![64, 128].contains(rows)) {
        return refuse("rows", rows.to_string(), "64, 128, or one factor per KV head");
    }
    if !problem.lengths.is_even() {
        return refuse("lengths", "uneven".to_owned(), "equal lengths");
    }
    let changes = problem.score.softcap.is_some() || problem.score.sink || problem.programs.score.is_some();
    if options.smooth_keys && (changes || problem.pass.lse()) {
        let accepted = "false with a softcap, sinks, a score program or an LSE, which see the mean";
        return refuse("smooth_keys", "true".to_owned(), accepted);
    }
    Ok(())
}

/// The factor of elements up to `most`.
fn factor(most: f32, dtype: DType) -> f32 {
    let factor = most / dtype.largest();
    // Below the normal numbers, the quotient would lose bits of the elements.
    if factor >= f32::MIN_POSITIVE { factor } else { 1.0 }
}

fn code(x: f32, dtype: DType) -> u8 {
    match dtype {
        DType::E5m2 => problem::E5m2::from_f32(x).to_bits(),
        _ => problem::E4m3::from_f32(x).to_bits(),
    }
}

/// Subtracts the mean of all rows from each row.
fn subtract_mean(all: &mut [f32], dim: usize) {
    let rows = (all.len() / dim).max(1) as f64;
    let mut sums = vec![0.0f64; dim];
    for row in all.chunks_exact(dim) {
        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    for row in all.chunks_exact_mut(dim) {
        row.iter_mut().zip(&sums).for_each(|(x, sum)| *x -= (sum / rows) as f32);
    }
}

/// An orthogonal matrix: a diagonal of random signs, then a normalised Hadamard matrix for each block.
struct Rotation {
    signs: Vec<f32>,
    block: usize,
}

impl Rotation {
    fn new(seed: u64, dim: usize) -> Rotation {
        let mut state = seed;
        // SplitMix64 (Steele, Lea and Flood, 2014).
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ z >> 31
        };
        let signs = (0..dim).map(|_| if next() % 2 == 0 { 1.0 } else { -1.0 }).collect();
        Rotation { signs, block: 1 << dim.trailing_zeros() }
    }

    fn apply(&self, row: &mut [f32]) {
        row.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign);
        let scale = (self.block as f32).sqrt().recip();
        for block in row.chunks_exact_mut(self.block) {
            let mut half = 1;
            while half < self.block {
                for pair in block.chunks_exact_mut(2 * half) {
                    let (a, b) = pair.split_at_mut(half);
                    for (a, b) in a.iter_mut().zip(b) {
                        (*a, *b) = (*a + *b, *a - *b);
                    }
                }
                half *= 2;
            }
            block.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// A quantised tensor as an input of its problem.
impl<'a> Quantized {
    /// The codes as an input of type `dtype`, that of the quantisation.
    pub fn input(&'a self, dtype: DType) -> Input<'a> {
        match dtype {
            DType::E5m2 => Input::from(bytemuck::cast_slice::<u8, problem::E5m2>(&self.codes)),
            _ => Input::from(bytemuck::cast_slice::<u8, problem::E4m3>(&self.codes)),
        }
    }
}
