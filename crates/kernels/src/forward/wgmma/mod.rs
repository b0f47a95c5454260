//! The large-grid forward family of sm_90a: persistent and warp-specialised, with `wgmma` products and TMA
//! loads.
//!
//! Each SM runs one CTA, which computes tile after tile of `64 · consumers` query rows of one head. The first
//! warpgroup is the producer: one thread requests queries, keys and values; keys and values go to rings of
//! `stages` tiles. Each consumer warpgroup has 64 rows and visits the keys in blocks of `block_n`, from the
//! last block to the first. S = Q Kᵀ of a block is in flight together with O += P V of the block before it,
//! and the softmax of a block overlaps the end of both (FlashAttention-3, Algorithm 2).
//!
//! Two warpgroups can divide the head dims instead of the rows ([`Share::HeadDim`]), for O of more than 256
//! columns: each computes S over half of Q's columns, and they add their parts through shared memory.
//!
//! A table with an element of 16 bits for each score, such as a bias tensor, may come to shared memory in a
//! ring of its own ([`Tables::Shared`]). Consumers read it with `ldmatrix`.
//!
//! Genes change this structure: several resident CTAs per SM; clusters of two CTAs on neighbouring tiles that
//! load every KV block once by multicast; pack-GQA; warpgroups that skip the blocks that their own rows do
//! not see, and halve the first block that they visit; O stored by TMA while the next tile is computed; the
//! tiles of the last wave split into pieces, one per CTA (stream-K).
//!
//! The code depends on the plan and on [`crate::Baked`]: of the lengths, it has whether `block_n` divides
//! `seq_kv`. Launch parameters: tensor maps, pointers, strides, lengths and the scale. One kernel therefore
//! serves all lengths of its kind.
//!
//! With uneven lengths, the producer reads the lengths of a tile's batch entry, broadcasts them with the
//! tile, and skips tiles without rows. Tiles of packed queries are counted over all sequences
//! ([`attend::Lengths::tile`]). Values beyond a sequence's end are loaded as zeros
//! ([`tile::SwizzledTile::ragged_at`]).
//!
//! Keys and values in pages are loaded in boxes of rows of one page (`pages.rs`).

mod check;
mod consumer;
mod default;
mod descale;
mod emit;
mod family;
mod fp8;
mod launch;
mod lengths;
mod memory;
mod pages;
mod plan;
mod produce;
mod rows;
mod store;
mod tables;
mod transpose;

pub use plan::{Diagonal, Ends, Probabilities, Rescaling, Share, Store, Tables, WgmmaPlan};
