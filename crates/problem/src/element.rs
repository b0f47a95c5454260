//! The element types of tensors in host memory.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::DType;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A slice of one of the three element types.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// IEEE binary32.
    F32(&'a [f32]),
    /// IEEE binary16.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl Elements<'_> {
    /// The number of elements.
    pub fn len(self) -> usize {
        match self {
            Elements::F32(x) => x.len(),
            Elements::F16(x) => x.len(),
            Elements::Bf16(x) => x.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// A mutable slice of one of the three element types.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// IEEE binary32.
    F32(&'a mut [f32]),
    /// IEEE binary16.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

/// An element type of Q, K, V and O: `f32`, [`half::f16`] or [`half::bf16`].
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The name of this type in a [`Problem`](crate::Problem).
    const DTYPE: DType;

    /// The value in f32, which is exact.
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Rounds `factor · from` into `to`, which has the same length as `from`.
    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [Self]);

    /// The slice with its type as data.
    fn elements(from: &[Self]) -> Elements<'_>;

    /// The mutable slice with its type as data.
    fn elements_mut(to: &mut [Self]) -> ElementsMut<'_>;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> f32 {
        value
    }

    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
    }

    fn elements(from: &[f32]) -> Elements<'_> {
        Elements::F32(from)
    }

    fn elements_mut(to: &mut [f32]) -> ElementsMut<'_> {
        ElementsMut::F32(to)
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;

    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    fn from_f32(value: f32) -> f16 {
        f16::from_f32(value)
    }

    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [f16]) {
        scaled_chunks(from, factor, to, |to, scaled| to.convert_from_f32_slice(scaled));
    }

    fn elements(from: &[f16]) -> Elements<'_> {
        Elements::F16(from)
    }

    fn elements_mut(to: &mut [f16]) -> ElementsMut<'_> {
        ElementsMut::F16(to)
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }

    fn from_f32(value: f32) -> bf16 {
        bf16::from_f32(value)
    }

    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [bf16]) {
        scaled_chunks(from, factor, to, |to, scaled| to.convert_from_f32_slice(scaled));
    }

    fn elements(from: &[bf16]) -> Elements<'_> {
        Elements::Bf16(from)
    }

    fn elements_mut(to: &mut [bf16]) -> ElementsMut<'_> {
        ElementsMut::Bf16(to)
    }
}

/// Passes `factor · from` to `convert` in chunks that fit the stack.
fn scaled_chunks<T>(from: &[f32], factor: f32, to: &mut [T], convert: impl Fn(&mut [T], &[f32])) {
    const PIECE: usize = 64;
    let mut scaled = [0.0; PIECE];
    for (from, to) in from.chunks(PIECE).zip(to.chunks_mut(PIECE)) {
        for (scaled, from) in scaled.iter_mut().zip(from) {
            *scaled = from * factor;
        }
        convert(to, &scaled[..from.len()]);
    }
}
