use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use problem::DType;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Elements of one of the three types.
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
    pub(crate) fn len(self) -> usize {
        match self {
            Elements::F32(x) => x.len(),
            Elements::F16(x) => x.len(),
            Elements::Bf16(x) => x.len(),
        }
    }
}

/// The same, to be written.
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
    /// The name a [`problem::Problem`] gives to this type.
    const DTYPE: DType;

    /// The same value in f32 (exact).
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Rounds `factor · from` into `to`, which has the same length.
    fn narrow_scaled(from: &[f32], factor: f32, to: &mut [Self]);

    /// The elements with their type as data.
    fn elements(from: &[Self]) -> Elements<'_>;

    /// The same, to be written.
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

/// Hands `factor · from` to `convert` in pieces that stay on the stack.
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
