//! The `decode` family: attention of few query rows to many keys on `mma.sync`, in one kernel without a plan
//! of the host.
//!
//! The query rows of all heads of a KV head are packed into tiles of 16 rows. The KV blocks of all tiles of
//! all sequences form one line, which is cut evenly over a fixed grid. Each CTA finds its piece from the
//! lengths in device memory, so that a captured graph serves other lengths and other page tables. A tile that
//! several CTAs divide is merged by the last of them, in an order that is fixed, and in two steps if they are
//! many ([`attend::LineMerge`]). With the gene `piece`, keys are cut at fixed places, so that the bits of a
//! row depend neither on the batch nor on the grid ([`attend::FixedMerge`]).
//!
//! The warps of a CTA divide the keys of each block. Each warp has its own ring of stages, which it fills by
//! `cp.async` or, with the gene `tma`, by boxes of rows of one page (`boxes.rs`). It does so across the ends
//! of tiles, so that memory is read while results are merged and stored.
//!
//! # Head dims above 256
//!
//! O of 16 rows and 512 columns takes 256 registers of each thread of one warp. With `dim_warps` above 1, the
//! warps of a CTA have the same keys and divide the head dims instead: warp w of C has the w-th part of the
//! columns of Q, K, V and O. Its ring holds these columns alone, so the loads need no barrier of the CTA, and
//! each element of K and V is read from shared memory once for S or O. The products of Q and K are then parts
//! of S, which the warps add through shared memory ([`tile::WarpSum`]), one barrier for each block. Every
//! warp computes the softmax of all of S: the row max and the row sum are equal in all warps, bit for bit,
//! and P needs no exchange. At the end of a tile the warps have nothing to merge.
//!
//! With C = 4, Q takes 32 registers and O 64 at head dim 512, so Q stays in registers. The alternative, in
//! which each warp computes S of its share of the keys and the warps exchange P, would read all of Q from
//! shared memory in every warp and every block (64 KB for four warps), exchange the row max too, and load K
//! for all warps, with a second barrier.
//!
//! A block of 32 keys in cycles of an SM of an H200, predicted, at 4.55 TB/s and 1.8 GHz (19 bytes a cycle):
//!
//! | | head dim 512 | latent, 576 and 512 |
//! |---|---|---|
//! | bytes of K and V from memory | 64 KB, 3450 | 36 KB, 1940 |
//! | `ldmatrix` of K and V, 128 bytes a cycle | 512 | 544 |
//! | parts of S, stored once and read by 4 warps | 320 | 320 |
//! | products, 64 or 68 `mma` of each warp, 8 cycles each | 512 | 544 |
//! | exponentials of 4 warps, 16 a cycle | 128 | 128 |
//!
//! The sum of all but the first row bounds the time of a block in which nothing overlaps: about 1500 cycles,
//! below the time of its bytes in both cases. The loads are asynchronous, so they continue meanwhile: three
//! stages of 64 KB or five of 36 KB leave 128 KB or more in flight.
//!
//! # Latent attention
//!
//! If V is a view of K ([`problem::Problem::v_in_k`]), each row is loaded once. A warp's tile of the first
//! `head_dim_v` columns of K is the operand of both products; the warp's part of the other columns of K has a
//! tile of its own. One tile of 16 query rows does 1.9 · 16 operations for each byte, and is bound by the
//! memory.
//!
//! Up to 128 heads share a row. A CTA of twice the warps has two tiles of 16 rows, which share the ring of
//! their columns: each warp copies half of the keys, and the barriers of the CTA order copies and reads. In
//! cycles for a block of 32 keys and 32 rows, predicted: 1560 for 36 KB from L2, 1690 of shared memory (136
//! KB for the products and 80 KB for parts of S), 1090 of products, 260 of exponentials. With 128 heads, four
//! CTAs read each row, three of them from L2, and the time is at least four times 1690 cycles, where the
//! bytes from memory take 1940: the kernel is bound by shared memory then, and reaches at most 310 TFLOP/s.
//! Four tiles of rows in 16 warps would not be faster: a thread has 128 registers then, and Q would be read
//! from shared memory in each block, 580 cycles for 64 rows. With the gene `products: warpgroup`, two
//! warpgroups multiply 64 rows by `wgmma`, whose operands do not pass through registers (`warpgroups`).

mod boxes;
mod emit;
mod family;
mod form;
mod line;
mod load;
mod params;
mod pieces;
mod plan;
mod ring;
mod slices;
mod tiles;
mod warpgroups;

pub use plan::{DecodePlan, ProductUnit};
