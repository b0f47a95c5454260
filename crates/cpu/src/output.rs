//! Rows of one tensor that several threads write.
#![allow(unsafe_code)] // rows of different tasks interleave in memory, which slices cannot express

use std::marker::PhantomData;

use problem::Strides;

/// A tensor whose rows are written by several threads, each row by one thread.
pub(crate) struct OutputRows<'a, T> {
    data: *mut T,
    len: usize,
    origin: usize,
    strides: Strides,
    dim: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer stands for an exclusive borrow of elements that are Send; by the contract of `row`,
// each row is used by one thread.
unsafe impl<T: Send> Sync for OutputRows<'_, T> {}

impl<'a, T> OutputRows<'a, T> {
    /// Takes over `buffer`. Element (0, 0, 0, 0) is at index `origin`, and a row has `dim` elements.
    pub(crate) fn new(buffer: &'a mut [T], origin: usize, strides: Strides, dim: usize) -> Self {
        OutputRows { data: buffer.as_mut_ptr(), len: buffer.len(), origin, strides, dim, buffer: PhantomData }
    }

    /// Row (`batch`, `head`, `row`).
    ///
    /// # Safety
    /// The results of two calls with the same indices must not be alive at the same time. Distinct rows must
    /// not overlap; `Problem::check` rejects strides with which they do.
    #[allow(clippy::mut_from_ref)] // that is the point: see the contract
    pub(crate) unsafe fn row(&self, batch: usize, head: usize, row: usize) -> &mut [T] {
        let start = self.origin as i64 + self.strides.offset(batch, head, row);
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        assert!(start.checked_add(self.dim).is_some_and(|end| end <= self.len), "row outside its buffer");
        // SAFETY: inside the buffer by the assertion, exclusive by the caller's guarantee.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), self.dim) }
    }
}
