//! Which launches are recorded: as the environment says, or between two calls of the program.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

use crate::protocol;
use crate::state::note;

/// The launches to record.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// The folder for records; without it nothing is written.
    pub folder: Option<PathBuf>,
    /// A part of the kernels' names.
    pub kernel: Option<String>,
    /// Numbers of launches of each kernel, from 1.
    pub at: Vec<u64>,
    /// Bytes of the memory of one launch.
    pub limit: usize,
    pub after: bool,
}

impl Selection {
    /// As the environment says.
    pub fn given() -> Selection {
        let variable = |name: &str| std::env::var(name).ok();
        Selection {
            folder: std::env::var_os(protocol::FOLDER).map(PathBuf::from),
            kernel: variable(protocol::KERNEL),
            at: variable(protocol::AT).map(|text| numbers(&text)).unwrap_or_default(),
            limit: variable(protocol::LIMIT).and_then(|text| text.parse().ok()).unwrap_or(usize::MAX),
            after: std::env::var_os(protocol::AFTER).is_some(),
        }
    }

    pub fn wants(&self, kernel: &str, number: u64) -> bool {
        self.folder.is_some()
            && self.kernel.as_ref().is_some_and(|part| kernel.contains(part.as_str()))
            && self.at.contains(&number)
    }
}

/// Numbers that commas separate.
fn numbers(text: &str) -> Vec<u64> {
    text.split(',').filter_map(|number| number.trim().parse().ok()).collect()
}

/// Records launches of kernels whose name has this part, by their numbers from now on, until
/// [`flashcore_capture_end`]. Returns 0, or 1 where the program was not started by `flashcore capture`.
///
/// # Safety
/// Both texts must end with NUL.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn flashcore_capture_begin(
    kernel: *const c_char,
    at: *const c_char,
    after: c_int,
) -> c_int {
    // SAFETY: as the caller guarantees.
    let text = |text: *const c_char| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    let (kernel, at) = (text(kernel), numbers(&text(at)));
    let begun = note(|state| {
        state.selection = Selection { kernel: Some(kernel), at, after: after != 0, ..Selection::given() };
        state.seen.clear();
        state.selection.folder.is_some()
    });
    c_int::from(begun != Some(true))
}

/// Records the launches again that the environment selects.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn flashcore_capture_end() {
    note(|state| state.selection = Selection::given());
}
