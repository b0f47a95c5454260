//! Access to the rows of input tensors, and to the elements of tables.
#![allow(unsafe_code)] // a slice over a whole tensor would cover the gaps between its rows too

use std::marker::PhantomData;
use std::ptr::NonNull;

use half::{bf16, f16};
use problem::{
    DType, E4m3, E5m2, ElementType, KeyPlaces, Operand, OperandMap, Operands, Problem, ProblemError, Strides,
    Tensor,
};

use crate::{CpuError, Element, Elements};

/// The memory of an input, from its lowest element to its highest. A slice is such memory. If the rows of a
/// tensor have gaps, [`Input::from_raw_parts`] makes no assumption about the gaps: another thread may write
/// them.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    start: NonNull<u8>,
    len: usize,
    dtype: ElementType,
    elements: PhantomData<&'a [u8]>,
}

// SAFETY: an `Input` is a shared borrow of elements of a type that is `Sync`, as a slice of them is.
unsafe impl Send for Input<'_> {}
// SAFETY: as above.
unsafe impl Sync for Input<'_> {}

impl<'a, T: Element> From<&'a [T]> for Input<'a> {
    fn from(elements: &'a [T]) -> Self {
        let start = NonNull::from(elements).cast();
        Input { start, len: elements.len(), dtype: T::DTYPE.into(), elements: PhantomData }
    }
}

/// The elements of some rows, row by row.
pub(crate) trait ElementRows<'a>: Iterator<Item = Elements<'a>> {}

impl<'a, I: Iterator<Item = Elements<'a>>> ElementRows<'a> for I {}

impl<'a> From<Elements<'a>> for Input<'a> {
    fn from(elements: Elements<'a>) -> Self {
        let start = NonNull::from(elements.bytes()).cast();
        Input { start, len: elements.len(), dtype: elements.dtype(), elements: PhantomData }
    }
}

impl<'a> Input<'a> {
    /// The `len` elements of type `dtype` from `start` on.
    ///
    /// # Safety
    /// `start` is aligned for the type, the range lies in one allocation, and for `'a` each element that the
    /// problem's shapes and strides place in the range is initialised and not written: of Q, K, V and O
    /// each row, of a table each element, of another input all.
    pub unsafe fn from_raw_parts(dtype: ElementType, start: NonNull<u8>, len: usize) -> Self {
        Input { start, len, dtype, elements: PhantomData }
    }

    /// No element of type `dtype`.
    pub(crate) fn empty(dtype: ElementType) -> Self {
        // A slice of f32 is aligned for every type.
        Input { dtype, ..Input::from(&[] as &[f32]) }
    }

    /// Type and number of the elements.
    pub(crate) fn type_and_len(&self) -> (ElementType, usize) {
        (self.dtype, self.len)
    }

    /// All elements. Only of inputs without strides, whose whole range is initialised and not written.
    fn elements(self) -> Elements<'a> {
        let Input { start, len, dtype, .. } = self;
        macro_rules! slice {
            // SAFETY: the type is that of the elements, and the rest is the contract of `from_raw_parts`.
            ($of:ident) => {
                Elements::$of(unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), len) })
            };
        }
        match dtype {
            ElementType::F32 => slice!(F32),
            ElementType::F16 => slice!(F16),
            ElementType::Bf16 => slice!(Bf16),
            ElementType::I32 => slice!(I32),
            ElementType::U8 => slice!(U8),
            ElementType::E4m3 => slice!(E4m3),
            ElementType::E5m2 => slice!(E5m2),
        }
    }

    /// The elements, if they have type `T`.
    fn memory<T: Element>(self) -> Option<Memory<'a, T>> {
        let Input { start, len, dtype, .. } = self;
        (dtype == T::DTYPE.into()).then(|| Memory::new(start, len))
    }

    /// The memory of a table.
    fn table(self) -> TableMemory<'a> {
        let Input { start, len, dtype, .. } = self;
        match dtype {
            ElementType::F32 => TableMemory::F32(Memory::new(start, len)),
            ElementType::F16 => TableMemory::F16(Memory::new(start, len)),
            ElementType::Bf16 => TableMemory::Bf16(Memory::new(start, len)),
            ElementType::I32 => TableMemory::I32(Memory::new(start, len)),
            // `Table::check` refuses the 8-bit floats.
            ElementType::U8 | ElementType::E4m3 | ElementType::E5m2 => {
                TableMemory::U8(Memory::new(start, len))
            }
        }
    }
}

/// The inputs without strides as slices: arrays of lengths, sinks and descale factors.
pub(crate) fn arrays<'a>(inputs: &OperandMap<Input<'a>>) -> Operands<'a> {
    let strided = |operand| matches!(operand, Operand::Tensor(_) | Operand::OutBefore | Operand::Table(_));
    let arrays = inputs.iter().filter(|&(operand, _)| !strided(operand));
    arrays.map(|(operand, input)| (operand, input.elements())).collect()
}

/// The memory of the programs' tables, in order.
pub(crate) fn tables<'a>(inputs: &OperandMap<Input<'a>>) -> Vec<TableMemory<'a>> {
    let tables = inputs.iter().filter(|(operand, _)| matches!(operand, Operand::Table(_)));
    tables.map(|(_, input)| input.table()).collect()
}

/// The memory of a table, from its first element to its last one. As of an [`Input`], nothing is assumed
/// about what lies between the elements.
#[derive(Clone, Copy)]
pub(crate) enum TableMemory<'a> {
    F32(Memory<'a, f32>),
    F16(Memory<'a, f16>),
    Bf16(Memory<'a, bf16>),
    I32(Memory<'a, i32>),
    U8(Memory<'a, u8>),
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
        // which no thread writes, by the contract of `from_raw_parts`.
        unsafe { std::slice::from_raw_parts(self.start.add(first).as_ptr(), count) }
    }
}

/// Returns the index of element (0, 0, 0, 0) in a buffer of `len` elements of type `dtype`. Rejects another
/// type than the problem's, and a buffer that is too short for `tensor`.
pub(crate) fn origin(
    problem: &Problem,
    tensor: Tensor,
    (dtype, len): (ElementType, usize),
) -> Result<usize, ProblemError> {
    let (argument, expected) = (tensor.name(), problem.dtypes.of(tensor).into());
    if dtype != expected {
        let (dtype, expected) = (dtype.name(), expected.name());
        return Err(ProblemError::OperandType { argument, dtype, expected });
    }
    let (needed, origin) = problem.span(tensor).ok_or(ProblemError::TooLarge { tensor: argument })?;
    if len < needed {
        return Err(ProblemError::OperandTooShort { argument, len, needed });
    }
    Ok(origin)
}

/// An input tensor: the buffer that holds it, and the positions of its rows.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, T> {
    data: Memory<'a, T>,
    origin: usize,
    strides: Strides,
    /// Where the rows of a batch entry lie.
    places: KeyPlaces<'a>,
    /// Number of elements of a row.
    dim: usize,
}

impl<'a, T: Element> View<'a, T> {
    /// Rejects elements of another type, and a buffer that is too short. `places` are those of the rows of
    /// the tensor.
    fn new(
        problem: &Problem,
        tensor: Tensor,
        input: Input<'a>,
        places: KeyPlaces<'a>,
    ) -> Result<Self, CpuError> {
        let origin = origin(problem, tensor, input.type_and_len())?;
        let (argument, dtype, expected) = (tensor.name(), input.dtype.name(), T::DTYPE.name());
        let wrong = ProblemError::OperandType { argument, dtype, expected };
        let data = input.memory::<T>().ok_or(wrong)?;
        let [.., dim] = problem.extents(tensor);
        Ok(View { data, origin, strides: problem.strides(tensor), places, dim })
    }

    fn start(&self, batch: usize, head: usize, row: usize) -> usize {
        let (batch, row) = self.places.place(batch, row);
        (self.origin as i64 + self.strides.offset(batch, head, row)) as usize
    }

    /// Number of elements of a row.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// One row.
    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> &'a [T] {
        self.data.slice(self.start(batch, head, row), self.dim)
    }

    /// Where rows begin, from `first` on: one for each place in `to`. Each has the view's number of elements.
    #[inline(always)]
    pub(crate) fn starts(&self, batch: usize, head: usize, first: usize, to: &mut [*const T]) {
        let mut done = 0;
        while done < to.len() {
            let run = self.places.run(first + done, to.len() - done);
            let mut at = self.start(batch, head, first + done) as i64;
            for row in &mut to[done..][..run] {
                *row = self.data.slice(at as usize, self.dim).as_ptr();
                at += self.strides.row;
            }
            done += run;
        }
    }

    /// `count` rows as one slice, if they are contiguous in memory.
    pub(crate) fn dense_rows(
        &self,
        batch: usize,
        head: usize,
        first: usize,
        count: usize,
    ) -> Option<&'a [T]> {
        (self.strides.row == self.dim as i64 && self.places.run(first, count) == count)
            .then(|| self.data.slice(self.start(batch, head, first), count * self.dim))
    }
}

/// The three inputs of a problem, checked against it.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub q: Any<'a>,
    pub k: Any<'a>,
    pub v: Any<'a>,
}

impl<'a> Inputs<'a> {
    /// Rejects elements of another type, and buffers that are too short. The problem has been checked, or
    /// differs from a checked one by dense inputs. `places` are those of keys and values.
    pub(crate) fn views(
        problem: &Problem,
        [q, k, v]: [Input<'a>; 3],
        places: KeyPlaces<'a>,
    ) -> Result<Self, CpuError> {
        Ok(Inputs {
            q: Any::new(problem, Tensor::Q, q, KeyPlaces::ROWS)?,
            k: Any::new(problem, Tensor::K, k, places)?,
            v: Any::new(problem, Tensor::V, v, places)?,
        })
    }
}

/// An expression of the view of an [`Any`].
macro_rules! of_any {
    ($any:expr, $view:ident => $of:expr) => {
        match $any {
            Any::F32($view) => $of,
            Any::F16($view) => $of,
            Any::Bf16($view) => $of,
            Any::E4m3($view) => $of,
            Any::E5m2($view) => $of,
        }
    };
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
    pub(crate) fn new(
        problem: &Problem,
        tensor: Tensor,
        input: Input<'a>,
        places: KeyPlaces<'a>,
    ) -> Result<Self, CpuError> {
        Ok(match problem.dtypes.of(tensor) {
            DType::F32 => Any::F32(View::new(problem, tensor, input, places)?),
            DType::F16 => Any::F16(View::new(problem, tensor, input, places)?),
            DType::Bf16 => Any::Bf16(View::new(problem, tensor, input, places)?),
            DType::E4m3 => Any::E4m3(View::new(problem, tensor, input, places)?),
            DType::E5m2 => Any::E5m2(View::new(problem, tensor, input, places)?),
        })
    }

    /// One row.
    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> Elements<'a> {
        of_any!(self, view => view.row(batch, head, row).into())
    }

    /// `count` rows as one slice, if they are contiguous in memory.
    pub(crate) fn dense_rows(
        &self,
        batch: usize,
        head: usize,
        first: usize,
        count: usize,
    ) -> Option<Elements<'a>> {
        of_any!(self, view => view.dense_rows(batch, head, first, count).map(Elements::from))
    }

    /// Number of elements of a row.
    pub(crate) fn dim(&self) -> usize {
        of_any!(self, view => view.dim)
    }

    /// The type of the elements.
    pub(crate) fn dtype(&self) -> DType {
        fn of<T: Element>(_: &View<'_, T>) -> DType {
            T::DTYPE
        }
        of_any!(self, view => of(view))
    }
}
