//! The arguments of a function: checked, and turned into an operation on Q, K and V.

use std::sync::OnceLock;

use candle::{DType, Result, Tensor, bail};
use flashcore::gpu::{LengthArray, Operand};
use flashcore::raw::CallOptions;
use flashcore::{Band, ElementType, Expr, Pass, library};

use crate::op::Attention;
use crate::side::{self, SideOperand, program, view, with_dense_rows};

/// The arguments of any of the functions.
pub(crate) struct Arguments<'a> {
    pub tensors: [&'a Tensor; 3],
    pub scale: f32,
    /// Visible keys before and after the level key.
    pub window: [Option<usize>; 2],
    pub slopes: Option<&'a Tensor>,
    pub softcap: Option<f32>,
    pub packed: Option<Packed<'a>>,
}

/// The arguments for packed sequences; pairs are of queries and of keys.
pub(crate) struct Packed<'a> {
    pub starts: [&'a Tensor; 2],
    pub longest: [usize; 2],
    pub pages: Option<PageArguments<'a>>,
}

/// The arguments for keys in pages.
pub(crate) struct PageArguments<'a> {
    pub table: &'a Tensor,
    pub rows: usize,
    pub ranges: Option<&'a Tensor>,
}

/// The right side of the window of a causal mask.
pub(crate) fn window(causal: bool) -> Option<usize> {
    causal.then_some(0)
}

impl<'a> Packed<'a> {
    pub fn new(starts: [&'a Tensor; 2], longest: [usize; 2]) -> Option<Packed<'a>> {
        Some(Packed { starts, longest, pages: None })
    }
}

impl<'a> Arguments<'a> {
    pub fn new(tensors: [&'a Tensor; 3], scale: f32) -> Arguments<'a> {
        Arguments { tensors, scale, window: [None; 2], slopes: None, softcap: None, packed: None }
    }

    /// Computes the output, as a node of candle's graph if a tensor has a gradient.
    pub fn attend(self) -> Result<Tensor> {
        let [q, k, v] = self.tensors;
        let name = if self.packed.is_some() { "flash-attn-varlen" } else { "flash-attn" };
        let rank = if self.packed.is_some() { 3 } else { 4 };
        let is_paged = self.packed.as_ref().is_some_and(|packed| packed.pages.is_some());
        for (argument, tensor, rank) in [
            ("q", q, rank),
            ("k", k, if is_paged { 4 } else { rank }),
            ("v", v, if is_paged { 4 } else { rank }),
        ] {
            if tensor.rank() != rank {
                bail!("{name} expects {argument} of rank {rank}, got shape {:?}", tensor.shape())
            }
        }
        let (q, k, v) = (&with_dense_rows(q)?, &with_dense_rows(k)?, &with_dense_rows(v)?);
        let mut side = Vec::new();
        let mut options = CallOptions {
            scale: Some(self.scale),
            softcap: self.softcap.filter(|&softcap| softcap != 0.0),
            ..CallOptions::default()
        };
        let (sequences, keys) = match &self.packed {
            None => (q.dim(0)?, k.dim(1)?),
            Some(packed) => (packed.add(k, &mut side)?, packed.longest[1]),
        };
        if let Some(slopes) = self.slopes {
            side.push(SideOperand::slopes(slopes, sequences, q.dim(q.rank() - 2)?)?);
            options.score = Some(program(&library::alibi(0))?);
        }
        let limit =
            |size: Option<usize>| size.filter(|&size| size <= keys).and_then(|n| u32::try_from(n).ok());
        let [before, after] = self.window.map(limit);
        options.band = Band { before, after, ..Band::FULL };
        if let Some(packed) = &self.packed {
            options.longest = packed.longest.map(Some);
            if let Some(ranges) = packed.pages.as_ref().and_then(|pages| pages.ranges) {
                mask_ranges(ranges, sequences, &mut options, &mut side)?;
            }
        }
        let keeps_lse = [q, k, v].iter().any(|tensor| tensor.track_op());
        options.pass = Pass::forward(keeps_lse);
        let lse = keeps_lse.then(OnceLock::new);
        let attention = Attention { name, options, side, lse };
        // Without a gradient, candle's graph keeps no operation.
        if keeps_lse { q.apply_op3(k, v, attention) } else { q.apply_op3_no_bwd(k, v, &attention) }
    }
}

impl Packed<'_> {
    /// Checks the arrays and adds them to the operands. Returns the number of sequences.
    fn add(&self, k: &Tensor, side: &mut Vec<SideOperand>) -> Result<usize> {
        let [of_q, of_k] = self.starts.map(|starts| starts.dims1());
        let (of_q, of_k) = (of_q?, of_k?);
        if of_q < 2 {
            bail!("seqlens_q should have a len >= 2 {of_q}")
        }
        if of_q != of_k {
            bail!("seqlens_q and seqlens_k should have the same number of elements {of_q} <> {of_k}")
        }
        let sequences = of_q - 1;
        let lengths = |array| Operand::Lengths(array);
        let [starts_q, starts_k] = self.starts;
        side.push(SideOperand::integers(lengths(LengthArray::CumulativeQ), "seqlens_q", starts_q)?);
        let Some(PageArguments { table, rows, .. }) = self.pages else {
            side.push(SideOperand::integers(lengths(LengthArray::CumulativeKv), "seqlens_k", starts_k)?);
            return Ok(sequences);
        };
        if rows != k.dim(1)? {
            bail!("page_block_size {rows} does not match k shape {:?}", k.shape())
        }
        if table.rank() != 2 || table.dims()[0] != sequences {
            bail!("block_table must have the shape ({sequences}, pages), got {:?}", table.shape())
        }
        let used = side::lengths("seqlens_k", starts_k)?;
        side.push(SideOperand::integers(lengths(LengthArray::UsedKv), "seqlens_k", &used)?);
        side.push(SideOperand::integers(Operand::PageTable, "block_table", table)?);
        Ok(sequences)
    }
}

/// Each range is a part of the mask's program, whose length is limited.
const MOST_RANGES: usize = 256;

/// Has the mask let the queries of each range see the keys of the range. The window moves from the band into
/// the mask, because ranges open what a window hides.
fn mask_ranges(
    ranges: &Tensor,
    sequences: usize,
    options: &mut CallOptions,
    side: &mut Vec<SideOperand>,
) -> Result<()> {
    if ranges.dtype() != DType::I32 {
        bail!("mm_prefix_ranges must be i32, got {:?}", ranges.dtype())
    }
    let (batch, count, two) = ranges.dims3()?;
    if batch != sequences || two != 2 {
        bail!("mm_prefix_ranges shape must be ({sequences}, max_ranges, 2), got {:?}", ranges.shape())
    }
    if count > MOST_RANGES {
        bail!("mm_prefix_ranges has {count} ranges for each sequence, at most {MOST_RANGES} are supported")
    }
    let Band { before, after, .. } = options.band;
    if count == 0 || (before, after) == (None, None) {
        return Ok(());
    }
    let number = u8::from(options.score.is_some());
    let view = view(ElementType::I32, ranges)?;
    let operand = Operand::Table(number);
    side.push(SideOperand { operand, name: "mm_prefix_ranges", tensor: ranges.clone(), view });
    let (level, key) = (library::level, library::key);
    // Limits are parameters, so that another window needs no other kernel.
    let mut limit = |size: Option<u32>, distance: Expr| -> Expr {
        let Some(size) = size else { return true.into() };
        options.ints.push(i32::try_from(size).unwrap_or(i32::MAX));
        distance.le(library::int(options.ints.len() as u32 - 1))
    };
    let mut mask = limit(before, level() - key()) & limit(after, key() - level());
    for range in 0..count as i32 {
        let bound =
            |side: i32| Expr::load(u32::from(number), false, [library::batch(), range.into(), side.into()]);
        let inside = |position: Expr| position.clone().ge(bound(0)) & position.lt(bound(1));
        mask = mask | (inside(level()) & inside(key()));
    }
    options.mask = Some(program(&mask)?);
    options.band = Band::FULL;
    Ok(())
}
