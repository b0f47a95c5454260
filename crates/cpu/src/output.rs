//! Rows of one tensor, written from several threads.
#![allow(unsafe_code)] // rows of different tasks interleave in memory, which slices cannot express

use std::marker::PhantomData;

use problem::Strides;

/// A tensor whose rows are handed out to threads, each row to one of them.
pub(crate) struct OutputRows<'a, T> {
    data: *mut T,
    len: usize,
    origin: usize,
    strides: Strides,
    dim: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer stands for an exclusive borrow of elements that are Send; `row` hands each row to one thread.
unsafe impl<T: Send> Sync for OutputRows<'_, T> {}

impl<'a, T> OutputRows<'a, T> {
    /// Takes over `buffer`, in which element (0, 0, 0, 0) is at `origin` and a row has `dim` elements.
    pub(crate) fn new(buffer: &'a mut [T], origin: usize, strides: Strides, dim: usize) -> Self {
        OutputRows { data: buffer.as_mut_ptr(), len: buffer.len(), origin, strides, dim, buffer: PhantomData }
    }

    /// Row (`batch`, `head`, `row`).
    ///
    /// # Safety
    /// No two calls with the same indices may have their results alive at once, and distinct rows must not overlap
    /// (`Problem::check` refuses strides that make them).
    #[allow(clippy::mut_from_ref)] // that is the point: see the contract
    pub(crate) unsafe fn row(&self, batch: usize, head: usize, row: usize) -> &mut [T] {
        let start = self.origin as i64 + self.strides.offset(batch, head, row);
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        assert!(start.checked_add(self.dim).is_some_and(|end| end <= self.len), "row outside its buffer");
        // SAFETY: inside the buffer by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), self.dim) }
    }
}
