use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use problem::DType;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element type of Q, K, V and O: `f32`, [`half::f16`] or [`half::bf16`].
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {
    /// The name a [`problem::Problem`] gives to this type.
    const DTYPE: DType;

    /// The same value in f32 (exact).
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Widens `from` into `to`, which has the same length.
    fn widen(from: &[Self], to: &mut [f32]);

    /// Rounds `from` into `to`, which has the same length.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// The elements as f32 where that needs no copy.
    fn as_f32(elements: &[Self]) -> Option<&[f32]>;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> f32 {
        value
    }

    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn as_f32(elements: &[f32]) -> Option<&[f32]> {
        Some(elements)
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

    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }

    fn as_f32(_: &[f16]) -> Option<&[f32]> {
        None
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

    fn widen(from: &[bf16], to: &mut [f32]) {
        // A bfloat16 is the upper half of an f32. Written out because this loop vectorises and
        // `bf16::to_f32`, which quiets signalling NaNs, does not; arithmetic quiets them anyway.
        for (wide, narrow) in to.iter_mut().zip(from) {
            *wide = f32::from_bits(u32::from(narrow.to_bits()) << 16);
        }
    }

    fn narrow(from: &[f32], to: &mut [bf16]) {
        to.convert_from_f32_slice(from);
    }

    fn as_f32(_: &[bf16]) -> Option<&[f32]> {
        None
    }
}
