//! Functions for [TVM-FFI](https://tvm.apache.org/ffi/), by its C interface (`tvm/ffi/c_api.h`, 0.1). A
//! program that loads a module finds a function `name` as `__tvm_ffi_name`.
//!
//! Each function takes the text of a [`CallSpec`] and then its tensors.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

use flashcore::AttentionError;
use flashcore::raw::Ready;
use smallvec::SmallVec;

use crate::abi;
use crate::arrays::{CallTarget, guarded};
use crate::errors::invalid;
use crate::spec::{CallSpec, HandedCall, HandedTensor, MANY, parsed};

/// `TVMFFIAny`: the value is a number or an address, by the index of the type.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TvmAny {
    pub type_index: i32,
    /// Bytes of a small string.
    pub length: u32,
    pub value: u64,
}

const INT: i32 = 1;
const TENSOR_POINTER: i32 = 7;
const RAW_STRING: i32 = 8;
const SMALL_STRING: i32 = 11;
const STRING: i32 = 65;
const TENSOR: i32 = 70;
/// Bytes of `TVMFFIObject`, which is in front of the content of an object.
const OBJECT: usize = 24;
/// `kDLBool`, which a program reads as 8-bit numbers.
const BOOL: u32 = 0x10806;

/// `DLTensor` of DLPack.
#[repr(C)]
struct DlTensor {
    data: *const c_void,
    device_type: i32,
    device: i32,
    dimensions: i32,
    /// `DLDataType`: code, bits, lanes.
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `TVMFFIByteArray`.
#[repr(C)]
struct ByteArray {
    data: *const u8,
    size: usize,
}

/// Checks a call, and compiles and loads what it needs on a GPU: `prepare(text, *tensors)`.
///
/// # Safety
/// `args` has `count` values of TVM-FFI.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __tvm_ffi_prepare(
    _: *mut c_void,
    args: *const TvmAny,
    count: i32,
    _: *mut TvmAny,
) -> i32 {
    // SAFETY: this function's own contract.
    unsafe { run(args, count, |call| call.with_ready(|_| Ok(()))) }
}

/// Computes attention: `attention(text, *tensors)`.
///
/// # Safety
/// As [`__tvm_ffi_prepare`], and the tensors are as [`Ready::enqueue`] demands.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __tvm_ffi_attention(
    _: *mut c_void,
    args: *const TvmAny,
    count: i32,
    _: *mut TvmAny,
) -> i32 {
    // SAFETY: this function's own contract.
    unsafe { run(args, count, |call| call.run()) }
}

/// The bytes of device memory that a call uses besides its tensors: `workspace_size(text, *tensors)`.
///
/// # Safety
/// As [`__tvm_ffi_prepare`], and `result` is the place of a value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __tvm_ffi_workspace_size(
    _: *mut c_void,
    args: *const TvmAny,
    count: i32,
    result: *mut TvmAny,
) -> i32 {
    let write = |ready: &Ready<'_>| {
        // SAFETY: this function's own contract.
        unsafe { result.write(TvmAny { type_index: INT, length: 0, value: ready.workspace_size() as u64 }) };
        Ok(())
    };
    // SAFETY: this function's own contract.
    unsafe { run(args, count, |call| call.with_ready(write)) }
}

/// Runs a function, and raises its error in TVM-FFI.
///
/// # Safety
/// As [`__tvm_ffi_prepare`].
unsafe fn run(
    args: *const TvmAny,
    count: i32,
    then: impl FnOnce(&HandedCall<'_>) -> Result<(), AttentionError>,
) -> i32 {
    let called = guarded(|| {
        let args = match usize::try_from(count) {
            // SAFETY: this function's own contract.
            Ok(count @ 1..) if !args.is_null() => unsafe { std::slice::from_raw_parts(args, count) },
            _ => return Err(invalid("the arguments", "number", count, "a text and its tensors")),
        };
        // SAFETY: the values are those of TVM-FFI.
        let text = unsafe { text(&args[0])? };
        let spec = parsed(text)?;
        // SAFETY: as above.
        let device = unsafe { device(&spec, &args[1..])? };
        let place = match device {
            Some((abi::CUDA, ordinal)) => CallTarget::Stream { ordinal, handle: stream(ordinal) },
            _ => CallTarget::Host(spec.threads),
        };
        let handed = args[1..].iter().enumerate().map(|(index, value)| {
            // SAFETY: as above.
            unsafe { tensor(spec.name(index), value).map(|tensor| handed(tensor)) }
        });
        let tensors: SmallVec<[HandedTensor<'_>; MANY]> = handed.collect::<Result<_, _>>()?;
        then(&HandedCall { text, spec: &spec, place, tensors: &tensors })
    });
    let Err((code, text)) = called else { return 0 };
    let kind = match code {
        abi::INVALID => c"ValueError",
        _ => c"RuntimeError",
    };
    raise(kind, &text);
    -1
}

/// # Safety
/// The value is one of TVM-FFI.
unsafe fn text(value: &TvmAny) -> Result<&[u8], AttentionError> {
    // SAFETY: the index of the type says what the value is.
    unsafe {
        match value.type_index {
            RAW_STRING => Ok(CStr::from_ptr(pointer::<c_char>(value.value)).to_bytes()),
            SMALL_STRING => {
                let bytes = &raw const value.value;
                Ok(std::slice::from_raw_parts(bytes.cast::<u8>(), value.length.min(8) as usize))
            }
            STRING => {
                let array = &*pointer::<u8>(value.value).add(OBJECT).cast::<ByteArray>();
                Ok(std::slice::from_raw_parts(array.data, array.size))
            }
            other => Err(invalid("the first argument", "type", other, "a string: the names of the tensors")),
        }
    }
}

fn pointer<T>(value: u64) -> *const T {
    std::ptr::with_exposed_provenance(value as usize)
}

/// # Safety
/// The value is one of TVM-FFI.
unsafe fn tensor<'a>(name: &'static str, value: &TvmAny) -> Result<&'a DlTensor, AttentionError> {
    // SAFETY: the index of the type says what the value is.
    unsafe {
        match value.type_index {
            TENSOR_POINTER => Ok(&*pointer::<DlTensor>(value.value)),
            TENSOR => Ok(&*pointer::<u8>(value.value).add(OBJECT).cast::<DlTensor>()),
            other => Err(invalid(name, "type", format!("type index {other}"), "a tensor")),
        }
    }
}

/// # Safety
/// The tensor's arrays have its number of dimensions.
unsafe fn handed(tensor: &DlTensor) -> HandedTensor<'_> {
    let number = u32::from(tensor.code) | u32::from(tensor.bits) << 8 | u32::from(tensor.lanes) << 16;
    let rank = usize::try_from(tensor.dimensions).unwrap_or(0);
    // SAFETY: this function's own contract; null is no array.
    let array = |start: *const i64| unsafe {
        (!start.is_null() && rank > 0).then(|| std::slice::from_raw_parts(start, rank))
    };
    HandedTensor {
        dtype: if number == BOOL { abi::U8 } else { number },
        address: (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset),
        shape: array(tensor.shape).unwrap_or_default(),
        strides: array(tensor.strides),
    }
}

/// Type and ordinal of the device that all tensors are on; `None` without a tensor.
///
/// # Safety
/// The values are those of TVM-FFI.
unsafe fn device(spec: &CallSpec, values: &[TvmAny]) -> Result<Option<(i32, i32)>, AttentionError> {
    let mut first = None;
    for (index, value) in values.iter().enumerate() {
        let name = spec.name(index);
        // SAFETY: this function's own contract.
        let tensor = unsafe { tensor(name, value)? };
        let device = (tensor.device_type, tensor.device);
        if !matches!(device.0, abi::CPU | abi::CUDA) {
            return Err(invalid(name, "device type", device.0, "1 (CPU) or 2 (CUDA) of DLPack"));
        }
        let expected = *first.get_or_insert(device);
        if device != expected {
            let words = |(of, ordinal)| format!("{}:{ordinal}", if of == abi::CPU { "cpu" } else { "cuda" });
            return Err(invalid(name, "device", words(device), format!("{}, as before", words(expected))));
        }
    }
    Ok(first)
}

/// A function of TVM-FFI, which is part of each program that calls this module.
fn of_tvm(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a NUL.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// The stream of a GPU on which the program enqueues its work now.
fn stream(ordinal: i32) -> u64 {
    type Get = unsafe extern "C" fn(i32, i32) -> *mut c_void;
    static FOUND: OnceLock<Get> = OnceLock::new();
    let find = || {
        of_tvm(c"TVMFFIEnvGetStream").map(|get| {
            // SAFETY: `tvm/ffi/extra/c_env_api.h` declares the function so.
            *FOUND.get_or_init(|| unsafe { transmute::<*mut c_void, Get>(get) })
        })
    };
    let Some(get) = FOUND.get().copied().or_else(find) else { return 0 };
    // SAFETY: as above.
    unsafe { get(abi::CUDA, ordinal).expose_provenance() as u64 }
}

fn raise(kind: &CStr, text: &str) {
    type Set = unsafe extern "C" fn(*const c_char, *const c_char);
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    if let Some(set) = of_tvm(c"TVMFFIErrorSetRaisedFromCStr") {
        // SAFETY: `tvm/ffi/c_api.h` declares the function so. It copies the texts.
        unsafe { transmute::<*mut c_void, Set>(set)(kind.as_ptr(), text.as_ptr()) };
    }
}
