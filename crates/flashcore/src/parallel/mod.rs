//! Attention of a sequence whose rows are sharded over the ranks of a group.
//!
//! A [`SequenceSplit`] says which rows each rank holds. [`Attention::sharded`](crate::Attention::sharded)
//! makes a call of the shards. Its masks, windows, programs and biases see positions in the whole sequence.
//! Ranks exchange keys, or heads, through a group: [`thread_ranks`] are threads of this process, and other
//! libraries of messages implement [`Collectives`]. `cargo run --example parallel` is a whole program.
//!
//! ```
//! use flashcore::parallel::{Collectives, SequenceSplit, thread_ranks};
//! use flashcore::{Layout, TensorView, attention};
//!
//! let length = 6;
//! let x: Vec<f32> = (0..length * 8).map(|i| (i % 5) as f32).collect(); // one head, head dim 8
//! let whole = TensorView::dense(&x, [1, 1, length, 8], Layout::Bhsd)?;
//! let whole = attention(whole, whole, whole).causal().run()?;
//! let split = SequenceSplit::zigzag(&[0, length], 2)?;
//! let time_out = std::time::Duration::from_secs(60);
//! std::thread::scope(|scope| {
//!     let ranks = thread_ranks(2, time_out).into_iter().map(|mut group| {
//!         let (x, split, whole) = (&x, &split, &whole);
//!         scope.spawn(move || {
//!             let shard = split.shard(x, group.rank(), [1, 8])?; // three rows
//!             let view = TensorView::dense(&shard, [1, 1, split.rows(), 8], Layout::Bhsd)?;
//!             let out = attention(view, view, view).causal().sharded(split).run(&mut group)?;
//!             let all = split.unshard(&mut group, &out.data, [1, 8])?;
//!             assert!(all.iter().zip(&whole.data).all(|(a, b)| (a - b).abs() < 1e-5));
//!             Ok::<(), flashcore::AttentionError>(())
//!         })
//!     });
//!     ranks.collect::<Vec<_>>().into_iter().try_for_each(|rank| rank.join().unwrap())
//! })?;
//! # Ok::<(), flashcore::AttentionError>(())
//! ```

mod agree;
mod call;
mod collectives;
mod cost;
mod decode;
mod device;
mod heads;
mod plan;
mod rows;
mod sharded;
mod sockets;
mod split;
mod stages;
mod threads;

pub use crate::error::GroupError;
pub use collectives::Collectives;
pub use cost::{ScheduleForecast, ShardCosts};
pub use decode::merge_over_group;
pub use device::{DeviceRing, DeviceShards};
pub use sharded::{ShardSchedule, ShardedAttention};
pub use sockets::{host_ranks, join_ranks};
pub use split::SequenceSplit;
pub use threads::{ChannelRank, thread_ranks};
