//! Fused attention beside burn's own attention, forward and backward.

#[path = "../../examples/recall.rs"]
#[allow(dead_code, reason = "the test calls no main function")]
mod recall;

use burn::tensor::module::attention as own_attention;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_flashcore::{AttentionModuleOptions, attention};

fn draw(shape: [usize; 4]) -> Tensor<4> {
    Tensor::random(shape, Distribution::Uniform(-1.0, 1.0), &Device::flex().autodiff())
}

/// Each key head for all query heads of its group.
fn repeated(x: Tensor<4>, group: usize) -> Tensor<4> {
    let [batch, heads, rows, dim] = x.dims();
    let x: Tensor<5> = x.reshape([batch, heads, 1, rows, dim]);
    x.repeat_dim(2, group).reshape([batch, heads * group, rows, dim])
}

fn close(name: &str, found: Tensor<4>, expected: Tensor<4>) {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let numbers = |x: Tensor<4>| x.cast(DType::F32).into_data().try_to_vec::<f32>().unwrap();
    let (found, expected) = (numbers(found), numbers(expected));
    assert!(expected.iter().any(|x| x.abs() > 0.01), "{name}: expected numbers are all about 0");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() < 2e-5, "{name}: {found}, not {expected}, at {i}");
    }
}

#[test]
fn outputs_and_gradients_are_those_of_burns_attention() {
    let causal = AttentionModuleOptions { is_causal: true, ..Default::default() };
    for (name, group, [rows, keys], options) in [
        ("full", 1, [5, 5], AttentionModuleOptions::default()),
        ("causal", 1, [6, 9], causal),
        ("groups", 3, [7, 7], causal),
        ("all", 4, [1, 33], AttentionModuleOptions { scale: Some(0.4), softcap: Some(1.5), is_causal: true }),
    ] {
        // Rows of q are strided, and so is the gradient of the output.
        let q = draw([2, rows, 2 * group, 16]).require_grad();
        let (k, v) = (draw([2, 2, keys, 16]).require_grad(), draw([2, 2, keys, 24]).require_grad());
        let weights = draw([2, rows, 2 * group, 24]).detach();
        let loss = |out: Tensor<4>| (out.swap_dims(1, 2) * weights.clone()).sum();
        let ours = attention(q.clone().swap_dims(1, 2), k.clone(), v.clone(), options).unwrap();
        let wide = [&k, &v].map(|x| repeated(x.clone(), group));
        let [wide_k, wide_v] = wide;
        let theirs = own_attention(q.clone().swap_dims(1, 2), wide_k, wide_v, None, None, options);
        close(name, ours.clone().inner(), theirs.clone().inner());
        let (ours, theirs) = (loss(ours).backward(), loss(theirs).backward());
        for (tensor, x) in [("q", &q), ("k", &k), ("v", &v)] {
            close(&format!("{name}, {tensor}"), x.grad(&ours).unwrap(), x.grad(&theirs).unwrap());
        }
    }
}

#[test]
fn tensors_without_gradients_and_halves_are_computed() {
    let device = &Device::flex();
    for dtype in [DType::F16, DType::BF16] {
        let x = Tensor::<4>::random([1, 2, 9, 8], Distribution::Uniform(-1.0, 1.0), device).cast(dtype);
        let out = attention(x.clone(), x.clone(), x.clone(), AttentionModuleOptions::default()).unwrap();
        assert_eq!((out.dims(), out.dtype()), (x.dims(), dtype));
        let x = x.cast(DType::F32);
        let expected = own_attention(x.clone(), x.clone(), x, None, None, AttentionModuleOptions::default());
        let off = (out.cast(DType::F32) - expected).abs().max().into_scalar::<f32>();
        assert!(off < 1e-2, "{off}");
    }
}

#[test]
fn bad_arguments_are_refused_by_name() {
    let refused = |q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options, part: &str| {
        let text = attention(q, k, v, options).unwrap_err().to_string();
        assert!(text.contains(part), "{text:?} does not contain {part:?}");
    };
    let plain = AttentionModuleOptions::default();
    let x = || draw([2, 4, 5, 8]);
    refused(x(), draw([1, 4, 5, 8]), x(), plain, "k has batch = 1");
    refused(x(), draw([2, 4, 5, 16]), x(), plain, "k has head_dim = 16");
    refused(x(), x(), draw([2, 4, 6, 8]), plain, "v has sequence length = 6");
    refused(x(), x(), draw([2, 2, 5, 8]), plain, "v has heads = 2");
    refused(x(), draw([2, 3, 5, 8]), draw([2, 3, 5, 8]), plain, "heads");
    refused(x(), x().cast(DType::F16), x(), plain, "k");
    refused(x(), x(), x(), AttentionModuleOptions { softcap: Some(-1.0), ..plain }, "softcap");
    refused(x(), x(), x(), AttentionModuleOptions { scale: Some(f64::NAN), ..plain }, "scale");
}

#[test]
fn a_model_learns_as_with_burns_attention() {
    let losses = recall::train(25).unwrap();
    for (step, [ours, theirs]) in losses.iter().enumerate() {
        assert!((ours - theirs).abs() < 1e-3, "step {step}: {ours}, not {theirs}");
    }
    assert!(losses[24][0] < 0.97 * losses[0][0], "{losses:?}");
}
