//! PyTorch's tensors and its state, read without Python code in between.
//!
//! `torch.Tensor.__dlpack_c_exchange_api__` (DLPack 1.3) exports C functions that describe a tensor and name
//! the current stream. A description borrows the tensor's own shape and strides and takes some tens of
//! nanoseconds.
#![allow(unsafe_code, reason = "C functions that PyTorch exports, and what they describe")]

use std::ffi::{c_int, c_void};

use problem::ElementType;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyString, PyType};

use crate::call::{Handed, Place};
use crate::error::Error;

/// `DLDeviceType` of the host and of CUDA.
pub const HOST: i32 = 1;
pub const CUDA: i32 = 2;

/// `DLTensor`.
#[repr(C)]
struct Description {
    data: *mut c_void,
    device: (i32, i32),
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLPackExchangeAPI` of major version 1.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    previous: *const c_void,
    managed: [*const c_void; 3],
    describe: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut Description) -> c_int>,
    current_stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}

/// A tensor of one to four dimensions with elements.
#[derive(Clone, Copy)]
pub struct Seen {
    /// Address of the first element.
    pub address: u64,
    /// `DLDeviceType` and ordinal.
    pub device: (i32, i32),
    pub dtype: ElementType,
    /// Whether the elements are truth values.
    pub is_bool: bool,
    pub dimensions: usize,
    pub shape: [usize; 4],
    pub strides: [i64; 4],
}

impl Seen {
    /// Whether the elements of the last dimension lie one behind the other.
    pub fn has_rows(&self) -> bool {
        let last = self.dimensions - 1;
        self.strides[last] == 1 || self.shape[last] == 1
    }

    /// The tensor with another first dimension, of one element, if it has one dimension less than stated.
    pub fn with_entries(mut self, dimensions: usize) -> Option<Seen> {
        if self.dimensions + 1 == dimensions {
            (self.dimensions, self.shape) =
                (dimensions, std::array::from_fn(|i| if i == 0 { 1 } else { self.shape[i - 1] }));
            self.strides = std::array::from_fn(|i| if i == 0 { 0 } else { self.strides[i - 1] });
            self.strides[0] = self.shape[1] as i64 * self.strides[1];
        }
        (self.dimensions == dimensions).then_some(self)
    }

    /// Address, shape and strides of four dimensions.
    pub fn handed(&self) -> Handed {
        let ([a, b, c, d], [of_a, of_b, of_c, of_d]) = (self.shape, self.strides);
        (self.address, (a, b, c, d), (of_a, of_b, of_c, of_d))
    }

    /// Whether the elements lie one behind the other in the order of the dimensions.
    pub fn is_dense(&self) -> bool {
        let mut next = 1;
        (0..self.dimensions).rev().all(|i| {
            let fits = self.shape[i] == 1 || self.strides[i] == next;
            next *= self.shape[i] as i64;
            fits
        })
    }

    /// Bytes from the first element to the end of the last one, for strides that are not negative.
    fn reach(&self) -> Option<u64> {
        let steps = self.shape.iter().zip(&self.strides).take(self.dimensions);
        let last =
            steps.map(|(&extent, &stride)| (extent as u64 - 1).checked_mul(u64::try_from(stride).ok()?));
        let last = { last }.try_fold(0u64, |sum, step| sum.checked_add(step?))?;
        last.checked_add(1)?.checked_mul(self.dtype.bytes() as u64)
    }
}

/// The functions of PyTorch that a call asks.
#[derive(FromPyObject)]
pub struct Functions {
    /// `torch.Tensor` and `torch.nn.Parameter`.
    plain: (Py<PyType>, Py<PyType>),
    /// Without arguments: they return something true if PyTorch does more with calls than compute them.
    disturbed: Vec<Py<PyAny>>,
    /// Modules, each with the name of an attribute and the object that the attribute is otherwise.
    flags: Vec<(Py<PyAny>, Py<PyString>, Py<PyAny>)>,
    /// The number of modes of functions, and whether one of them is of interest.
    function_modes: (Py<PyAny>, Py<PyAny>),
    pub grad_enabled: Py<PyAny>,
    pub autocast_enabled: Py<PyAny>,
    pub flash_enabled: Py<PyAny>,
    pub allows_tf32: Py<PyAny>,
    pub threads: Py<PyAny>,
    pub current_device: Py<PyAny>,
    /// Of a tensor: memory of its shape and type.
    pub empty_like: Py<PyAny>,
    /// Of q and the output's head dim.
    pub output_like: Py<PyAny>,
    /// Of q and a shape, in float32.
    pub floats: Py<PyAny>,
    /// Has autograd record a call that is made, and returns its results as autograd knows them. Of q, k, v,
    /// the sinks, the call (the axis of the heads, the terms, features, lengths and the results), and tables.
    pub record: Py<PyAny>,
    /// The features of a call without their tensors, by its sizes, programs, what messages call its table,
    /// whether gradients must have equal bits in each run, and the probability of dropout.
    pub features: Py<PyAny>,
    /// Whether gradients must have equal bits in each run, whatever calls ask for.
    pub deterministic: Py<PyAny>,
    /// Of q: a new state of dropout's generator.
    pub draw_rng_state: Py<PyAny>,
}

/// PyTorch, as far as calls need it.
pub struct Torch {
    exchange: &'static Exchange,
    pub functions: Functions,
}

// SAFETY: the exchange is a table of functions that PyTorch never changes.
unsafe impl Send for Torch {}
// SAFETY: as above.
unsafe impl Sync for Torch {}

impl Torch {
    pub fn new(capsule: &Bound<'_, PyCapsule>, functions: Functions) -> Result<Torch, Error> {
        let unknown = || Error::Unsupported("this PyTorch exchanges tensors in another way".to_owned());
        let pointer = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?;
        // SAFETY: DLPack documents that a capsule of this name points to such a table, which lives as long as
        // the process.
        let exchange = unsafe { pointer.cast::<Exchange>().as_ref() };
        let knows = exchange.describe.is_some() && exchange.current_stream.is_some();
        if exchange.major != 1 || !knows { Err(unknown()) } else { Ok(Torch { exchange, functions }) }
    }

    /// Whether PyTorch only computes what it is asked: no mode, transform, trace or profiler looks at calls.
    pub fn is_quiet(&self, py: Python<'_>) -> Option<()> {
        let Functions { disturbed, flags, function_modes, .. } = &self.functions;
        for function in disturbed {
            quiet(asks(py, function)?)?;
        }
        for (module, name, usual) in flags {
            quiet(!module.bind(py).getattr(name).ok()?.is(usual))?;
        }
        quiet(asks(py, &function_modes.0)? && asks(py, &function_modes.1)?)
    }

    /// Describes a plain tensor, and pushes its storage on `held`. `None` for other objects, for tensors
    /// without elements, whose elements stand for negated ones, or lie outside of their storage.
    pub fn see<'py>(&self, tensor: &Bound<'py, PyAny>, held: &mut Vec<Bound<'py, PyAny>>) -> Option<Seen> {
        let (py, kind) = (tensor.py(), tensor.get_type_ptr());
        let Functions { plain, .. } = &self.functions;
        quiet(kind != plain.0.as_ptr().cast() && kind != plain.1.as_ptr().cast())?;
        let seen = self.describe(tensor)?;
        if seen.dtype.is_float() {
            quiet(tensor.call_method0(intern!(py, "is_neg")).ok()?.is_truthy().ok()?)?;
        }
        let storage = tensor.call_method0(intern!(py, "untyped_storage")).ok()?;
        let start: u64 = storage.call_method0(intern!(py, "data_ptr")).ok()?.extract().ok()?;
        let bytes: u64 = storage.call_method0(intern!(py, "nbytes")).ok()?.extract().ok()?;
        held.push(storage);
        let fits =
            start <= seen.address && seen.address.checked_add(seen.reach()?)? <= start.checked_add(bytes)?;
        (fits && start > 0).then_some(seen)
    }

    /// Describes memory that was just allocated.
    pub fn describe(&self, tensor: &Bound<'_, PyAny>) -> Option<Seen> {
        let mut told = std::mem::MaybeUninit::<Description>::uninit();
        // SAFETY: the function takes an object and memory for a description.
        let refused = unsafe { (self.exchange.describe?)(tensor.as_ptr(), told.as_mut_ptr()) } != 0;
        if refused {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the function has returned 0, so it has written the description.
        let told = unsafe { told.assume_init() };
        let dtype = match (told.code, told.bits, told.lanes) {
            (0, 32, 1) => ElementType::I32,
            (1 | 6, 8, 1) => ElementType::U8,
            (2, 16, 1) => ElementType::F16,
            (2, 32, 1) => ElementType::F32,
            (4, 16, 1) => ElementType::Bf16,
            (10, 8, 1) => ElementType::E4m3,
            (12, 8, 1) => ElementType::E5m2,
            _ => return None,
        };
        let dimensions = usize::try_from(told.dimensions).ok().filter(|dims| (1..=4).contains(dims))?;
        let (mut shape, mut strides) = ([1; 4], [0; 4]);
        for i in 0..dimensions {
            // SAFETY: shape and strides have as many elements as the tensor has dimensions, and the tensor
            // is borrowed.
            let (extent, stride) = unsafe { (*told.shape.add(i), *told.strides.add(i)) };
            shape[i] = usize::try_from(extent).ok().filter(|&extent| extent > 0)?;
            strides[i] = stride;
        }
        let address = (told.data as u64).checked_add(told.byte_offset)?;
        let is_bool = told.code == 6;
        Some(Seen { address, device: told.device, dtype, is_bool, dimensions, shape, strides })
    }

    /// Where a call on tensors of a device runs.
    pub fn place(&self, py: Python<'_>, device: (i32, i32)) -> Option<Place> {
        let ask = |function: &Py<PyAny>| function.bind(py).call0().ok();
        match device {
            (HOST, _) => Some((None, ask(&self.functions.threads)?.extract().ok()?)),
            (CUDA, ordinal) => {
                // PyTorch allocates, and captures, on the current device.
                quiet(ask(&self.functions.current_device)?.extract::<i32>().ok()? != ordinal)?;
                Some((Some(ordinal), self.current_stream(ordinal)?))
            }
            _ => None,
        }
    }

    /// Whether products of such a type are made in tf32.
    pub fn tf32(&self, py: Python<'_>, device: (i32, i32), dtype: ElementType) -> Option<bool> {
        let asked = device.0 == CUDA && dtype == ElementType::F32;
        if asked { asks(py, &self.functions.allows_tf32) } else { Some(false) }
    }

    /// The current stream of a GPU.
    fn current_stream(&self, ordinal: i32) -> Option<u64> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the function takes a device and memory for a handle.
        let refused = unsafe { (self.exchange.current_stream?)(CUDA, ordinal, &raw mut stream) } != 0;
        if refused {
            Python::attach(|py| drop(PyErr::take(py)));
        }
        (!refused).then_some(stream as u64)
    }
}

/// Whether a tensor requires grad.
pub fn requires_grad(tensor: &Bound<'_, PyAny>) -> Option<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad")).ok()?.is_truthy().ok()
}

/// Whether a function returns something true.
pub fn asks(py: Python<'_>, function: &Py<PyAny>) -> Option<bool> {
    function.bind(py).call0().ok()?.is_truthy().ok()
}

/// `None` if the call is for Python code.
pub fn quiet(disturbed: bool) -> Option<()> {
    (!disturbed).then_some(())
}
