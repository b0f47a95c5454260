//! The examples, with less work.

#[path = "../../examples/gpt.rs"]
#[allow(dead_code, reason = "the test calls no main function")]
mod gpt;
#[path = "../../examples/llama.rs"]
#[allow(dead_code, reason = "the test calls no main function")]
mod llama;

#[test]
fn a_llama_generates_the_tokens_of_candles_operations() {
    let [theirs, ours] = llama::tokens(12).unwrap();
    assert_eq!((theirs.len(), &theirs), (12, &ours));
}

#[test]
fn a_gpt_learns_as_with_candles_operations_and_in_pytorch() {
    let losses = gpt::train(30, 2, 40).unwrap();
    for (step, [ours, theirs, pytorch]) in losses.iter().enumerate() {
        for (name, other) in [("candle", theirs), ("PyTorch", pytorch)] {
            assert!((ours - other).abs() < 1e-3, "step {step}: {ours}, not {other} of {name}");
        }
    }
    let last: f32 = losses[25..].iter().map(|[ours, ..]| ours / 5.0).sum();
    assert!(last < 0.85 * losses[0][0], "{losses:?}");
}
