//! A paged cache of keys and values in host memory, for the decoding of many sequences.
//!
//! Sequences share pages: a fork copies no keys, and a page is copied when one of its sequences appends to
//! it.
//!
//! ```
//! use flashcore::cache::PagedCache;
//!
//! // 16 pages of 4 rows, 2 KV heads, head dim 8.
//! let mut cache = PagedCache::<f32>::new(16, 4, 2, [8, 8])?;
//! let first = cache.create();
//! cache.append(first, &vec![0.2; 6 * 2 * 8], &vec![0.5; 6 * 2 * 8])?; // six keys
//! let second = cache.fork(first)?;
//! cache.append(second, &vec![0.1; 2 * 8], &vec![0.5; 2 * 8])?; // one more
//! assert_eq!((cache.len(first)?, cache.len(second)?, cache.free_pages()), (6, 7, 13));
//! // One query of 4 heads for each sequence: `[sequence, row, head, dim]`.
//! let out = cache.attend(&[first, second], &vec![0.3; 2 * 4 * 8], 4, None)?;
//! assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-6));
//! # Ok::<(), flashcore::cache::CacheError>(())
//! ```

use cpu::{CpuError, CpuPlan, attention_with};
use problem::{Band, Elements, LengthArray, Operand, OperandMap, Pages, Problem, ProblemError, Storage};

use crate::{Element, Layout};

/// A sequence of a [`PagedCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId(u64);

/// Why a cache refuses a call. The cache is as it was before the call.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The pages do not suffice.
    #[error("{needed} pages are needed, and {free} are free; free a sequence, or make a cache of more pages")]
    Full {
        /// Pages that the call needs.
        needed: usize,
        /// Free pages.
        free: usize,
    },
    /// The cache has no such sequence.
    #[error("the cache has no sequence {id}: it was freed, or belongs to another cache")]
    Unknown {
        /// The number of the sequence.
        id: u64,
    },
    /// A length that a sequence does not have.
    #[error("invalid value '{rows}' for rows: expected at most {len}, the keys of the sequence")]
    Rows {
        /// The number of rows given.
        rows: usize,
        /// The keys of the sequence.
        len: usize,
    },
    /// Elements that are no whole rows.
    #[error("invalid value '{len}' for the number of elements of {argument}: expected {expected}")]
    Elements {
        /// The argument.
        argument: &'static str,
        /// The number of elements given.
        len: usize,
        /// What is accepted.
        expected: String,
    },
    /// A problem that no kernel supports.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A call that the CPU kernels refuse.
    #[error(transparent)]
    Cpu(#[from] CpuError),
}

/// Keys and values of sequences, in pages of a pool. Rows lie as `[page, row, head, dim]`.
#[derive(Clone, Debug)]
pub struct PagedCache<T> {
    page_rows: usize,
    pages: usize,
    heads: usize,
    /// Elements of a row of K and of V in one head.
    dims: [usize; 2],
    keys: Vec<T>,
    values: Vec<T>,
    /// The number of sequences of each page.
    users: Vec<u32>,
    free: Vec<u32>,
    sequences: Vec<(SequenceId, Cached)>,
    next: u64,
}

/// The keys of a sequence.
#[derive(Clone, Debug, Default)]
struct Cached {
    pages: Vec<u32>,
    len: usize,
}

impl<T: Element + Default> PagedCache<T> {
    /// An empty cache of `pages` pages of `page_rows` rows, for `heads` KV heads with rows of `[head_dim,
    /// head_dim_v]` elements.
    ///
    /// # Errors
    /// [`CacheError::Problem`] for an extent that is 0 or too large.
    pub fn new(pages: usize, page_rows: usize, heads: usize, dims: [usize; 2]) -> Result<Self, CacheError> {
        let [dim, dim_v] = dims;
        let mut problem = Problem::new(1, heads, 1, dim, T::DTYPE).with_heads_kv(heads, Layout::Bshd);
        (problem.head_dim_v, problem.seq_kv) = (dim_v, page_rows);
        let problem = problem.with_layout(Layout::Bshd).with_pages(page_rows, pages);
        problem.check()?;
        let elements = |dim: usize| pages * page_rows * heads * dim;
        let last = u32::try_from(pages).unwrap_or(u32::MAX);
        Ok(PagedCache {
            page_rows,
            pages,
            heads,
            dims,
            keys: vec![T::default(); elements(dim)],
            values: vec![T::default(); elements(dim_v)],
            users: vec![0; pages],
            free: (0..last).rev().collect(),
            sequences: Vec::new(),
            next: 0,
        })
    }

    /// A sequence without keys.
    pub fn create(&mut self) -> SequenceId {
        self.add(Cached::default())
    }

    /// A sequence with the keys of another one, which share their pages.
    ///
    /// # Errors
    /// [`CacheError::Unknown`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, CacheError> {
        self.share_prefix(id, self.len(id)?)
    }

    /// A sequence with the first `rows` keys of another one, which share their pages.
    ///
    /// # Errors
    /// [`CacheError::Unknown`], and [`CacheError::Rows`] if the other sequence has fewer keys.
    pub fn share_prefix(&mut self, id: SequenceId, rows: usize) -> Result<SequenceId, CacheError> {
        let Cached { pages, len } = self.cached(id)?;
        if rows > *len {
            return Err(CacheError::Rows { rows, len: *len });
        }
        let pages = pages[..rows.div_ceil(self.page_rows)].to_vec();
        pages.iter().for_each(|&page| self.users[page as usize] += 1);
        Ok(self.add(Cached { pages, len: rows }))
    }

    /// Appends keys and values, `[row, head, dim]` each.
    ///
    /// # Errors
    /// [`CacheError::Unknown`], [`CacheError::Elements`], and [`CacheError::Full`] if the pages do not
    /// suffice.
    pub fn append(&mut self, id: SequenceId, keys: &[T], values: &[T]) -> Result<(), CacheError> {
        let [of_keys, of_values] = self.dims.map(|dim| dim * self.heads);
        let rows = keys.len() / of_keys;
        let refuse = |argument, len, expected| Err(CacheError::Elements { argument, len, expected });
        if keys.len() != rows * of_keys {
            return refuse("keys", keys.len(), format!("a multiple of {of_keys}, a row of all heads"));
        }
        if values.len() != rows * of_values {
            return refuse("values", values.len(), format!("{}, a row for each of keys", rows * of_values));
        }
        let Cached { pages, len } = self.cached(id)?.clone();
        let copied =
            pages.get(len / self.page_rows).filter(|&&page| self.users[page as usize] > 1 && rows > 0);
        let added = (len + rows).div_ceil(self.page_rows) - pages.len();
        let needed = added + usize::from(copied.is_some());
        if needed > self.free.len() {
            return Err(CacheError::Full { needed, free: self.free.len() });
        }
        if let Some(&shared) = copied {
            self.copy_page(id, len / self.page_rows, shared)?;
        }
        for _ in 0..added {
            let page = self.take()?;
            self.cached_mut(id)?.pages.push(page);
        }
        let pages = self.cached(id)?.pages.clone();
        for row in 0..rows {
            let at = len + row;
            let to = pages[at / self.page_rows] as usize * self.page_rows + at % self.page_rows;
            self.keys[to * of_keys..][..of_keys].copy_from_slice(&keys[row * of_keys..][..of_keys]);
            self.values[to * of_values..][..of_values]
                .copy_from_slice(&values[row * of_values..][..of_values]);
        }
        self.cached_mut(id)?.len = len + rows;
        Ok(())
    }

    /// Keeps the first `rows` keys, and frees pages without other keys: for drafts that were refused.
    ///
    /// # Errors
    /// [`CacheError::Unknown`], and [`CacheError::Rows`] if the sequence has fewer keys.
    pub fn truncate(&mut self, id: SequenceId, rows: usize) -> Result<(), CacheError> {
        let kept = rows.div_ceil(self.page_rows);
        let cached = self.cached_mut(id)?;
        if rows > cached.len {
            return Err(CacheError::Rows { rows, len: cached.len });
        }
        cached.len = rows;
        let released = cached.pages.split_off(kept);
        self.release(&released);
        Ok(())
    }

    /// Frees a sequence, and its pages that no other sequence has.
    ///
    /// # Errors
    /// [`CacheError::Unknown`].
    pub fn free(&mut self, id: SequenceId) -> Result<(), CacheError> {
        let at = self.position(id)?;
        let (_, cached) = self.sequences.swap_remove(at);
        self.release(&cached.pages);
        Ok(())
    }

    /// Number of keys of a sequence.
    ///
    /// # Errors
    /// [`CacheError::Unknown`].
    pub fn len(&self, id: SequenceId) -> Result<usize, CacheError> {
        Ok(self.cached(id)?.len)
    }

    /// Whether the cache has no sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Number of free pages.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Attention of the last queries of sequences to their keys: `queries` is `[sequence, row, head, dim]`,
    /// and the last row sees all keys of its sequence. Returns the output, `[sequence, row, head, dim_v]`.
    /// `scale` is the factor of the scores; `None` means `1/√head_dim`.
    ///
    /// # Errors
    /// [`CacheError::Unknown`], [`CacheError::Elements`], and [`CacheError::Cpu`].
    pub fn attend(
        &self,
        ids: &[SequenceId],
        queries: &[T],
        heads_q: usize,
        scale: Option<f32>,
    ) -> Result<Vec<T>, CacheError> {
        let of_row = (ids.len() * heads_q * self.dims[0]).max(1);
        let rows = queries.len() / of_row;
        if queries.len() != rows * of_row {
            let expected = format!("a multiple of {of_row}, a row of every head and sequence");
            return Err(CacheError::Elements { argument: "queries", len: queries.len(), expected });
        }
        let cached: Vec<&Cached> = ids.iter().map(|&id| self.cached(id)).collect::<Result<_, _>>()?;
        let per_sequence = cached.iter().map(|cached| cached.pages.len()).max().unwrap_or(0);
        let mut problem =
            Problem::new(ids.len(), heads_q, rows, self.dims[0], T::DTYPE).with_band(Band::CAUSAL);
        problem.score.scale = scale;
        (problem.heads_kv, problem.head_dim_v) = (self.heads, self.dims[1]);
        problem.seq_kv = per_sequence * self.page_rows;
        problem = problem.with_layout(Layout::Bshd).with_pages(self.page_rows, self.pages);
        problem.storage = Storage::Pages(Pages { rows: self.page_rows, count: self.pages, per_sequence });
        problem.lengths.kv.used = true;
        let mut out = vec![T::default(); ids.len() * rows * heads_q * self.dims[1]];
        if problem.is_empty() {
            return Ok(out);
        }
        let used: Vec<i32> = cached.iter().map(|cached| cached.len as i32).collect();
        let entry = |cached: &Cached, index: usize| cached.pages.get(index).map_or(-1, |&page| page as i32);
        let table: Vec<i32> = cached
            .iter()
            .flat_map(|cached| (0..per_sequence).map(move |index| entry(cached, index)))
            .collect();
        let inputs = OperandMap::from_iter([
            (Operand::Q, queries.into()),
            (Operand::K, (&self.keys[..]).into()),
            (Operand::V, (&self.values[..]).into()),
            (Operand::Lengths(LengthArray::UsedKv), Elements::I32(&used).into()),
            (Operand::PageTable, Elements::I32(&table).into()),
        ]);
        attention_with(&problem, &inputs, &mut out, None, &CpuPlan::for_problem(&problem))?;
        Ok(out)
    }

    fn add(&mut self, cached: Cached) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.push((id, cached));
        id
    }

    fn position(&self, id: SequenceId) -> Result<usize, CacheError> {
        let at = self.sequences.iter().position(|(other, _)| *other == id);
        at.ok_or(CacheError::Unknown { id: id.0 })
    }

    fn cached(&self, id: SequenceId) -> Result<&Cached, CacheError> {
        Ok(&self.sequences[self.position(id)?].1)
    }

    fn cached_mut(&mut self, id: SequenceId) -> Result<&mut Cached, CacheError> {
        let at = self.position(id)?;
        Ok(&mut self.sequences[at].1)
    }

    fn take(&mut self) -> Result<u32, CacheError> {
        let page = self.free.pop().ok_or(CacheError::Full { needed: 1, free: 0 })?;
        self.users[page as usize] = 1;
        Ok(page)
    }

    fn release(&mut self, pages: &[u32]) {
        for &page in pages {
            let users = &mut self.users[page as usize];
            *users -= 1;
            if *users == 0 {
                self.free.push(page);
            }
        }
    }

    /// Gives the sequence a copy of a page that others have, too.
    fn copy_page(&mut self, id: SequenceId, index: usize, shared: u32) -> Result<(), CacheError> {
        let page = self.take()?;
        for (pool, dim) in [(&mut self.keys, self.dims[0]), (&mut self.values, self.dims[1])] {
            let elements = self.page_rows * self.heads * dim;
            let from = shared as usize * elements;
            pool.copy_within(from..from + elements, page as usize * elements);
        }
        self.release(&[shared]);
        self.cached_mut(id)?.pages[index] = page;
        Ok(())
    }
}

/// Rotates the first `2 · cos.len()` elements of a row in pairs (rotary position embedding). Elements `2 i`
/// and `2 i + 1` form a pair if `interleaved`, else elements `i` and `i + cos.len()`. Products and sums are
/// f32, and are rounded once. `sin` has as many elements as `cos`; pairs beyond the row are left out.
pub fn rotate<T: Element>(row: &mut [T], cos: &[f32], sin: &[f32], interleaved: bool) {
    let half = cos.len();
    for (i, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
        let (first, second) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        if second < row.len() {
            let [x, y] = [first, second].map(|at| row[at].to_f32());
            row[first] = T::from_f32(x * cos - y * sin);
            row[second] = T::from_f32(x * sin + y * cos);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: usize = 2;
    const DIMS: [usize; 2] = [8, 4];

    /// Rows of keys and values that no other call returns.
    fn rows(count: usize, seed: usize) -> [Vec<f32>; 2] {
        let number = |i: usize| ((i * 37 + seed * 101) % 64) as f32 / 32.0 - 1.0;
        DIMS.map(|dim| (0..count * HEADS * dim).map(number).collect())
    }

    /// A cache beside the keys and values that its sequences should have.
    struct Mirror {
        cache: PagedCache<f32>,
        expected: Vec<(SequenceId, [Vec<f32>; 2])>,
    }

    impl Mirror {
        fn append(&mut self, id: SequenceId, count: usize, seed: usize) -> Result<(), CacheError> {
            let [keys, values] = rows(count, seed);
            self.cache.append(id, &keys, &values)?;
            let (_, all) = self.expected.iter_mut().find(|(other, _)| *other == id).unwrap();
            all[0].extend(keys);
            all[1].extend(values);
            Ok(())
        }

        /// Compares the attention of two rows to each sequence with that to the expected keys.
        fn check(&self) {
            let ids: Vec<SequenceId> = self.expected.iter().map(|&(id, _)| id).collect();
            let (queries, heads_q) = (2, 4);
            let q: Vec<f32> =
                (0..ids.len() * queries * heads_q * DIMS[0]).map(|i| (i % 7) as f32 / 7.0).collect();
            let found = self.cache.attend(&ids, &q, heads_q, Some(0.5)).unwrap();
            let per_sequence = [DIMS[0], DIMS[1]].map(|dim| queries * heads_q * dim);
            for (i, (_, [keys, values])) in self.expected.iter().enumerate() {
                let mut problem =
                    Problem::new(1, heads_q, queries, DIMS[0], f32::DTYPE).with_band(Band::CAUSAL);
                (problem.heads_kv, problem.head_dim_v) = (HEADS, DIMS[1]);
                problem.seq_kv = keys.len() / HEADS / DIMS[0];
                problem.score.scale = Some(0.5);
                let problem = problem.with_layout(Layout::Bshd);
                let mut out = vec![0.0f32; per_sequence[1]];
                let q = &q[i * per_sequence[0]..][..per_sequence[0]];
                let plan = CpuPlan::for_problem(&problem);
                cpu::attention(&problem, q, keys, values, &mut out, None, &plan).unwrap();
                let found = &found[i * per_sequence[1]..][..per_sequence[1]];
                let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
                assert!(out.iter().zip(found).all(near), "sequence {i}: {out:?} {found:?}");
            }
        }
    }

    #[test]
    fn elements_that_are_no_rows_are_named() {
        let mut cache = PagedCache::new(2, 3, HEADS, DIMS).unwrap();
        let id = cache.create();
        let ([keys, _], [_, values]) = (rows(2, 0), rows(3, 0));
        let mut told = |keys: &[f32]| cache.append(id, keys, &values).unwrap_err().to_string();
        let of_keys =
            "'31' for the number of elements of keys: expected a multiple of 16, a row of all heads";
        let of_values = "'24' for the number of elements of values: expected 16, a row for each of keys";
        assert!(told(&keys[1..]).ends_with(of_keys));
        assert!(told(&keys).ends_with(of_values));
    }

    #[test]
    fn sequences_keep_their_keys() {
        let cache = PagedCache::new(12, 3, HEADS, DIMS).unwrap();
        let mut mirror = Mirror { cache, expected: Vec::new() };
        let first = mirror.cache.create();
        mirror.expected.push((first, Default::default()));
        mirror.check(); // without keys
        for (seed, count) in [1, 2, 4, 0, 1].into_iter().enumerate() {
            mirror.append(first, count, seed).unwrap();
            mirror.check();
        }
        // Eight keys in three pages, the last of which is shared and not full.
        let second = mirror.cache.fork(first).unwrap();
        let third = mirror.cache.share_prefix(first, 4).unwrap();
        let prefix = mirror.expected[0].1.clone();
        let of_four = [0, 1].map(|i: usize| prefix[i][..4 * HEADS * DIMS[i]].to_vec());
        mirror.expected.extend([(second, prefix), (third, of_four)]);
        assert_eq!(mirror.cache.free_pages(), 9);
        for (seed, id) in [second, first, third, first].into_iter().enumerate() {
            mirror.append(id, 2, 10 + seed).unwrap();
            mirror.check();
        }
        mirror.cache.truncate(second, 5).unwrap();
        for (all, dim) in mirror.expected[1].1.iter_mut().zip(DIMS) {
            all.truncate(5 * HEADS * dim);
        }
        mirror.append(second, 1, 20).unwrap();
        mirror.check();
        for (id, _) in std::mem::take(&mut mirror.expected) {
            mirror.cache.free(id).unwrap();
        }
        assert!(mirror.cache.is_empty() && mirror.cache.free_pages() == 12);
        assert_eq!(mirror.cache.len(first), Err(CacheError::Unknown { id: 0 }));
    }

    /// A refused append leaves the cache as it was.
    #[test]
    fn refusals_change_nothing() {
        let cache = PagedCache::new(4, 2, HEADS, DIMS).unwrap();
        let mut mirror = Mirror { cache, expected: Vec::new() };
        let first = mirror.cache.create();
        mirror.expected.push((first, Default::default()));
        mirror.append(first, 5, 1).unwrap();
        let second = mirror.cache.fork(first).unwrap();
        mirror.expected.push((second, mirror.expected[0].1.clone()));
        // The shared page is copied, and one more is needed.
        let full = CacheError::Full { needed: 2, free: 1 };
        assert_eq!(mirror.append(second, 2, 2), Err(full));
        assert_eq!((mirror.cache.free_pages(), mirror.cache.len(second)), (1, Ok(5)));
        let [keys, values] = rows(1, 3);
        let error = mirror.cache.append(second, &keys, &values[1..]).unwrap_err().to_string();
        assert!(error.contains("'7' for the number of elements of values: expected 8"), "{error}");
        let rows = CacheError::Rows { rows: 6, len: 5 };
        assert_eq!(mirror.cache.truncate(second, 6), Err(rows));
        mirror.check();
        mirror.append(second, 1, 4).unwrap();
        mirror.check();
        assert!(PagedCache::<f32>::new(0, 4, 1, DIMS).is_err());
    }
}
