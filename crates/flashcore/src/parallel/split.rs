//! Which rows of a sequence each rank holds.

use std::ops::Range;

use problem::Element;

use super::Collectives;
use crate::AttentionError;
use crate::error::refused;

/// The rows of a sequence that each rank holds. Positions are those in the whole sequence, or in its packed
/// documents, which see themselves alone. Shards of all ranks have equally many rows: those with fewer rows
/// of the sequence are padded at their end, so that any length can be split.
///
/// ```
/// use flashcore::parallel::SequenceSplit;
///
/// let split = SequenceSplit::zigzag(&[0, 8], 2)?;
/// assert_eq!(split.shard(&[0, 1, 2, 3, 4, 5, 6, 7], 0, [1, 1])?, [0, 1, 6, 7]);
/// assert_eq!(split.shard(&[0, 1, 2, 3, 4, 5, 6, 7], 1, [1, 1])?, [2, 3, 4, 5]);
/// assert_eq!(split.positions(1), [2, 3, 4, 5]);
/// # Ok::<(), flashcore::AttentionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceSplit {
    /// Of each rank, its rows of the sequence, in the order of its shard.
    pub(super) fragments: Vec<Vec<Range<usize>>>,
    /// The first row of each document, and the end of the last. No document is empty.
    pub(super) documents: Vec<usize>,
}

impl SequenceSplit {
    /// Rank `r` holds chunks `r` and `2 · ranks − 1 − r` of `2 · ranks`: equal work for causal attention.
    /// `documents` are the first rows of packed documents and the end of the last one, `[0, length]` for one.
    ///
    /// # Errors
    /// When `documents` do not ascend from 0, or there is no rank.
    pub fn zigzag(documents: &[usize], ranks: usize) -> Result<SequenceSplit, AttentionError> {
        let all = 0..checked(documents, ranks)?;
        let of = |rank| pair(ranks, rank).map(|number| chunk(&all, 2 * ranks, number)).to_vec();
        Ok(SequenceSplit::new(documents, (0..ranks).map(of)))
    }

    /// Rank `r` holds chunk `r` of `ranks`: for windows, and for attention that is not causal.
    ///
    /// # Errors
    /// As [`zigzag`](SequenceSplit::zigzag).
    pub fn contiguous(documents: &[usize], ranks: usize) -> Result<SequenceSplit, AttentionError> {
        let all = 0..checked(documents, ranks)?;
        Ok(SequenceSplit::new(documents, (0..ranks).map(|rank| vec![chunk(&all, ranks, rank)])))
    }

    /// Each document is split in zigzag. A rank holds the first chunks of all documents, then the second
    /// ones.
    ///
    /// # Errors
    /// As [`zigzag`](SequenceSplit::zigzag).
    pub fn by_documents(documents: &[usize], ranks: usize) -> Result<SequenceSplit, AttentionError> {
        checked(documents, ranks)?;
        let of = |rank: usize, half: usize| {
            documents.windows(2).enumerate().map(move |(number, ends)| {
                // Chunks that have a row more go to another rank for each document.
                even_chunk(ends[0]..ends[1], 2 * ranks, pair(ranks, (rank + number) % ranks)[half])
            })
        };
        Ok(SequenceSplit::new(documents, (0..ranks).map(|rank| of(rank, 0).chain(of(rank, 1)).collect())))
    }

    fn new(documents: &[usize], fragments: impl Iterator<Item = Vec<Range<usize>>>) -> SequenceSplit {
        let mut documents = documents.to_vec();
        documents.dedup(); // a document without rows has no query and no key
        if documents.len() == 1 {
            documents.push(0);
        }
        let used = |mut of: Vec<Range<usize>>| {
            of.retain(|rows| !rows.is_empty());
            of
        };
        SequenceSplit { fragments: fragments.map(used).collect(), documents }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.fragments.len()
    }

    /// The first row of each document, and the end of the last one.
    pub fn documents(&self) -> &[usize] {
        &self.documents
    }

    /// The rows of the whole sequence.
    pub fn length(&self) -> usize {
        self.documents.last().copied().unwrap_or(0)
    }

    /// The rows of a shard, padding included.
    pub fn rows(&self) -> usize {
        (0..self.ranks()).map(|rank| self.used(rank)).max().unwrap_or(0)
    }

    /// The rows of a rank that belong to the sequence. Those after them are padding.
    pub fn used(&self, rank: usize) -> usize {
        self.fragments[rank].iter().map(Range::len).sum()
    }

    /// The rows of a rank: first in its shard, then in the sequence.
    pub(super) fn places(&self, rank: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        let mut at = 0;
        self.fragments[rank].iter().map(move |rows| {
            at += rows.len();
            (at - rows.len()..at, rows.clone())
        })
    }

    /// The document of a row.
    pub(super) fn document(&self, row: usize) -> usize {
        self.documents.partition_point(|&first| first <= row).saturating_sub(1)
    }

    /// The split in which each `together` neighbouring ranks hold their rows together, in ascending order.
    pub(super) fn joined(&self, together: usize) -> SequenceSplit {
        let joined = |of: &[Vec<Range<usize>>]| {
            let mut rows = of.concat();
            rows.sort_unstable_by_key(|rows| rows.start);
            rows
        };
        let fragments = self.fragments.chunks(together).map(joined).collect();
        SequenceSplit { fragments, documents: self.documents.clone() }
    }

    /// The position of each row of a rank in its document, for rotary embedding. Padding has position 0.
    pub fn positions(&self, rank: usize) -> Vec<i32> {
        let rows = self.fragments[rank].iter().cloned().flatten();
        let mut positions: Vec<i32> =
            rows.map(|row| (row - self.documents[self.document(row)]) as i32).collect();
        positions.resize(self.rows(), 0);
        positions
    }

    /// The rows of a rank, of a tensor `[outer, length, inner]`; padding is 0. A tensor `[batch, heads, row,
    /// dim]` has `[batch · heads, dim]` as `[outer, inner]`, one of `[batch, row, heads, dim]` has `[batch,
    /// heads · dim]`. Everything that goes with a position is sharded alike: tokens, labels, rotary tables.
    ///
    /// # Errors
    /// When `x` has not that many elements, or there is no such rank.
    pub fn shard<T: Copy + Default>(
        &self,
        x: &[T],
        rank: usize,
        [outer, inner]: [usize; 2],
    ) -> Result<Vec<T>, AttentionError> {
        if rank >= self.ranks() {
            return Err(refused("rank", "number", rank, format!("0 to {}", self.ranks() - 1)));
        }
        let (length, rows) = (self.length(), self.rows());
        check_elements(x.len(), [outer, length, inner])?;
        let mut shard = vec![T::default(); outer * rows * inner];
        for i in 0..outer {
            for (here, there) in self.places(rank) {
                let to = &mut shard[(i * rows + here.start) * inner..(i * rows + here.end) * inner];
                to.copy_from_slice(&x[(i * length + there.start) * inner..(i * length + there.end) * inner]);
            }
        }
        Ok(shard)
    }

    /// The tensor `[outer, length, inner]` of the shards of all ranks, on every rank.
    ///
    /// # Errors
    /// When `x` is no shard of this split, or the group fails.
    pub fn unshard<T: Element>(
        &self,
        group: &mut dyn Collectives,
        x: &[T],
        [outer, inner]: [usize; 2],
    ) -> Result<Vec<T>, AttentionError> {
        let (length, rows) = (self.length(), self.rows());
        check_elements(x.len(), [outer, rows, inner])?;
        check_ranks(self, group)?;
        let mut whole = vec![T::from_f32(0.0); outer * length * inner];
        for (rank, message) in group.all_gather(T::elements(x).bytes())?.iter().enumerate() {
            let shard = super::rows::from_bytes::<T>(message, x.len(), rank)?;
            for i in 0..outer {
                for (here, there) in self.places(rank) {
                    let to = &mut whole[(i * length + there.start) * inner..(i * length + there.end) * inner];
                    to.copy_from_slice(
                        &shard[(i * rows + here.start) * inner..(i * rows + here.end) * inner],
                    );
                }
            }
        }
        Ok(whole)
    }
}

/// Refuses a group that has another number of ranks than a split.
pub(super) fn check_ranks(split: &SequenceSplit, group: &dyn Collectives) -> Result<(), AttentionError> {
    match split.ranks() {
        ranks if ranks == group.ranks() => Ok(()),
        ranks => {
            Err(refused("split", "number of ranks", ranks, format!("{}, those of the group", group.ranks())))
        }
    }
}

fn check_elements(len: usize, extents: [usize; 3]) -> Result<(), AttentionError> {
    let needed = extents.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
    match needed {
        Some(needed) if needed == len => Ok(()),
        _ => Err(refused(
            "x",
            "number of elements",
            len,
            format!("that of [outer, rows, inner] = {extents:?}"),
        )),
    }
}

/// The length of the sequence.
fn checked(documents: &[usize], ranks: usize) -> Result<usize, AttentionError> {
    if ranks == 0 {
        return Err(refused("ranks", "number", 0, "1 or more"));
    }
    match documents {
        [0, .., last] if documents.is_sorted() && i32::try_from(*last).is_ok() => Ok(*last),
        _ => {
            let value = format!("{documents:?}");
            Err(refused("documents", "first rows", value, "ascending numbers from 0 to at most 2^31 - 1"))
        }
    }
}

fn pair(ranks: usize, rank: usize) -> [usize; 2] {
    [rank, 2 * ranks - 1 - rank]
}

/// A chunk; the last ones may be shorter or empty, as those of `torch.chunk`.
fn chunk(rows: &Range<usize>, chunks: usize, number: usize) -> Range<usize> {
    let size = rows.len().div_ceil(chunks);
    let at = |number: usize| rows.end.min(rows.start + number * size);
    at(number)..at(number + 1)
}

/// A chunk; lengths differ by one row at most.
fn even_chunk(rows: Range<usize>, chunks: usize, number: usize) -> Range<usize> {
    let at = |number: usize| rows.start + rows.len() * number / chunks;
    at(number)..at(number + 1)
}
