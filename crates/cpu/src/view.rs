//! Access to the rows of input tensors, and to the elements of tables.
#![allow(unsafe_code)] // a slice over a whole tensor would cover the gaps between its rows too

use std::marker::PhantomData;
use std::ptr::NonNull;

use half::{bf16, f16};
use problem::{DType, E4m3, E5m2, Problem, ProblemError, Strides, TableData, TableType, Tensor};

use crate::{CpuError, Element, Elements};

/// The memory of an input tensor, from its lowest element to its highest. A slice is such memory. If the rows
/// of a tensor have gaps, [`Input::from_raw_parts`] makes no assumption about the gaps: another thread may
/// write them.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    start: NonNull<u8>,
    len: usize,
    dtype: DType,
    elements: PhantomData<&'a [u8]>,
}

// SAFETY: an `Input` is a shared borrow of elements of a type that is `Sync`, as a slice of them is.
unsafe impl Send for Input<'_> {}
// SAFETY: as above.
unsafe impl Sync for Input<'_> {}

impl<'a, T: Element> From<&'a [T]> for Input<'a> {
    fn from(elements: &'a [T]) -> Self {
        let start = NonNull::from(elements).cast();
        Input { start, len: elements.len(), dtype: T::DTYPE, elements: PhantomData }
    }
}

impl<'a> From<Elements<'a>> for Input<'a> {
    fn from(elements: Elements<'a>) -> Self {
        match elements {
            Elements::F32(x) => x.into(),
            Elements::F16(x) => x.into(),
            Elements::Bf16(x) => x.into(),
            Elements::E4m3(x) => x.into(),
            Elements::E5m2(x) => x.into(),
        }
    }
}

impl<'a> Input<'a> {
    /// The `len` elements of type `dtype` from `start` on.
    ///
    /// # Safety
    /// `start` is aligned for the type, the range lies in one allocation, and for `'a` each row that the
    /// problem's shape and strides place in the range is initialised and not written.
    pub unsafe fn from_raw_parts(dtype: DType, start: NonNull<u8>, len: usize) -> Self {
        Input { start, len, dtype, elements: PhantomData }
    }

    /// The elements, if they have type `T`.
    fn memory<T: Element>(self) -> Option<Memory<'a, T>> {
        let Input { start, len, dtype, .. } = self;
        (dtype == T::DTYPE).then(|| Memory::new(start, len))
    }
}

/// The memory of a table, from its first element to its last one. A [`TableData`] is such memory. As of an
/// [`Input`], nothing is assumed about what lies between the elements.
#[derive(Clone, Copy)]
pub struct TableInput<'a>(pub(crate) TableMemory<'a>);

/// The memory of a table of each type.
#[derive(Clone, Copy)]
pub(crate) enum TableMemory<'a> {
    F32(Memory<'a, f32>),
    F16(Memory<'a, f16>),
    Bf16(Memory<'a, bf16>),
    I32(Memory<'a, i32>),
    U8(Memory<'a, u8>),
}

impl<'a> TableInput<'a> {
    /// The `len` elements of type `dtype` from `start` on.
    ///
    /// # Safety
    /// `start` is aligned for the type, the range lies in one allocation, and for `'a` each element that the
    /// table's extents and strides place in the range is initialised and not written.
    pub unsafe fn from_raw_parts(dtype: TableType, start: NonNull<u8>, len: usize) -> Self {
        TableInput(match dtype {
            TableType::F32 => TableMemory::F32(Memory::new(start, len)),
            TableType::F16 => TableMemory::F16(Memory::new(start, len)),
            TableType::Bf16 => TableMemory::Bf16(Memory::new(start, len)),
            TableType::I32 => TableMemory::I32(Memory::new(start, len)),
            TableType::U8 => TableMemory::U8(Memory::new(start, len)),
        })
    }

    /// Type and number of the elements.
    pub(crate) const fn size(&self) -> (TableType, usize) {
        match self.0 {
            TableMemory::F32(Memory { len, .. }) => (TableType::F32, len),
            TableMemory::F16(Memory { len, .. }) => (TableType::F16, len),
            TableMemory::Bf16(Memory { len, .. }) => (TableType::Bf16, len),
            TableMemory::I32(Memory { len, .. }) => (TableType::I32, len),
            TableMemory::U8(Memory { len, .. }) => (TableType::U8, len),
        }
    }
}

impl<'a> From<TableData<'a>> for TableInput<'a> {
    fn from(data: TableData<'a>) -> Self {
        TableInput(match data {
            TableData::F32(x) => TableMemory::F32(x.into()),
            TableData::F16(x) => TableMemory::F16(x.into()),
            TableData::Bf16(x) => TableMemory::Bf16(x.into()),
            TableData::I32(x) => TableMemory::I32(x.into()),
            TableData::U8(x) => TableMemory::U8(x.into()),
        })
    }
}

/// Memory with elements of a known type.
#[derive(Clone, Copy)]
pub(crate) struct Memory<'a, T> {
    start: NonNull<T>,
    len: usize,
    elements: PhantomData<&'a [T]>,
}

// SAFETY: as for `Input`.
unsafe impl<T: Sync> Send for Memory<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Memory<'_, T> {}

impl<'a, T> From<&'a [T]> for Memory<'a, T> {
    fn from(elements: &'a [T]) -> Self {
        Memory::new(NonNull::from(elements).cast(), elements.len())
    }
}

impl<'a, T> Memory<'a, T> {
    const fn new(start: NonNull<u8>, len: usize) -> Self {
        Memory { start: start.cast(), len, elements: PhantomData }
    }

    /// The element at an index.
    ///
    /// # Panics
    /// If the index exceeds the memory.
    #[inline(always)]
    pub(crate) fn read(&self, at: usize) -> T
    where
        T: Copy,
    {
        assert!(at < self.len, "element outside its buffer");
        // SAFETY: inside the memory by the assertion, and an element of a table, which is initialised by the
        // contract of `from_raw_parts`.
        unsafe { self.start.add(at).read() }
    }

    /// `count` elements from index `first` on.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    #[inline(always)]
    pub(crate) fn slice(&self, first: usize, count: usize) -> &'a [T] {
        assert!(first.checked_add(count).is_some_and(|end| end <= self.len), "row outside its buffer");
        // SAFETY: inside the range by the assertion, and rows of an input or consecutive elements of a table,
        // which no thread writes, by the contracts of `from_raw_parts`.
        unsafe { std::slice::from_raw_parts(self.start.add(first).as_ptr(), count) }
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
    data: Memory<'a, T>,
    origin: usize,
    strides: Strides,
    /// Number of elements of a row.
    pub dim: usize,
}

impl<'a, T: Element> View<'a, T> {
    /// Rejects elements of another type, and a buffer that is too short.
    fn new(problem: &Problem, tensor: Tensor, input: Input<'a>) -> Result<Self, CpuError> {
        let (slices, expected) = (input.dtype, problem.dtypes.of(tensor));
        let data = input.memory::<T>().filter(|_| slices == expected);
        let data = data.ok_or(CpuError::DType { tensor: tensor.name(), slices, problem: expected })?;
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
    /// Rejects elements of another type, and buffers that are too short. The problem has been checked, or
    /// differs from a checked one by dense inputs.
    pub(crate) fn views(problem: &Problem, [q, k, v]: [Input<'a>; 3]) -> Result<Self, CpuError> {
        Ok(Inputs {
            q: View::new(problem, Tensor::Q, q)?,
            k: View::new(problem, Tensor::K, k)?,
            v: View::new(problem, Tensor::V, v)?,
        })
    }
}

/// An input tensor of any type.
#[derive(Clone, Copy)]
pub(crate) enum Any<'a> {
    F32(View<'a, f32>),
    F16(View<'a, f16>),
    Bf16(View<'a, bf16>),
    E4m3(View<'a, E4m3>),
    E5m2(View<'a, E5m2>),
}

impl<'a> Any<'a> {
    pub(crate) fn new(problem: &Problem, tensor: Tensor, input: Input<'a>) -> Result<Self, CpuError> {
        Ok(match input.dtype {
            DType::F32 => Any::F32(View::new(problem, tensor, input)?),
            DType::F16 => Any::F16(View::new(problem, tensor, input)?),
            DType::Bf16 => Any::Bf16(View::new(problem, tensor, input)?),
            DType::E4m3 => Any::E4m3(View::new(problem, tensor, input)?),
            DType::E5m2 => Any::E5m2(View::new(problem, tensor, input)?),
        })
    }

    /// One row.
    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> Elements<'a> {
        match self {
            Any::F32(view) => Elements::F32(view.row(batch, head, row)),
            Any::F16(view) => Elements::F16(view.row(batch, head, row)),
            Any::Bf16(view) => Elements::Bf16(view.row(batch, head, row)),
            Any::E4m3(view) => Elements::E4m3(view.row(batch, head, row)),
            Any::E5m2(view) => Elements::E5m2(view.row(batch, head, row)),
        }
    }
}
