//! Rows of a sequence that lie in pages of a pool, in the order of a page table.

use ptx::{Builder, Global, R32, R64, Type};

use crate::divide;

/// The pages of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct RowPages {
    /// The sequence's entries of the page table, 32-bit integers.
    pub table: Global,
    /// Rows of a page.
    pub rows: u32,
    /// The last page of the pool.
    pub last: R32,
    /// The sequence's first row in its pages; `None` for row 0.
    pub start: Option<R32>,
}

impl RowPages {
    /// The page and the row in that page that hold row `row` of the sequence. The page table must have an
    /// entry for the row. An entry that is no page stands for the last page of the pool, so that no entry
    /// leads outside of the pool.
    pub fn place(&self, k: &mut Builder, row: R32) -> [R32; 2] {
        let row = self.start.map_or(row, |start| k.add(row, start));
        let index = divide(k, row, self.rows);
        let at = k.index(self.table, index, 4);
        let entry = k.ld_read_only(Type::U32, at);
        let page = self.page(k, entry);
        let before = if self.rows == 1 { index } else { k.mul(index, self.rows) };
        [page, k.sub(row, before)]
    }

    /// The page that an entry of the table stands for.
    pub fn page(&self, k: &mut Builder, entry: R32) -> R32 {
        // A negative entry is a large unsigned number.
        k.min_u(entry, self.last)
    }
}

/// A tensor whose rows lie in pages.
#[derive(Clone, Copy, Debug)]
pub struct PagedRows {
    pub pages: RowPages,
    /// Bytes from one page to the next.
    pub page_bytes: R64,
    /// Bytes from one row of a page to the next.
    pub row_bytes: i64,
}

impl PagedRows {
    /// The address of a row of the sequence. `head` points at the head's first row in page 0.
    pub fn row(&self, k: &mut Builder, head: Global, row: R32) -> Global {
        let place = self.pages.place(k, row);
        self.at(k, head, place)
    }

    /// The address of the row at a [place](RowPages::place). `head` points at the head's first row in page 0.
    pub fn at(&self, k: &mut Builder, head: Global, place: [R32; 2]) -> Global {
        let [page, row] = place.map(|n| k.zext(n));
        let of_page = k.mad(page, self.page_bytes, head.base);
        Global { base: k.mad(row, self.row_bytes, of_page), ..head }
    }
}
