//! Attention on the CPU with native kernels.
//!
//! [`attention`] computes on the CPU: f32, f16 and bf16 in and out, 8-bit floats in, f32 accumulation,
//! online softmax over blocks of keys, memory linear in the sequence length. A [`CpuPlan`] (plain data)
//! determines how it runs.
//!
//! Rows without mass: a query that sees no key, or only keys whose logit is −∞, has O = 0 and LSE = −∞. For a
//! row with a visible logit of NaN or +∞, O and LSE are NaN. A key that a row does not see does not affect
//! the row, even if the key is NaN or infinite. With an attention sink, a row without mass has O = 0 and
//! LSE = the sink.
//!
//! Rows that belong to no sequence are not read, and O and the LSE keep their contents there.

mod aligned;
mod arithmetic;
mod backward;
mod before;
mod computed;
mod cost;
mod decode;
mod dims;
mod error;
mod forward;
pub mod kept;
mod narrow;
mod output;
mod parts;
pub mod peak;
mod plan;
mod programs;
mod quantize;
mod simd;
mod softcap;
mod terms;
mod threads;
mod tile;
mod view;

pub use backward::{gradients, gradients_on};
pub use cost::{Bound, Cost};
pub use error::CpuError;
pub use forward::{attention, attention_on, attention_with, attention_with_on};
pub use plan::{CpuPlan, Lanes, MAX_THREADS, Order, Rows};
pub use problem::{Element, Elements, ElementsMut, Quantization};
pub use quantize::{Quantized, quantize, quantize_into, quantized_lengths, quantized_problem};
pub use simd::Isa;
pub use threads::{CallingThread, Executor, Pool, threads};
pub use view::Input;
