//! How keys and values lie in memory: as strided rows, or in pages of a pool that a page table lists.

use serde::{Deserialize, Serialize};

use crate::{Operand, Operands, Problem, ProblemError};

/// How K and V are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// Each batch entry has its rows at the tensor's strides.
    #[default]
    Rows,
    /// The rows of a batch entry lie in pages, which its row of the page table lists.
    Pages(Pages),
}

impl Storage {
    /// Whether keys and values lie at strides alone. Files omit this default.
    pub(crate) const fn is_rows(&self) -> bool {
        matches!(self, Storage::Rows)
    }

    /// The pages, if keys and values lie in pages.
    pub const fn pages(self) -> Option<Pages> {
        match self {
            Storage::Rows => None,
            Storage::Pages(pages) => Some(pages),
        }
    }
}

/// Keys and values in pages. K and V are pools of extents `[count, heads_kv, rows, dim]`: the batch stride of
/// [`Problem::k`] and of [`Problem::v`] is the distance between pages. Any order of the dimensions and one
/// memory for both pools are a matter of base addresses and strides.
///
/// Key `j` of batch entry `b` is row `j % rows` of the page `page_table[b][j / rows]`, for both K and V. The
/// operand `page_table` has extents `[batch, per_sequence]`. Entries past a sequence's length are never read.
/// An entry that is no page of the pool stands for the last page, so that no entry leads outside of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pages {
    /// Rows of a page.
    pub rows: usize,
    /// Pages of the pool.
    pub count: usize,
    /// Entries of the page table for each batch entry (`max_pages`).
    pub per_sequence: usize,
}

impl Pages {
    /// The page that an entry of the page table stands for.
    pub fn page(self, entry: i32) -> usize {
        let last = self.count.saturating_sub(1);
        usize::try_from(entry).map_or(last, |page| page.min(last))
    }
}

/// The place of every key and value in K and V.
#[derive(Clone, Copy, Debug)]
pub struct KeyPlaces<'a> {
    /// The pages and the page table; `None` if K and V have strided rows.
    pages: Option<(Pages, &'a [i32])>,
}

impl<'a> KeyPlaces<'a> {
    /// Rows at the strides of the tensor.
    pub const ROWS: KeyPlaces<'static> = KeyPlaces { pages: None };

    /// The places of a problem's keys. `inputs` have passed [`Problem::check_inputs`].
    pub fn of(problem: &Problem, inputs: &Operands<'a>) -> KeyPlaces<'a> {
        let table = inputs.integers(Operand::PageTable);
        KeyPlaces { pages: problem.storage.pages().map(|pages| (pages, table)) }
    }

    /// The batch index and the row in the tensors of row `row` of a batch entry
    /// ([`Span`](crate::Span)), as [`Strides::offset`](crate::Strides::offset) takes them.
    #[inline]
    pub fn place(&self, batch: usize, row: usize) -> (usize, usize) {
        match self.pages {
            None => (batch, row),
            Some((pages, table)) => {
                let entry = table[batch * pages.per_sequence + row / pages.rows];
                (pages.page(entry), row % pages.rows)
            }
        }
    }

    /// The number of rows from `row` on, at most `most`, that lie at one batch index.
    #[inline]
    pub fn run(&self, row: usize, most: usize) -> usize {
        self.pages.map_or(most, |(pages, _)| most.min(pages.rows - row % pages.rows))
    }
}

impl Problem {
    /// Stores K and V in `count` pages of `rows` rows, dense as `[page, row, head, dim]`, with a page table
    /// for `seq_kv` keys.
    pub fn with_pages(mut self, rows: usize, count: usize) -> Problem {
        let per_sequence = self.seq_kv.div_ceil(rows.max(1));
        self.storage = Storage::Pages(Pages { rows, count, per_sequence });
        let strides = |dim| crate::Layout::Bshd.strides(self.heads_kv, rows, dim);
        (self.k, self.v) = (strides(self.head_dim), strides(self.v_columns()));
        self
    }

    pub(crate) fn check_storage(&self) -> Result<(), ProblemError> {
        let Some(pages) = self.storage.pages() else { return Ok(()) };
        let Pages { rows, count, per_sequence } = pages;
        for (argument, value) in [("page_size", rows), ("pages", count)] {
            if value == 0 {
                return Err(ProblemError::Zero { argument });
            }
        }
        let refuse = |reason| Err(ProblemError::Side { argument: "kv", reason });
        if self.lengths.kv.packed.is_some() {
            return refuse("packed keys and values have no pages; expected page_table or cu_seqlens_k");
        }
        if self.pass.is_backward() {
            return refuse("the backward pass reads keys and values as rows; expected no page_table");
        }
        if per_sequence.saturating_mul(rows) < self.seq_kv {
            return refuse("expected a page table with enough entries for seq_kv keys");
        }
        let most = i32::MAX as usize;
        let entries = self.batch.saturating_mul(per_sequence);
        if self.seq_kv > most || rows > most || count > most || entries > 1 << 58 {
            return refuse("expected at most 2^31 - 1 keys, rows of a page and pages");
        }
        Ok(())
    }

    /// Rejects entries of the page table that are no pages of the pool, among those that the lengths reach.
    pub(crate) fn check_page_table(&self, inputs: &Operands<'_>) -> Result<(), ProblemError> {
        let Some(Pages { rows, count, per_sequence }) = self.storage.pages() else { return Ok(()) };
        let (table, expected) = (inputs.integers(Operand::PageTable), self.batch * per_sequence);
        if table.len() != expected {
            let argument = Operand::PageTable.name();
            return Err(ProblemError::Lengths { argument, len: table.len(), expected });
        }
        let rows = rows.max(1);
        for (sequence, spans) in self.sequences(inputs)?.into_iter().enumerate() {
            let entries = spans.kv.start / rows..(spans.kv.start + spans.kv.len).div_ceil(rows);
            for index in entries.take_while(|_| spans.kv.len > 0) {
                let value = table[sequence * per_sequence + index];
                if !usize::try_from(value).is_ok_and(|page| page < count) {
                    return Err(ProblemError::Page { sequence, index, value, pages: count });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Elements, LengthArray, SideLengths, Tensor};

    /// Three sequences of at most seven keys in five pages of three rows.
    fn problem() -> Problem {
        let mut p = Problem::new(3, 2, 7, 4, DType::F16).with_pages(3, 5);
        p.lengths.kv.used = true;
        p
    }

    fn inputs<'a>(used: &'a [i32], table: &'a [i32]) -> Operands<'a> {
        Operands::default()
            .with(Operand::Lengths(LengthArray::UsedKv), used)
            .with(Operand::PageTable, Elements::I32(table))
    }

    #[test]
    fn keys_are_found_by_the_table() {
        let p = problem();
        p.check().unwrap();
        assert_eq!(p.extents(Tensor::K), [5, 2, 3, 4]);
        assert_eq!(p.operand(Operand::PageTable).map(|table| table.elements), Some(9));
        let table = [4, 0, 2, -1, 7, i32::MIN, 1, 1, i32::MAX];
        let inputs = inputs(&[7, 0, 5], &table);
        let places = KeyPlaces::of(&p, &inputs);
        assert_eq!([0, 2, 3, 6].map(|row| places.place(0, row)), [(4, 0), (4, 2), (0, 0), (2, 0)]);
        // The same page twice, and entries that are no pages.
        assert_eq!([1, 4].map(|row| places.place(2, row)), [(1, 1), (1, 1)]);
        assert_eq!([0, 3, 6].map(|row| places.place(1, row)), [(4, 0), (4, 0), (4, 0)]);
        assert_eq!([(0, 9), (1, 9), (2, 9), (3, 2)].map(|(row, most)| places.run(row, most)), [3, 2, 1, 2]);
        assert_eq!((KeyPlaces::ROWS.place(3, 8), KeyPlaces::ROWS.run(8, 100)), ((3, 8), 100));
    }

    /// Only entries that the lengths reach must be pages.
    #[test]
    fn entries_outside_of_the_pool_are_refused() {
        let p = problem();
        let check = |used: &[i32], table: &[i32]| p.check_length_values(&inputs(used, table));
        let table = [4, -1, 99, 99, -7, 0, 0, 4, i32::MIN];
        check(&[3, 0, 6], &table).unwrap();
        let told = |used: &[i32]| check(used, &table).unwrap_err().to_string();
        let pages = "expected 0 to 4, the pages of the pool";
        assert_eq!(told(&[4, 0, 6]), format!("invalid value '-1' for page_table[0][1]: {pages}"));
        assert_eq!(told(&[3, 1, 6]), format!("invalid value '99' for page_table[1][0]: {pages}"));
        assert_eq!(told(&[3, 0, 7]), format!("invalid value '-2147483648' for page_table[2][2]: {pages}"));
        let short = check(&[3, 0, 6], &table[..8]).unwrap_err().to_string();
        assert_eq!(short, "invalid value '8' for the number of elements of page_table: expected 9");
    }

    #[test]
    fn pages_that_no_kernel_can_read_are_refused() {
        let refused = |change: fn(&mut Problem, &mut Pages)| {
            let mut p = problem();
            let mut pages = p.storage.pages().unwrap();
            change(&mut p, &mut pages);
            p.storage = Storage::Pages(pages);
            p.check().unwrap_err().to_string()
        };
        assert_eq!(refused(|_, pages| pages.rows = 0), "invalid value '0' for page_size: expected 1 or more");
        assert_eq!(refused(|_, pages| pages.count = 0), "invalid value '0' for pages: expected 1 or more");
        let short = refused(|_, pages| pages.per_sequence = 2);
        assert!(short.ends_with("expected a page table with enough entries for seq_kv keys"), "{short}");
        let packed = refused(|p, _| p.lengths.kv = SideLengths { packed: Some(9), used: false });
        assert!(packed.ends_with("expected page_table or cu_seqlens_k"), "{packed}");
        let many = refused(|_, pages| pages.count = 1 << 31);
        assert!(many.ends_with("expected at most 2^31 - 1 keys, rows of a page and pages"), "{many}");
    }
}
