//! Split-KV: several workers share query rows and divide the keys. Their results are merged through the
//! shared memory of a CTA, of a cluster, or through global memory.

mod exchange;
mod fixed;
mod line;
mod merge;
mod partials;
mod shared_max;
mod stream_k;

pub use exchange::{Division, Exchange, WarpgroupPlace};
pub use fixed::FixedMerge;
pub use line::LineMerge;
pub use merge::merge_bytes;
pub use partials::{Partials, SplitRow};
pub use shared_max::SharedRowMax;
pub use stream_k::StreamKMerge;
