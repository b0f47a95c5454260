//! Access to the rows of one tensor that several threads write.
#![allow(unsafe_code)] // rows of different tasks interleave in memory, which slices cannot express

use std::marker::PhantomData;

use half::{bf16, f16};
use problem::{ElementsMut, Strides};

use crate::simd::Simd;

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

/// The output tensor, in one of its types.
pub(crate) enum Output<'a> {
    F32(OutputRows<'a, f32>),
    F16(OutputRows<'a, f16>),
    Bf16(OutputRows<'a, bf16>),
}

impl<'a> Output<'a> {
    /// As [`OutputRows::new`]; `None` for 8-bit elements.
    pub(crate) fn new(buffer: ElementsMut<'a>, origin: usize, strides: Strides, dim: usize) -> Option<Self> {
        Some(match buffer {
            ElementsMut::F32(x) => Output::F32(OutputRows::new(x, origin, strides, dim)),
            ElementsMut::F16(x) => Output::F16(OutputRows::new(x, origin, strides, dim)),
            ElementsMut::Bf16(x) => Output::Bf16(OutputRows::new(x, origin, strides, dim)),
            ElementsMut::E4m3(_) | ElementsMut::E5m2(_) => return None,
        })
    }

    /// Writes `factor · wide`, rounded, to a row, or zeros without a factor.
    ///
    /// # Safety
    /// As for [`OutputRows::row`].
    pub(crate) unsafe fn write<S: Simd>(
        &self,
        simd: S,
        [batch, head, row]: [usize; 3],
        wide: &[f32],
        factor: Option<f32>,
    ) {
        // SAFETY: by this function's contract.
        unsafe {
            match self {
                Output::F32(rows) => put(simd, wide, factor, rows.row(batch, head, row)),
                Output::F16(rows) => put(simd, wide, factor, rows.row(batch, head, row)),
                Output::Bf16(rows) => put(simd, wide, factor, rows.row(batch, head, row)),
            }
        }
    }
}

fn put<S: Simd, T: problem::Element>(simd: S, wide: &[f32], factor: Option<f32>, to: &mut [T]) {
    match factor {
        Some(factor) => simd.narrow_scaled(wide, factor, to),
        None => to.fill(T::from_f32(0.0)),
    }
}
