//! The arguments of `flashcore run`.

use std::path::PathBuf;

use clap::Args;
use problem::Layout;

#[derive(Debug, Args)]
pub struct Run {
    #[arg(from_global)]
    pub json: bool,
    /// Queries: .npy, or .safetensors with a tensor "q", or - for either from standard input. Keys and values
    /// come from the same file unless --k or --v is given
    #[arg(long, value_name = "FILE")]
    pub q: PathBuf,
    /// Keys (tensor "k")
    #[arg(long, value_name = "FILE")]
    pub k: Option<PathBuf>,
    /// Values (tensor "v")
    #[arg(long, value_name = "FILE")]
    pub v: Option<PathBuf>,
    /// Output: .npy, or .safetensors with the tensors "out" and "lse", or - for standard output in the format
    /// of the queries
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Causal mask aligned to the bottom right: the last query sees all keys
    #[arg(long)]
    pub causal: bool,
    /// Causal mask aligned to the top left, as PyTorch's is_causal: the first query sees one key
    #[arg(long, conflicts_with = "causal")]
    pub causal_top_left: bool,
    /// Sliding window: number of keys that a query sees before and after its own position, such as 127,0; inf
    /// for no bound. Positions are aligned to the bottom right, or to the top left with --causal-top-left.
    /// With either causal mask AFTER must be 0
    #[arg(long, value_name = "BEFORE,AFTER")]
    pub window: Option<String>,
    /// Factor on Q·Kᵀ; default: 1/sqrt(head_dim)
    #[arg(long, value_parser = single)]
    pub scale: Option<f32>,
    /// Cap on the logits, as in Gemma 2: softcap · tanh(scale · q·k / softcap)
    #[arg(long, value_parser = single, value_name = "CAP")]
    pub softcap: Option<f32>,
    /// Order of dimensions: bhsd (PyTorch) or bshd (FlashAttention)
    #[arg(long, default_value = "bhsd")]
    pub layout: Layout,
    /// Plan (JSON, as `topk` and `plans list` print it); default: the plan kept for this problem (`flashcore
    /// plans`), else the built-in choice
    #[arg(long, value_name = "FILE.json")]
    pub plan: Option<PathBuf>,
}

/// Reads a number that f32 rounds neither to 0 nor to infinity.
fn single(text: &str) -> Result<f32, String> {
    let value: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    let rounded = value as f32;
    let is_held = (rounded == 0.0) == (value == 0.0) && rounded.is_finite() == value.is_finite();
    if is_held { Ok(rounded) } else { Err("expected 0 or a number from 1e-45 to 3.4e38 in size".to_owned()) }
}
