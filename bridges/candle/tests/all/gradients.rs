//! Gradients against candle's autodiff of attention of candle's operations.

use candle::backprop::GradStore;
use candle::{DType, Device, Result, Tensor, Var};
use candle_flashcore::{
    flash_attn, flash_attn_alibi_windowed_softcap, flash_attn_varlen_paged_windowed,
    flash_attn_varlen_windowed,
};

use crate::operations;
use crate::plain::{Options, random};

const SCALE: f32 = 0.6;

struct Inputs([Var; 3]);

impl Inputs {
    fn new(shapes: [&[usize]; 3], dtype: DType) -> Inputs {
        let var = |i: usize| Var::from_tensor(&(random(i as u64 + 20, shapes[i]) * 1.5)?.to_dtype(dtype)?);
        Inputs([0, 1, 2].map(|i| var(i).unwrap()))
    }

    fn tensors(&self) -> [&Tensor; 3] {
        self.0.each_ref().map(Var::as_tensor)
    }

    fn of(&self, store: &GradStore) -> [Tensor; 3] {
        self.tensors().map(|x| store.get(x).unwrap().to_dtype(DType::F32).unwrap())
    }

    /// Compares the gradients of two losses.
    fn compare(&self, name: &str, found: Result<Tensor>, expected: Result<Tensor>, tolerance: f32) {
        let [found, expected] = [found, expected].map(|loss| self.of(&loss.unwrap().backward().unwrap()));
        for ((argument, found), expected) in ["q", "k", "v"].into_iter().zip(found).zip(expected) {
            let largest = |x: Tensor| x.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            let (distance, size) = (largest((found - &expected).unwrap()), largest(expected));
            assert!(
                distance <= tolerance * size,
                "{name}: the gradient of {argument} differs by {distance:e}"
            );
            assert!(size > 1e-3, "{name}: the gradient of {argument} is about 0");
        }
    }
}

fn eager([q, k, v]: [&Tensor; 3], options: &Options) -> Result<Tensor> {
    let one = |b: usize| operations::eager([&q.get(b)?, &k.get(b)?, &v.get(b)?], options);
    Tensor::stack(&(0..q.dim(0)?).map(one).collect::<Result<Vec<_>>>()?, 0)
}

#[test]
fn dense_gradients_are_those_of_autodiff() {
    let numbers = vec![0.5f32, 0.25, 0.125, 0.0625];
    let slopes = Tensor::from_slice(&numbers, 4, &Device::Cpu).unwrap();
    let weights = random(40, &[2, 5, 4, 16]);
    for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 6e-2)] {
        let inputs = Inputs::new([&[2, 5, 4, 16], &[2, 7, 2, 16], &[2, 7, 2, 16]], dtype);
        let [q, k, v] = inputs.tensors();
        let wide = [q, k, v].map(|x| x.to_dtype(DType::F32).unwrap());
        let loss = |out: Result<Tensor>| (out?.to_dtype(DType::F32)? * &weights)?.sum_all();
        let of_eager = |options: &Options| loss(eager(wide.each_ref(), options));
        let options = Options { scale: SCALE, ..Options::default() };
        let causal = Options { window: [None, Some(0)], ..options.clone() };
        inputs.compare("full", loss(flash_attn(q, k, v, SCALE, false)), of_eager(&options), tolerance);
        inputs.compare("causal", loss(flash_attn(q, k, v, SCALE, true)), of_eager(&causal), tolerance);
        let all = Options {
            window: [Some(3), Some(1)],
            softcap: Some(1.5),
            slopes: Some(numbers.clone()),
            ..options
        };
        let found = flash_attn_alibi_windowed_softcap(q, k, v, Some(&slopes), SCALE, Some(3), Some(1), 1.5);
        inputs.compare("all", loss(found), of_eager(&all), tolerance);
    }
}

/// The gradient that arrives is a broadcast number, transposed, or a slice; inputs are slices of one tensor.
#[test]
fn gradients_and_inputs_may_have_any_strides() {
    let inputs = Inputs::new([&[2, 6, 2, 16]; 3], DType::F32);
    let [q, k, v] = inputs.tensors();
    let options = Options { scale: SCALE, ..Options::default() };
    let ours = || flash_attn(q, k, v, SCALE, false);
    let theirs = || eager([q, k, v], &options);
    let part = random(5, &[2, 6, 2, 16]);
    let mixed = || (&part * 1.0).unwrap();
    // The gradient of a row's mean differs by row, or dQ and dK would be 0.
    let square = |out: Result<Tensor>| out?.sqr()?.sum_all();
    inputs.compare("square", square(ours()), square(theirs()), 2e-5);
    let turned = |out: Result<Tensor>| {
        (out?.transpose(1, 3)?.contiguous()? * mixed().transpose(1, 3)?.contiguous()?)?.sum_all()
    };
    inputs.compare("transposed", turned(ours()), turned(theirs()), 2e-5);
    let narrow = |out: Result<Tensor>| out?.narrow(3, 4, 1)?.sum_all();
    inputs.compare("narrow", narrow(ours()), narrow(theirs()), 2e-5);
    // A broadcast gradient: dV is the sum of the weights' columns.
    let sum = ours().unwrap().sum_all().unwrap().backward().unwrap();
    let expected = theirs().unwrap().sum_all().unwrap().backward().unwrap();
    let difference =
        (sum.get(v).unwrap() - expected.get(v).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
    assert!(difference.to_scalar::<f32>().unwrap() < 1e-5);

    let fused = Inputs::new([&[1, 5, 8, 16], &[1, 1, 1, 16], &[1, 1, 1, 16]], DType::F32);
    let fused = fused.0[0].as_tensor();
    let split = || [(0, 4), (4, 2), (6, 2)].map(|(start, heads)| fused.narrow(2, start, heads).unwrap());
    let [q, k, v] = split();
    let found = square(flash_attn(&q, &k, &v, SCALE, false)).unwrap().backward().unwrap();
    let expected = square(eager([&q, &k, &v], &options)).unwrap().backward().unwrap();
    let difference = (found.get(fused).unwrap() - expected.get(fused).unwrap()).unwrap().abs().unwrap();
    assert!(difference.max_all().unwrap().to_scalar::<f32>().unwrap() < 2e-5);
}

#[test]
fn packed_gradients_are_those_of_each_sequence() {
    let inputs = Inputs::new([&[8, 4, 16], &[11, 2, 16], &[11, 2, 16]], DType::F32);
    let [q, k, v] = inputs.tensors();
    let (starts_q, starts_k) = ([0u32, 3, 8], [0u32, 5, 11]);
    let weights = random(41, &[8, 4, 16]);
    let options = Options { scale: SCALE, window: [Some(2), Some(0)], ..Options::default() };
    let part = |i: usize| {
        let cut = |x: &Tensor, starts: [u32; 3]| {
            x.narrow(0, starts[i] as usize, (starts[i + 1] - starts[i]) as usize)
        };
        operations::eager([&cut(q, starts_q)?, &cut(k, starts_k)?, &cut(v, starts_k)?], &options)
    };
    let loss = |out: Tensor| (out * &weights)?.sum_all();
    let [of_q, of_k] = [starts_q, starts_k].map(|starts| Tensor::new(&starts, &Device::Cpu).unwrap());
    let found = flash_attn_varlen_windowed(q, k, v, &of_q, &of_k, 5, 6, SCALE, Some(2), Some(0)).unwrap();
    let expected = Tensor::cat(&[part(0).unwrap(), part(1).unwrap()], 0).unwrap();
    inputs.compare("packed", loss(found), loss(expected), 2e-5);
}

/// Rows that see no key have no gradient, and make none NaN.
#[test]
fn dead_rows_have_no_gradient() {
    let inputs = Inputs::new([&[1, 5, 2, 8], &[1, 3, 2, 8], &[1, 3, 2, 8]], DType::F32);
    let [q, k, v] = inputs.tensors();
    let loss = |out: Tensor| out.sqr()?.sum_all();
    let found = inputs.of(&loss(flash_attn(q, k, v, SCALE, true).unwrap()).unwrap().backward().unwrap());
    // Rows 0 and 1 are level with keys before the first.
    let live = q.narrow(1, 2, 3).unwrap();
    let expected =
        inputs.of(&loss(flash_attn(&live, k, v, SCALE, true).unwrap()).unwrap().backward().unwrap());
    for (found, expected) in found.iter().zip(&expected) {
        let largest = |x: Tensor| x.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        let (difference, size) = (largest((found - expected).unwrap()), largest(expected.clone()));
        assert!(difference <= 2e-5 * size, "differs by {difference:e} of {size}");
    }
    let dead = found[0].narrow(1, 0, 2).unwrap().abs().unwrap().max_all().unwrap();
    assert_eq!(dead.to_scalar::<f32>().unwrap(), 0.0);
}

#[test]
fn keys_in_pages_have_no_backward_pass() {
    let inputs = Inputs::new([&[3, 2, 8], &[2, 4, 2, 8], &[2, 4, 2, 8]], DType::F32);
    let [q, k, v] = inputs.tensors();
    let starts = |last: u32| Tensor::new(&[0, last], &Device::Cpu).unwrap();
    let table = Tensor::new(&[[1u32, 0]], &Device::Cpu).unwrap();
    let (of_q, of_k) = (starts(3), starts(7));
    let out = flash_attn_varlen_paged_windowed(
        q,
        k,
        v,
        &of_q,
        &of_k,
        &table,
        None,
        3,
        7,
        SCALE,
        None,
        Some(0),
        4,
        None,
    );
    let error = out.unwrap().sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(error.contains("pages"), "{error}");
}
