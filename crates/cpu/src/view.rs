//! Rows of input tensors.
#![allow(unsafe_code)] // a slice over a whole tensor would cover the gaps between its rows too

use std::marker::PhantomData;
use std::ptr::NonNull;

use half::{bf16, f16};
use problem::{ElementsMut, Problem, ProblemError, Strides, Tensor};

use crate::{CpuError, Element};

/// The memory of an input tensor, from its lowest element to its highest. A slice is such memory. For a
/// tensor whose rows have gaps, [`Input::from_raw_parts`] asks nothing of the gaps: another thread may write
/// them.
#[derive(Clone, Copy)]
pub struct Input<'a, T> {
    start: NonNull<T>,
    len: usize,
    elements: PhantomData<&'a [T]>,
}

// SAFETY: an `Input` is a shared borrow of elements of type T, as `&[T]` is.
unsafe impl<T: Sync> Send for Input<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Input<'_, T> {}

impl<'a, T> From<&'a [T]> for Input<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Input { start: NonNull::from(elements).cast(), len: elements.len(), elements: PhantomData }
    }
}

impl<'a, T> Input<'a, T> {
    /// The `len` elements from `start` on.
    ///
    /// # Safety
    /// `start` is aligned, the range lies in one allocation, and for `'a` each row that the problem's shape
    /// and strides place in the range is initialised and not written.
    pub unsafe fn from_raw_parts(start: NonNull<T>, len: usize) -> Self {
        Input { start, len, elements: PhantomData }
    }

    /// `count` elements from index `first` on.
    ///
    /// # Panics
    /// If they reach beyond the input.
    fn slice(&self, first: usize, count: usize) -> &'a [T] {
        assert!(first.checked_add(count).is_some_and(|end| end <= self.len), "row outside its buffer");
        // SAFETY: inside the range by the assertion, and part of rows that nobody writes by the promise made
        // to `from_raw_parts`; a view asks for rows of the problem only.
        unsafe { std::slice::from_raw_parts(self.start.add(first).as_ptr(), count) }
    }
}

impl<'a, T: Element> Input<'a, T> {
    /// The same memory, with another name of its element type.
    ///
    /// # Panics
    /// If `U` is another type.
    fn cast<U: Element>(self) -> Input<'a, U> {
        // `Element` is sealed, and no two of its types have one `DTYPE`.
        assert_eq!(T::DTYPE, U::DTYPE, "elements of another type");
        Input { start: self.start.cast(), len: self.len, elements: PhantomData }
    }
}

/// `[q, k, v]` and O, with the element type as data.
pub(crate) enum Tensors<'a> {
    F32([Input<'a, f32>; 3], &'a mut [f32]),
    F16([Input<'a, f16>; 3], &'a mut [f16]),
    Bf16([Input<'a, bf16>; 3], &'a mut [bf16]),
}

impl<'a> Tensors<'a> {
    pub(crate) fn new<T: Element>(inputs: [Input<'a, T>; 3], out: &'a mut [T]) -> Self {
        match T::elements_mut(out) {
            ElementsMut::F32(out) => Tensors::F32(inputs.map(Input::cast), out),
            ElementsMut::F16(out) => Tensors::F16(inputs.map(Input::cast), out),
            ElementsMut::Bf16(out) => Tensors::Bf16(inputs.map(Input::cast), out),
        }
    }
}

/// Returns the index of element (0, 0, 0, 0) in a buffer of `len` elements. An error if the buffer is too
/// short for `tensor`.
pub(crate) fn origin(problem: &Problem, tensor: Tensor, len: usize) -> Result<usize, CpuError> {
    let (needed, origin) = problem.span(tensor).ok_or(ProblemError::TooLarge { tensor: tensor.name() })?;
    if len < needed {
        return Err(CpuError::BufferTooShort { tensor: tensor.name(), len, needed });
    }
    Ok(origin)
}

/// An input tensor: the buffer that holds it, and the positions of its rows.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, T> {
    data: Input<'a, T>,
    origin: usize,
    strides: Strides,
    /// Number of elements of a row.
    pub dim: usize,
}

impl<'a, T> View<'a, T> {
    fn new(problem: &Problem, tensor: Tensor, data: Input<'a, T>) -> Result<Self, CpuError> {
        let origin = origin(problem, tensor, data.len)?;
        let [.., dim] = problem.extents(tensor);
        Ok(View { data, origin, strides: problem.strides(tensor), dim })
    }

    fn start(&self, batch: usize, head: usize, row: usize) -> usize {
        (self.origin as i64 + self.strides.offset(batch, head, row)) as usize
    }

    /// One row.
    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> &'a [T] {
        self.data.slice(self.start(batch, head, row), self.dim)
    }

    /// `count` rows as one slice, if they are contiguous in memory.
    pub(crate) fn dense_rows(
        &self,
        batch: usize,
        head: usize,
        first: usize,
        count: usize,
    ) -> Option<&'a [T]> {
        (self.strides.row == self.dim as i64)
            .then(|| self.data.slice(self.start(batch, head, first), count * self.dim))
    }
}

/// The three inputs of a problem, checked against it.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a, T> {
    pub q: View<'a, T>,
    pub k: View<'a, T>,
    pub v: View<'a, T>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Rejects an invalid problem, elements of another type, and buffers that are too short.
    pub(crate) fn check(problem: &Problem, [q, k, v]: [Input<'a, T>; 3]) -> Result<Self, CpuError> {
        problem.check()?;
        if T::DTYPE != problem.dtype {
            return Err(CpuError::DType { slices: T::DTYPE, problem: problem.dtype });
        }
        Ok(Inputs {
            q: View::new(problem, Tensor::Q, q)?,
            k: View::new(problem, Tensor::K, k)?,
            v: View::new(problem, Tensor::V, v)?,
        })
    }
}
