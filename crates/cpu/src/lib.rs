//! Attention without a GPU: native kernels, the f64 oracle, and a reference in the input precision.
//!
//! [`attention`] computes on the CPU: f32, f16 and bf16 in and out, f32 accumulation, online softmax over
//! blocks of keys, memory linear in the sequence length. A [`CpuPlan`] (plain data) determines how it runs.
//! [`oracle`] computes the exact result in f64. [`reference_in_precision`] computes standard attention in the
//! input precision; its distance from the oracle is the basis of tolerances.
//!
//! Rows without mass: a query that sees no key, or only keys whose logit is −∞, has O = 0 and LSE = −∞. For a
//! row with a visible logit of NaN or +∞, O and LSE are NaN. A key that a row does not see does not affect
//! the row, even if the key is NaN or infinite.

mod aligned;
mod arithmetic;
mod cost;
mod dims;
mod element;
mod error;
mod forward;
mod narrow;
mod oracle;
mod output;
mod parts;
pub mod peak;
mod plan;
mod simd;
mod softcap;
mod terms;
mod threads;
mod tile;
mod view;

pub use cost::{Bound, Cost};
pub use element::{Element, Elements, ElementsMut};
pub use error::CpuError;
pub use forward::{attention, attention_on};
pub use oracle::{Reference, oracle, reference_in_precision};
pub use plan::{CpuPlan, Lanes, Order, Rows};
pub use simd::Isa;
pub use threads::{CallingThread, Executor, Pool, threads};
pub use view::Input;
