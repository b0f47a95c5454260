//! The launch file of `flashcore check`: what a kernel that comes without host code is launched with.
//!
//! ```toml
//! [problem]            # optional; with it `out` and `lse` are judged against the oracle
//! batch = 1            # default 1
//! heads_q = 8
//! heads_kv = 8         # default heads_q
//! seq_q = 512
//! seq_kv = 512         # default seq_q
//! head_dim = 64
//! dtype = "f16"        # f16, bf16, f32
//! mask = "none"        # none, causal; default none
//! scale = 0.125        # default 1/sqrt(head_dim)
//!
//! [launch]
//! entry = "attention"  # default: the only entry
//! grid = [8, 8, 1]
//! block = [128, 1, 1]  # default: the entry's .reqntid
//! cluster = [1, 1, 1]  # default
//! dynamic_shared = 0   # bytes; default 0
//!
//! [[arg]]              # one per parameter, in order
//! role = "q"           # q, k, v, out (of the problem's dtype), lse (f32)
//! layout = "bhsd"      # bhsd, bshd; default bhsd; not for lse, which is [batch][head][row]
//!
//! [[arg]]
//! role = "buffer"
//! dtype = "f32"
//! elements = 1024
//! init = "zeros"       # zeros, random, uninitialised, iota
//!
//! [[arg]]
//! role = "u32"         # u32, i32, u64, i64, f32
//! value = 512
//! ```
//!
//! What is parsed (`RawFile`) is kept apart from what is validated ([`LaunchSpec`]), and that from what is bound to a
//! module ([`Bound`]).

mod bind;
mod error;
mod raw;
mod spec;
#[cfg(test)]
mod tests;

pub use bind::{Bound, Role};
pub use error::LaunchError;
pub use spec::{ArgSpec, BufferType, Init, LaunchSpec};
