//! Slices of tensor elements in host memory, and the Rust types of the elements.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::{DType, E4m3, E5m2};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for crate::E4m3 {}
    impl Sealed for crate::E5m2 {}
}

/// A slice of one of the five element types.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// IEEE binary32.
    F32(&'a [f32]),
    /// IEEE binary16.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// 8-bit floating point with 4 significant bits.
    E4m3(&'a [E4m3]),
    /// 8-bit floating point with 3 significant bits.
    E5m2(&'a [E5m2]),
}

/// Matches on either enum and runs `$body` with `$x` bound to the slice.
macro_rules! each {
    ($enum:ident, $elements:expr, $x:ident => $body:expr) => {
        match $elements {
            $enum::F32($x) => $body,
            $enum::F16($x) => $body,
            $enum::Bf16($x) => $body,
            $enum::E4m3($x) => $body,
            $enum::E5m2($x) => $body,
        }
    };
}

impl<'a> Elements<'a> {
    /// The elements' type.
    pub const fn dtype(self) -> DType {
        match self {
            Elements::F32(_) => DType::F32,
            Elements::F16(_) => DType::F16,
            Elements::Bf16(_) => DType::Bf16,
            Elements::E4m3(_) => DType::E4m3,
            Elements::E5m2(_) => DType::E5m2,
        }
    }

    /// The number of elements.
    pub fn len(self) -> usize {
        each!(Elements, self, x => x.len())
    }

    /// The elements from index `start` to `end`.
    ///
    /// # Panics
    /// If `end` exceeds the length of the slice.
    pub fn range(self, start: usize, end: usize) -> Elements<'a> {
        each!(Elements, self, x => Element::elements(&x[start..end]))
    }

    /// Writes the values to `to` as f32, up to the shorter length. The conversion is exact.
    pub fn widen(self, to: &mut [f32]) {
        each!(Elements, self, x => for (to, &x) in to.iter_mut().zip(x) {
            *to = Element::to_f32(x);
        });
    }

    /// Whether there is no element.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// A mutable slice of one of the five element types.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// IEEE binary32.
    F32(&'a mut [f32]),
    /// IEEE binary16.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
    /// 8-bit floating point with 4 significant bits.
    E4m3(&'a mut [E4m3]),
    /// 8-bit floating point with 3 significant bits.
    E5m2(&'a mut [E5m2]),
}

impl ElementsMut<'_> {
    /// The elements' type.
    pub fn dtype(&self) -> DType {
        match self {
            ElementsMut::F32(_) => DType::F32,
            ElementsMut::F16(_) => DType::F16,
            ElementsMut::Bf16(_) => DType::Bf16,
            ElementsMut::E4m3(_) => DType::E4m3,
            ElementsMut::E5m2(_) => DType::E5m2,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        each!(ElementsMut, self, x => x.len())
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// An element type of Q, K, V and O: `f32`, [`half::f16`], [`half::bf16`], and [`E4m3`] or [`E5m2`] for
/// inputs.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The name of this type in a [`Problem`](crate::Problem).
    const DTYPE: DType;

    /// The value in f32. The conversion is exact.
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even. The 8-bit types saturate ([`E4m3::from_f32`]).
    fn from_f32(value: f32) -> Self;

    /// Rounds `factor · from` into `to`, which has the same length as `from`.
    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [Self]);

    /// The slice as an [`Elements`].
    fn elements(from: &[Self]) -> Elements<'_>;

    /// The slice as an [`ElementsMut`].
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

impl Element for E4m3 {
    const DTYPE: DType = DType::E4m3;

    fn to_f32(self) -> f32 {
        E4m3::to_f32(self)
    }

    fn from_f32(value: f32) -> E4m3 {
        E4m3::from_f32(value)
    }

    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [E4m3]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = E4m3::from_f32(from * factor);
        }
    }

    fn elements(from: &[E4m3]) -> Elements<'_> {
        Elements::E4m3(from)
    }

    fn elements_mut(to: &mut [E4m3]) -> ElementsMut<'_> {
        ElementsMut::E4m3(to)
    }
}

impl Element for E5m2 {
    const DTYPE: DType = DType::E5m2;

    fn to_f32(self) -> f32 {
        E5m2::to_f32(self)
    }

    fn from_f32(value: f32) -> E5m2 {
        E5m2::from_f32(value)
    }

    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [E5m2]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = E5m2::from_f32(from * factor);
        }
    }

    fn elements(from: &[E5m2]) -> Elements<'_> {
        Elements::E5m2(from)
    }

    fn elements_mut(to: &mut [E5m2]) -> ElementsMut<'_> {
        ElementsMut::E5m2(to)
    }
}

/// Passes `factor · from` to `convert` in chunks that fit on the stack.
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
