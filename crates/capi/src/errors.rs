//! Errors of arguments, and the buffer of a caller that receives their texts.

use std::ffi::c_char;

/// An argument that is not valid.
pub use flashcore::raw::refused as invalid;

/// Where a call's error goes.
#[derive(Clone, Copy)]
pub struct ErrorBuffer {
    pub start: *mut c_char,
    pub bytes: usize,
}

impl ErrorBuffer {
    pub const NONE: ErrorBuffer = ErrorBuffer { start: std::ptr::null_mut(), bytes: 0 };

    /// Writes as much of a text as fits, and a NUL.
    ///
    /// # Safety
    /// The buffer has the bytes that the caller stated.
    pub unsafe fn write(self, text: &str) {
        let Some(room) = self.bytes.checked_sub(1).filter(|_| !self.start.is_null()) else { return };
        let end = (0..=room.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        // SAFETY: `end` is less than the buffer's bytes, by this function's contract.
        unsafe {
            self.start.copy_from_nonoverlapping(text.as_ptr().cast(), end);
            self.start.add(end).write(0);
        }
    }
}
