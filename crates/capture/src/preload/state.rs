//! The modules, functions and tensor maps of the program.

use std::collections::HashMap;
use std::ffi::c_int;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use crate::driver::Handle;
use crate::image::Image;
use crate::selection::Selection;

/// A kernel by its handle.
#[derive(Clone, Debug)]
pub struct CapturedFunction {
    pub name: String,
    pub image: Image,
    /// Whether the handle is that of a library's kernel (`CUkernel`).
    pub is_kernel: bool,
}

/// A tensor map as the program asked for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorMap {
    pub element: u32,
    pub address: u64,
    pub interleave: u32,
    pub swizzle: u32,
    pub fill: u32,
    pub im2col: bool,
    pub dims: Vec<u64>,
    pub strides: Vec<u64>,
    pub extents: Vec<u32>,
    pub steps: Vec<u32>,
}

impl TensorMap {
    /// The map with the arrays that its rank gives a length.
    ///
    /// # Safety
    /// The arrays must be those of a call that the driver has accepted.
    pub unsafe fn with_shape(
        self,
        rank: u32,
        dims: *const u64,
        strides: *const u64,
        extents: Option<*const u32>,
        steps: *const u32,
    ) -> TensorMap {
        let rank = rank as usize;
        // SAFETY: each array has the rank's number of elements, and that of the strides one less, which may
        // be none.
        unsafe {
            let words = |from: *const u32| std::slice::from_raw_parts(from, rank).to_vec();
            TensorMap {
                dims: std::slice::from_raw_parts(dims, rank).to_vec(),
                strides: (0..rank.saturating_sub(1)).map(|at| *strides.add(at)).collect(),
                extents: extents.map(words).unwrap_or_default(),
                steps: words(steps),
                ..self
            }
        }
    }
}

/// The most tensor maps that are kept: some programs encode one for each launch.
const MAPS: usize = 1 << 16;

#[derive(Default)]
pub struct State {
    images: HashMap<Handle, Image>,
    functions: HashMap<Handle, CapturedFunction>,
    maps: HashMap<[u8; 128], TensorMap>,
    /// Launches by kernel since the program began, and since the selection did.
    counts: HashMap<String, u64>,
    pub seen: HashMap<String, u64>,
    pub selection: Selection,
    /// Number of records of this process.
    pub records: u64,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Does something with the state; `None` if that panics, which must not reach the program.
pub fn note<T>(what: impl FnOnce(&mut State) -> T) -> Option<T> {
    let work = || {
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        what(state.get_or_insert_with(State::begin))
    };
    catch_unwind(AssertUnwindSafe(work)).ok()
}

unsafe extern "C" {
    fn atexit(what: extern "C" fn()) -> c_int;
}

extern "C" fn at_exit() {
    note(|state| state.write_counts());
}

impl State {
    fn begin() -> State {
        // SAFETY: the function takes nothing and does not unwind.
        unsafe { atexit(at_exit) };
        State { selection: Selection::given(), ..State::default() }
    }

    pub fn loaded(&mut self, module: Handle, image: Image) {
        self.images.insert(module, image);
    }

    /// A module of a library.
    pub fn same_image(&mut self, module: Handle, library: Handle) {
        if let Some(image) = self.images.get(&library).cloned() {
            self.images.insert(module, image);
        }
    }

    pub fn got(&mut self, handle: Handle, module: Handle, name: String, is_kernel: bool) {
        let missing = || Image::Missing("the module was loaded by a function that is not wrapped".to_owned());
        let image = self.images.get(&module).cloned().unwrap_or_else(missing);
        self.functions.insert(handle, CapturedFunction { name, image, is_kernel });
    }

    /// The function of a library's kernel.
    pub fn function_of(&mut self, function: Handle, kernel: Handle) {
        if let Some(of) = self.functions.get(&kernel).cloned() {
            self.functions.insert(function, CapturedFunction { is_kernel: false, ..of });
        }
    }

    pub fn encoded(&mut self, bytes: [u8; 128], map: TensorMap) {
        if self.maps.len() >= MAPS {
            self.maps.clear();
        }
        self.maps.insert(bytes, map);
    }

    /// A map with another address.
    pub fn moved(&mut self, before: &[u8; 128], after: [u8; 128], address: u64) {
        if let Some(map) = self.maps.get(before).cloned() {
            self.encoded(after, TensorMap { address, ..map });
        }
    }

    pub fn map(&self, bytes: &[u8; 128]) -> Option<&TensorMap> {
        self.maps.get(bytes)
    }

    /// Counts a launch. Returns the function and the launch's number if it is to be recorded.
    pub fn count(&mut self, function: Handle) -> Option<(CapturedFunction, u64)> {
        let unknown = || CapturedFunction {
            name: format!("(function {function:#x}, which no wrapped call returned)"),
            image: Image::Missing("the function is unknown".to_owned()),
            is_kernel: false,
        };
        let known = self.functions.get(&function).cloned().unwrap_or_else(unknown);
        let next = |counts: &mut HashMap<String, u64>| {
            let count = counts.entry(known.name.clone()).or_default();
            *count += 1;
            *count
        };
        let total = next(&mut self.counts);
        let number = next(&mut self.seen);
        // A program that ends without its exit handlers leaves the last of these.
        if total.is_power_of_two() && total <= 1 << 10 {
            self.write_counts();
        }
        self.selection.wants(&known.name, number).then_some((known, number))
    }

    /// Writes the numbers of launches by kernel.
    fn write_counts(&self) {
        let Some(folder) = self.selection.folder.as_ref().filter(|_| !self.counts.is_empty()) else { return };
        let mut text = String::new();
        for (kernel, count) in &self.counts {
            let _ = writeln!(text, "{count} {kernel}");
        }
        // Another process of the program has another file.
        let _ = std::fs::write(folder.join(format!("counts-{}", std::process::id())), text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_counted_by_the_name_that_their_handle_got() {
        let mut state = State::default();
        state.selection.folder = Some(std::env::temp_dir().join("flashcore-capture-none"));
        (state.selection.kernel, state.selection.at) = (Some("add".to_owned()), vec![2]);
        state.loaded(1, Image::Copied(b"text".as_slice().into()));
        state.same_image(2, 1);
        state.got(10, 2, "my_add".to_owned(), true);
        state.function_of(11, 10);
        assert!(state.count(10).is_none());
        let (function, number) = state.count(11).unwrap();
        assert_eq!((function.name.as_str(), function.is_kernel, number), ("my_add", false, 2));
        assert_eq!(function.image.bytes(), Ok(b"text".as_slice()));
        assert!(state.count(11).is_none() && state.count(99).is_none());
        state.seen.clear();
        assert!(state.count(10).is_none() && state.count(10).is_some());
    }

    #[test]
    fn a_map_keeps_its_shape_when_its_address_is_replaced() {
        let mut state = State::default();
        let (dims, strides, extents, steps) = ([64, 8], [128], [64, 8], [1, 1]);
        // SAFETY: arrays of two dimensions.
        let map = unsafe {
            TensorMap { address: 16, ..TensorMap::default() }.with_shape(
                2,
                dims.as_ptr(),
                strides.as_ptr(),
                Some(extents.as_ptr()),
                steps.as_ptr(),
            )
        };
        state.encoded([1; 128], map.clone());
        state.moved(&[1; 128], [2; 128], 32);
        assert_eq!(state.map(&[1; 128]), Some(&map));
        assert_eq!(state.map(&[2; 128]), Some(&TensorMap { address: 32, ..map }));
        assert_eq!(state.map(&[3; 128]), None);
    }
}
