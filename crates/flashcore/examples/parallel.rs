//! Attention of one sequence on several ranks, here threads of a process: forward, backward and decoding.
//!
//!     cargo run --release --example parallel
//!
//! It prints the predicted times of all schedules, and the largest differences to one call.

use std::thread;
use std::time::Duration;

use flashcore::parallel::{
    ChannelRank, Collectives, SequenceSplit, ShardCosts, merge_over_group, thread_ranks,
};
use flashcore::{AttentionError, Layout, TensorView, attention};

const RANKS: usize = 2;
const LENGTH: usize = 1000;
const HEADS: usize = 4;
const DIM: usize = 64;

/// Q, K, V and the gradient of O of the whole sequence, `[head, row, dim]`.
fn tensors() -> [Vec<f32>; 4] {
    [3, 5, 11, 7]
        .map(|step| (0..HEADS * LENGTH * DIM).map(|i| (i * step % 101) as f32 / 50.0 - 1.0).collect())
}

fn view(x: &[f32], rows: usize) -> Result<TensorView<'_, f32>, AttentionError> {
    TensorView::dense(x, [1, HEADS, rows, DIM], Layout::Bhsd)
}

/// The largest difference of O and of dK.
fn train(group: &mut ChannelRank) -> Result<[f32; 2], AttentionError> {
    let whole = tensors();
    let split = SequenceSplit::zigzag(&[0, LENGTH], group.ranks())?;
    let rank = group.rank();
    let shards = whole.each_ref().map(|x| split.shard(x, rank, [HEADS, DIM]));
    let [q, k, v, d_out] = shards.map(|shard| shard.expect("a rank of the split"));
    let rows = split.rows();
    let call = attention(view(&q, rows)?, view(&k, rows)?, view(&v, rows)?).causal().sharded(&split);
    if rank == 0 {
        call.explain(&ShardCosts::THREADS).iter().for_each(|forecast| println!("{forecast}"));
    }
    let made = call.clone().run(group)?;
    let found = call.backward(group, view(&made.data, rows)?, &made.lse, view(&d_out, rows)?)?;

    let out = split.unshard(group, &made.data, [HEADS, DIM])?;
    let dk = split.unshard(group, &found.dk, [HEADS, DIM])?;
    let [q, k, v, d_out] = whole.each_ref().map(|x| view(x, LENGTH));
    let call = attention(q?, k?, v?).causal();
    let one = call.clone().run()?;
    let gradients = call.backward(view(&one.data, LENGTH)?, &one.lse, d_out?)?;
    Ok([largest(&out, &one.data), largest(&dk, &gradients.dk)])
}

/// The largest difference of the result of a query to keys of which each rank holds some.
fn decode(group: &mut ChannelRank) -> Result<f32, AttentionError> {
    let [q, k, v, _] = tensors();
    let q = &q[..HEADS * DIM];
    let split = SequenceSplit::contiguous(&[0, LENGTH], group.ranks())?;
    let (mine_k, mine_v) =
        (split.shard(&k, group.rank(), [HEADS, DIM])?, split.shard(&v, group.rank(), [HEADS, DIM])?);
    let mut made =
        attention(view(q, 1)?, view(&mine_k, split.rows())?, view(&mine_v, split.rows())?).run()?;
    merge_over_group(group, &mut made)?;
    let one = attention(view(q, 1)?, view(&k, LENGTH)?, view(&v, LENGTH)?).run()?;
    Ok(largest(&made.data, &one.data))
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn main() -> Result<(), AttentionError> {
    let work = |mut group: ChannelRank| -> Result<([f32; 2], f32), AttentionError> {
        Ok((train(&mut group)?, decode(&mut group)?))
    };
    thread::scope(|scope| {
        let group = thread_ranks(RANKS, Duration::from_secs(60)).into_iter();
        let ranks: Vec<_> = group.map(|group| scope.spawn(move || work(group))).collect();
        for (rank, thread) in ranks.into_iter().enumerate() {
            let ([out, dk], decoded) = thread.join().expect("a rank panicked")?;
            println!("rank {rank}: O differs by {out:.1e}, dK by {dk:.1e}, a decoded row by {decoded:.1e}");
        }
        Ok(())
    })
}
