//! Attention without a GPU: the f64 oracle, the same mathematics in the input precision, and native kernels.
//!
//! [`attention`] is what a machine without a GPU runs: f32, f16 and bf16 in and out, f32 accumulation, online
//! softmax over blocks of keys, memory linear in the sequence. How it runs is a [`CpuPlan`] (plain data).
//! [`oracle`] says what the answer is, in f64; [`reference_in_precision`] says how far from it standard attention
//! in the input precision falls, which is what a tolerance is derived from.
//!
//! Rows without mass: a query that sees no key, or only keys whose logit is −∞, has O = 0 and LSE = −∞. A row with
//! a visible logit of NaN or +∞ is NaN, O and LSE alike. A key that a row does not see cannot touch it, even if it
//! is NaN or infinite.

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
