//! Conversion of numbers to the bytes that are copied.
#![allow(unsafe_code, reason = "the bytes of a slice of numbers")]

mod sealed {
    pub trait Sealed {}
}

/// A number type without padding, for which every bit pattern is valid.
pub trait Plain: Copy + sealed::Sealed {}

macro_rules! plain {
    ($($number:ty),*) => {
        $(impl sealed::Sealed for $number {}
        impl Plain for $number {})*
    };
}

plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::f16, half::bf16);

/// The bytes of a slice of numbers.
pub fn bytes_of<T: Plain>(numbers: &[T]) -> &[u8] {
    // SAFETY: a `Plain` type has no padding, bytes need no alignment, and the length is that of the slice.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// The bytes of a slice of numbers, for writing.
pub fn bytes_of_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; every bit pattern is a valid number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_their_bytes() {
        let mut numbers = [1u32, 0x0203_0405];
        assert_eq!(bytes_of(&numbers), [1u32.to_ne_bytes(), 0x0203_0405u32.to_ne_bytes()].concat());
        bytes_of_mut(&mut numbers)[4..].fill(0);
        assert_eq!(numbers, [1, 0]);
        assert!(bytes_of::<f32>(&[]).is_empty());
    }
}
