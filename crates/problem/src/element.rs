//! Slices of tensor elements in host memory, and the Rust types of the elements.

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::{DType, E4m3, E5m2};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for crate::E4m3 {}
    impl Sealed for crate::E5m2 {}
}

/// The element type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// 32-bit signed integer.
    I32,
    /// Byte. In a boolean mask, every value other than 0 is true.
    U8,
    /// 8-bit floating point with 4 significant bits.
    E4m3,
    /// 8-bit floating point with 3 significant bits.
    E5m2,
}

impl ElementType {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            ElementType::F32 | ElementType::I32 => 4,
            ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::U8 | ElementType::E4m3 | ElementType::E5m2 => 1,
        }
    }

    /// The type as that of a tensor; `None` for integers.
    pub const fn float(self) -> Option<DType> {
        match self {
            ElementType::F32 => Some(DType::F32),
            ElementType::F16 => Some(DType::F16),
            ElementType::Bf16 => Some(DType::Bf16),
            ElementType::E4m3 => Some(DType::E4m3),
            ElementType::E5m2 => Some(DType::E5m2),
            ElementType::I32 | ElementType::U8 => None,
        }
    }

    /// Whether the elements are floats; otherwise they are integers.
    pub const fn is_float(self) -> bool {
        self.float().is_some()
    }

    /// The name in messages and files.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::F32 => "f32",
            ElementType::F16 => "f16",
            ElementType::Bf16 => "bf16",
            ElementType::I32 => "i32",
            ElementType::U8 => "u8",
            ElementType::E4m3 => "e4m3",
            ElementType::E5m2 => "e5m2",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A slice of elements of an operand.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// IEEE binary32.
    F32(&'a [f32]),
    /// IEEE binary16.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// 32-bit signed integers.
    I32(&'a [i32]),
    /// Bytes; a boolean mask holds 0 or 1.
    U8(&'a [u8]),
    /// 8-bit floating point with 4 significant bits.
    E4m3(&'a [E4m3]),
    /// 8-bit floating point with 3 significant bits.
    E5m2(&'a [E5m2]),
}

/// Matches on [`Elements`] and runs `$body` with `$x` bound to the slice.
macro_rules! each {
    ($elements:expr, $x:ident => $body:expr) => {
        match $elements {
            Elements::F32($x) => $body,
            Elements::F16($x) => $body,
            Elements::Bf16($x) => $body,
            Elements::I32($x) => $body,
            Elements::U8($x) => $body,
            Elements::E4m3($x) => $body,
            Elements::E5m2($x) => $body,
        }
    };
}

impl<'a> Elements<'a> {
    /// The elements' type.
    pub const fn dtype(self) -> ElementType {
        match self {
            Elements::F32(_) => ElementType::F32,
            Elements::F16(_) => ElementType::F16,
            Elements::Bf16(_) => ElementType::Bf16,
            Elements::I32(_) => ElementType::I32,
            Elements::U8(_) => ElementType::U8,
            Elements::E4m3(_) => ElementType::E4m3,
            Elements::E5m2(_) => ElementType::E5m2,
        }
    }

    /// The number of elements.
    pub fn len(self) -> usize {
        each!(self, x => x.len())
    }

    /// The elements from index `start` to `end`.
    ///
    /// # Panics
    /// If `end` exceeds the length of the slice.
    pub fn range(self, start: usize, end: usize) -> Elements<'a> {
        each!(self, x => x[start..end].into())
    }

    /// The element at `index` as f32. The conversion of floats is exact.
    pub fn get(self, index: usize) -> Option<f32> {
        match self {
            Elements::F32(x) => x.get(index).copied(),
            Elements::F16(x) => x.get(index).map(|&x| Element::to_f32(x)),
            Elements::Bf16(x) => x.get(index).map(|&x| Element::to_f32(x)),
            Elements::I32(x) => x.get(index).map(|&x| x as f32),
            Elements::U8(x) => x.get(index).map(|&x| f32::from(x)),
            Elements::E4m3(x) => x.get(index).map(|&x| Element::to_f32(x)),
            Elements::E5m2(x) => x.get(index).map(|&x| Element::to_f32(x)),
        }
    }

    /// The elements as bytes, in the byte order of this machine.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Elements::F32(x) => bytemuck::cast_slice(x),
            Elements::I32(x) => bytemuck::cast_slice(x),
            Elements::F16(x) => bytemuck::cast_slice(x.reinterpret_cast()),
            Elements::Bf16(x) => bytemuck::cast_slice(x.reinterpret_cast()),
            Elements::U8(x) => x,
            Elements::E4m3(x) => bytemuck::cast_slice(x),
            Elements::E5m2(x) => bytemuck::cast_slice(x),
        }
    }

    /// Writes the values to `to` as f32, up to the shorter length. The conversion of floats is exact.
    pub fn widen(self, to: &mut [f32]) {
        fn widen<T: Copy>(from: &[T], to: &mut [f32], of: impl Fn(T) -> f32) {
            to.iter_mut().zip(from).for_each(|(to, &x)| *to = of(x));
        }
        match self {
            Elements::F32(x) => widen(x, to, |x| x),
            Elements::F16(x) => widen(x, to, Element::to_f32),
            Elements::Bf16(x) => widen(x, to, Element::to_f32),
            Elements::I32(x) => widen(x, to, |x| x as f32),
            Elements::U8(x) => widen(x, to, f32::from),
            Elements::E4m3(x) => widen(x, to, Element::to_f32),
            Elements::E5m2(x) => widen(x, to, Element::to_f32),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

macro_rules! conversions {
    ($($element:ty => $of:expr),* $(,)?) => {
        $(impl<'a> From<&'a [$element]> for Elements<'a> {
            fn from(elements: &'a [$element]) -> Elements<'a> {
                $of(elements)
            }
        }

        impl<'a> From<&'a Vec<$element>> for Elements<'a> {
            fn from(elements: &'a Vec<$element>) -> Elements<'a> {
                elements.as_slice().into()
            }
        }

        impl<'a, const N: usize> From<&'a [$element; N]> for Elements<'a> {
            fn from(elements: &'a [$element; N]) -> Elements<'a> {
                elements.as_slice().into()
            }
        })*
    };
}
conversions! {
    f32 => Elements::F32,
    f16 => Elements::F16,
    bf16 => Elements::Bf16,
    i32 => Elements::I32,
    u8 => Elements::U8,
    E4m3 => Elements::E4m3,
    E5m2 => Elements::E5m2,
    bool => truths,
}

/// Bytes with 1 for true and 0 for false.
fn truths(elements: &[bool]) -> Elements<'_> {
    Elements::U8(bytemuck::cast_slice(elements))
}

/// A mutable slice of one of the five element types of tensors.
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
        match self {
            ElementsMut::F32(x) => x.len(),
            ElementsMut::F16(x) => x.len(),
            ElementsMut::Bf16(x) => x.len(),
            ElementsMut::E4m3(x) => x.len(),
            ElementsMut::E5m2(x) => x.len(),
        }
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

/// Implements [`Element`] for types by their conversions and their rounding of scaled numbers.
macro_rules! elements {
    ($($type:ident $kind:ident: $to_f32:expr, $from_f32:expr, $narrow:expr;)+) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$kind;

            #[inline]
            fn to_f32(self) -> f32 {
                $to_f32(self)
            }

            #[inline]
            fn from_f32(value: f32) -> $type {
                $from_f32(value)
            }

            fn narrow_scaled(from: &[f32], factor: f32, to: &mut [$type]) {
                $narrow(from, factor, to)
            }

            fn elements(from: &[$type]) -> Elements<'_> {
                Elements::$kind(from)
            }

            fn elements_mut(to: &mut [$type]) -> ElementsMut<'_> {
                ElementsMut::$kind(to)
            }
        }
    )+};
}

elements! {
    f32 F32: std::convert::identity, std::convert::identity, scaled_each;
    f16 F16: f16::to_f32, f16::from_f32, scaled_chunks;
    bf16 Bf16: bf16::to_f32, bf16::from_f32, scaled_chunks;
    E4m3 E4m3: E4m3::to_f32, E4m3::from_f32, scaled_each;
    E5m2 E5m2: E5m2::to_f32, E5m2::from_f32, scaled_each;
}

/// Rounds `factor · from` element by element.
fn scaled_each<T: Element>(from: &[f32], factor: f32, to: &mut [T]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::from_f32(from * factor);
    }
}

/// Rounds `factor · from` by chunks that fit on the stack.
fn scaled_chunks<T>(from: &[f32], factor: f32, to: &mut [T])
where
    [T]: HalfFloatSliceExt,
{
    const PIECE: usize = 64;
    let mut scaled = [0.0; PIECE];
    for (from, to) in from.chunks(PIECE).zip(to.chunks_mut(PIECE)) {
        for (scaled, from) in scaled.iter_mut().zip(from) {
            *scaled = from * factor;
        }
        to.convert_from_f32_slice(&scaled[..from.len()]);
    }
}
